"""What users do wrong, and interrupts: one prompt fails alone, and no other text is touched."""

import gc
from collections.abc import Callable

import pytest

from eaglegbv import LLM, Completion, EngineConfig, InvalidArgument, Plan, SamplingParams
from eaglegbv.engine import Engine
from eaglegbv.metrics import FINISHED, StepRecord
from eaglegbv.models.hf import HFTarget
from eaglegbv.request import FinishReason, RequestOutput

PARAMS = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(paths=2, depth=3, engine=EngineConfig(kv_slots=4096))


def unread(llm: LLM) -> bool:
    llm._engine.check()
    return not llm._open and not llm._engine.has_work


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (5, "prompt=5: expected text, token ids or chat messages"),
        (None, "prompt=None: expected text, token ids or chat messages"),
        (b"bytes", "prompt=b'bytes': expected text"),
        ("\ud83d", "expected text without halves of surrogate pairs"),
        ([{"role": "robot", "content": "Hi"}], "expected messages that the chat template of"),
        ([{"role": "user", "content": None}], "expected a message with role and content, both"),
        ([{"role": "user", "content": [{"type": "image"}]}], "expected a message with role and"),
        ([1, 2.5], "expected text, token ids or chat messages"),
    ],
    ids=["number", "none", "bytes", "surrogate", "role", "no content", "picture", "fractions"],
)
def test_a_prompt_that_is_none_fails_alone(llm: LLM, bad: object, message: str) -> None:
    good = llm.generate("good", PARAMS)
    first, failed, last = llm.generate(["good", bad, "good"], PARAMS)
    assert first.token_ids == last.token_ids == good.token_ids
    assert failed.finish_reason is FinishReason.ERROR
    assert message in str(failed.error)
    assert unread(llm)


@pytest.mark.parametrize(
    "params", [{"max_tokens": 3}, 5, "hot", [PARAMS, None], [PARAMS], [PARAMS, {"seed": 1}]]
)
def test_settings_that_are_none_are_named_and_nothing_is_begun(llm: LLM, params: object) -> None:
    with pytest.raises(InvalidArgument, match=r"sampling_params=.*: expected .*one per prompt"):
        llm.generate(["good", "good"], params)
    assert unread(llm)
    with pytest.raises(InvalidArgument, match="sampling_params="):
        next(llm.stream("good", {"temperature": 0}))
    assert unread(llm)


def test_parts_of_text_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert llm.encode([{"role": "user", "content": parts}]) == llm.encode(
        [{"role": "user", "content": "ab"}]
    )


def test_a_plan_and_choices_are_not_both_taken() -> None:
    with pytest.raises(InvalidArgument, match=r"plan=Plan.*: expected None where paths is given"):
        LLM(plan=Plan(), paths=2)


def test_prompts_added_before_an_interrupt_do_not_stay(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, added = Engine.add, []

    def interrupted(*arguments: object, **named: object) -> object:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(add(*arguments, **named))
        return added[-1]

    monkeypatch.setattr(Engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], PARAMS)
    assert [request.finish_reason for request in added] == 2 * [FinishReason.CANCELLED]
    assert unread(llm)


def streamed(llm: LLM, act: Callable[[], None], *, after: int) -> tuple[str, Completion]:
    """Stream a text, doing something else after some pieces."""
    pieces = []
    for number, piece in enumerate(llm.stream("a text", PARAMS)):
        pieces.append(piece)
        if number == after:
            act()
    assert pieces[-1].completion is not None
    assert [t for p in pieces for t in p.token_ids] == pieces[-1].completion.token_ids
    return "".join(piece.text for piece in pieces), pieces[-1].completion


def test_an_interrupt_behind_a_commit_loses_no_text_of_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llm.generate("a text", PARAMS)
    commit, seen = Engine._commit, []

    def interrupted(*arguments: object) -> list[RequestOutput]:
        commits = commit(*arguments)
        seen.append(commits)
        if len(seen) == 2:  # the stream's own group was committed; nobody hears of it
            raise KeyboardInterrupt
        return commits

    def interrupt() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("other", PARAMS, plan=Plan(verifier="token", paths=1, depth=2))

    text, completion = streamed(llm, interrupt, after=1)
    if completion.finish_reason is FinishReason.LENGTH:
        assert completion.token_ids == whole.token_ids
    assert text == completion.text == whole.text[: len(text)]
    assert unread(llm)


def test_a_stream_that_is_collected_within_a_step_harms_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(["a", "b"], PARAMS)
    left = llm.stream("left", PARAMS)
    next(left)
    cycle = [left]
    cycle.append(cycle)
    del left, cycle
    forward = HFTarget.forward

    def collecting(*arguments: object, **named: object) -> object:
        gc.collect()
        return forward(*arguments, **named)

    gc.disable()
    monkeypatch.setattr(HFTarget, "forward", collecting)
    try:
        answers = llm.generate(["a", "b"], PARAMS)
    finally:
        gc.enable()
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert unread(llm)


def test_a_stop_string_in_the_last_token_is_a_stop_and_counts_once(llm: LLM) -> None:
    full = llm.generate("stop", PARAMS)
    stop = full.text[-2:]
    at = full.text.index(stop)
    before = dict(llm.metrics.values[FINISHED])
    cut = llm.generate("stop", SamplingParams(max_tokens=16, seed=3, ignore_eos=True, stop=stop))
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == full.text[:at]
    after = llm.metrics.values[FINISHED]
    assert sum(after.values()) == sum(before.values()) + 1
    assert after["stop"] == before.get("stop", 0) + 1


def test_a_request_that_breaks_off_keeps_what_it_had(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llm.generate("a text", PARAMS)
    forward, calls = HFTarget.forward, []

    def breaking(*arguments: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of memory, say")
        return forward(*arguments, **named)

    monkeypatch.setattr(HFTarget, "forward", breaking)
    [answer] = llm.generate(["a text"], PARAMS)
    assert answer.finish_reason is FinishReason.ERROR
    assert "out of memory, say" in str(answer.error)
    assert 0 < len(answer.token_ids) < len(whole.token_ids)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert whole.text.startswith(answer.text)
    assert unread(llm)


def test_an_observer_may_cancel_and_not_step(llm: LLM) -> None:
    class Cancels:
        def on_step(self, _: StepRecord) -> None:
            for answer in tuple(llm._open.values()):
                llm._engine.cancel(answer.request)

    observer = Cancels()
    llm.observe(observer)
    answer = llm.generate("a text", PARAMS)
    llm.unobserve(observer)
    assert answer.finish_reason is FinishReason.CANCELLED
    assert unread(llm)
