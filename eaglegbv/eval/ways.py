"""Ways to generate: the engine with one planning, watched or not, and transformers."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from eaglegbv.auto_plan import Planning
from eaglegbv.errors import EagleGBVError
from eaglegbv.eval.baselines import Generation
from eaglegbv.eval.timing import Cell, Timing
from eaglegbv.llm import LLM
from eaglegbv.metrics import FORWARDS, REASONS, Metric
from eaglegbv.params import SamplingParams
from eaglegbv.uniforms import request_seed

_CHOICES = (FORWARDS, REASONS)


class Way(Protocol):
    """A way to generate."""

    @property
    def name(self) -> str:
        """Name of the way in tables."""

    @property
    def max_batch(self) -> int | None:
        """Most prompts it takes at once; None for any number."""

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """Answer all prompts with ``tokens`` tokens each.

        Args:
            prompts: Token ids.
            tokens: Length of each answer.
            temperature: Sampling temperature.
            seed: Seed of all random numbers.

        Returns:
            Number of tokens generated, all answers together.
        """


@dataclass(frozen=True, slots=True)
class EngineWay:
    """The engine with one planning; see :class:`Way`.

    Attributes:
        name: Name of the way in tables.
        llm: The engine.
        plan: How all requests are planned.
        max_batch: None, because the engine takes any number of prompts.
    """

    name: str
    llm: LLM
    plan: Planning
    max_batch: int | None = None

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """See :meth:`Way.run`."""
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=tokens,
                ignore_eos=True,
                seed=request_seed(seed, n),
            )
            for n in range(len(prompts))
        ]
        answers = self.llm.generate(prompts, params, plan=self.plan)
        for answer in answers:
            if answer.error is not None:  # for example, a prompt longer than the model's context
                raise EagleGBVError(answer.error)
        return sum(len(answer.token_ids) for answer in answers)


@dataclass(slots=True)
class WatchedWay:
    """A way of the engine that counts the plans chosen in each cell; see :class:`Way`.

    Ways share an engine and its counters, so what was counted before a call is subtracted.

    Attributes:
        way: The way.
        chosen: Decoding forwards, counted once per request, by plan and by reason in each cell.
    """

    way: EngineWay
    chosen: dict[Cell, dict[Metric, Counter[str]]] = field(default_factory=dict)
    _last: dict[Metric, Counter[str]] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        """See :attr:`Way.name`."""
        return self.way.name

    @property
    def max_batch(self) -> int | None:
        """See :attr:`Way.max_batch`."""
        return self.way.max_batch

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """See :meth:`Way.run`."""
        before = self._counted()
        generated = self.way.run(prompts, tokens, temperature=temperature, seed=seed)
        self._last = {m: counts - before[m] for m, counts in self._counted().items()}
        return generated

    def note(self, timing: Timing) -> None:
        """Count the last call if the timing is of this way; calls without one only warmed up."""
        if timing.way == self.name:
            chosen = self.chosen.setdefault(timing.cell, {})
            for metric, counts in self._last.items():
                chosen.setdefault(metric, Counter()).update(counts)

    def _counted(self) -> dict[Metric, Counter[str]]:
        values = self.way.llm.metrics.values
        return {m: Counter({k: int(n) for k, n in values.get(m, {}).items()}) for m in _CHOICES}


@dataclass(frozen=True, slots=True)
class TransformersWay:
    """transformers' ``generate``; see :class:`Way`.

    Attributes:
        name: Name of the way in tables.
        generation: Plain or assisted generation, with ends of sequence ignored.
    """

    name: str
    generation: Generation

    @property
    def max_batch(self) -> int | None:
        """See :attr:`Way.max_batch`."""
        return self.generation.baseline.max_batch

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """See :meth:`Way.run`."""
        return self.generation(prompts, tokens, temperature=temperature, seed=seed).numel()
