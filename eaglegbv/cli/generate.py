"""``eaglegbv generate``: answer one prompt."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.options import (
    VERIFIERS,
    CompileBackend,
    CudaGraphs,
    Device,
    Drafter,
    DraftQuantization,
    DraftTemperature,
    DraftWidth,
    Dtype,
    MaxTokens,
    Model,
    SamplingName,
    base_plan,
    check_out,
    fitting_paths,
    graph_mode,
    load_llm,
    quantization,
    read_text,
)
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import DRAFT_WIDTH

if TYPE_CHECKING:
    from eaglegbv.config import Plan, Planning
    from eaglegbv.llm import LLM
    from eaglegbv.sampling import SamplingParams
    from eaglegbv.text import Completion

Messages = list[dict[str, str]]


def generate(
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the prompt; '-' reads standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False,
    model: Model = None,
    drafter: Drafter = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            help=f"One of {VERIFIERS}; or 'none' for plain decoding.",
            show_default="otbv; without this, --paths, --depth and --draft-sampling the engine chooses plans",
        ),
    ] = None,
    paths: Annotated[
        int | None,
        typer.Option(help="Drafted paths, K.", show_default="3, or as many as the verifier takes"),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Drafted tokens per path, L.", show_default="4")
    ] = None,
    draft_sampling: SamplingName = None,
    draft_width: DraftWidth = DRAFT_WIDTH,
    draft_temperature: DraftTemperature = 1.0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(help="Keep the most likely tokens that together reach this probability."),
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="Keep this many most likely tokens.", show_default="all")
    ] = None,
    min_p: Annotated[
        float,
        typer.Option(help="Drop tokens less likely than this fraction of the most likely one."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Above 1, makes tokens of the prompt and the answer less likely."),
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logits of tokens that occur in the answer.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted once for each time that a token occurs in the answer.")
    ] = 0.0,
    max_tokens: MaxTokens = 128,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after end-of-sequence tokens.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Reproduces a text if --verifier, --paths, --depth or --draft-sampling is given; plans that "
            "the engine chooses depend on timing.",
            show_default="a fixed one, which is printed",
        ),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, tokens, metrics.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="File for a timeline of the engine's steps, a Chrome trace (Perfetto)."),
    ] = None,
    trace_trees: Annotated[
        bool,
        typer.Option(
            "--trace-trees", help="Add every draft tree to the trace; 'eaglegbv view' draws them."
        ),
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    compile_backend: CompileBackend = None,
    cuda_graphs: CudaGraphs = "auto",
    draft_quantization: DraftQuantization = "auto",
) -> None:
    """Answer a prompt; the text follows the target's distribution, whatever the drafter and verifier."""
    message = _prompt(prompt, prompt_file)
    if raw and system is not None:
        raise InvalidArgument("system", system, "none with --raw, which has no chat template")
    if trace_trees and trace is None:
        raise InvalidArgument("trace-trees", trace_trees, "--trace FILE to write them to")
    check_out(trace, "trace")
    from eaglegbv.config import EngineConfig
    from eaglegbv.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        seed=seed,
    )
    plan = _plan(base_plan(draft_sampling, draft_width, draft_temperature), verifier, paths, depth)
    params = _seeded(params, plan)
    config = EngineConfig(
        cuda_graphs=graph_mode(cuda_graphs), draft_quantization=quantization(draft_quantization)
    )
    llm = load_llm(
        model, drafter, plan, device, dtype, engine=config, compile_backend=compile_backend
    )
    request = message if raw else messages(message, system)
    with _tracing(llm, trace, trees=trace_trees):
        if as_json:
            start = time.perf_counter()
            completion = answer(llm, request, params)
            typer.echo(_json(llm, completion, time.perf_counter() - start))
        else:
            completion = print_answer(llm, request, params, stream=stream)
            repeated = _repeating(params) if seed is None else ""
            typer.echo(_footer(completion, repeated), err=True)


@contextmanager
def _tracing(llm: "LLM", path: Path | None, *, trees: bool) -> Iterator[None]:
    """Write the steps taken in this context to a trace, if a path is given."""
    if path is None:
        yield
        return
    from eaglegbv.trace import Tracer

    with Tracer(path, decode=llm.decode if trees else None) as tracer:
        llm.observe(tracer, trees=trees)
        yield
    typer.echo(f"wrote {path}", err=True)


def messages(prompt: str, system: str | None = None) -> Messages:
    """Return a conversation with one user message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def answer(llm: "LLM", request: str | Messages, params: "SamplingParams") -> "Completion":
    """Return the whole answer, ignoring the pieces of the stream."""
    for delta in llm.stream(request, params):
        if delta.completion is not None:
            return delta.completion
    raise RuntimeError("the stream ended without a completion")


def print_answer(
    llm: "LLM", request: str | Messages, params: "SamplingParams", *, stream: bool
) -> "Completion":
    """Print the answer, piece by piece or at once, and return it."""
    if not stream:
        completion = answer(llm, request, params)
        typer.echo(completion.text)
        return completion
    for delta in llm.stream(request, params):
        typer.echo(delta.text, nl=False)
        if delta.completion is not None:
            typer.echo()
            return delta.completion
    raise RuntimeError("the stream ended without a completion")


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is None and prompt_file is None:
        raise InvalidArgument("prompt", prompt, "--prompt TEXT or --prompt-file FILE")
    if prompt is not None and prompt_file is not None:
        raise InvalidArgument(
            "prompt-file", str(prompt_file), "--prompt or --prompt-file, not both"
        )
    text = prompt if prompt_file is None else read_text(prompt_file)
    if not text or not text.strip():
        raise InvalidArgument("prompt", text, "a text that is not empty")
    return text


def _plan(base: "Plan", verifier: str | None, paths: int | None, depth: int | None) -> "Planning":
    """Return the plan that the options fix, or limits for the engine's choice if they fix none."""
    import msgspec

    if all(choice is None for choice in (verifier, paths, depth, base.draft_sampling)):
        from eaglegbv.config import AutoPlan

        temperatures = (base.draft_temperature,)
        return AutoPlan(draft_width=base.draft_width, draft_temperatures=temperatures)
    verifier = base.verifier if verifier is None else verifier
    fitting = fitting_paths(verifier, base.paths)
    return msgspec.structs.replace(
        base,
        verifier=verifier,
        paths=fitting if paths is None else paths,
        depth=base.depth if depth is None else depth,
    )


def _json(llm: "LLM", completion: "Completion", seconds: float) -> str:
    import msgspec

    metrics = completion.metrics
    result = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_token_ids": completion.prompt_token_ids,
        "plan": llm.plan,
        "seconds": seconds,
        "metrics": {
            **msgspec.structs.asdict(metrics),
            "block_efficiency": metrics.block_efficiency,
            "acceptance_length": metrics.acceptance_length,
            "acceptance_by_depth": metrics.acceptance_by_depth,
            "decode_seconds": metrics.decode_seconds,
        },
    }
    return msgspec.json.encode(result).decode()


def _seeded(params: "SamplingParams", plan: "Planning") -> "SamplingParams":
    """Return settings with the seed that the engine would derive, so that it can be printed.

    If the engine chooses plans, no seed reproduces a text, because the choice depends on timing.
    """
    import msgspec

    from eaglegbv.config import EngineConfig, Plan
    from eaglegbv.rng import request_seed

    if params.seed is not None or not isinstance(plan, Plan):
        return params
    return msgspec.structs.replace(params, seed=request_seed(EngineConfig().seed, 0))


def _repeating(params: "SamplingParams") -> str:
    """Return a note with the seed that reproduces a sampled text; empty if no seed does."""
    drawn = params.temperature > 0 and params.seed is not None
    return f", seed {params.seed}" if drawn else ""


def _footer(completion: "Completion", repeats: str) -> str:
    metrics = completion.metrics
    seconds = metrics.decode_seconds
    rate = f", {metrics.committed_tokens / seconds:.0f} tokens/s" if seconds else ""
    # Reading the prompt yields a token that is not counted in any decoding forward.
    first = max(0, len(completion.token_ids) - metrics.committed_tokens)
    forwards = metrics.target_forwards
    steps = ""
    if forwards:
        steps = (
            f": {first} from the prompt, {metrics.committed_tokens} in {forwards} target "
            f"forward{'' if forwards == 1 else 's'} ({metrics.block_efficiency:.2f} each)"
        )
    return f"[{len(completion.token_ids)} tokens{steps}{rate}, {completion.finish_reason}{repeats}]"
