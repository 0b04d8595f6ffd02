"""``LLM(..., backend="sglang")``: the same ``generate`` and ``stream``, served by SGLang.

:class:`Endpoint` is a client of a server's OpenAI endpoint, for benchmarks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import msgspec
import torch
from tqdm.asyncio import tqdm

from eaglegbv.backends.sglang.launch import engine as start_engine
from eaglegbv.backends.sglang.metrics import request_metrics
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.config import EngineConfig, Plan, PlanChoices, PlanName, Planning, Source
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.devices import AUTO_DTYPE, dtype_name, named_dtype
from eaglegbv.errors import EagleGBVError, InvalidArgument, StepFailed
from eaglegbv.llm import AnyPlan, Call, TextGenerator, load_tokenizer, sampling_defaults_of
from eaglegbv.loading import named_models
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion, Delta, Prompt, Result
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.registry import choose, chosen_plan

ANSWERS_WITHIN = 3600.0
OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""Names that differ in the OpenAI endpoints."""

SGLANG_NAMES: Mapping[str, str] = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "seed": "random_seed",
    "tokenizer": "tokenizer_path",
}
"""Arguments of :class:`eaglegbv.llm.LLM` that SGLang's engine has by another name."""

LOCAL_ALONE: Mapping[str, str] = {
    "check_health": "ask SGLang's /health",
    "dtype": "SGLang chooses it",
    "generate_async": "SGLang has an event loop of its own",
    "explain_plans": "one plan serves every request",
    "max_model_len": "ask SGLang's /v1/models",
    "metrics": "SGLang counts for itself, see its /metrics",
    "observe": "SGLang's steps are its own",
    "pair": "SGLang holds the models",
    "reset_prefix_cache": "SGLang keeps its own cache",
    "score": "ask its own API for return_logprob with logprob_start_len=0",
    "stream_async": "SGLang has an event loop of its own",
    "unobserve": "SGLang's steps are its own",
}
"""Members of only the local engine's :class:`eaglegbv.llm.LLM`, and why they are missing here."""

UNUSED_SIZES: Mapping[str, str] = {
    "kv_bytes": "give it mem_fraction_static, or kv_slots",
    "check_slots": "it checks its pools by variables of its own",
}
"""Fields of :class:`EngineConfig` that SGLang does not use, and what to do instead."""


class SGLangLLM(TextGenerator):
    """Result of ``LLM(..., backend="sglang")``: SGLang runs the models; arguments are LLM's.

    One plan serves every request: SGLang fixes the number and length of paths when it starts.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        drafter: str | Path | None = None,
        *,
        plan: AnyPlan = None,
        dtype: torch.dtype | str = AUTO_DTYPE,
        device: torch.device | str | None = None,
        engine: EngineConfig | None = None,
        generation_config: str = "auto",
        backend: str = "sglang",
        **arguments: Any,
    ) -> None:
        """Start SGLang; see :class:`eaglegbv.llm.LLM` for the arguments.

        Here ``drafter`` is an EAGLE head, ``draft_sampling`` None or ``iid``, and ``plan`` no
        automatic one. The ``dtype`` ``"auto"`` and the ``device`` None are SGLang's choice, and
        ``arguments`` are the choices for a plan and other arguments of SGLang's engine.

        Raises:
            EagleGBVError: Something cannot be served; the message names it and the remedy.
        """
        del backend
        for name, theirs in SGLANG_NAMES.items():
            if name in arguments:
                arguments[theirs] = arguments.pop(name)
        models = named_models(model, drafter)
        chosen = {field.name for field in fields(PlanChoices)} & arguments.keys()
        choices = PlanChoices(**{name: arguments.pop(name) for name in chosen})
        self._plan = _served_plan(chosen_plan(choices) if plan is None else choose(plan, choices))
        if not self._plan.speculative:
            models = replace(models, drafter=None)
        elif models.drafter is None:
            raise InvalidArgument("drafter", None, f"a drafter, for {self._plan.verifier!r}")
        sizes = engine or EngineConfig()
        defaults = sampling_defaults_of(models.target, generation_config)
        tokenizer = load_tokenizer(models.target)
        self._sglang = start_engine(
            models.target,
            models.drafter,
            paths=self._plan.paths,
            depth=self._plan.depth,
            settings=Settings(
                verifier=self._plan.verifier,
                draft_width=self._plan.draft_width,
                draft_temperature=self._plan.draft_temperature,
                seed=sizes.seed,
            ),
            **(_engine_arguments(sizes, dtype, device) | arguments),
        )
        super().__init__(
            str(models.target),
            models.drafter_name,
            plan=self._plan,
            device=torch.device(self._sglang.server_args.device),
            tokenizer=tokenizer,
            sampling_defaults=defaults,
        )

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> object:
            """Explain why a member of the local engine is missing here."""
            if name in LOCAL_ALONE:
                why = f"{LOCAL_ALONE[name]}; LLM(..., backend='local') has it"
                raise AttributeError(f"SGLangLLM has no {name!r}: {why}", name=name, obj=self)
            return super().__getattribute__(name)  # raises the usual error

    def close(self) -> None:
        """Stop SGLang's processes."""
        self._sglang.shutdown()

    shutdown = close

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        plan: AnyPlan = None,
        priority: int = 0,
    ) -> Iterator[Delta]:
        """See :meth:`TextGenerator.stream`."""
        call = self._call(prompt, sampling_params, plan, priority)
        if call.total != 1:
            raise InvalidArgument("n", call.total, "1 in a stream of SGLang's")
        return self._pieces(self.encode(prompt), call.copies[0][0])

    def _pieces(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        asked = {"input_ids": prompt_ids, "sampling_params": to_sglang(params)}
        pieces = self._sglang.generate(**asked, stream=True)
        answer: dict[str, Any] = {}
        text = ""
        tokens = 0
        for whole in pieces:
            # SGLang continues to append to the list it has returned.
            new = Delta(text=whole["text"][len(text) :], token_ids=whole["output_ids"][tokens:])
            answer, text, tokens = whole, whole["text"], tokens + len(new.token_ids)
            yield new
        yield Delta(text="", token_ids=[], completion=self._completion(prompt_ids, answer))

    def _check(self, plan: AnyPlan, priority: int) -> None:
        if plan is not None and plan != self.plan:
            raise InvalidArgument("plan", plan, f"None or the plan SGLang runs, {self.plan}")
        if priority != 0:
            expected = "0: through SGLang every call is served alike"
            raise InvalidArgument("priority", priority, expected)

    def _run(self, call: Call, *, progress: bool) -> list[Result]:
        async def answer_all() -> list[Result]:
            both = zip(call.prompts, call.copies, strict=True)
            answers = [self._answer(prompt, own) for prompt, copies in both for own in copies]
            return await tqdm.gather(*answers, disable=not progress, unit="prompt")

        return cast("list[Result]", self._sglang.loop.run_until_complete(answer_all()))

    async def _answer(self, prompt: Prompt, params: SamplingParams) -> Result:
        try:
            prompt_ids, own = self.encode(prompt), to_sglang(params)
            answer = await self._sglang.async_generate(input_ids=prompt_ids, sampling_params=own)
        except EagleGBVError as error:
            return Result.of_error(error)
        except ValueError as error:  # SGLang raises it for requests it does not accept
            return Result.of_error(InvalidArgument("prompt", f"{len(prompt)} long", str(error)))
        return Result(self._completion(prompt_ids, answer))

    def _completion(self, prompt_ids: list[int], answer: dict[str, Any]) -> Completion:
        about = answer["meta_info"]
        reason = about["finish_reason"]
        aborted = reason["type"] == "abort"
        return Completion(
            text=answer["text"],
            token_ids=list(answer["output_ids"]),
            prompt_token_ids=prompt_ids,
            finish_reason=FinishReason.ERROR if aborted else FinishReason(reason["type"]),
            error=reason.get("message") if aborted else None,
            metrics=request_metrics(about, self._plan),
        )


def _served_plan(plan: Planning | PlanName) -> Plan:
    if not isinstance(plan, Plan):
        expected = "a Plan: SGLang fixes the number and length of paths when it starts"
        raise InvalidArgument("plan", plan, expected)
    if plan.source is not Source.DRAFTER:
        raise InvalidArgument("source", str(plan.source), "'drafter': SGLang asks the head alone")
    if plan.draft_sampling not in (None, DraftSampling.IID):
        expected = "'iid': SGLang's trees are independently drawn paths"
        raise InvalidArgument("draft_sampling", str(plan.draft_sampling), expected)
    if plan.widths:
        expected = "K paths, such as (3, 1, 1, 1): SGLang's trees have a row for each path"
        raise InvalidArgument("widths", plan.widths, expected)
    for name in ("whole_vocab", "min_confidence"):
        if value := getattr(plan, name):
            expected = "0: SGLang's drafts have the width and the depth they are given"
            raise InvalidArgument(name, value, expected)
    return plan


def _engine_arguments(
    sizes: EngineConfig, dtype: torch.dtype | str, device: torch.device | str | None
) -> dict[str, object]:
    default = EngineConfig()
    for name, reason in UNUSED_SIZES.items():
        value, expected = getattr(sizes, name), getattr(default, name)
        if value != expected:
            raise InvalidArgument(name, value, f"{expected} with SGLang: {reason}")
    if sizes.cuda_graphs is GraphMode.EAGER:
        expected = "'auto', 'on' or 'off' with SGLang: 'eager' is for the local engine's graphs"
        raise InvalidArgument("cuda_graphs", str(sizes.cuda_graphs), expected)
    arguments: dict[str, object] = {
        "max_running_requests": sizes.max_batch,
        "max_total_tokens": sizes.kv_slots,
        "random_seed": sizes.seed % 2**31,
        "log_level": "warning",
        "disable_radix_cache": not sizes.prefix_cache,
        "disable_cuda_graph": sizes.cuda_graphs is GraphMode.OFF,
    }
    if sizes.prefill_tokens != default.prefill_tokens:
        arguments["chunked_prefill_size"] = sizes.prefill_tokens
    if dtype != AUTO_DTYPE:
        arguments["dtype"] = dtype_name(named_dtype(str(dtype).removeprefix("torch.")))
    if device is not None:
        place = torch.device(device)
        arguments["device"] = place.type
        if place.index is not None:
            arguments["base_gpu_id"] = place.index
    return arguments


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Answers chat messages through ``/v1/chat/completions``."""

    url: str  # address of the server
    shape: Plan  # plan with the shape of its trees; its verifier does not matter here

    def __call__(
        self, prompts: list[dict[str, str]], sampling_params: SamplingParams, *, plan: Plan
    ) -> Completion:
        """Answer one conversation.

        Raises:
            InvalidArgument: The server refused the request; the message quotes its reason.
            StepFailed: The server broke off.
        """
        del plan  # it was fixed when the server started
        own = to_sglang(sampling_params).items()
        body = {OPENAI_NAMES.get(name, name): value for name, value in own}
        body |= {"model": "default", "messages": prompts}
        body |= {"return_meta_info": True, "return_token_ids": True}
        try:
            answer = httpx.post(
                f"{self.url}/v1/chat/completions", json=body, timeout=ANSWERS_WITHIN
            )
        except httpx.HTTPError as error:
            raise StepFailed(0, str(error)) from error
        if answer.is_error:
            raise InvalidArgument("prompt", f"{len(prompts)} messages", answer.text)
        [choice] = answer.json()["choices"]
        aborted = choice["finish_reason"] == "abort"
        return Completion(
            text=choice["message"]["content"] or "",
            token_ids=choice["response_token_ids"],
            finish_reason=FinishReason.ERROR if aborted else FinishReason(choice["finish_reason"]),
            metrics=request_metrics(choice["meta_info"], self.shape),
        )


_SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
}
_LOCAL_SETTINGS = {
    "bad_words": "SGLang has no such setting",
    "allowed_token_ids": "SGLang has no such setting",
    "grammar": "its own notation is another, ebnf",
    "logprobs": "ask SGLang's own API for return_logprob",
    "prompt_logprobs": "ask SGLang's own API for return_logprob",
}


def to_sglang(params: SamplingParams) -> dict[str, Any]:
    """Return the same settings under the names of SGLang's engine and ``/generate``.

    Raises:
        InvalidArgument: One is set that is not passed on.
    """
    settings = msgspec.structs.asdict(params)
    del settings["logprobs_mode"]
    unset = SamplingParams()
    for name, reason in _LOCAL_SETTINGS.items():
        value, usual = settings.pop(name), getattr(unset, name)
        if value != usual:
            raise InvalidArgument(name, value, f"{usual} with SGLang: {reason}")
    for name, theirs in _SGLANG_NAMES.items():
        settings[theirs] = settings.pop(name)
    seed = settings.pop("seed")
    settings["logit_bias"] = {str(token): value for token, value in settings["logit_bias"]} or None
    settings["top_k"] = -1 if params.top_k is None else params.top_k
    for name in ("stop", "stop_token_ids"):
        settings[name] = list(settings[name])
    if seed is not None:
        # SGLang's seeds are signed; this keeps all 64 bits distinct.
        settings["sampling_seed"] = (seed + 2**63) % 2**64 - 2**63
    return settings
