"""What ``generate``, ``chat`` and ``demo`` share: an answer shown as it comes, and its footer."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import typer

from eaglegbv.config import Plan, Planning
from eaglegbv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from eaglegbv.llm import LLM, Stream
    from eaglegbv.text import Completion, Delta

Messages: TypeAlias = list[dict[str, str]]
Show: TypeAlias = "Callable[[Delta], None]"
INTERRUPTED = 130  # exit status after Ctrl-C, as in a shell
_MOST_PLANS = 2  # plans that a footer names
_ENDS: Mapping[str, str] = {
    "length": "cut off at {} tokens (-n, --max-tokens)",
    "cancelled": "interrupted after {} tokens",
}
"""What a footer says of answers that did not end by themselves."""


def messages(prompt: str, system: str | None = None) -> Messages:
    """Return a conversation with one user message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def request_params(llm: "LLM", sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the model's own settings, with what was asked for in their place."""
    from msgspec.structs import asdict

    return SamplingParams(**asdict(llm.sampling_defaults) | dict(sampling))


class Answer(NamedTuple):
    """An answer, and why the plans of its steps were chosen."""

    completion: "Completion"
    reasons: Mapping[str, float]  # number of forwards by reason, as the engine counts them

    def footer(self, planning: Planning) -> str:
        """Return in words how the answer was written, given the plan that was asked for."""
        metrics = self.completion.metrics
        tokens, forwards = metrics.committed_tokens, metrics.target_forwards
        # Reading the prompt yields a token that is not counted in any decoding forward.
        facts = ["the prompt's own forward wrote it"]
        if forwards:
            each = f"{metrics.block_efficiency:.1f} each"
            words = f"{_counted(forwards, 'forward')} wrote {_counted(tokens, 'token')} ({each})"
            rate = f"{tokens / metrics.decode_seconds:.0f} tokens/s"
            facts = [words, rate, self._plans(planning)]
        end = _ENDS.get(str(self.completion.finish_reason))
        if end is not None:
            facts.append(end.format(len(self.completion.token_ids)))
        return ", ".join(facts)

    def _plans(self, planning: Planning) -> str:
        ranked = Counter(self.completion.metrics.plans).most_common(_MOST_PLANS)
        names = []
        for name, _ in ranked:
            names.append("plain decoding" if name == "none" else f"plan {name}")
        if ranked[0][0] == "none":
            names[0] += f" ({self._why(planning)})"
        return names[0] if len(names) == 1 else f"mostly {', then '.join(names)}"

    def _why(self, planning: Planning) -> str:
        if isinstance(planning, Plan):
            return "as asked"
        if self.reasons.get("best"):
            return "drafts promised no gain"
        return "steps had to be timed first"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def answer(llm: "LLM", request: str | Messages, params: SamplingParams, show: Show) -> Answer:
    """Return an answer, or as much of it as there is at Ctrl-C; ``show`` is given its pieces."""
    from eaglegbv.metrics import REASONS

    before = Counter(llm.metrics.values.get(REASONS, {}))
    stream = llm.stream(request, params)
    try:
        completion = _whole(stream, show)
    except KeyboardInterrupt:
        stream.cancel()
        completion = _whole(stream, show)
    return Answer(completion, Counter(llm.metrics.values.get(REASONS, {})) - before)


def _whole(stream: "Stream", show: Show) -> "Completion":
    for delta in stream:
        show(delta)
        if delta.completion is not None:
            return delta.completion
    raise AssertionError("a stream ends with a completion")


def print_text(delta: "Delta") -> None:
    """Print a piece of an answer."""
    typer.echo(delta.text, nl=delta.completion is not None)


def print_nothing(delta: "Delta") -> None:
    """Leave an answer to be printed whole."""
    del delta
