"""What users do wrong, interrupts and threads: nothing touches the text of another prompt."""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent
from types import SimpleNamespace

import pytest
from support.cli import process
from support.requests import idle

from eaglegbv import LLM, Completion, EngineConfig, InvalidArgument, Plan, SamplingParams
from eaglegbv.engine import Engine
from eaglegbv.errors import EagleGBVError, EngineBusy, StepFailed
from eaglegbv.metrics import FINISHED, STEPS, StepRecord
from eaglegbv.models.hf import HFTarget
from eaglegbv.request import FinishReason, RequestOutput
from eaglegbv.serving import Serving
from eaglegbv.text import TextStream

PARAMS = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=120, seed=3, ignore_eos=True)
STOPPING = SamplingParams(max_tokens=16, stop="never")


@pytest.fixture(scope="module")
def llm() -> LLM:
    engine = EngineConfig(kv_slots=4096, max_batch=16, check_slots=True)
    return LLM("tiny", plan=Plan(paths=2, depth=3), engine=engine)


BAD = [
    (5, "prompt=5: expected text, token ids or chat messages"),
    (b"bytes", "prompt=b'bytes': expected text"),
    ("", "prompt='': expected a text that is not empty"),
    ("\ud83d", "expected text without halves of surrogate pairs"),
    ([1, 2.5], "expected text, token ids or chat messages"),
    ([True], "expected text, token ids or chat messages"),
    ([], r"prompt=[]: expected at least one token"),
    ([10**6], "prompt=1000000: expected token ids in [0, "),
    ([1] * 10**4, "prompt='10000 tokens': expected at most "),
    ([{"role": "robot", "content": "Hi"}], "expected messages that the chat template of"),
    ([{"content": "no role"}], "expected a message with role and content"),
    ([{"role": "user"}], "expected a message with role and content"),
    ([{"role": "user", "content": None}], "expected a message with role and content, both"),
    ([{"role": "user", "content": [{"type": "image"}]}], "expected a message with role and"),
]


def test_prompts_that_are_none_fail_alone(llm):
    good = llm.generate("good", PARAMS)
    first, *failed, last = llm.generate(["good", *(bad for bad, _ in BAD), "good"], PARAMS)
    assert first.token_ids == last.token_ids == good.token_ids
    assert first.error is None
    for answer, (_, message) in zip(failed, BAD, strict=True):
        assert answer.finish_reason is FinishReason.ERROR
        assert message in str(answer.error)
        assert answer.token_ids == []
    assert idle(llm)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [PARAMS, None], [PARAMS]])
def test_settings_that_are_none_are_named_and_nothing_is_begun(llm, params):
    with pytest.raises(InvalidArgument, match=r"sampling_params=.*: expected .*one per prompt"):
        llm.generate(["good", "good"], params)
    with pytest.raises(InvalidArgument, match="sampling_params="):
        next(llm.stream("good", {"temperature": 0}))
    assert idle(llm)


def test_parts_of_text_are_joined(llm):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert llm.encode([{"role": "user", "content": parts}]) == llm.encode(
        [{"role": "user", "content": "ab"}]
    )


def test_prompts_added_before_an_interrupt_do_not_stay(llm, monkeypatch):
    add, added = Engine.add, []

    def interrupted(*arguments: object, **named: object) -> object:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(add(*arguments, **named))
        return added[-1]

    monkeypatch.setattr(Engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], PARAMS)
    assert idle(llm)  # the engine's thread ends them right behind the error
    assert [request.finish_reason for request in added] == 2 * [FinishReason.CANCELLED]


def test_what_breaks_the_engine_behind_a_commit_loses_no_text(llm, monkeypatch):
    whole = llm.generate("a text", LONG)
    commit, seen = Engine._commit, []

    def broken(*arguments: object) -> list[RequestOutput]:
        commits = commit(*arguments)
        seen.append(commits)
        if len(seen) == 2:  # the stream's tokens were committed; the engine says nothing of it
            raise SystemExit
        return commits

    stream = llm.stream("a text", LONG)
    pieces = [next(stream), next(stream)]
    monkeypatch.setattr(Engine, "_commit", broken)
    with pytest.raises(StepFailed, match="a step broke off: SystemExit"):
        pieces.extend(stream)  # it keeps what came before the error
    text = "".join(piece.text for piece in pieces)
    assert text == whole.text[: len(text)]
    assert sum(len(piece.token_ids) for piece in pieces) < len(whole.token_ids)
    assert idle(llm)
    assert llm.generate("a text", LONG).text == whole.text


def test_tokens_without_text_end_their_own_request_only(llm, monkeypatch):
    expected = llm.generate("other", PARAMS)
    feed = TextStream.feed

    def broken(stream: TextStream, token_ids: list[int]) -> str:
        if stream.stop:
            raise OverflowError("no such id")
        return feed(stream, token_ids)

    monkeypatch.setattr(TextStream, "feed", broken)
    bad, good = llm.generate(["bad", "other"], [STOPPING, PARAMS])
    assert bad.finish_reason is FinishReason.ERROR
    assert "OverflowError: no such id" in bad.error
    assert good.token_ids == expected.token_ids
    assert idle(llm)


@pytest.mark.thorough
def test_ctrl_c_ends_a_call_and_its_requests():
    """A real signal, at the main thread, which waits for an answer."""
    code = """
        import os, signal
        from eaglegbv import LLM, Plan, SamplingParams
        class Interrupts:
            steps = 0
            def on_step(self, record):
                self.steps += 1
                if self.steps == 5:
                    os.kill(os.getpid(), signal.SIGINT)
        llm = LLM("tiny", plan=Plan())
        params = SamplingParams(max_tokens=1500, ignore_eos=True)
        llm.observe(Interrupts())
        try:
            llm.generate("Once", params)
        except KeyboardInterrupt:
            print("interrupted", llm._serving.call(lambda engine: engine.has_work))
        print(len(llm.generate("Once", SamplingParams(max_tokens=3)).token_ids))
    """
    assert process(sys.executable, "-c", dedent(code)).stdout == "interrupted False\n3\n"


@pytest.mark.thorough
def test_a_forked_process_goes_on_where_the_engine_was_idle():
    code = """
        import os, sys
        from eaglegbv import LLM, EagleGBVError, Plan, SamplingParams
        import torch
        torch.set_num_threads(1)  # the threads of a pool do not come along
        llm = LLM("tiny", plan=Plan())
        params = SamplingParams(max_tokens=4, temperature=0)
        expected = llm.generate("Once", params).text
        stream = llm.stream("Once", SamplingParams(max_tokens=1500)) if "busy" in sys.argv else None
        if (child := os.fork()) == 0:
            try:
                print(llm.generate("Once", params).text == expected)
            except EagleGBVError as error:
                print(error)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print(llm.generate("Once", params).text == expected)
    """
    quiet = process(sys.executable, "-Wignore", "-c", dedent(code))
    assert quiet.stdout == "True\nTrue\n"
    busy = process(sys.executable, "-Wignore", "-c", dedent(code), "busy")
    assert busy.stdout.startswith("this LLM was at work when the process was forked: load one in")
    assert busy.stdout.endswith("\nTrue\n")


def test_a_stream_that_is_collected_within_a_step_harms_no_other(llm, monkeypatch):
    expected = llm.generate(["a", "b"], PARAMS)
    left = llm.stream("left", PARAMS)
    next(left)
    cycle = [left]
    cycle.append(cycle)
    del left, cycle
    forward = HFTarget.forward

    def collecting(*arguments: object, **named: object) -> object:
        monkeypatch.setattr(HFTarget, "forward", forward)
        gc.collect()
        return forward(*arguments, **named)

    gc.disable()
    monkeypatch.setattr(HFTarget, "forward", collecting)
    try:
        answers = llm.generate(["a", "b"], PARAMS)
    finally:
        gc.enable()
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert idle(llm)


def test_a_stop_string_in_the_last_token_is_a_stop_and_counts_once(llm):
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


def test_an_observer_may_cancel_and_not_step(llm):
    refused = []

    def cancel_all(_: StepRecord) -> None:
        try:
            llm.generate("another")
        except EngineBusy as error:
            refused.append(error)
        for request in llm._engine._scheduler.running:
            llm._engine.cancel(request)

    observer = SimpleNamespace(on_step=cancel_all)
    llm.observe(observer)
    answer = llm.generate("a text", PARAMS)
    llm.unobserve(observer)
    assert answer.finish_reason is FinishReason.CANCELLED
    assert len(refused) == 1
    assert idle(llm)


# Threads share an LLM: each gets what it would get alone, and nobody waits for the others' end.

THREADS = 4


@pytest.fixture
def hasty() -> Iterator[None]:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0, seed=number, ignore_eos=True)


@pytest.mark.usefixtures("hasty")
def test_threads_get_the_texts_they_would_get_alone(llm):
    prompts = [f"The {word}" for word in ("dog", "sun", "old man", "river")]
    alone = [llm.generate(prompt, params(0)).text for prompt in prompts]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(3):
            answers = list(pool.map(lambda p: llm.generate(p, params(0)), prompts))
            assert [answer.text for answer in answers] == alone
    assert idle(llm)


@pytest.mark.usefixtures("hasty")
def test_streams_that_are_left_on_other_threads_free_their_slots(llm):
    def look_in(number: int) -> None:
        stream = llm.stream("Once", params(number))
        next(stream)  # and no more: the generator is closed where it is collected

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(look_in, range(3 * THREADS)))
    assert llm.generate("Once", params(1)).token_ids
    assert idle(llm)


def test_a_call_is_served_while_another_goes_on(llm):
    """In the same batch: the short answer does not wait for the long one."""
    order: list[str] = []
    long = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    began = threading.Event()

    def take_long() -> None:
        for _ in llm.stream("A long story", long):
            began.set()
        order.append("long")

    thread = threading.Thread(target=take_long)
    thread.start()
    began.wait()
    llm.generate("A short one", SamplingParams(max_tokens=2))
    order.append("short")
    thread.join()
    assert order == ["short", "long"]


def test_asyncio_serves_all_tasks_in_the_same_steps(llm):
    alone = llm.generate("Once", params(0))
    before = llm.metrics.value(STEPS)

    async def ask() -> list[Completion]:
        calls = [llm.generate_async("Once", params(n)) for n in range(8)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert [answer.text for answer in answers] == 8 * [alone.text]
    assert llm.metrics.value(STEPS) - before < 3 * alone.metrics.target_forwards
    assert idle(llm)


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["while it is added", "while it runs"])
def test_a_task_that_is_cancelled_ends_its_requests(llm, pause):
    long = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)

    async def ask() -> None:
        task = asyncio.ensure_future(llm.generate_async(["A long story", "Another"], long))
        await asyncio.sleep(pause)
        task.cancel()
        steps = llm.metrics.value(STEPS)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.get_running_loop().shutdown_default_executor()
        assert llm.metrics.value(STEPS) - steps <= 1

    asyncio.run(ask())
    assert idle(llm)
    llm.generate("Once", params(1))
    assert idle(llm)


def test_a_stream_of_a_task_has_the_text_of_a_call_while_other_tasks_go_on(llm):
    alone = llm.generate("Once", params(0))

    async def read() -> tuple[str, Completion | None]:
        pieces = [piece async for piece in llm.stream_async("Once", params(0))]
        return "".join(piece.text for piece in pieces), pieces[-1].completion

    async def read_some() -> str:
        async for piece in llm.stream_async("Once", LONG):
            if piece.text:
                return piece.text
        return ""

    async def ask() -> list[object]:
        return await asyncio.gather(*(read() for _ in range(4)), read_some())

    *whole, some = asyncio.run(ask())
    assert [text for text, _ in whole] == 4 * [alone.text]
    assert all(completion.token_ids == alone.token_ids for _, completion in whole)
    assert some
    assert idle(llm)


def test_requests_of_a_loop_that_was_closed_end(llm):
    loop = asyncio.new_event_loop()
    stream = llm.stream_async("Once", LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    assert idle_soon(llm)
    del stream


def idle_soon(llm: LLM) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if idle(llm):
            return True
        time.sleep(0.01)
    return False


def test_sixteen_threads_are_served_in_the_same_steps(llm):
    most = 0

    def note(record: StepRecord) -> None:
        nonlocal most
        most = max(most, record.requests)

    observer = SimpleNamespace(on_step=note)
    llm.observe(observer)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: llm.generate("Once", LONG), range(16)))
    llm.unobserve(observer)
    assert len({answer.text for answer in answers}) == 1
    assert most == 16


def test_a_call_within_a_running_event_loop_is_served(llm):
    """As in a notebook, whose cells run within one."""

    async def cell() -> Completion:
        return llm.generate("Once", params(0))

    assert asyncio.run(cell()).token_ids == llm.generate("Once", params(0)).token_ids


def test_an_idle_engine_has_no_thread(llm):
    llm.generate("Once", params(0))
    deadline = time.monotonic() + 60
    while any(thread.name == "eaglegbv" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_call_that_gets_no_thread_raises_and_later_ones_are_served(llm, monkeypatch):
    expected = llm.generate("Once", params(0))
    while llm._serving._thread is not None:
        time.sleep(0.001)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            llm.generate("Once", params(0))
    assert llm.generate("Once", params(0)).token_ids == expected.token_ids


def test_errors_of_tasks_are_those_of_calls(llm):
    with pytest.raises(InvalidArgument, match="expected a text that is not empty"):
        asyncio.run(llm.generate_async("", params(1)))
    good, bad = asyncio.run(llm.generate_async(["Once", ""], params(1)))
    assert (good.error, bad.finish_reason) == (None, FinishReason.ERROR)
    assert idle(llm)


def test_a_stream_may_be_open_when_the_interpreter_exits():
    stream = "LLM('tiny', plan=Plan()).stream('Once')"
    code = f"from eaglegbv import LLM, Plan\nstream = {stream}\nnext(stream)"
    assert "Error" not in process(sys.executable, "-c", code).stderr


@pytest.mark.parametrize(
    "place",
    [
        "_step",
        pytest.param("_follow_all", marks=pytest.mark.thorough),
        pytest.param("_cancel_left", marks=pytest.mark.thorough),
    ],
)
def test_a_fault_of_the_engine_s_thread_ends_whoever_waits(saved_pair, monkeypatch, place):
    """Outside of a step too: nobody hangs, and later calls say what has happened."""
    usual = getattr(Serving, place)

    def faulty(serving: Serving) -> None:
        if len(serving._open) == 5:
            raise RuntimeError("planted")
        usual(serving)

    monkeypatch.setattr(Serving, place, faulty)
    stopped = "the engine has stopped: RuntimeError: planted"
    with LLM(*saved_pair, paths=2, depth=3) as llm, ThreadPoolExecutor() as pool:
        stream = llm.stream("a", LONG)
        calls = [pool.submit(llm.generate, ["a", "b"], LONG) for _ in range(2)]
        with pytest.raises(EagleGBVError, match=stopped):
            list(stream)
        for call in calls:
            assert all(stopped in answer.error for answer in call.result(timeout=60))
        for later in (lambda: llm.generate("a"), llm.reset_prefix_cache, llm.check_health):
            with pytest.raises(EagleGBVError, match=stopped):
                later()
