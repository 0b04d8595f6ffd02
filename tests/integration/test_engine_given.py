"""Given tokens and previews: the engine drafts and scores at places of a text it was given.

In float64, so that a text read in other parts, or beside others, differs by far less than the
tolerance.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from support.tiny_engine import TinyEngine, tiny_engine

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.config import PLAIN, Plan
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.engine import GivenSequence
from eaglegbv.errors import InvalidArgument, OutOfSlots
from eaglegbv.request import FinishReason, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.verification import VerifyOutput

VOCAB = 8
PROMPT = [3, 1, 4, 1, 5]
OTBV = Plan(verifier="otbv", paths=3, depth=3)
FIXED = Plan(verifier="target_only", paths=2, depth=3, draft_sampling=DraftSampling.FIXED, nodes=6)
PARAMS = SamplingParams(max_tokens=36, seed=7)
GREEDY = SamplingParams(max_tokens=36, temperature=0.0)
SIZES = {"vocab": VOCAB, "sharpness": 2.5, "slots": 512, "dtype": torch.float64}


ARCHS = pytest.mark.parametrize("arch", [Arch.EAGLE3, Arch.EAGLE1])


@pytest.fixture
def tiny(arch: Arch) -> TinyEngine:
    return tiny_engine(**SIZES, arch=arch, check_slots=True, prefix_cache=False)


@pytest.fixture
def other(arch: Arch) -> TinyEngine:
    """An engine over the same models."""
    return tiny_engine(**SIZES, arch=arch, check_slots=True, prefix_cache=False)


def text_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()


def read_whole(tiny: TinyEngine, *requests: Request) -> None:
    """Take a step, which must read all that requests were given."""
    tiny.engine.step()
    assert [request.to_prefill for request in requests] == [0] * len(requests)


def preview(tiny: TinyEngine, request: Request) -> VerifyOutput:
    """What the engine drafts and decides where a request stands; nothing of it is kept."""
    before = (request.token_ids[:], request.slots.tolist(), request.step, request.metrics)
    free = tiny.target.allocator.num_free
    [output] = tiny.engine.preview([request])
    after = (request.token_ids, request.slots.tolist(), request.step, request.metrics)
    assert after == before
    assert tiny.target.allocator.num_free == free
    assert output.faults.tolist() == [0]
    tiny.engine.check()
    return output


def assert_same_scores(one: VerifyOutput, other: VerifyOutput) -> None:
    """The same trees, drawn from and judged by the same distributions, with the same verdict."""
    tree = one.group.tree.tensors
    others = other.group.tree.tensors
    for name, tensor in tree.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=1e-9)
    assert one.target is not None
    assert other.target is not None
    every = torch.arange(VOCAB).expand(*one.target.rows.shape, VOCAB)
    p, q = (output.target.probs_in(output.target.rows, every) for output in (one, other))
    torch.testing.assert_close(p, q, rtol=0, atol=1e-9)
    assert decision(one) == decision(other)


def decision(output: VerifyOutput) -> list[int]:
    """The accepted tokens and the one after them, of a single request."""
    tree, verdict = output.group.tree, output.verdict
    nodes = verdict.path_nodes[0, : int(verdict.accepted[0])]
    return [*tree.token_ids[0, nodes].tolist(), int(verdict.token_ids[0])]


def preview_at_once(
    other: TinyEngine, text: Sequence[int], plan: Plan, params: SamplingParams = PARAMS
) -> VerifyOutput:
    """The preview of a new request at the end of a text, all but the last token as its prompt."""
    request = other.engine.add([*PROMPT, *text[:-1]], params, plan)
    request.give(text[-1:])
    request.step = len(text)  # the same random numbers as at the end of an answer so long
    read_whole(other, request)
    output = preview(other, request)
    other.engine.cancel(request)
    return output


@ARCHS
@pytest.mark.parametrize("plan", [OTBV, FIXED, PLAIN], ids=["sampled", "fixed", "plain"])
def test_drafts_and_scores_are_those_of_a_prompt_as_long(tiny, other, plan):
    """In strides of several lengths, one after steps of its own; nothing is left of other plans."""
    text = text_of(1, 20)
    request = tiny.engine.add(PROMPT, PARAMS, OTBV)
    for known in (1, 2, 9, 20):
        request.give(text[len(request.token_ids) : known])
        read_whole(tiny, request)
        request.plan = OTBV
        preview(tiny, request)
        request.plan = plan
        assert_same_scores(preview(tiny, request), preview_at_once(other, text[:known], plan))
    request.plan = OTBV
    for _ in range(3):
        tiny.engine.step()
    request.give(text[:3])
    read_whole(tiny, request)
    request.plan = plan
    fresh = preview_at_once(other, request.token_ids, plan)
    assert_same_scores(preview(tiny, request), fresh)


@ARCHS
def test_given_tokens_stand_whatever_the_target_holds_of_them(tiny):
    """Those that it finds least likely of all, and its own text after them."""
    unlikely: list[int] = []
    request = tiny.engine.add(PROMPT, GREEDY, OTBV)
    request.give([0])
    for _ in range(6):
        read_whole(tiny, request)
        output = preview(tiny, request)
        assert output.target is not None
        row = output.target.logits[output.target.rows[0, 0]]
        unlikely.append(int(row.argmin()))
        assert decision(output)[0] != unlikely[-1]
        request.give(unlikely[-1:])
    given = [0, *unlikely]
    tiny.run([request])
    assert request.token_ids[: len(given)] == given
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.token_ids) == GREEDY.max_tokens
    left = msgspec.structs.replace(GREEDY, max_tokens=GREEDY.max_tokens - len(given))
    [own] = tiny.tokens([[*PROMPT, *given]], left, PLAIN)
    assert request.token_ids[len(given) :] == own
    assert tiny.target.allocator.num_free == tiny.target.allocator.num_slots


@ARCHS
def test_a_preview_is_the_next_step(tiny, other):
    [alone] = other.tokens([PROMPT], PARAMS, OTBV)
    request = tiny.engine.add(PROMPT, PARAMS, OTBV)
    tiny.engine.step()
    several = 0
    while len(request.token_ids) < PARAMS.max_tokens - OTBV.depth - 1:
        output = preview(tiny, request)
        assert_same_scores(preview(tiny, request), output)
        expected = decision(output)
        known = len(request.token_ids)
        tiny.engine.step()
        assert request.token_ids[known:] == expected
        several += len(expected) > 1
    assert several > 2
    tiny.run([request])
    assert request.token_ids == alone


@ARCHS
def test_others_go_on_meanwhile(tiny, other):
    """In one batch, requests of two plans answer as they do alone, and previews are as alone."""
    asked = [(text_of(5, 12), PARAMS, OTBV), (text_of(6, 30), GREEDY, FIXED)]
    expected = tiny.texts(asked)
    text = text_of(2, 24)
    given = tiny.engine.add(PROMPT, PARAMS, OTBV)
    others = [tiny.engine.add(*own) for own in asked]
    for known in (3, 8, 24):
        given.give(text[len(given.token_ids) : known])
        read_whole(tiny, given)
        alone = preview_at_once(other, text[:known], OTBV)
        running = [own for own in others if not own.finished]
        assert running
        outputs = tiny.engine.preview([*running, given])
        own = next(output for output in outputs if given in output.group.requests)
        b = own.group.requests.index(given)
        size = int(alone.group.tree.num_nodes[0])
        assert int(own.group.tree.num_nodes[b]) == size
        tokens = own.group.tree.token_ids[b, :size]
        assert torch.equal(tokens, alone.group.tree.token_ids[0, :size])
        given.give(text[known : known + 1])
    tiny.engine.cancel(given)
    tiny.run(others)
    assert [own.token_ids for own in others] == expected
    assert tiny.target.allocator.num_free == tiny.target.allocator.num_slots


def test_a_given_text_is_shared_and_survives_pre_emption():
    tiny = tiny_engine(**SIZES, check_slots=True)
    text = text_of(3, 30)
    request = tiny.engine.add(PROMPT, PARAMS, OTBV)
    request.give(text)
    read_whole(tiny, request)
    before = preview(tiny, request)
    tiny.engine._scheduler.preempt(request)
    with pytest.raises(InvalidArgument, match=r"requests=.*read"):
        tiny.engine.preview([request])
    read_whole(tiny, request)
    assert request.metrics.cached_tokens == 32
    assert_same_scores(preview(tiny, request), before)
    later = tiny.engine.add(PROMPT, PARAMS, OTBV)
    later.give(text)
    tiny.engine.step()
    assert later.metrics.cached_tokens == 32
    assert_same_scores(preview(tiny, later), before)


@ARCHS
def test_a_verifier_with_state_goes_on_from_given_tokens(tiny, other):
    """What earlier steps left to the target was of tokens of their own."""
    stateful = Plan(verifier="spectr_gbv", paths=2, depth=3)
    requests = [tiny.engine.add(PROMPT, replaced(seed), stateful) for seed in range(4)]
    for _ in range(3):
        tiny.engine.step()
    left = [request for request in requests if request.target_layers]
    assert left
    for request in left:
        request.give(text_of(4, 9))
        assert request.target_layers == ()
    read_whole(tiny, *left)
    for request in left:
        fresh = preview_at_once(other, request.token_ids, stateful, request.params)
        assert_same_scores(preview(tiny, request), fresh)
    tiny.run(requests)
    assert all(len(request.token_ids) == PARAMS.max_tokens for request in requests)


def replaced(seed: int) -> SamplingParams:
    return msgspec.structs.replace(PARAMS, seed=seed)


def test_ends_and_limits():
    """Given tokens never end a request, not even a stop; its own do, at the limit at the last."""
    tiny = tiny_engine(**SIZES, check_slots=True, prefix_cache=False)
    params = SamplingParams(max_tokens=6, stop_token_ids=(2,), temperature=0.0)
    request = tiny.engine.add(PROMPT, params, OTBV)
    with pytest.raises(InvalidArgument, match=r"token_ids='6 tokens': expected fewer than 6"):
        request.give([2] * 6)
    request.give([2, 2, 2])
    with pytest.raises(InvalidArgument, match=r"token_ids='3 tokens': expected fewer than 3"):
        request.give([2] * 3)
    request.give([2, 2])
    read_whole(tiny, request)
    assert not request.finished
    own = decision(preview(tiny, request))
    tiny.run([request])
    assert request.token_ids == [2] * 5 + own[:1]
    wanted = FinishReason.STOP if own[0] == 2 else FinishReason.LENGTH
    assert request.finish_reason is wanted
    with pytest.raises(InvalidArgument, match="fewer than 0"):
        request.give([1])
    with pytest.raises(InvalidArgument, match="requests"):
        tiny.engine.preview([request])


def test_what_was_not_read_has_no_preview_and_a_pool_too_small_keeps_its_slots():
    tiny = tiny_engine(**SIZES | {"slots": 48}, check_slots=True)
    first, second = (tiny.engine.add(PROMPT, PARAMS, OTBV) for _ in range(2))
    with pytest.raises(InvalidArgument, match=f"requests={first.number}"):
        tiny.engine.preview([first])
    first.give(text_of(8, 20))
    tiny.engine.step()
    assert second.to_prefill  # there is no room for both
    with pytest.raises(InvalidArgument, match=f"requests={second.number}"):
        tiny.engine.preview([first, second])
    allocator = tiny.target.allocator
    assert isinstance(allocator, SlotAllocator)
    taken = allocator.allocate(allocator.num_free - 2)
    with pytest.raises(OutOfSlots):
        tiny.engine.preview([first])
    assert allocator.num_free == 2
    assert len(first.borrowed) == 0
    allocator.release(taken)
    preview(tiny, first)


@ARCHS
def test_visits_are_requests_that_were_given_as_much(tiny, other):
    """At the places of each sequence; one without any is not read. Nothing is left afterwards."""
    texts = [text_of(1, 20), text_of(2, 12), []]
    places = [(3, 9), (5,), ()]
    given = [
        GivenSequence(PROMPT, text, at, seed=7) for text, at in zip(texts, places, strict=True)
    ]
    seen = []
    for requests in tiny.engine.visit(given):
        for number, request in requests.items():
            known = len(request.token_ids)
            seen.append((number, known))
            request.plan = OTBV
            alone = preview_at_once(other, texts[number][:known], OTBV)
            assert_same_scores(preview(tiny, request), alone)
    assert seen == [(0, 3), (1, 5), (0, 9)]
    assert tiny.target.allocator.num_free == tiny.target.allocator.num_slots
    for _ in tiny.engine.visit(given):
        break  # whoever leaves leaves nothing either
    assert not tiny.engine.has_work


@ARCHS
def test_a_list_is_answered_together(tiny, other):
    prompts, params = [PROMPT, text_of(5, 12)], [PARAMS, GREEDY]
    requests = tiny.engine.run(prompts, params, OTBV)
    expected = other.texts((*asked, OTBV) for asked in zip(prompts, params, strict=True))
    assert [request.token_ids for request in requests] == expected
    with pytest.raises(InvalidArgument, match="prompt"):
        tiny.engine.run([[]], [PARAMS], OTBV)
