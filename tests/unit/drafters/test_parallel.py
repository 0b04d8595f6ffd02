"""Block drafters against a plain re-reading of their files over the whole text."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import drafting
from support.drafting import TokenSession, advance, head_for, starts, text_of
from support.g_test import g_test
from support.grown_trees import prefixes
from support.published_blocks import BLOCKS, DIM, KV_HEADS, VOCAB, PlainBlock, make_target
from transformers import LlamaForCausalLM

from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import REPLAYED, OperationWatch, Recorder
from eaglegbv.drafters.parallel import ParallelDrafter
from eaglegbv.drafters.parallel_model import ParallelHead
from eaglegbv.request import Request
from eaglegbv.tree import DraftSampling, DraftTree

SLOTS = 4000
PROMPT = [5, 17, 3, 3, 28, 9]
PLAN = Plan(paths=3, depth=4, draft_width=VOCAB)
ACCEPTED = [0, 2, 4, 1, 3]


@cache
def target() -> LlamaForCausalLM:
    return make_target()


class BlockSession(TokenSession):
    """A drafter whose target is the plain model; unwritten slots hold NaN."""

    drafter: ParallelDrafter

    def __init__(self, head: ParallelHead, plain: PlainBlock, **how: Any) -> None:
        self.plain = plain
        layers = len(head.config.sights)
        pool = KVPool(layers, SLOTS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
        pool.keys.fill_(torch.nan)
        pool.values.fill_(torch.nan)
        # The last slot is nobody's, and padding reads it.
        pool.keys[:, -1], pool.values[:, -1] = 0, 0
        super().__init__(ParallelDrafter(head, TorchPagedAttention(pool), **how), SLOTS - 1)

    def start(self, prompt, first, plan, *, observe: bool = True, **how) -> Request:
        request = super().start(prompt, first, plan, **how)
        if observe:
            self.drafter.observe(request, self.plain.features(prompt))
        return request

    def commit(self, request, tokens, nodes) -> None:
        features = self.plain.features(text_of(request) + list(tokens[:-1]))
        super().commit(request, tokens, nodes)
        self.drafter.observe(request, features[-(len(nodes) + 1) :])


def opened(name: str, folder: Path, **how: Any) -> BlockSession:
    """A session with a drafter of :data:`BLOCKS`, from files."""
    block, model = BLOCKS[name](), target()
    head = head_for(model, block.write(folder))
    return BlockSession(head, PlainBlock(block, model), **how)


@pytest.fixture(params=list(BLOCKS))
def session(request, tmp_path) -> BlockSession:
    return opened(request.param, tmp_path)


def probs(
    session: BlockSession,
    text: Sequence[int],
    drafted: Sequence[int],
    plan: Plan,
    temperature: float,
) -> NDArray[np.float64]:
    """The plain distribution, tempered and cut to its most likely tokens."""
    logits = session.plain.logits(text, drafted, plan.depth).numpy()
    kept = np.argsort(-logits)[: plan.draft_width]
    weights = np.exp((logits[kept] - logits[kept].max()) / temperature)
    dist = np.zeros(VOCAB)
    dist[session.plain.ids[kept].numpy()] = weights / weights.sum()
    return dist


def assert_plain(session: BlockSession, tree: DraftTree, requests: Sequence[Request]) -> None:
    for b, request in enumerate(requests):
        temperature = request.params.temperature * request.plan.draft_temperature
        known = prefixes(tree, b)
        for node in drafting.inner_nodes(tree, b):
            expected = probs(session, text_of(request), known[node], request.plan, temperature)
            found = drafting.full_probs(tree, b, node, VOCAB)
            np.testing.assert_allclose(found, expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("draft_sampling", "plan"),
    [
        (DraftSampling.IID, PLAN),
        (DraftSampling.IID, Plan(paths=2, depth=5, draft_width=7, draft_temperature=1.6)),
        (DraftSampling.WOR, PLAN),
        (DraftSampling.IID, Plan(widths=(2, 1, 2, 1), draft_width=VOCAB)),
    ],
)
def test_drafts_carry_the_plain_distributions(session, draft_sampling, plan) -> None:
    requests = starts(session, PROMPT, plan)
    for accepted in ACCEPTED:
        tree = session.draft(requests, draft_sampling)
        assert_plain(session, tree, requests)
        for b, request in enumerate(requests):
            advance(session, request, tree, b, (accepted + b) % (plan.depth + 1), VOCAB)


TREES = [
    (DraftSampling.IID, PLAN),
    (DraftSampling.IID, Plan(widths=(3, 2, 1), draft_width=9)),
    (DraftSampling.FIXED, Plan(draft_sampling="fixed", depth=3, beam=4, nodes=9)),
]


@pytest.mark.parametrize("name", ["dflash causal", "dflash2", "dspark gated"])
def test_recorded_drafts_are_those_of_the_host(name, tmp_path) -> None:
    recorded, host = opened(name, tmp_path, graphs=Recorder()), opened(name, tmp_path)
    for count, (draft_sampling, plan) in enumerate(TREES, start=1):
        found, expected = (
            s.draft(starts(s, PROMPT, plan), draft_sampling) for s in (recorded, host)
        )
        assert dict(recorded.drafter.graph_counts) == {REPLAYED: count}
        assert torch.equal(found.num_nodes, expected.num_nodes)
        assert torch.equal(found.draws, expected.draws)
        for field in ("token_ids", "parents", "depth", "draft_ids", "draft_probs"):
            part = getattr(found, field)[:, : expected.nodes]
            torch.testing.assert_close(part, getattr(expected, field), atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_levels_are_drawn_by_the_kernels_of_recorded_drafts(name, tmp_path, monkeypatch) -> None:
    """Interpreted on a CPU: two launches a level, and the trees of the host."""
    pytest.importorskip("triton", reason="Triton, which runs the kernels, is not installed")
    from support.launches import launches

    from eaglegbv import draft_kernels

    # Lists in the order of a device: the most likely first.
    best = "eaglegbv.drafters.draft_probs._most_likely"
    monkeypatch.setattr(best, lambda logits, count: logits.topk(count, dim=1).indices)
    monkeypatch.setattr("eaglegbv.drafters.draft_probs.takes_rows", lambda *_: False)
    plan = Plan(paths=3, depth=4, draft_width=5)
    host, recorded = opened(name, tmp_path), opened(name, tmp_path, graphs=Recorder())
    expected = host.draft(starts(host, PROMPT, plan), DraftSampling.IID)
    for module in ("sampling", "drafters.drawn_paths"):
        monkeypatch.setattr(f"eaglegbv.{module}.runs_kernels", lambda _: True)
    requests = starts(recorded, PROMPT, plan)
    kernels = ("draw_children", "number_children")
    with np.errstate(all="ignore"), launches({draft_kernels: kernels}) as names:
        found = recorded.draft(requests, DraftSampling.IID)
    assert [names.count(kernel) % plan.depth for kernel in kernels] == [0, 0]
    assert all(names.count(kernel) for kernel in kernels)
    assert torch.equal(found.num_nodes, expected.num_nodes)
    assert torch.equal(found.draws, expected.draws)
    for field in ("token_ids", "parents", "depth", "draft_ids", "draft_probs"):
        part = getattr(found, field)[:, : expected.nodes]
        torch.testing.assert_close(part, getattr(expected, field), atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_a_draft_is_one_forward_and_as_many_operations_a_level_whatever_the_paths(
    name, tmp_path, monkeypatch
) -> None:
    forwards: list[int] = []
    block = ParallelHead.block

    def counted(self, token_ids, *rest):
        forwards.append(token_ids.shape[-1])
        return block(self, token_ids, *rest)

    monkeypatch.setattr(ParallelHead, "block", counted)
    session = opened(name, tmp_path, graphs=Recorder())
    operations: dict[tuple[int, int], int] = {}
    for depth in (2, 4, 8):
        for paths in (1, 3, 8):
            plan = Plan(paths=paths, depth=depth, draft_width=VOCAB)
            [request] = starts(session, PROMPT, plan)[:1]
            session.drafter.catch_up([request])
            session.draft([request], DraftSampling.IID)  # makes the buffers
            forwards.clear()
            with OperationWatch() as watch:
                session.draft([request], DraftSampling.IID)
            assert len(forwards) == 1
            operations[paths, depth] = watch.count
            session.drafter.forget(request)
    for paths in (3, 8):
        # Growth finds equal drafts of several paths; beyond that their number costs nothing.
        assert operations[paths, 4] == operations[3, 4]
    level = (operations[3, 4] - operations[3, 2]) / 2
    assert operations[3, 8] - operations[3, 4] == level * 4
    assert operations[8, 8] == operations[3, 8]
    assert level <= 80


@pytest.mark.parametrize(
    "plan", [Plan(paths=1, depth=2, draft_width=VOCAB), Plan(widths=(2, 2), draft_width=VOCAB)]
)
def test_drawn_paths_have_the_frequencies_of_their_distributions(plan, tmp_path) -> None:
    """Of two levels of the last path, at a node of which q is the product that the block says."""
    session = opened("dspark", tmp_path)
    number = 1500
    features = session.plain.features([4])
    requests = [session.start([4], 9, plan, seed=n, observe=False) for n in range(number)]
    for request in requests:
        session.drafter.observe(request, features)
    text = text_of(requests[0])
    first = probs(session, text, [], plan, 1.0)
    joint = np.stack([p * probs(session, text, [t], plan, 1.0) for t, p in enumerate(first)])
    cells: list[int] = []
    for part in range(0, number, 75):
        batch = requests[part : part + 75]
        tree = session.draft(batch, DraftSampling.IID)
        last = [count - 1 for count in plan.level_draws]  # others of a level are padding
        drawn = tree.token_ids.gather(1, tree.draws[:, [0, 1], last])
        cells += (VOCAB * drawn[:, 0] + drawn[:, 1]).tolist()
        for request in batch:
            session.allocator.release(session._tree_slots.pop(request.number))
    assert g_test(cells, joint.flatten()).p_value > 1e-4


def test_a_step_is_replayed_from_its_own_block(session) -> None:
    plan = Plan(paths=2, depth=4, draft_width=VOCAB)
    request = session.start(PROMPT, 11, plan)
    with pytest.raises(RuntimeError, match="has drafted no tree that is replayed"):
        session.drafter.snapshot(request)
    request.replayed = True
    text = text_of(request)
    tree = session.draft([request], DraftSampling.IID)
    snapshot = session.drafter.snapshot(request)
    advance(session, request, tree, 0, 1, VOCAB)
    session.drafter.catch_up([request])
    since = [*text_of(request)[len(text) :], 31]
    for end in range(plan.depth):
        found = session.drafter.probs_at([snapshot])
        dist = torch.zeros(VOCAB, dtype=torch.float64)
        dist.scatter_add_(0, found.ids[0], found.probs[0])
        expected = probs(session, text, since[:end], plan, 1.0)
        np.testing.assert_allclose(dist.numpy(), expected, atol=3e-5, rtol=0)
        if end < plan.depth - 1:
            none = torch.zeros(1, dtype=torch.int64)
            token = torch.tensor([since[end]])
            [snapshot] = session.drafter.advance([request], [snapshot], token, none)


def test_what_was_skipped_is_as_if_the_text_began_later(session) -> None:
    plan = Plan(paths=1, depth=3, draft_width=VOCAB)
    request = session.start(PROMPT, 11, plan, observe=False)
    features = session.plain.features(PROMPT)
    session.drafter.observe(request, features)
    session.drafter.skip(request, keep=4)
    short = session.start(PROMPT[2:], 11, plan, observe=False)
    session.drafter.observe(short, features[2:])
    found, expected = (session.draft([r], DraftSampling.IID) for r in (request, short))
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.draft_probs, expected.draft_probs)
    assert session.drafter.shareable(request) == 0
    session.drafter.forget(request)
    assert not request.draft_states
