"""Storage of measured step costs between runs."""

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import torch

from eaglegbv.config import PLAIN, AutoPlan, EngineConfig, Plan
from eaglegbv.devices import processor_name
from eaglegbv.engine import Engine
from eaglegbv.loading import Pair
from eaglegbv.models.target import Target
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.costs import CostTable, KnownCosts, StepCosts, StepShape
from eaglegbv.utils import cache_folder

_FORMAT = 10

_NAMES = ("_name_or_path", "transformers_version")
"""Entries of a configuration that have no influence on shapes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CostCache:
    """Cache file for one setting: models, device, threads, and whatever else affects step costs.

    Attributes:
        path: The file; it need not exist.
    """

    path: Path

    @classmethod
    def of(cls, *facts: object, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the cache of a setting.

        Args:
            facts: Other values that affect costs: models, plans, options.
            device: Device of the target.
            dtype: Dtype in which the target computes.
        """
        threads, name = torch.get_num_threads(), _device_name(device)
        known = (_FORMAT, torch.__version__, threads, name, str(dtype), *facts)
        key = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
        return cls(cache_folder() / f"costs-{key}.json")

    def read(self) -> KnownCosts | None:
        """Return the saved costs, or None; a file that cannot be read is logged and ignored."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=KnownCosts)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("costs of steps are measured again: %s: %s", self.path, error)
            return None

    def write(self, costs: KnownCosts) -> None:
        """Save ``costs``; if that is impossible, log it and continue."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(costs))
            part.replace(self.path)
        except OSError as error:
            _log.warning("costs of steps are not kept: %s: %s", self.path, error)


def shape_of(model: str | None) -> str | None:
    """Return what decides a model's costs: its configuration, or its name if it has none here."""
    if model is None or not (Path(model) / "config.json").is_file():
        return model
    config = msgspec.json.decode((Path(model) / "config.json").read_bytes())
    facts = {key: value for key, value in config.items() if key not in _NAMES}
    return str(msgspec.json.encode(facts, order="sorted"))


def _device_name(device: torch.device) -> str:
    """Return a name that tells a device from those of other machines that share the folder."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() if device.type == "cpu" else str(device)


# The cost of steps on this machine, measured before the first request is served.


SECONDS = 12.0
"""Time limit of the calibration. The most informative steps come first."""

_FIRST_ROUND = 0.6
"""Share of the time after which all steps are measured again, with prompts already read.

The fastest measurement counts, because a machine may be slow for a second.
"""

_SIZES = (1, 4, 8, 16)
LARGEST = _SIZES[-1]
"""Largest batch size that is measured."""

_PROMPT, _LONG_PROMPT = 64, 512
"""Tokens of a made-up prompt: a few long prompts show what attended tokens cost.

Both steps that draft and steps that do not are measured with them, because nodes attend to the
tokens again. With short texts alone, plain decoding of 16 texts of 1,920 tokens seemed twice as
expensive as it is compared with trees.
"""

_UNTIMED, _TIMED = 3, 3
"""Steps of each kind: the first ones read the prompts and prepare kernels for new shapes.

Trees differ in their number of nodes, and each number may need different kernels, so whatever is
timed first would seem more expensive than what follows. So the fastest of the timed steps counts.
"""


class _Kind(NamedTuple):
    """A kind of steps to measure.

    Attributes:
        size: Number of requests.
        plan: Plan of all requests.
        prompt: Tokens of each request's prompt.
    """

    size: int
    plan: Plan
    prompt: int = _PROMPT


def calibrate(
    pair: Pair,
    auto: AutoPlan,
    config: EngineConfig,
    *,
    seconds: float = SECONDS,
    compile_backend: str | None = None,
) -> KnownCosts:
    """Run made-up requests by several plans in batches of several sizes, and time their steps.

    Args:
        pair: Target and drafter; nothing of the requests remains in their pools.
        auto: The plans to choose from later.
        config: Configuration of the later engine.
        seconds: Time after which no further kind of steps is begun.
        compile_backend: See :class:`Engine`.

    Returns:
        The measured costs; empty if the pool or the context is too small for such requests.

    Raises:
        InvalidArgument: The pair cannot run the plans.
        SamplingMismatch: The plans' verifier is not lossless for the drafter's sampling.
    """
    # A prompt is read once for all kinds, because reading would take half of the time.
    quiet = msgspec.structs.replace(config, prefix_cache=True, check_slots=False)
    engine = Engine(pair.target, pair.drafter, quiet, compile_backend=compile_backend)
    engine.check_plan(auto)
    _log.info("measuring what steps cost on this machine, once for these options: %.0f s", seconds)
    vocab = pair.target.vocab_size
    sampled, greedy = _Times(engine, vocab, 1.0), _Times(engine, vocab, 0.0)

    def measure(kind: _Kind) -> None:
        sampled.measure(kind)
        greedy.measure(kind)

    kinds: list[_Kind] = []
    end = time.perf_counter() + _FIRST_ROUND * seconds
    for kind in _kinds(auto, config.max_batch):
        # Measure at least one kind: without any, there would be no costs to compare.
        if kinds and time.perf_counter() > end:
            break
        if _fits(pair.target, kind):
            kinds.append(kind)
            measure(kind)
    for kind in kinds:
        measure(kind)
    engine.reset_prefix_cache()
    return KnownCosts(greedy=greedy.table(), sampled=sampled.table())


def _fits(target: Target, kind: _Kind) -> bool:
    """Return whether made-up requests fit the pool together, and the context each."""
    steps = _UNTIMED + _TIMED
    longest = kind.prompt + (steps + 1) * (kind.plan.depth + 1) + kind.plan.depth
    slots = kind.size * (kind.prompt + steps * kind.plan.tree_slots)
    return slots <= target.max_slots and longest <= target.max_context


def _kinds(auto: AutoPlan, most: int) -> Iterator[_Kind]:
    """Yield what to measure: one request by all plans, plain decoding at every size, then the rest.

    The rest begins with the cheapest: in large batches, small trees are those that may pay.
    """
    paths, depths = (
        sorted({getattr(plan, name) for plan in auto.candidates}) for name in ("paths", "depth")
    )
    shapes = [
        (paths[len(paths) // 2], depths[len(depths) // 4]),
        (paths[0], depths[len(depths) // 3]),
        (paths[-1], depths[len(depths) // 2]),
        (paths[0], depths[0]),
        (paths[0], depths[min(1, len(depths) - 1)]),
        (paths[len(paths) // 4], depths[max(0, len(depths) - 2)]),
    ]
    plans = {(plan.paths, plan.depth): plan for plan in auto.candidates}
    drafts = [plans[shape] for shape in dict.fromkeys(shapes)]
    sizes = [size for size in _SIZES if size <= most]
    # One request may gain from any number of paths, and a tenth of a step decides there. A level of
    # a single path may cost much less than one of several, so both are measured.
    alone = [plans[count, depths[len(depths) // 3]] for count in paths[:4]]
    alone += [plans[paths[0], depth] for depth in depths]
    yield from (_Kind(sizes[0], plan) for plan in dict.fromkeys((PLAIN, *drafts, *alone)))
    yield from (_Kind(size, PLAIN) for size in sizes[1:])
    largest = max(drafts, key=lambda plan: plan.tree_nodes)
    yield from (_Kind(sizes[:2][-1], plan, _LONG_PROMPT) for plan in (PLAIN, largest))
    rest = [_Kind(size, plan) for size in sizes[1:] for plan in drafts]
    yield from sorted(rest, key=lambda kind: kind.size * kind.plan.paths * kind.plan.depth)


class _Times:
    """The fastest step of every kind, at one temperature."""

    def __init__(self, engine: Engine, vocab: int, temperature: float) -> None:
        self._engine = engine
        self._vocab = vocab
        self._temperature = temperature
        self._shapes: dict[_Kind, list[StepShape]] = {}
        self._seconds: dict[_Kind, float] = {}

    def measure(self, kind: _Kind) -> None:
        """Run requests of a kind for some steps."""
        size, plan, prompt = kind
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=(_UNTIMED + _TIMED + 1) * (plan.depth + 1),
            ignore_eos=True,
        )
        requests = [
            self._engine.add([(7 * n + 13 * i) % self._vocab for i in range(prompt)], params, plan)
            for n in range(size)
        ]
        shapes: list[StepShape] = []
        times: list[float] = []
        try:
            for step in range(_UNTIMED + _TIMED):
                context = sum(request.context for request in requests)
                drafting = size if plan.speculative else 0
                shape = StepShape.of(plan, requests=size, context=context, drafting=drafting)
                start = time.perf_counter()
                self._engine.step()
                if any(request.finished for request in requests):
                    break
                if step >= _UNTIMED:
                    shapes.append(shape)
                    times.append(time.perf_counter() - start)
        finally:
            for request in requests:
                self._engine.cancel(request)
        self._shapes[kind] = shapes
        self._seconds[kind] = min([*times, self._seconds.get(kind, math.inf)])

    def table(self) -> CostTable:
        """Return the measured costs."""
        costs = StepCosts()
        for kind, shapes in self._shapes.items():
            for shape in shapes:
                costs.observe(shape, self._seconds[kind])
        return costs.table()
