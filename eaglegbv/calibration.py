"""Costs of steps on this machine: measured before the first request is served, and kept on disk.

Whatever is measured or kept is a guess, which the engine's first steps check
(:mod:`eaglegbv.scheduler.planner`). So a machine that was busy for a minute does no lasting harm.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, Self

import msgspec
import torch

from eaglegbv.config import PLAIN, AutoPlan, EngineConfig, Plan
from eaglegbv.devices import processor_name
from eaglegbv.engine import Engine
from eaglegbv.loading import Pair
from eaglegbv.models.target import Target
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.planner import KnownCosts, Measured, StepShape
from eaglegbv.utils import cache_folder

_FORMAT = 11
_NAMES = ("_name_or_path", "transformers_version")  # of a configuration: they decide no cost
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CostCache:
    """The file of one setting: models, device, threads, and whatever else affects step costs."""

    path: Path  # the file; it need not exist

    @classmethod
    def of(cls, *facts: object, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the cache of a target's device and dtype, and other ``facts`` of its costs."""
        # A folder may be shared by machines, so the processor counts too.
        names = {"cuda": torch.cuda.get_device_name, "cpu": lambda _: processor_name()}
        name = names.get(device.type, str)(device)
        known = (_FORMAT, torch.__version__, torch.get_num_threads(), name, str(dtype), *facts)
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
    # Python's JSON has Infinity, which configurations have too.
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8-sig"))
    facts = {key: value for key, value in config.items() if key not in _NAMES}
    return json.dumps(facts, sort_keys=True)


SECONDS = 12.0  # Time limit: what informs most comes first, and nobody waits for longer.
_FIRST_ROUND = 0.6  # Share of it for the first round; the second finds prompts already read.
_SIZES = (1, 4, 8, 16)  # Batch sizes: the cost of a request is the same between them.
LARGEST = _SIZES[-1]  # Largest batch size that is measured.
_PROMPT, _LONG_PROMPT = 64, 512  # Tokens of a prompt; a few long ones show what contexts cost.
_UNTIMED, _TIMED = 3, 3  # Steps of a kind: the first read prompts and prepare kernels for it.
_QUIET = 0.8  # Least share of the CPU, and of a slower round that the faster takes, in peace.


class _Kind(NamedTuple):
    """A kind of steps to measure: requests, the plan of all of them, tokens of each prompt."""

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

    Everything is measured twice, and the faster time counts. If the times differ much, or the
    processor was taken away, it is measured once more, and a warning says so. Nothing of the
    requests remains in the pools. After so many ``seconds`` no further kind of steps is begun. The
    result is empty if pool or context are too small for such requests.

    Raises:
        InvalidArgument: The pair cannot run the plans.
        SamplingMismatch: The plans' verifier is not lossless for the drafter's sampling.
    """
    # A prompt is read once for all kinds, because reading would take half of the time.
    quiet = msgspec.structs.replace(config, prefix_cache=True, check_slots=False)
    engine = Engine(pair.target, pair.drafter, quiet, compile_backend=compile_backend)
    engine.check_plan(auto)
    _log.info("measuring what steps cost on this machine, once for these options: %.0f s", seconds)
    end, cpu, wall = time.perf_counter() + _FIRST_ROUND * seconds, 0.0, 0.0
    times: dict[tuple[_Kind, float], list[Measured]] = {}
    for kind in _kinds(auto, config.max_batch):
        if times and time.perf_counter() > end:
            break
        if _fits(pair.target, kind):
            times |= {(kind, t): [_measure(engine, pair.target, kind, t)] for t in (0.0, 1.0)}
    for again in range(2):
        before = time.thread_time(), time.perf_counter()
        for (kind, temperature), own in times.items():
            own.append(_measure(engine, pair.target, kind, temperature))
        cpu, wall = time.thread_time() - before[0], time.perf_counter() - before[1]
        # Elsewhere than on a CPU the thread may sleep while it waits.
        share = cpu / wall if pair.target.device.type == "cpu" else 1.0
        if not was_disturbed([[m.seconds for m in own[-2:]] for own in times.values()], share):
            break
        told = "they are measured once more" if not again else "the first steps will check them"
        _log.warning("the machine was busy while costs of steps were measured: %s", told)
    engine.reset_prefix_cache()
    fastest = {key: min(own, key=lambda step: step.seconds) for key, own in times.items()}
    greedy, sampled = (tuple(s for (_, own), s in fastest.items() if own == t) for t in (0.0, 1.0))
    return KnownCosts(greedy=greedy, sampled=sampled)


def was_disturbed(repeats: list[list[float]], cpu_share: float) -> bool:
    """Return whether other programs ran: by the spread of repeated times, and the CPU's share."""
    ratios = [max(times) / min(times) for times in repeats]
    return bool(ratios) and (median(ratios) > 1 / _QUIET or cpu_share < _QUIET)


def _measure(engine: Engine, target: Target, kind: _Kind, temperature: float) -> Measured:
    """Run requests of a kind for some steps, and return the fastest of those that are timed."""
    size, plan, prompt = kind
    tokens = (_UNTIMED + _TIMED + 1) * (plan.depth + 1)
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    texts = [[(7 * n + 13 * i) % target.vocab_size for i in range(prompt)] for n in range(size)]
    requests = [engine.add(text, params, plan) for text in texts]
    steps: list[Measured] = []
    try:
        for _ in range(_UNTIMED + _TIMED):
            shape = StepShape.of([plan], size, sum(request.context for request in requests))
            start = time.perf_counter()
            engine.step()
            steps.append(Measured(shape, time.perf_counter() - start))
    finally:
        for request in requests:
            engine.cancel(request)
    return min(steps[_UNTIMED:], key=lambda step: step.seconds)


def _fits(target: Target, kind: _Kind) -> bool:
    """Return whether made-up requests fit the pool together, and the context each."""
    steps = _UNTIMED + _TIMED
    longest = kind.prompt + (steps + 1) * (kind.plan.depth + 1) + kind.plan.depth
    slots = kind.size * (kind.prompt + steps * kind.plan.tree_slots)
    return slots <= target.max_slots and longest <= target.max_context


def _kinds(auto: AutoPlan, most: int) -> Iterator[_Kind]:
    """Yield what to measure: one request, plain decoding at every size, then the cheapest first."""
    plans = {(plan.paths, plan.depth): plan for plan in auto.candidates}
    paths, depths = (sorted(set(axis)) for axis in zip(*plans, strict=True))
    third, sizes = depths[len(depths) // 3], [size for size in _SIZES if size <= most]
    drafts = [
        plans[paths[len(paths) // 2], depths[len(depths) // 4]],
        plans[paths[0], third],
        plans[paths[-1], depths[len(depths) // 2]],
        *(plans[paths[0], depth] for depth in depths[:2]),
        plans[paths[len(paths) // 4], depths[max(0, len(depths) - 2)]],
    ]
    # One request may gain from any number of paths, and a level of a single path may cost less.
    alone = [plans[n, third] for n in paths[:4]] + [plans[paths[0], depth] for depth in depths]
    yield from (_Kind(sizes[0], plan) for plan in dict.fromkeys((PLAIN, *drafts, *alone)))
    yield from (_Kind(size, PLAIN) for size in sizes[1:])
    largest = max(drafts, key=lambda plan: plan.tree_nodes)
    yield from (_Kind(sizes[:2][-1], plan, _LONG_PROMPT) for plan in (PLAIN, largest))
    rest = [_Kind(size, plan) for size in sizes[1:] for plan in dict.fromkeys(drafts)]
    yield from sorted(rest, key=lambda kind: kind.size * kind.plan.paths * kind.plan.depth)
