"""One thread owns the engine: commands come in, and pieces of answers go out.

The thread lives while there is something to do. It ends when the last request has ended and no
command waits, and the next command starts another: an idle engine has no thread that would keep it
alive, wait for anything, or be missing in a forked process.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from eaglegbv.config import Planning
from eaglegbv.devices import end_idle_workers
from eaglegbv.engine import Engine
from eaglegbv.errors import EagleGBVError, EngineBusy, StepFailed
from eaglegbv.request import FinishReason, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Delta, RequestText, Result, TextStream, TokenTexts

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class CallRequest(NamedTuple):
    """One request of a call."""

    place: int  # which of the call's requests it is
    prompt_ids: list[int]
    params: SamplingParams


class Piece(NamedTuple):
    """News of one request of a call."""

    place: int  # which of the call's requests it is
    delta: Delta  # new text and tokens; the rest of the text, and the completion, at the end
    result: Result | None = None  # what came of the request, in its last piece

    @classmethod
    def last(cls, place: int, result: Result, rest: str = "") -> Self:
        """Return the last piece of a request, with the rest of its text."""
        return cls(place, Delta(text=rest, token_ids=[], completion=result.completion), result)


class Outbox(Protocol):
    """Where pieces go: a queue that another thread may put things into."""

    def put(self, piece: Piece, /) -> None:
        """Take a piece, without waiting; RuntimeError if nobody can ever get it."""


class LoopOutbox:
    """An outbox for the tasks of the event loop that runs where it is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()

    def put(self, piece: Piece, /) -> None:
        """See :class:`Outbox`; a loop that was closed raises."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def get(self) -> Piece:
        """Return the next piece, when it comes."""
        return await self._pieces.get()


@dataclass(slots=True, eq=False)
class Caller:
    """Who waits for the answers of a call."""

    outbox: Outbox
    streamed: bool = False  # whether every new piece is wanted, or only the last of each request
    # Set where nobody waits any more: the requests end at the next step. As it is only a flag,
    # finalisers may set it, which run on any thread and in the midst of anything.
    left: bool = False


class _Open(NamedTuple):
    """A request that has not ended, and who waits for it."""

    answer: RequestText
    place: int
    caller: Caller
    arrived: float  # by `time.perf_counter`


class Serving:
    """An engine and the thread that runs it; any thread may call the methods.

    Attributes:
        engine: The engine. Only work that is given to :meth:`call` may touch it.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine = engine
        self._texts = TokenTexts(tokenizer)
        self._open: list[_Open] = []
        self._commands: deque[tuple[Future[object], Callable[[Engine], object]]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False
        self._fault: BaseException | None = None  # what stopped the engine for good

    def begin(
        self, caller: Caller, requests: Sequence[CallRequest], plan: Planning, priority: int
    ) -> "Future[None]":
        """Begin the requests of a call, all in the same step.

        What is wrong with one of them is its only piece.

        Returns:
            A future, done when they have begun; it raises if the plan does not fit the engine.

        Raises:
            EagleGBVError: The engine was closed, or has stopped by a fault.
            EngineBusy: The caller is an observer, within a step.
        """
        if threading.current_thread() is self._thread:
            raise EngineBusy("a call within a step: expected one from another thread")
        return self._enqueue(lambda _: self._begin(caller, requests, plan, priority))

    def call(self, work: Callable[[Engine], Value]) -> Value:
        """Do some work with the engine between two steps; return what it returns.

        Raises:
            EagleGBVError: The engine was closed, or has stopped by a fault.
        """
        if threading.current_thread() is self._thread:
            return work(self.engine)
        return self._enqueue(work).result()

    def check(self) -> None:
        """Raise EagleGBVError if the engine was closed, or has stopped by a fault."""
        if self._fault is not None:
            raise _stopped(self._fault)
        if self._closed:
            raise _closed()

    def close(self, timeout: float | None = None) -> None:
        """Cancel all requests, and wait for the thread's end, at most ``timeout`` seconds.

        A finaliser may call it: nothing is waited for on the engine's own thread.
        """
        self._closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _enqueue(self, work: Callable[[Engine], Value]) -> "Future[Value]":
        self._check_process()
        end_idle_workers()  # of the caller, who waits for the engine's thread now
        future: Future[Value] = Future()
        with self._lock:
            self.check()
            self._commands.append((future, work))  # type: ignore[arg-type]  # a value is an object
            if self._thread is None:
                # A daemon, as its owner stops it at the interpreter's exit.
                self._thread = threading.Thread(target=self._run, name="eaglegbv", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the system has no more threads: a later call may get one
                    self._thread = None
                    self._commands.pop()
                    raise
        return future

    def _check_process(self) -> None:
        """Go on in a process that was forked while the engine was idle."""
        if os.getpid() == self._process:
            return
        # Behind its last answer the thread may not have ended yet: that is no work.
        if self._thread is not None and (self.engine.has_work or self._commands):
            raise EagleGBVError(
                "this LLM was at work when the process was forked: load one in the new process"
            )
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._thread = None
        self._open = []

    def _run(self) -> None:
        try:
            while self._do_commands():
                self._step()
                self._follow_all()
        except BaseException as error:  # noqa: BLE001  nobody may wait for a thread that has ended
            _log.exception("the engine has stopped")
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """Tell all who wait what has stopped the engine; whoever comes later is told too."""
        with self._lock:
            self._fault = error
            self._thread = None
        self._refuse_commands(_stopped(error))
        for opened in self._open:
            with suppress(Exception):  # what stopped it may be an outbox; the others are told
                result = Result.of_error(_stopped(error))
                opened.caller.outbox.put(Piece.last(opened.place, result))
        self._open = []

    def _do_commands(self) -> bool:
        """End what nobody waits for, do what was asked for; return whether to take a step."""
        while True:
            if self._closed:
                self._end_all()
            self._cancel_left()
            with self._lock:
                if not self._commands:
                    if not self._open:
                        self._thread = None
                    return bool(self._open)
                future, work = self._commands.popleft()
            _fulfil(future, work, self.engine)

    def _refuse_commands(self, error: EagleGBVError) -> None:
        while self._commands:
            future, _ = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _end_all(self) -> None:
        self._refuse_commands(_closed())
        for opened in self._open:
            opened.caller.left = True

    def _begin(
        self, caller: Caller, requests: Sequence[CallRequest], plan: Planning, priority: int
    ) -> None:
        self.engine.check_plan(plan)
        try:
            for wanted in requests:
                self._add(caller, wanted, plan, priority)
        except BaseException:
            caller.left = True
            raise

    def _add(self, caller: Caller, wanted: CallRequest, plan: Planning, priority: int) -> None:
        params = wanted.params
        try:
            request = self.engine.add(wanted.prompt_ids, params, plan, priority=priority)
        except EagleGBVError as error:
            caller.outbox.put(Piece.last(wanted.place, Result.of_error(error)))
            return
        text = TextStream.of(self._texts.tokenizer, params, request.ends, request.prompt_ids)
        answer = RequestText(request, text, self._texts)
        self._open.append(_Open(answer, wanted.place, caller, perf_counter()))

    def _cancel_left(self) -> None:
        for opened in self._open:
            if opened.caller.left:
                self.engine.cancel(opened.answer.request)

    def _step(self) -> None:
        if not self.engine.has_work:
            return
        started = perf_counter()
        waiting = [opened for opened in self._open if not opened.answer.request.begun]
        try:
            self.engine.step()
        except BaseException as error:  # noqa: BLE001  whoever waits, on other threads, is told
            _log.exception("the engine broke off")
            for opened in self._open:
                if not opened.answer.request.finished:
                    self._fail(opened.answer.request, error)
        for opened in waiting:
            opened.answer.request.metrics.queue_seconds = started - opened.arrived

    def _follow_all(self) -> None:
        """Turn new tokens into text, and give callers what is new."""
        for opened in self._open:
            try:
                self._follow(opened)
            except Exception as error:  # noqa: BLE001  a tokenizer's, which harms no other request
                _log.exception("tokens could not be turned into text")
                self._fail(opened.answer.request, error)
                self._end(opened, rest="")
        self._open = [opened for opened in self._open if not opened.answer.request.finished]

    def _follow(self, opened: _Open) -> None:
        answer = opened.answer
        delta = answer.follow()
        if answer.stops_here:
            self.engine.finish(answer.request, FinishReason.STOP, keep=answer.kept)
        if delta is not None and opened.caller.streamed:
            self._deliver(opened.caller, Piece(opened.place, delta))
        if answer.request.finished:
            self._end(opened, rest=answer.text.flush())

    def _fail(self, request: Request, error: BaseException) -> None:
        request.error = StepFailed.of(request.number, error)
        self.engine.finish(request, FinishReason.ERROR)

    def _end(self, opened: _Open, rest: str) -> None:
        """Give the caller the last piece of a request, with the rest of its text."""
        self._deliver(opened.caller, Piece.last(opened.place, opened.answer.result(), rest))

    def _deliver(self, caller: Caller, piece: Piece) -> None:
        try:
            caller.outbox.put(piece)
        except RuntimeError:  # the event loop was closed
            caller.left = True


def _fulfil(future: "Future[object]", work: Callable[[Engine], object], engine: Engine) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = work(engine)
    except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
        future.set_exception(error)
        del future  # or the error would hold this frame, and that the error
    else:
        future.set_result(value)


def _stopped(error: BaseException) -> EagleGBVError:
    fault = EagleGBVError(f"the engine has stopped: {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault


def _closed() -> EagleGBVError:
    return EagleGBVError("this LLM was closed")
