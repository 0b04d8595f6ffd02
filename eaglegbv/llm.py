"""The Python API, text in, text out: ``LLM``, and what any backend's answers prompts by."""

import asyncio
import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast, overload

import msgspec
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eaglegbv.arguments import known_arguments
from eaglegbv.attention import PoolSize
from eaglegbv.compiling import check_backend
from eaglegbv.config import (
    PLAIN,
    AutoPlan,
    DraftSampling,
    EngineConfig,
    PlanChoices,
    PlanName,
    Planning,
    named_planning,
)
from eaglegbv.cost_cache import cost_cache, shape_of
from eaglegbv.devices import AUTO_DTYPE, end_idle_workers, place_of
from eaglegbv.engine import Engine, check_priority
from eaglegbv.errors import EagleGBVError, InvalidArgument, one_of
from eaglegbv.gguf import RECOMMENDED, is_smollm2
from eaglegbv.loading import check_model, drafter_class, load_pair, model_revision, named_models
from eaglegbv.metrics import EngineMetrics, StepObserver
from eaglegbv.models.hf import load_sampling_defaults
from eaglegbv.models.hf import load_tokenizer as load_tokenizer
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler import Planner
from eaglegbv.serving import Caller, CallRequest, LoopOutbox, Piece, Serving
from eaglegbv.text import (
    Completion,
    Delta,
    Message,
    Prompt,
    Result,
    Score,
    encode_prompt,
    is_one,
    per_prompt,
    plain_ids,
)
from eaglegbv.utils import DRAFT_WIDTH, log_once
from eaglegbv.verification import check_plan
from eaglegbv.verifiers import choose

_SAMPLING = SamplingParams.__struct_fields__

Prompts: TypeAlias = Sequence[Prompt]
AnyParams: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
AnyPlan: TypeAlias = Planning | PlanName | None


class Call(NamedTuple):
    """What is asked for at once; see :meth:`TextGenerator.generate`."""

    prompts: Prompts
    one: bool  # whether the caller gave one prompt, and no list
    copies: list[list[SamplingParams]]  # those of each prompt, of each of its answers
    plan: AnyPlan
    priority: int

    @property
    def total(self) -> int:
        """Number of answers, each of which is a request."""
        return sum(map(len, self.copies))

    def answers(self, results: Sequence[Result]) -> Completion | list[Completion]:
        """Return one prompt's completion, or a list of all prompts', given each request's result.

        Raises:
            EagleGBVError: There was one prompt, and an answer to it broke off.
        """
        errors = [result.error for result in results if result.error is not None]
        if self.one and errors:
            raise errors[0]
        completions = []
        rest = iter(results)
        for copies in self.copies:
            first, *others = [next(rest).completion for _ in copies]
            completions.append(msgspec.structs.replace(first, others=others) if others else first)
        return completions[0] if self.one else completions


class TextGenerator(ABC):
    """A model that is ready to answer.

    Attributes:
        model_name: Folder or hub name of the target.
        drafter_name: What drafts for it, or None.
        plan: How requests speculate that bring no plan of their own.
        device: Where the target runs.
        tokenizer: The target's.
        sampling_defaults: How requests are sampled that bring no settings of their own.
    """

    def __init__(
        self,
        model_name: str,
        drafter_name: str | None,
        *,
        plan: Planning,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        sampling_defaults: SamplingParams,
    ) -> None:
        self.model_name = model_name
        self.drafter_name = drafter_name
        self.plan = plan
        self.device = device
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults

    @overload
    def generate(  # type: ignore[overload-overlap]  # a dictionary's keys say what it is
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

    @known_arguments(_SAMPLING)
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
                Also ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``; ids of NumPy or torch,
                ``[tokens]``, or ``[prompts, tokens]`` for many prompts.
            sampling_params: One for all, or one per prompt; None takes ``sampling_defaults``.
            plan: How to speculate, instead of its own plan.
            priority: Lower numbers are served first, where streams or other calls wait too.
            progress: Show a progress bar.

        Returns:
            A :class:`Completion` for one prompt, a list in the order of the prompts for many. Of
            many, one with bad input has ``finish_reason`` ``error``, and so has one that broke off,
            with the tokens it had; the others are answered. Of several answers (``n``), it is the
            first, and ``choices`` has them all.

        Raises:
            EagleGBVError: A single prompt is not usable, or the settings of the call are not.
        """
        call = self._call(prompts, sampling_params, plan, priority)
        return call.answers(self._run(call, progress=progress))

    @known_arguments(_SAMPLING)
    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: AnyParams = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        plan: AnyPlan = None,
        priority: int = 0,
        progress: bool = False,
    ) -> Completion | list[Completion]:
        """Answer one conversation or many, as :meth:`generate` does.

        Args:
            messages: Messages with ``role`` and ``content``, or a list of such conversations.
            sampling_params: See :meth:`generate` for this, ``plan``, ``priority`` and ``progress``.
            tools: Descriptions of functions (JSON schemas), for templates that write them. A call
                of one is in the answer's text.
            chat_template_kwargs: Further variables of the model's chat template.
            continue_final_message: Go on within the last message instead of answering it.
            add_generation_prompt: Let the template begin an answer; by default, unless the last
                message is continued.

        Raises:
            EagleGBVError: See :meth:`generate`.
        """
        one = is_one(messages)
        conversations = [messages] if one else messages
        prompts: list[Prompt] = [
            {
                "messages": conversation,
                "tools": tools,
                "chat_template_kwargs": chat_template_kwargs or {},
                "continue_final_message": continue_final_message,
                "add_generation_prompt": add_generation_prompt,
            }
            for conversation in conversations
        ]
        call = self._call(prompts[0] if one else prompts, sampling_params, plan, priority)
        return call.answers(self._run(call, progress=progress))

    @abstractmethod
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
    ) -> Iterator[Delta]:
        """Answer one prompt piece by piece; see :meth:`generate` for the arguments.

        A caller that stops iterating, or closes the iterator, cancels the request. Pieces of
        several answers (``n``) come as they are made; ``index`` tells them apart.

        Raises:
            EagleGBVError: The prompt or the settings are not usable, or the model's output is not.
        """

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt as the model reads it.

        Raises:
            InvalidArgument: It is empty or no prompt, or the model takes no such chat messages.
        """
        return encode_prompt(self.tokenizer, prompt, self.model_name)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, special ones included unless they are skipped."""
        how = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(token_ids), **how))

    @abstractmethod
    def close(self) -> None:
        """End what is unanswered and free the models; nothing can be asked afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, prompts: object, params: AnyParams, plan: AnyPlan, priority: int) -> Call:
        self._check(plan, priority)
        plain = plain_ids(prompts)
        one = is_one(plain)
        many = cast("Prompts", [plain] if one else plain)
        each = per_prompt(params, len(many), self.sampling_defaults)
        return Call(many, one, [params.copies() for params in each], plan, priority)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return ``sampling_defaults``, by the name that this has in vLLM."""
        return self.sampling_defaults

    @abstractmethod
    def _check(self, plan: AnyPlan, priority: int) -> None:
        """Raise unless requests can follow the plan (None is its own) and have the priority."""

    @abstractmethod
    def _run(self, call: Call, *, progress: bool) -> list[Result]:
        """Answer all prompts, or say what is wrong with each; see :meth:`generate`."""


def sampling_defaults_of(model: str | Path, generation_config: str) -> SamplingParams:
    """Return how a target is sampled where nothing is said; say it, once, if the model says how.

    Raises:
        InvalidArgument: ``generation_config`` is neither ``"auto"`` nor ``"none"``.
    """
    if generation_config not in ("auto", "none"):
        raise InvalidArgument("generation_config", generation_config, "'auto' or 'none'")
    usual = SamplingParams()
    if generation_config == "none":
        return usual
    defaults = load_sampling_defaults(model)
    if defaults == usual and is_smollm2(model):  # the hub's file says nothing
        warmth = RECOMMENDED["temperature"]
        share = RECOMMENDED["top_p"]
        defaults = SamplingParams(temperature=warmth, top_p=share)
    stated = msgspec.structs.asdict(defaults)
    differing = [
        f"{name}={stated[name]}"
        for name, value in msgspec.structs.asdict(usual).items()
        if stated[name] != value
    ]
    if differing:
        said = f"sampling defaults of the model's generation_config: {', '.join(differing)}"
        log_once(_log, logging.WARNING, f"{said} (generation_config='none' ignores them)")
    return defaults


_log = logging.getLogger(__name__)

_FINALISER_WAITS = 60.0
"""Seconds to wait for the end of a step where an LLM is collected while requests run.

Only a step that waits for a lock of the very thread that collects, or a very long one, is longer.
"""

BACKENDS: Mapping[str, str] = {
    "local": "eaglegbv.llm.LLM",
    "sglang": "eaglegbv.backends.sglang.llm.SGLangLLM",
}
"""The class that serves by each backend, by its full name: loaded when it is asked for."""


class LLM(TextGenerator):
    """A target, a drafter and an engine.

    ``LLM()`` loads SmolLM2-135M-Instruct and its packaged head where the model is at hand, or else
    the packaged tiny pair, which a line says. With a ``model`` of your own name a ``drafter`` too;
    without one, drafts are looked up in the text itself.
    ``LLM(..., backend="sglang")`` has SGLang serve the same calls: it gives another
    :class:`TextGenerator`, without what is said of this package's engine below.

    A thread of its own takes the steps while there are requests. Threads and tasks may share an
    LLM: every step serves the requests of all of them. In asyncio,
    ``await llm.generate_async(...)`` and ``async for delta in llm.stream_async(...)``. An LLM is a
    context manager: :meth:`close` frees the models at once, and so does ``del llm``.

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

    @known_arguments(_SAMPLING)
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
        widths: Sequence[int] | None = None,
        plan: AnyPlan = None,
        dtype: torch.dtype | str = AUTO_DTYPE,
        device: torch.device | str | None = None,
        engine: EngineConfig | None = None,
        compile_backend: str | None = None,
        trust_remote_code: bool = False,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        seed: int | None = None,
        generation_config: str = "auto",
        backend: str = "local",
    ) -> None:
        """Load the models.

        Args:
            model: Folder or hub name of a transformers decoder-only model; ``"smollm2"``, or
                ``"tiny"`` for the packaged one. None takes the first of these two that is there.
            drafter: Folder of an EAGLE head, of a small language model with the same tokenizer, or
                of a table; ``"ngram"`` for prompt lookup, the default but for ``tiny``, which has
                ``"eagle3"`` and ``"eagle1"``, and for ``smollm2``, which has its own.
            verifier: See :class:`eaglegbv.config.PlanChoices` for this and the next six. Where no
                verifier and nothing of a tree is given, the engine chooses paths and depth itself,
                step by step.
            paths: Number of drafted paths.
            depth: Length of a drafted path.
            draft_sampling: How a tree's children arise.
            draft_width: Candidates a draft distribution keeps.
            draft_temperature: Draft temperature as a multiple of the request's.
            widths: Drafts below each node of a depth.
            plan: Instead of those seven: such a plan, or an :class:`AutoPlan` (``"auto"``) within
                whose limits the engine chooses. A seed reproduces a text under a fixed plan only.
            dtype: A torch dtype or its name; ``"auto"`` takes bfloat16 on a GPU, and on a CPU that
                multiplies it faster than float32, which is timed.
            device: CUDA where there is one, by default.
            engine: Sizes and seed of the engine.
            compile_backend: ``"inductor"`` has ``torch.compile`` compile the model at the start, in
                some minutes (less with the compiler's cache), which makes steps of few rows faster.
                Other backends of its are taken too.
            trust_remote_code: Run the code that a model brings, where transformers has none for it.
            tokenizer: Folder or hub name of another tokenizer than the model's.
            revision: Revision of a hub model.
            max_model_len: Most tokens of a prompt and its answer, where the model's context is
                longer.
            gpu_memory_utilization: Share of the device's memory that models and KV pools may take
                together; without it, and without sizes in ``engine``, 0.8 of what the models leave.
            seed: The engine's seed, instead of that of ``engine``.
            generation_config: ``"auto"`` takes what the model's ``generation_config.json``
                recommends for requests without sampling parameters; ``"none"`` does not.
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
        if seed is not None:
            config = msgspec.structs.replace(config, seed=seed)
        tree = (verifier, paths, depth, draft_sampling, draft_width, draft_temperature, widths)
        planning = choose(plan, PlanChoices(*tree))
        place, precision = place_of(device, dtype)
        models = named_models(model, drafter, precision).drafting_by(planning)
        if revision is not None:
            models = replace(models, target=model_revision(models.target, revision))
        # What can be wrong is found before minutes go by with loading.
        if compile_backend is not None:
            check_backend(compile_backend)
        check_model(models.target)
        check_plan(planning, drafter_class(models.drafter))
        defaults = sampling_defaults_of(models.target, generation_config)
        words = load_tokenizer(tokenizer or models.target, trust_remote_code=trust_remote_code)
        self.pair = load_pair(
            models.target,
            models.drafter,
            slots=PoolSize(
                config.kv_slots,
                config.kv_bytes,
                longest_sequences=config.max_batch,
                utilization=gpu_memory_utilization,
            ),
            dtype=precision,
            device=place,
            compile_backend=compile_backend,
            graphs=config.cuda_graphs,
            trust_remote_code=trust_remote_code,
            self_check=config.self_check,
            native=config.native,
            max_context=max_model_len,
        )
        self.dtype = self.pair.target.dtype
        super().__init__(
            str(models.target),
            models.drafter_name,
            plan=planning,
            device=self.pair.target.device,
            tokenizer=words,
            sampling_defaults=defaults,
        )
        self._start(config, compile_backend)

    def _start(self, config: EngineConfig, compile_backend: str | None) -> None:
        """Put the engine together, and begin to serve."""
        planner = self._planner(config, compile_backend)
        # At close, when nobody refers to it any more, or when the interpreter exits.
        self._keep_costs = weakref.finalize(self, planner.keep)
        target = self.pair.target
        drafter = self.pair.drafter
        self._engine = Engine(target, drafter, config, planner=planner, tokenizer=self.tokenizer)
        self._engine.check_plan(self.plan)
        if not isinstance(self.plan, AutoPlan):
            self._engine.record(self.plan, SamplingParams())
        end_idle_workers()  # those that loading needed
        self._serving = Serving(self._engine, self.tokenizer)
        # Where the last user goes, or the interpreter exits, whatever is unanswered ends.
        self._finalizer = weakref.finalize(self, self._serving.close, _FINALISER_WAITS)

    def __repr__(self) -> str:
        facts = (f"model={self.model_name!r}", f"drafter={self.drafter_name!r}", f"{self.plan}")
        where = f"device={str(self.device)!r}, dtype={self.dtype}"
        return f"LLM({', '.join(facts)}, {where}, runs_by={self.pair.target.runs_by!r})"

    @known_arguments(_SAMPLING)
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
    ) -> "Stream":
        """See :meth:`TextGenerator.stream`; the answer goes on while nobody takes its pieces."""
        return Stream(self, self._call(prompt, sampling_params, plan, priority))

    @known_arguments(_SAMPLING)
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
        call = self._call(prompts, sampling_params, plan, priority)
        results: dict[int, Result] = {}
        async with aclosing(self._pieces(call, streamed=False)) as pieces:
            async for piece in pieces:
                if piece.result is not None:
                    results[piece.place] = piece.result
        return call.answers(_in_order(results))

    @known_arguments(_SAMPLING)
    async def stream_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
    ) -> AsyncGenerator[Delta, None]:
        """Answer one prompt piece by piece, as :meth:`stream` does, while other tasks go on.

        A task that is cancelled, or stops iterating, cancels the request.
        """
        call = self._call(prompt, sampling_params, plan, priority)
        async with aclosing(self._pieces(call, streamed=True)) as pieces:
            async for piece in pieces:
                yield _checked(piece)

    def score(self, prompts: object, *, logprobs: int = 0) -> Score | list[Score]:
        """Return how likely the target finds a text, or each of many, token by token.

        Texts are read in the engine's packed forwards, many at once and long ones in parts.

        Args:
            prompts: What :meth:`generate` takes as prompts.
            logprobs: How many of the most likely tokens to give beside each token; -1 for all.

        Raises:
            EagleGBVError: A single text is not usable; of many, its score has the error.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=logprobs)
        call = self._call(prompts, params, PLAIN, 0)
        read = call.answers(self._run(call, progress=False))
        return [Score.of(each) for each in read] if isinstance(read, list) else Score.of(read)

    def close(self) -> None:
        """See :meth:`TextGenerator.close`."""
        serving = self.__dict__.pop("_serving", None)
        if serving is not None:
            self._finalizer.detach()
            serving.close()
        self._keep_costs()
        self.__dict__.pop("_engine", None)
        self.__dict__.pop("pair", None)

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> object:
            """Explain why what was freed is missing."""
            if name in ("_engine", "_serving", "pair"):
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
        self._serving.call(lambda engine: engine.observe(observer, trees=trees))

    def unobserve(self, observer: StepObserver) -> None:
        """Tell ``observer`` no more."""
        self._serving.call(lambda engine: engine.unobserve(observer))

    def reset_prefix_cache(self) -> None:
        """Forget the texts that were read so far: the next prompt is read from its beginning."""
        self._serving.call(Engine.reset_prefix_cache)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.pair.target.max_context

    def check_health(self) -> None:
        """Raise EagleGBVError if it takes no requests any more: it was closed, or has broken."""
        self._serving.check()

    def explain_plans(self) -> str:
        """Return in words what the engine expects of the best plans for the running requests."""
        return self._serving.call(Engine.explain_plans)

    def _check(self, plan: AnyPlan, priority: int) -> None:
        check_priority(priority)
        self._planning(plan)  # the engine checks it where the call begins

    def _planning(self, plan: AnyPlan) -> Planning:
        return self.plan if plan is None else named_planning(plan)

    def _planner(self, config: EngineConfig, compile_backend: str | None) -> Planner:
        """Return what chooses plans, with what earlier runs learned of the costs of steps."""
        if not isinstance(self.plan, AutoPlan):
            return Planner()
        cache = cost_cache(
            shape_of(self.model_name),
            shape_of(self.drafter_name),
            AutoPlan(**msgspec.structs.asdict(self.plan)),  # whoever named it, or nobody
            compile_backend,
            config.cuda_graphs,
            self.pair.target.runs_by,
            device=self.device,
            dtype=self.dtype,
        )
        drafter = self.pair.drafter
        at_once = drafter is not None and drafter.at_once
        return Planner(cache.read(), cache.write, at_once=at_once)

    def _run(self, call: Call, *, progress: bool) -> list[Result]:
        pieces: SimpleQueue[Piece] = SimpleQueue()
        caller = Caller(pieces)
        results: dict[int, Result] = {}
        try:
            self._begin(call, caller).result()
            with tqdm(total=call.total, disable=not progress, unit="prompt") as bar:
                while len(results) < call.total:
                    piece = pieces.get()
                    if piece.result is not None:
                        results[piece.place] = piece.result
                        bar.update()
        finally:
            caller.left = True
        return _in_order(results)

    def _begin(self, call: Call, caller: Caller) -> "Future[None]":
        """Begin the requests of the prompts that can be read; see :meth:`Serving.begin`."""
        requests: list[CallRequest] = []
        places = itertools.count()
        for prompt, copies in zip(call.prompts, call.copies, strict=True):
            try:
                prompt_ids = self.encode(prompt)
                self._engine.prepare(copies[0])
            except EagleGBVError as error:
                for _ in copies:
                    caller.outbox.put(Piece.last(next(places), Result.of_error(error)))
                continue
            requests += [CallRequest(next(places), prompt_ids, params) for params in copies]
        return self._serving.begin(caller, requests, self._planning(call.plan), call.priority)

    async def _pieces(self, call: Call, *, streamed: bool) -> AsyncGenerator[Piece, None]:
        """Begin a call's requests, and yield news of them until all have ended."""
        outbox = LoopOutbox()
        caller = Caller(outbox, streamed=streamed)
        unfinished = call.total
        try:
            # On another thread, as prompts may take long to encode, and grammars to compile.
            begun = await asyncio.to_thread(self._begin, call, caller)
            await asyncio.wrap_future(begun)
            while unfinished:
                piece = await outbox.get()
                unfinished -= piece.result is not None
                yield piece
        finally:
            caller.left = True


class Stream(Iterator[Delta]):
    """The pieces of an answer, as they come; see :meth:`LLM.stream`."""

    def __init__(self, llm: LLM, call: Call) -> None:
        self._llm: LLM | None = llm  # it lives as long as somebody wants its answers
        self._pieces: SimpleQueue[Piece] = SimpleQueue()
        self._unfinished = call.total
        self._caller = Caller(self._pieces, streamed=True)
        try:
            llm._begin(call, self._caller).result()
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Delta:
        """Wait for the next piece.

        Raises:
            EagleGBVError: The prompt or the settings are not usable, or the model's output is not.
        """
        if not self._unfinished:
            raise StopIteration
        try:
            piece = self._pieces.get()
        except BaseException:  # Ctrl-C
            self.cancel()
            raise
        if piece.result is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self.close()
        return _checked(piece)

    def cancel(self) -> None:
        """End the answer at the next step; its last pieces can still be taken."""
        self._caller.left = True

    def close(self) -> None:
        """End the answer at the next step, and the iteration now."""
        self.cancel()
        self._unfinished = 0
        self._llm = None

    def __del__(self) -> None:
        self.cancel()


def _checked(piece: Piece) -> Delta:
    if piece.result is not None and piece.result.error is not None:
        raise piece.result.error
    return msgspec.structs.replace(piece.delta, index=piece.place) if piece.place else piece.delta


def _in_order(results: Mapping[int, Result]) -> list[Result]:
    return [results[place] for place in sorted(results)]
