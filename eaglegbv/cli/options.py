"""Options shared by several commands, and their combined meaning."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from eaglegbv.errors import InvalidArgument, one_of

if TYPE_CHECKING:
    from eaglegbv.config import EngineConfig, Plan, Planning
    from eaglegbv.cuda_graphs import GraphMode
    from eaglegbv.fused_linears import Quantization
    from eaglegbv.llm import LLM
    from eaglegbv.tree import DraftSampling

VERIFIERS = (
    "otbv, gbv, spectr_gbv, traversal, block, greedy_block, token, specinfer, spectr, spechub, "
    "greedy_draft, global_resolution or target_only"
)
"""Verifiers listed in help, without loading them; variants of a verifier are left out."""

QUESTION_SETS = (
    "mt-bench, spec-bench, gsm8k, humaneval, math-500, mgsm, mbpp, eagle-gsm8k, eagle-humaneval "
    "or builtin"
)
"""Sets of questions listed in help, without loading them."""

Kind = TypeVar("Kind", bound=StrEnum)

Model = Annotated[
    str | None,
    typer.Option(help="Folder or hub name of the target.", show_default="the packaged tiny model"),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub name of an EAGLE head, a small language model or a table; 'ngram'; "
        "'eagle1' or 'eagle3' of the tiny model."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Device, such as cpu or cuda.", show_default="cuda or cpu")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="One of float32, bfloat16, float16.", show_default="by device"),
]
CompileBackend = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="BACKEND",
        help="Compile models and verifier first, in minutes: 'inductor'.",
        show_default="not compiled",
    ),
]
CudaGraphs = Annotated[
    str,
    typer.Option(
        "--cuda-graphs",
        help="Replay tree forwards and drafting as CUDA graphs: auto, on, off, or eager (the same "
        "padding without recording, on any device).",
    ),
]
DraftQuantization = Annotated[
    str,
    typer.Option(
        "--draft-quantization",
        help="How an EAGLE head's weights are held: int8, none, or auto (int8 for automatic plans "
        "on a CPU that is fast with it).",
    ),
]
SamplingName = Annotated[
    str | None,
    typer.Option(
        help="Draft sampling: iid, wor, greedy, hub or fixed.", show_default="the verifier's own"
    ),
]
DraftWidth = Annotated[int, typer.Option(help="Number of candidates a draft distribution keeps.")]
Questions = Annotated[
    int | None,
    typer.Option(help="Number of questions, spread evenly over the set.", show_default="all"),
]
QuestionsSet = Annotated[
    str, typer.Option(help=f"Set of questions: {QUESTION_SETS}; or a file of JSON lines.")
]
QuestionData = Annotated[
    Path | None,
    typer.Option(help="File or folder from which to read the set, instead of the usual places."),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DraftTemperature = Annotated[
    float,
    typer.Option(
        help="Temperature of the drafts, as a multiple of the request's; lossless at any value."
    ),
]


def fitting_paths(verifier: str, paths: int) -> int:
    """Return ``paths``, or the most that a verifier takes; plain decoding takes any number."""
    from eaglegbv.verifiers.registry import make_any_verifier

    check_verifier(verifier)
    return paths if verifier == "none" else make_any_verifier(verifier).fitting_paths(paths)


def check_verifier(name: str) -> None:
    """Raise unless a verifier has this name; ``none`` is plain decoding."""
    from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS, VERIFIERS

    found = {"none", *VERIFIERS, *STATEFUL_VERIFIERS}
    if name not in found:
        raise InvalidArgument("verifier", name, one_of(sorted(found), name))


def verifier_names(text: str) -> list[str]:
    """Return the verifiers in a comma-separated list."""
    found = names("verifiers", text)
    for name in found:
        check_verifier(name)
    return found


def draft_samplings(text: str) -> "list[DraftSampling | None]":
    """Return the draft distributions in a comma-separated list; ``own`` is each verifier's own."""
    from eaglegbv.tree import DraftSampling

    found: list[DraftSampling | None] = []
    for name in names("draft_sampling", text):
        if name != "own" and name not in set(DraftSampling):
            raise InvalidArgument("draft_sampling", name, f"{one_of(DraftSampling, name)}, or own")
        found.append(None if name == "own" else DraftSampling(name))
    return found


def base_plan(draft_sampling: str | None, draft_width: int, draft_temperature: float) -> "Plan":
    """Return the default plan with these draft settings."""
    from eaglegbv.config import Plan
    from eaglegbv.tree import DraftSampling

    if draft_sampling is not None and draft_sampling not in set(DraftSampling):
        raise InvalidArgument(
            "draft_sampling", draft_sampling, one_of(DraftSampling, draft_sampling)
        )
    return Plan(
        draft_sampling=None if draft_sampling is None else DraftSampling(draft_sampling),
        draft_width=draft_width,
        draft_temperature=draft_temperature,
    )


def load_llm(
    model: str | None,
    drafter: str | None,
    plan: "Planning",
    device: str | None,
    dtype: str | None,
    *,
    engine: "EngineConfig | None" = None,
    compile_backend: str | None = None,
) -> "LLM":
    """Load the models that the options name."""
    from transformers.utils.logging import disable_progress_bar

    from eaglegbv.llm import LLM

    disable_progress_bar()
    with _telling("eaglegbv.calibration"):
        return LLM(
            model,
            drafter,
            plan=plan,
            device=device,
            dtype=dtype,
            engine=engine,
            compile_backend=compile_backend,
        )


class _Told(logging.Handler):
    """Prints log messages on standard error without a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        typer.echo(record.getMessage(), err=True)


@contextmanager
def _telling(name: str) -> Iterator[None]:
    """Print the progress that a module logs within this context."""
    log, handler = logging.getLogger(name), _Told()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def graph_mode(name: str) -> "GraphMode":
    """Return the graph mode with a name."""
    from eaglegbv.cuda_graphs import GraphMode

    return _named("cuda-graphs", name, GraphMode)


def quantization(name: str) -> "Quantization":
    """Return the quantisation with a name."""
    from eaglegbv.fused_linears import Quantization

    return _named("draft-quantization", name, Quantization)


def _named(option: str, name: str, kind: type[Kind]) -> Kind:
    """Return the member of ``kind`` that an option names."""
    if name not in list(kind):
        raise InvalidArgument(option, name, one_of(kind, name))
    return kind(name)


def read_text(path: Path) -> str:
    """Return a file's text; ``-`` is standard input."""
    try:
        if str(path) == "-":
            return typer.get_binary_stream("stdin").read().decode()
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("prompt-file", str(path), f"a readable file ({error})") from error


def check_out(path: Path | None, option: str = "out") -> None:
    """Raise if a file cannot be written, before what is to be written takes minutes to measure."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise InvalidArgument(option, str(path), "a file in a folder that can be written to")


def names(option: str, text: str) -> list[str]:
    """Return the entries of a comma-separated list."""
    found = [entry.strip() for entry in text.split(",")]
    if not all(found):
        raise InvalidArgument(option, text, "names separated by commas")
    return found


def integers(option: str, text: str) -> list[int]:
    """Return the integers in a comma-separated list."""
    try:
        return [int(entry) for entry in text.split(",")]
    except ValueError:
        raise InvalidArgument(option, text, "integers separated by commas") from None


def numbers(option: str, text: str) -> list[float]:
    """Return the numbers in a comma-separated list."""
    try:
        return [float(entry) for entry in text.split(",")]
    except ValueError:
        raise InvalidArgument(option, text, "numbers separated by commas") from None
