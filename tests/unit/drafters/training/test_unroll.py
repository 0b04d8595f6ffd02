import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.drafting import VOCAB, Pair, head_for, random_pair
from support.published_blocks import BLOCKS, PlainBlock, make_target
from torch import Tensor
from torch.nn import functional

from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.training import unroll as unrolling
from eaglegbv.drafters.training.unroll import Anchors, Depth, Loss, TargetRun, draw_anchors, unroll

WINDOW = 9


def make_run(arch: Arch) -> tuple[Pair, TargetRun]:
    """A pair, and its model's run over two texts."""
    pair = random_pair(arch, draft_vocab=VOCAB if arch is Arch.EAGLE1 else 15)
    pair.head.draft_to_target = pair.head.draft_to_target.sort().values
    is_response = torch.ones(2, WINDOW, dtype=torch.bool)
    is_response[0, :3] = False
    is_response[1, 7:] = False
    token_ids = torch.randint(VOCAB, (2, WINDOW), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = pair.model(token_ids, output_hidden_states=True)
    run = TargetRun(
        token_ids=token_ids,
        is_response=is_response,
        features=torch.stack([pair.features(text) for text in token_ids.tolist()]),
        final_hidden=out.hidden_states[-1],
        logits=out.logits,
    )
    return pair, run


@pytest.mark.parametrize("arch", list(Arch))
def test_unroll_equals_drafting_step_by_step(arch: Arch) -> None:
    pair, run = make_run(arch)
    position = torch.tensor([[2, 4], [1, 3]])
    anchors = Anchors(position, torch.ones_like(position, dtype=torch.bool))
    for d, depth in enumerate(unroll(pair.head, run, anchors, 4)):
        found = depth.logits.log_softmax(-1)
        for b, column in itertools.product(range(2), range(2)):
            root = int(position[b, column]) + 1
            text = run.token_ids[b].tolist()
            expected = pair.log_probs(text[: root + 1], text[root + 1 : root + 1 + d])
            np.testing.assert_allclose(found[b, column], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_unroll_of_a_block_is_its_plain_forward(name: str, tmp_path: Path) -> None:
    block, model = BLOCKS[name](), make_target()
    plain = PlainBlock(block, model)
    head = head_for(model, block.write(tmp_path))
    texts = torch.randint(30, (2, WINDOW), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(texts, output_hidden_states=True)
    run = TargetRun(
        token_ids=texts,
        is_response=torch.ones(2, WINDOW, dtype=torch.bool),
        features=torch.stack([plain.features(text) for text in texts.tolist()]),
        final_hidden=out.hidden_states[-1],
        logits=out.logits,
    )
    position = torch.tensor([[2, 4, 0], [1, 3, 4]])
    anchors = Anchors(position, torch.ones_like(position, dtype=torch.bool))
    for d, depth in enumerate(unroll(head, run, anchors, 3)):
        assert depth.used.all()
        found = depth.logits.log_softmax(-1)
        for b, column in itertools.product(range(2), range(3)):
            root = int(position[b, column]) + 1
            text = texts[b].tolist()
            logits = plain.logits(text[: root + 1], text[root + 1 : root + 1 + d], 3)
            expected = logits.log_softmax(-1)
            np.testing.assert_allclose(found[b, column], expected, rtol=1e-4, atol=5e-5)


def test_targets_are_the_distribution_of_the_drafted_token() -> None:
    pair, run = make_run(Arch.EAGLE3)
    head = pair.head
    anchors = Anchors(torch.tensor([[3], [1]]), torch.ones(2, 1, dtype=torch.bool))
    for d, depth in enumerate(unroll(head, run, anchors, 3)):
        for text, anchor in enumerate((3, 1)):
            assert run.logits is not None
            dist = run.logits[text, anchor + 1 + d].softmax(0)[head.draft_to_target]
            torch.testing.assert_close(depth.target_probs[text, 0], dist)
            chosen, token = int(depth.chosen[text, 0]), int(run.token_ids[text, anchor + 2 + d])
            drafted = head.draft_to_target.tolist()
            assert (drafted[chosen] == token) if chosen >= 0 else (token not in drafted)
            hidden = run.final_hidden[text, anchor + 1 + d]
            assert torch.equal(depth.target_hidden[text, 0], hidden)


def test_rows_leave_the_unroll_where_the_response_or_the_window_ends() -> None:
    pair, run = make_run(Arch.EAGLE1)
    anchors = Anchors(torch.tensor([[5, 6], [3, 4]]), torch.ones(2, 2, dtype=torch.bool))
    used = [depth.used.tolist() for depth in unroll(pair.head, run, anchors, 3)]
    # Text 0 ends with the window at 8, text 1's response at 6: token anchor + 2 + d must be there.
    assert used == [
        [[True, True], [True, True]],
        [[True, False], [True, False]],
        [[False, False], [False, False]],
    ]


def test_anchors_are_rows_that_draft() -> None:
    _, run = make_run(Arch.EAGLE1)
    anchors = draw_anchors(run.is_response, 20, seed=1)
    rows = [
        sorted(p for p, u in zip(ps, us, strict=True) if u)
        for ps, us in zip(anchors.position.tolist(), anchors.used.tolist(), strict=True)
    ]
    assert rows == [[2, 3, 4, 5, 6], [0, 1, 2, 3, 4]]
    few = draw_anchors(run.is_response, 2, seed=1)
    assert few.used.all()
    assert torch.equal(few.position, draw_anchors(run.is_response, 2, seed=1).position)


def one_depth(p: Tensor, q: Tensor, token_ids: Tensor, used: Tensor | None = None) -> Depth:
    shape = token_ids.shape
    return Depth(
        hidden=torch.zeros(*shape, 1),
        logits=q.log().expand(*shape, -1),
        target_hidden=torch.full((*shape, 1), 2.0),
        target_probs=p.expand(*shape, -1),
        chosen=token_ids,
        used=torch.ones_like(token_ids, dtype=torch.bool) if used is None else used,
    )


P = torch.tensor([0.5, 0.25, 0.25])
Q = torch.tensor([0.2, 0.7, 0.1])


def test_losses() -> None:
    depth = one_depth(P, Q, torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[True, False]]))
    cross_entropy, variation = functional.cross_entropy(Q.log(), P), 0.5 * (P - Q).abs().sum()
    expected = {
        Loss.CE: cross_entropy,
        Loss.TV: variation,
        Loss.MIX: 0.7 * cross_entropy + 0.3 * variation,
        Loss.BLOCK: variation,
    }
    for loss, value in expected.items():
        torch.testing.assert_close(loss.of([depth], 0.3, 0.9), value)
    lost = unrolling.feature_loss([depth], 0.9)
    torch.testing.assert_close(lost, torch.tensor(1.5))  # |2 - 0| - 1/2

    # Depths weigh by the decay.
    first, second = (one_depth(P, q, torch.zeros(1, 1, dtype=torch.int64)) for q in (Q, P))
    expected = Loss.TV.of([first], 0.0, 1.0) / 1.5  # the second is perfect
    torch.testing.assert_close(Loss.TV.of([first, second], 0.0, 0.5), expected)


def test_acceptance_counts_only_what_can_be_drafted() -> None:
    # The target's distribution restricted to a draft vocabulary misses mass.
    depth = one_depth(P[:2], Q[:2] / Q[:2].sum(), torch.zeros(1, 1, dtype=torch.int64))
    expected = torch.minimum(P[:2], Q[:2] / Q[:2].sum()).sum()
    torch.testing.assert_close(unrolling.acceptance(depth)[0, 0], expected)


def texts_of_the_target(length: int) -> Tensor:
    """Every text of that many tokens, as often as a target of probabilities ``P`` writes it."""
    tokens = torch.arange(3).repeat_interleave((P * 4).to(torch.int64))
    return torch.cartesian_prod(*[tokens] * length)


def test_block_efficiency_is_exact_on_the_targets_own_text() -> None:
    texts = texts_of_the_target(3)
    found = unrolling.measure([[one_depth(P, Q, texts[:, d : d + 1]) for d in range(3)]])
    accepted = float(torch.minimum(P, Q).sum())
    assert found.by_depth == pytest.approx([accepted] * 3)
    # Token verification accepts d tokens of a path with probability accepted ** d.
    assert found.token == pytest.approx(1 + accepted + accepted**2 + accepted**3)
    assert found.block == pytest.approx(1 + sum(block_verified(Q, Q, Q)))
    assert found.block > found.token


def block_verified(*drafts: Tensor) -> list[float]:
    """E[w_i] over every path drawn from ``drafts``: how often block verification accepts i tokens.

    Written as the paper has it, not as the loss does.
    """
    expected = [0.0] * len(drafts)
    for path in itertools.product(range(3), repeat=len(drafts)):
        drawn = w = 1.0
        for i, (q, token) in enumerate(zip(drafts, path, strict=True)):
            drawn *= float(q[token])
            w = min(1.0, w * float(P[token] / q[token]))
            # Later tokens of the path sum to one: count each prefix once.
            expected[i] += drawn * w / 3 ** (len(drafts) - 1 - i)
    return expected


def test_block_loss_is_what_block_verification_accepts() -> None:
    drafts = (Q, torch.tensor([0.1, 0.1, 0.8]), torch.tensor([0.6, 0.3, 0.1]))
    logits = [draft.log().requires_grad_() for draft in drafts]
    texts = texts_of_the_target(3)
    depths = [
        replace(one_depth(P, Q, texts[:, d : d + 1]), logits=logits.expand(len(texts), 1, -1))
        for d, logits in enumerate(logits)
    ]
    means = [accepted.mean().item() for accepted in unrolling.block_accepted(depths)]
    assert means == pytest.approx(block_verified(*drafts))
    loss = Loss.BLOCK.of(depths, 0.0, 0.9)
    assert loss.item() == pytest.approx(1 - sum(block_verified(*drafts)) / 3)

    # Its gradient is that of the exact expectation, by differences.
    loss.backward()
    for place, depth_logits in enumerate(logits):
        assert depth_logits.grad is not None
        for token, slope in enumerate(depth_logits.grad.tolist()):
            losses = []
            for step in (1e-3, -1e-3):
                moved = [d.log().double() for d in drafts]
                moved[place][token] += step
                losses.append(1 - sum(block_verified(*(m.softmax(0) for m in moved))) / 3)
            assert slope == pytest.approx((losses[0] - losses[1]) / 2e-3, abs=1e-4)


def test_tokens_outside_the_draft_vocabulary_end_a_path() -> None:
    dist = torch.tensor([1.0])
    texts = [torch.tensor([[-1], [0]]), torch.tensor([[0], [0]])]  # -1 cannot be drafted
    found = unrolling.measure([[one_depth(dist, dist, token) for token in texts]])
    assert (found.token, found.block) == (pytest.approx(2.5), pytest.approx(2.5))
