"""Groups of requests, and where their tokens and logits stand in the packed forward."""

import torch
from support.tree_check import check_tree

from eaglegbv.attention.base import pack
from eaglegbv.config import PLAIN, Plan
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.batch import Forward, Group, by_plan
from eaglegbv.tree import DraftSampling, DraftTree

OTBV, GBV = Plan(verifier="otbv", paths=2, depth=2), Plan(verifier="gbv", paths=2, depth=2)


def request(number, prompt, *, generated=(), slots=(), plan=OTBV, temperature=1.0):
    r = Request(
        number=number,
        prompt_ids=tuple(prompt),
        params=SamplingParams(temperature=temperature),
        plan=plan,
        rng=RequestRng(number),
        max_tokens=50,
    )
    r.token_ids = list(generated)
    r.slots = torch.tensor(slots, dtype=torch.int64)
    return r


def trees():
    """A fork of four nodes, and a chain of two padded to four."""
    tree = DraftTree(
        draft_sampling=DraftSampling.FIXED,
        token_ids=torch.tensor([[9, 3, 4, 5], [8, 6, 0, 0]]),
        parents=torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]),
        depth=torch.tensor([[0, 1, 2, 2], [0, 1, 0, 0]]),
        num_nodes=torch.tensor([4, 2]),
        path_nodes=torch.tensor([[[1, 2], [1, 3]], [[1, 1], [0, 0]]]),
        path_lengths=torch.tensor([[2, 2], [1, 0]]),
        draft_ids=torch.zeros((2, 4, 0), dtype=torch.int64),
        draft_probs=torch.zeros((2, 4, 0), dtype=torch.float64),
    )
    check_tree(tree)
    return tree


def decoding_group():
    requests = [
        request(0, [1, 2], generated=[7, 9], slots=[10, 11, 12]),
        request(1, [1], generated=[8], slots=[20]),
    ]
    slots = [torch.tensor([30, 31, 32, 33, 34]), torch.tensor([40, 41, 42, 43, 44])]
    return Group.decode(requests, trees(), slots)


def prefill_group():
    requests = [request(2, [5, 6, 7]), request(3, [4])]
    return Group.prefill(requests, [torch.tensor([50, 51, 52]), torch.tensor([60])])


def test_a_decoding_group_reads_each_tree_behind_its_context():
    group = decoding_group()
    assert not group.prefilling
    fork, chain = group.segments
    assert fork.token_ids.tolist() == [9, 3, 4, 5]
    # Three tokens are read; the root is at position 3, siblings share one.
    assert fork.positions.tolist() == [3, 4, 5, 5]
    assert fork.context_slots.tolist() == [10, 11, 12]
    assert fork.tree_slots.tolist() == [30, 31, 32, 33]
    assert fork.tree_positions.tolist() == [3, 4, 5, 5]
    assert fork.visible.int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 0, 1],
    ]
    # Padding takes part in nothing.
    assert chain.token_ids.tolist() == [8, 6]
    assert chain.positions.tolist() == [1, 2]
    assert chain.tree_slots.tolist() == [40, 41]
    assert chain.visible.int().tolist() == [[1, 0], [1, 1]]
    # The slots of the whole step stay with the group, unused ones included.
    assert [s.tolist() for s in group.slots] == [[30, 31, 32, 33, 34], [40, 41, 42, 43, 44]]


def test_a_prefill_group_reads_whole_prompts_and_its_roots_are_their_last_tokens():
    group = prefill_group()
    assert group.prefilling
    assert group.tree.token_ids.tolist() == [[7], [4]]
    assert [s.token_ids.tolist() for s in group.segments] == [[5, 6, 7], [4]]
    assert [s.positions.tolist() for s in group.segments] == [[0, 1, 2], [0]]
    assert [s.tree_slots.tolist() for s in group.segments] == [[50, 51, 52], [60]]
    assert [s.num_context for s in group.segments] == [0, 0]
    assert all(s.visible is None for s in group.segments)


def test_a_layout_says_where_each_tokens_row_and_logits_are():
    groups = [decoding_group(), prefill_group()]
    forward = Forward.of(groups, [])
    layouts, wanted = forward.layouts, forward.logit_rows
    # Packed rows: 0-3 the fork, 4-5 the chain, 6-8 the first prompt, 9 the second.
    assert layouts[0].first_tokens == [0, 4]
    assert layouts[0].root_tokens == [0, 4]
    assert layouts[1].first_tokens == [6, 9]
    assert layouts[1].root_tokens == [8, 9]
    assert wanted.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    # Padding nodes repeat the root's row of logits.
    assert layouts[0].node_rows.tolist() == [[0, 1, 2, 3], [4, 5, 4, 4]]
    assert layouts[0].logits == slice(0, 6)
    assert layouts[1].node_rows.tolist() == [[0], [1]]
    assert layouts[1].logits == slice(6, 8)


def test_a_layout_finds_every_nodes_token_in_the_packed_forward():
    groups = [prefill_group(), decoding_group(), prefill_group()]
    forward = Forward.of(groups, [])
    layouts, wanted = forward.layouts, forward.logit_rows
    packed = pack([s for group in groups for s in group.segments])
    tokens = packed.token_ids[wanted]  # what a model's logits stand at
    for group, layout in zip(groups, layouts, strict=True):
        read = tokens[layout.logits]
        assert layout.node_rows.shape == group.tree.token_ids.shape
        for b, count in enumerate(group.tree.num_nodes.tolist()):
            nodes = group.tree.token_ids[b, :count]
            assert torch.equal(read[layout.node_rows[b, :count]], nodes)
            assert packed.token_ids[layout.root_tokens[b]] == nodes[0]
            assert packed.token_ids[layout.first_tokens[b]] == group.segments[b].token_ids[0]
    assert packed.rows == sum(s.num_new for group in groups for s in group.segments)


def test_requests_are_grouped_by_plan_and_by_greedy_or_sampled_in_order():
    requests = [
        request(0, [1], plan=OTBV),
        request(1, [1], plan=GBV),
        request(2, [1], plan=OTBV, temperature=0.0),
        request(3, [1], plan=OTBV, temperature=0.5),
        request(4, [1], plan=PLAIN),
        request(5, [1], plan=GBV),
        request(6, [1], plan=Plan(verifier="otbv", paths=2, depth=2)),  # equal, another object
        request(7, [1], plan=Plan(verifier="otbv", paths=2, depth=3)),
        request(8, [1], plan=Plan(verifier="otbv", paths=2, depth=2, draft_temperature=1.5)),
        request(
            9, [1], plan=Plan(verifier="otbv", paths=2, depth=2, draft_sampling=DraftSampling.IID)
        ),
    ]
    groups = [[r.number for r in group] for group in by_plan(requests)]
    assert groups == [[0, 3, 6], [1, 5], [2], [4], [7], [8], [9]]


def test_nobody_to_group_makes_no_group():
    assert by_plan([]) == []
