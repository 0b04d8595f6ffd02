"""``eaglegbv generate``: answer one prompt; ``serve``: SGLang's server with our drafts."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import opt
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.utils import DRAFT_WIDTH

if TYPE_CHECKING:
    from eaglegbv.llm import LLM, Stream
    from eaglegbv.sampling import SamplingParams
    from eaglegbv.text import Completion

_DRAFTING = ("verifier", "widths", "paths", "depth", "draft_width", "draft_temperature")
Messages = list[dict[str, str]]
INTERRUPTED = 130  # exit status after Ctrl-C, as in a shell
_AUTO = (
    "otbv; without this, --paths, --depth, --widths and --draft-sampling the engine chooses plans"
)
_OWN_OR = "the model's own, or {}"
_SEED = (
    "Reproduces a text if --verifier, --paths, --depth, --widths or --draft-sampling is given; "
    "plans that the engine chooses depend on timing."
)


def generate(
    prompt: Annotated[str | None, opt("The prompt.")] = None,
    prompt_file: Annotated[Path | None, opt("File with it; '-' reads standard input.")] = None,
    system: Annotated[str | None, opt("System message before the prompt.")] = None,
    raw: opts.Raw = False,
    model: opts.Model = None,
    drafter: opts.Drafter = None,
    verifier: Annotated[
        str | None, opt(f"One of {opts.VERIFIERS}; or 'none' for plain decoding.", shown=_AUTO)
    ] = None,
    paths: Annotated[int | None, opt("Drafted paths, K.", shown=opts.FITTING)] = None,
    depth: Annotated[int | None, opt("Drafted tokens per path, L.", shown="4")] = None,
    widths: opts.Widths = None,
    draft_sampling: opts.SamplingName = None,
    draft_width: opts.DraftWidth = DRAFT_WIDTH,
    draft_temperature: opts.DraftTemperature = 1.0,
    temperature: Annotated[
        float | None, opt("Sampling temperature; 0 is greedy.", shown=_OWN_OR.format(1))
    ] = None,
    top_p: Annotated[
        float | None,
        opt("Most likely tokens that together reach this probability.", shown=_OWN_OR.format(1)),
    ] = None,
    top_k: Annotated[
        int | None, opt("Keep this many most likely tokens; 0: all.", shown=_OWN_OR.format("all"))
    ] = None,
    min_p: Annotated[
        float | None,
        opt("Drop tokens below this fraction of the most likely one.", shown=_OWN_OR.format(0)),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        opt(
            "Above 1, makes tokens of the prompt and the answer less likely.",
            shown=_OWN_OR.format(1),
        ),
    ] = None,
    presence_penalty: Annotated[
        float, opt("Subtracted from the logits of tokens that occur in the answer.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, opt("Subtracted once for each time that a token occurs in the answer.")
    ] = 0.0,
    max_tokens: Annotated[
        int | None, opt("Most tokens of an answer.", shown=_OWN_OR.format(128))
    ] = None,
    generation_config: opts.GenerationConfig = "auto",
    stop: Annotated[list[str] | None, opt("Text that ends the answer; may be repeated.")] = None,
    ignore_eos: Annotated[bool, opt("Go on after end-of-sequence tokens.", "--ignore-eos")] = False,
    seed: Annotated[int | None, opt(_SEED, shown="a fixed one, which is printed")] = None,
    stream: Annotated[bool, opt("Print the text as it comes.")] = True,
    as_json: Annotated[
        bool, opt("Print one JSON object: text, tokens, metrics.", "--json")
    ] = False,
    trace: Annotated[
        Path | None, opt("File for a timeline of the engine's steps, a Chrome trace (Perfetto).")
    ] = None,
    trace_trees: Annotated[
        bool, opt("Add every draft tree to the trace; 'eaglegbv view' draws them.", "--trace-trees")
    ] = False,
    device: opts.Device = None,
    dtype: opts.Dtype = "auto",
    compile_backend: opts.CompileBackend = None,
    cuda_graphs: opts.CudaGraphs = "auto",
    trust_remote_code: opts.TrustRemoteCode = False,
) -> None:
    """Answer a prompt; the text follows the target's distribution, whatever drafts and verifies.

    Ctrl-C ends the answer: the text so far stays, with its figures.
    """
    given, message = locals(), _prompt(prompt, prompt_file)
    if raw and system is not None:
        raise InvalidArgument("system", system, "none with --raw, which has no chat template")
    if trace_trees and trace is None:
        raise InvalidArgument("trace-trees", trace_trees, "--trace FILE to write them to")
    opts.check_out(trace, "trace")
    from eaglegbv.config import EngineConfig, Plan
    from eaglegbv.cuda_graphs import GraphMode
    from eaglegbv.rng import request_seed
    from eaglegbv.sampling import SamplingParams

    names = SamplingParams.__struct_fields__
    asked = {name: value for name, value in given.items() if name in names and value is not None}
    SamplingParams(**asked)  # what is wrong is found before minutes go by with loading
    plan = opts.made_of(given, opts.plan_choices).planning()
    config = EngineConfig(cuda_graphs=opts.member("cuda-graphs", cuda_graphs, GraphMode))
    llm = opts.made_of(given, opts.Models).load(plan, config)
    params = SamplingParams(**(msgspec.structs.asdict(llm.sampling_defaults) | asked))
    if seed is None and isinstance(plan, Plan):
        # The seed that the engine would derive, so that it can be printed.
        params = msgspec.structs.replace(params, seed=request_seed(config.seed, 0))
    request = message if raw else messages(message, system)
    with _tracing(llm, trace, trees=trace_trees):
        start = time.perf_counter()
        completion = answer(llm, request, params, printed=stream and not as_json)
        if as_json:
            opts.print_json(_facts(llm, completion, time.perf_counter() - start))
        elif not stream:
            typer.echo(completion.text)
        if not as_json:
            # If the engine chooses plans, no seed reproduces a text: the choice depends on timing.
            repeats = seed is None and params.seed is not None and not params.greedy
            typer.echo(_footer(completion, f", seed {params.seed}" if repeats else ""), err=True)
    if completion.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _tracing(llm: "LLM", path: Path | None, *, trees: bool) -> Iterator[None]:
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


def answer(
    llm: "LLM", request: str | Messages, params: "SamplingParams", *, printed: bool
) -> "Completion":
    """Return an answer, or as much of it as there is at Ctrl-C; print it as it comes if wanted."""
    stream = llm.stream(request, params)
    try:
        return _printed(stream, printed=printed)
    except KeyboardInterrupt:
        stream.cancel()
        return _printed(stream, printed=printed)


def _printed(stream: "Stream", *, printed: bool) -> "Completion":
    for delta in stream:
        if printed:
            typer.echo(delta.text, nl=delta.completion is not None)
        if delta.completion is not None:
            return delta.completion
    raise AssertionError("a stream ends with a completion")


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is None and prompt_file is None:
        raise InvalidArgument("prompt", prompt, "--prompt TEXT or --prompt-file FILE")
    if prompt is not None and prompt_file is not None:
        expected = "--prompt or --prompt-file, not both"
        raise InvalidArgument("prompt-file", str(prompt_file), expected)
    text = prompt
    if prompt_file is not None:
        try:
            stdin = str(prompt_file) == "-"
            raw = typer.get_binary_stream("stdin").read() if stdin else prompt_file.read_bytes()
            text = raw.decode("utf-8-sig")  # without a byte-order mark
        except (OSError, UnicodeDecodeError) as error:
            expected = f"a readable file ({error})"
            raise InvalidArgument("prompt-file", str(prompt_file), expected) from error
    if not text or not text.strip():
        raise InvalidArgument("prompt", text, "a text that is not empty")
    return text


def _facts(llm: "LLM", completion: "Completion", seconds: float) -> dict[str, object]:
    facts, metrics = completion.to_dict(), completion.metrics
    for name in ("block_efficiency", "acceptance_length", "acceptance_by_depth", "decode_seconds"):
        facts["metrics"][name] = getattr(metrics, name)
    return {**facts, "plan": llm.plan, "seconds": seconds}


def _footer(completion: "Completion", repeats: str) -> str:
    metrics = completion.metrics
    seconds, forwards = metrics.decode_seconds, metrics.target_forwards
    rate = f", {metrics.committed_tokens / seconds:.0f} tokens/s" if seconds else ""
    # Reading the prompt yields a token that is not counted in any decoding forward.
    first = max(0, len(completion.token_ids) - metrics.committed_tokens)
    steps = (
        f": {first} from the prompt, {metrics.committed_tokens} in {forwards} target "
        f"forward{'' if forwards == 1 else 's'} ({metrics.block_efficiency:.2f} each)"
    )
    told = steps if forwards else ""
    return f"[{len(completion.token_ids)} tokens{told}{rate}, {completion.finish_reason}{repeats}]"


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Folder or hub name of the target; or tiny, or smollm2.")
    ],
    drafter: Annotated[
        str | None,
        opt(
            "Folder or hub name of an EAGLE head.",
            shown="none: plain decoding; of tiny and smollm2 their own",
        ),
    ] = None,
    verifier: Annotated[str, opt("Verifier of independently drawn paths, such as gbv.")] = "otbv",
    paths: Annotated[int, opt("Drafted paths, K.")] = 3,
    depth: opts.Depth = 4,
    widths: opts.Widths = None,
    draft_width: opts.DraftWidth = DRAFT_WIDTH,
    draft_temperature: opts.DraftTemperature = 1.0,
    seed: Annotated[int, opt("Seed from which requests without a seed derive theirs.")] = 0,
    backend: Annotated[
        str, opt("sglang; or local, this package's engine: see 'serve --backend local --help'.")
    ] = "sglang",
    dry_run: Annotated[
        bool, opt("Check all that needs no accelerator, print the command and stop.", "--dry-run")
    ] = False,
) -> None:
    """Serve MODEL with SGLang; other options (--port, --tp, ...) are passed on to SGLang."""
    given = locals()
    if backend != "sglang":  # main() has the local one served by a command of its own
        raise InvalidArgument("backend", backend, one_of(("local", "sglang"), backend))
    from eaglegbv.backends.sglang.ready import check_ready

    check_ready(context.args, accelerator=not dry_run)
    from eaglegbv.backends.sglang.launch import launch
    from eaglegbv.backends.sglang.server_args import check_command
    from eaglegbv.backends.sglang.settings import Settings
    from eaglegbv.loading import named_models

    if widths is not None:
        paths, depth = opts.paths_of_widths(widths, "SGLang's trees are K paths of equal length")
    settings = opts.made_of(given, Settings)
    models = named_models(model, drafter)
    if models.drafter is None:
        _refuse_drafting(context)
    target, head, others = models.target, models.drafter, context.args
    start = launch(target, head, paths=paths, depth=depth, settings=settings, others=others)
    if dry_run:
        check_command(start)
        variables = (f"{name}='{value}'" for name, value in start.environment.items())
        typer.echo(" ".join([*variables, *start.command]))
        return
    sys.stdout.flush()
    os.execve(start.command[0], start.command, os.environ | start.environment)


def _refuse_drafting(context: typer.Context) -> None:
    """Raise :class:`InvalidArgument` if an option says how to draft, as nothing drafts."""
    for name in _DRAFTING:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidArgument("drafter", None, f"an EAGLE head, for {name}")
