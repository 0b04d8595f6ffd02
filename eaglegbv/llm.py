"""The Python API, text in, text out: ``LLM``, and what any backend's answers prompts by."""

import asyncio
import logging
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, cast, overload

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eaglegbv.attention.kv_cache import PoolSize
from eaglegbv.compiling import check_backend
from eaglegbv.config import (
    AutoPlan,
    EngineConfig,
    PlanChoices,
    PlanName,
    Planning,
    named_planning,
    plans_of,
)
from eaglegbv.cost_cache import CostCache, shape_of
from eaglegbv.engine import Engine, check_priority
from eaglegbv.errors import EagleGBVError, InvalidArgument, one_of
from eaglegbv.loading import check_model, drafter_class, load_pair, named_models
from eaglegbv.metrics import EngineMetrics, StepObserver
from eaglegbv.models.hf import load_tokenizer as load_tokenizer
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.planner import Planner
from eaglegbv.text import (
    Answer,
    Completion,
    Delta,
    Message,
    Prompt,
    Result,
    TextStream,
    encode_prompt,
    is_one,
    per_prompt,
)
from eaglegbv.tree import DraftSampling
from eaglegbv.utils import DRAFT_WIDTH, FairLock
from eaglegbv.verification import check_plan

Prompts: TypeAlias = Sequence[Prompt]
AnyParams: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
AnyPlan: TypeAlias = Planning | PlanName | None


class Call(NamedTuple):
    """What is asked for at once; see :meth:`TextGenerator.generate`."""

    prompts: Prompts
    params: list[SamplingParams]  # those of each prompt
    plan: AnyPlan
    priority: int


class TextGenerator(ABC):
    """A model that is ready to answer.

    Attributes:
        model_name: Folder or hub name of the target.
        drafter_name: What drafts for it, or None.
        plan: How requests speculate that bring no plan of their own.
        device: Where the target runs.
        tokenizer: The target's.
    """

    def __init__(
        self,
        model_name: str,
        drafter_name: str | None,
        *,
        plan: Planning,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.model_name = model_name
        self.drafter_name = drafter_name
        self.plan = plan
        self.device = device
        self.tokenizer = tokenizer

    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
        progress: bool = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[list[Message]] | list[Prompt],
        sampling_params: AnyParams = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
        progress: bool = False,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: object,
        sampling_params: AnyParams = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
        progress: bool = False,
    ) -> Completion | list[Completion]:
        """Answer one prompt or many.

        Args:
            prompts: Text, token ids or chat messages (``[{"role": ..., "content": ...}]``), or a
                list of such prompts. Text is read as it is; messages go through the chat template.
            sampling_params: One for all, or one per prompt.
            plan: How to speculate, instead of its own plan.
            priority: Lower numbers are served first, where streams or other calls wait too.
            progress: Show a progress bar.

        Returns:
            A :class:`Completion` for one prompt, a list in the order of the prompts for many. Of
            many, one with bad input has ``finish_reason`` ``error``, and so has one that broke off,
            with the tokens it had; the others are answered.

        Raises:
            EagleGBVError: A single prompt is not usable, or the settings of the call are not.
        """
        call = self._call(prompts, sampling_params, plan, priority)
        return _answers(self._run(call, progress=progress), one=is_one(prompts))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
    ) -> Iterator[Delta]:
        """Answer one prompt piece by piece; see :meth:`generate` for the arguments.

        A caller that stops iterating, or closes the iterator, cancels the request.

        Raises:
            EagleGBVError: The prompt or the settings are not usable, or the model's output is not.
        """
        self._check(plan, priority)
        yield from self._stream(Call([prompt], per_prompt(sampling_params, 1), plan, priority))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt as the model reads it.

        Raises:
            InvalidArgument: It is empty or no prompt, or the model takes no such chat messages.
        """
        return encode_prompt(self.tokenizer, prompt, self.model_name)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        text = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return str(text)

    @abstractmethod
    def close(self) -> None:
        """End what is unanswered and free the models; nothing can be asked afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, prompts: object, params: AnyParams, plan: AnyPlan, priority: int) -> Call:
        self._check(plan, priority)
        many = cast("Prompts", [prompts] if is_one(prompts) else prompts)
        return Call(many, per_prompt(params, len(many)), plan, priority)

    @abstractmethod
    def _check(self, plan: AnyPlan, priority: int) -> None:
        """Raise unless requests can follow the plan (None is its own) and have the priority."""

    @abstractmethod
    def _run(self, call: Call, *, progress: bool) -> list[Result]:
        """Answer all prompts, or say what is wrong with each; see :meth:`generate`."""

    @abstractmethod
    def _stream(self, call: Call) -> Iterator[Delta]:
        """Answer the only prompt piece by piece; see :meth:`stream`."""


def _answers(results: Sequence[Result], *, one: bool) -> Completion | list[Completion]:
    if not one:
        return [result.completion for result in results]
    if results[0].error is not None:
        raise results[0].error
    return results[0].completion


_log = logging.getLogger(__name__)

BACKENDS: Mapping[str, str] = {
    "local": "eaglegbv.llm.LLM",
    "sglang": "eaglegbv.backends.sglang.llm.SGLangLLM",
}
"""The class that serves by each backend, by its full name: loaded when it is asked for."""


class LLM(TextGenerator):
    """A target, a drafter and an engine.

    ``LLM()`` loads the tiny pair that comes with the package. With a ``model`` of your own name a
    ``drafter`` too; without one, drafts are looked up in the text itself.
    ``LLM(..., backend="sglang")`` has SGLang serve the same calls: it gives another
    :class:`TextGenerator`, without what is said of this package's engine below.

    Threads may share an LLM: they take turns step by step, and every step serves the requests of
    all of them. In asyncio, ``await llm.generate_async(...)``. An LLM is a context manager:
    :meth:`close` frees the models at once, and so does ``del llm``.

    Attributes:
        pair: The target and what drafts for it.
        dtype: What the target computes in.
    """

    def __new__(cls, *arguments: object, backend: str = "local", **named: object) -> Self:
        """Return what serves by ``backend``; of another class it is initialised already."""
        if backend not in BACKENDS:
            raise InvalidArgument("backend", backend, one_of(sorted(BACKENDS), backend))
        if backend == "local":
            return super().__new__(cls)
        home, _, name = BACKENDS[backend].rpartition(".")
        serving = getattr(import_module(home), name)
        # Python calls our __init__ on no other class. Type checkers take it for an LLM, as they
        # cannot be told of a class that a name decides on.
        return cast("Self", serving(*arguments, backend=backend, **named))

    def __init__(
        self,
        model: str | Path | None = None,
        drafter: str | Path | None = None,
        *,
        verifier: str | None = None,
        paths: int | None = None,
        depth: int | None = None,
        draft_sampling: DraftSampling | str | None = None,
        draft_width: int = DRAFT_WIDTH,
        draft_temperature: float = 1.0,
        plan: AnyPlan = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        engine: EngineConfig | None = None,
        compile_backend: str | None = None,
        trust_remote_code: bool = False,
        backend: str = "local",
    ) -> None:
        """Load the models.

        Args:
            model: Folder or hub name of a transformers decoder-only model; None for the tiny pair.
            drafter: Folder of an EAGLE head, of a small language model with the same tokenizer, or
                of a table; ``"ngram"`` for prompt lookup, the default but for the tiny pair, which
                has ``"eagle3"`` and ``"eagle1"``, and for ``smollm2``, which has its own.
            verifier: See :class:`eaglegbv.config.Plan` for this and the next five. Where none of
                the first four is given, the engine chooses paths and depth itself, step by step.
            paths: Number of drafted paths.
            depth: Length of a drafted path.
            draft_sampling: How a tree's children arise.
            draft_width: Candidates a draft distribution keeps.
            draft_temperature: Draft temperature as a multiple of the request's.
            plan: Instead of those six: such a plan, or an :class:`AutoPlan` (``"auto"``) within
                whose limits the engine chooses. A seed reproduces a text under a fixed plan only.
            dtype: A torch dtype or its name; float32 on CPU by default, bfloat16 on GPU.
            device: CUDA where there is one, by default.
            engine: Sizes and seed of the engine.
            compile_backend: ``"inductor"`` has ``torch.compile`` compile the target, an EAGLE head
                and the verification at the start, in some minutes (less with the compiler's cache),
                which makes steps of few rows faster. Other backends of its are taken too.
            trust_remote_code: Run the code that a model brings, where transformers has none for it.
            backend: ``"local"`` for this package's own engine, or ``"sglang"``.

        Raises:
            InvalidArgument: A path or value is not usable; the message names it.
            SamplingMismatch: The verifier is not lossless for the draft sampling.
            ModelNotSupported: The model does not honour the engine's attention.
            DrafterMismatch: The drafter does not fit the model.
        """
        del backend  # settled by __new__
        config = EngineConfig() if engine is None else engine
        if not isinstance(config, EngineConfig):
            raise InvalidArgument("engine", engine, "an EngineConfig")
        models = named_models(model, drafter)
        choices = PlanChoices(
            verifier, paths, depth, draft_sampling, draft_width, draft_temperature
        )
        planning = choices.planning() if plan is None else choices.give_way_to(plan)
        # What can be wrong is found before minutes go by with loading.
        if not any(p.asks_drafter for p in plans_of(planning, greedy=False)):
            models = replace(models, drafter=None)
        elif models.drafter is None:
            _log.warning(
                "no drafter is given: drafts are looked up in the text itself, as by 'ngram'"
            )
            models = replace(models, drafter="ngram")
        if compile_backend is not None:
            check_backend(compile_backend)
        check_model(models.target)
        check_plan(planning, drafter_class(models.drafter))
        tokenizer = load_tokenizer(models.target, trust_remote_code=trust_remote_code)
        size = PoolSize(config.kv_slots, config.kv_bytes, longest_texts=config.max_batch)
        self.pair = load_pair(
            models.target,
            models.drafter,
            slots=size,
            dtype=dtype,
            device=device,
            compile_backend=compile_backend,
            graphs=config.cuda_graphs,
            trust_remote_code=trust_remote_code,
            self_check=config.self_check,
        )
        target = self.pair.target
        super().__init__(
            str(models.target),
            models.drafter_name,
            plan=planning,
            device=target.device,
            tokenizer=tokenizer,
        )
        self.dtype = target.dtype
        planner = self._planner(config, compile_backend)
        # At close, when nobody refers to it any more, or when the interpreter exits.
        self._keep_costs = weakref.finalize(self, planner.keep)
        self._engine = Engine(
            target,
            self.pair.drafter,
            config,
            planner=planner,
            compile_backend=compile_backend,
        )
        self._engine.check_plan(planning)
        if not isinstance(planning, AutoPlan):
            self._engine.record(planning, SamplingParams())
        self._open: dict[int, Answer] = {}
        self._turns = FairLock()
        self._left: deque[Answer] = deque()

    def __repr__(self) -> str:
        facts = (f"model={self.model_name!r}", f"drafter={self.drafter_name!r}", f"{self.plan}")
        return f"LLM({', '.join(facts)}, device={str(self.device)!r}, dtype={self.dtype})"

    def _stream(self, call: Call) -> Iterator[Delta]:
        answer = self._add(call.prompts[0], call.params[0], call)
        try:
            while not answer.request.finished:
                self._step()
                yield from self._new(answer)
            yield from self._new(answer)
            [result] = self._results([answer])
            if result.error is not None:
                raise result.error
            yield Delta(text=answer.text.flush(), token_ids=[], completion=result.completion)
        finally:
            self._leave([answer])

    async def generate_async(
        self,
        prompts: Prompts | Prompt,
        sampling_params: AnyParams = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
    ) -> Completion | list[Completion]:
        """Answer one prompt or many, as :meth:`generate` does, while other tasks go on.

        All tasks' requests run in the same steps. Those of a task that is cancelled end at the
        next step.
        """
        answers: list[Answer | EagleGBVError] = []
        call = await asyncio.to_thread(self._call, prompts, sampling_params, plan, priority)
        adding = asyncio.ensure_future(asyncio.to_thread(self._add_all, answers, call))
        try:
            await asyncio.shield(adding)  # the thread goes on if this task is cancelled
            while _unfinished(answers):
                await asyncio.to_thread(self._step)
            results = await asyncio.to_thread(self._results, answers)
        finally:
            if adding.done():
                self._leave(answers)
            else:
                adding.add_done_callback(lambda _: self._leave(answers))
        return _answers(results, one=is_one(prompts))

    def close(self) -> None:
        """See :meth:`TextGenerator.close`."""
        with self._turn():
            for answer in self._open.values():
                self._engine.cancel(answer.request)
            self._open.clear()
            self._keep_costs()
            self.__dict__.pop("_engine", None)
            self.__dict__.pop("pair", None)

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> object:
            """Explain why what was freed is missing."""
            if name in ("_engine", "pair"):
                raise EagleGBVError("this LLM was closed")
            return super().__getattribute__(name)  # raises the usual error

    @property
    def metrics(self) -> EngineMetrics:
        """Counters and gauges of the engine; ``metrics.exposition()`` is Prometheus' text."""
        return self._engine.metrics

    def observe(self, observer: StepObserver, *, trees: bool = False) -> None:
        """Give every further step's record to ``observer``, such as :class:`eaglegbv.trace.Tracer`.

        An observer that raises is dropped; its error is logged, and no request suffers. With
        ``trees``, the records say what became of every draft tree too.
        """
        with self._turn():
            self._engine.observe(observer, trees=trees)

    def unobserve(self, observer: StepObserver) -> None:
        """Tell ``observer`` no more."""
        with self._turn():
            self._engine.unobserve(observer)

    def reset_prefix_cache(self) -> None:
        """Forget the texts that were read so far: the next prompt is read from its beginning."""
        with self._turn():
            self._engine.reset_prefix_cache()

    def explain_plans(self) -> str:
        """Return in words what the engine expects of the best plans for the running requests."""
        with self._turn():
            return self._engine.explain_plans()

    def _check(self, plan: AnyPlan, priority: int) -> None:
        check_priority(priority)
        planning = self._planning(plan)
        with self._turn():
            self._engine.check_plan(planning)

    def _planning(self, plan: AnyPlan) -> Planning:
        return self.plan if plan is None else named_planning(plan)

    def _planner(self, config: EngineConfig, compile_backend: str | None) -> Planner:
        """Return what chooses plans, with what earlier runs learned of the costs of steps."""
        if not isinstance(self.plan, AutoPlan):
            return Planner()
        cache = CostCache.of(
            shape_of(self.model_name),
            shape_of(self.drafter_name),
            self.plan,
            compile_backend,
            config.cuda_graphs,
            device=self.device,
            dtype=self.dtype,
        )
        return Planner(cache.read(), cache.write)

    def _run(self, call: Call, *, progress: bool) -> list[Result]:
        answers: list[Answer | EagleGBVError] = []
        try:
            self._add_all(answers, call)
            unfinished = _unfinished(answers)
            with tqdm(total=len(unfinished), disable=not progress, unit="prompt") as bar:
                while unfinished:
                    self._step()
                    before, unfinished = len(unfinished), _unfinished(unfinished)
                    bar.update(before - len(unfinished))
            return self._results(answers)
        finally:
            self._leave(answers)

    def _add_all(self, answers: list[Answer | EagleGBVError], call: Call) -> None:
        for prompt, own in zip(call.prompts, call.params, strict=True):
            try:
                answers.append(self._add(prompt, own, call))
            except EagleGBVError as error:
                answers.append(error)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the engine to oneself; answers that are left meanwhile are let go of afterwards."""
        try:
            with self._turns:
                yield
        finally:
            self._let_go()

    def _step(self) -> None:
        with self._turn():
            for commit in self._engine.step():
                answer = self._open.get(commit.request.number)
                if answer is not None:
                    self._follow(answer)

    def _follow(self, answer: Answer) -> None:
        """Turn new tokens into text, and end a request whose text ends."""
        answer.follow()
        if answer.stops_here:
            self._engine.finish(answer.request, FinishReason.STOP, keep=answer.kept)

    def _new(self, answer: Answer) -> list[Delta]:
        """Return new pieces; also of a step that an interrupt left before they were made."""
        with self._turn():
            self._follow(answer)
            taken, answer.pieces = answer.pieces, []
            return taken

    def _results(self, answers: Sequence[Answer | EagleGBVError]) -> list[Result]:
        with self._turn():
            for answer in answers:
                if isinstance(answer, Answer):
                    self._follow(answer)
            return [a.result() if isinstance(a, Answer) else Result.of_error(a) for a in answers]

    def _leave(self, answers: Sequence[Answer | EagleGBVError]) -> None:
        """Let go of answers, now or when the current turn ends.

        The garbage collector closes streams too, on any thread and in the midst of anything, so
        nothing is waited for here. When the interpreter exits, nothing is left to free.
        """
        if not sys.is_finalizing():
            self._left.extend(answer for answer in answers if isinstance(answer, Answer))
            self._let_go()

    def _let_go(self) -> None:
        """End the requests of answers that were left; whoever has a turn does it after that."""
        while self._left and self._turns.try_enter():
            try:
                while self._left:
                    request = self._left.popleft().request
                    if self._open.pop(request.number, None) is not None:
                        self._engine.cancel(request)
            finally:
                self._turns.leave()

    def _add(self, prompt: Prompt, params: SamplingParams, call: Call) -> Answer:
        ids, planning = self.encode(prompt), self._planning(call.plan)
        with self._turn():
            request = self._engine.add(ids, params, planning, priority=call.priority)
            answer = Answer(request, TextStream(self.tokenizer, params.stop, request.ends))
            self._open[request.number] = answer
        return answer


def _unfinished(answers: Sequence[Answer | EagleGBVError]) -> list[Answer]:
    return [a for a in answers if isinstance(a, Answer) and not a.request.finished]
