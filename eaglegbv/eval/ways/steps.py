"""Step times by phase for many settings of one pair of models, beside the time of products alone.

The *floor* of a phase is the time of its products with weights and nothing else: the model's own
linear layers over random rows, in one CUDA graph where there are any. Time above the floor goes to
attention, small kernels, launches and Python. Verification and commit have no floor here, because
they compute little; nor has a forward of the native library, which alone has the weights.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from eaglegbv import cuda_graphs
from eaglegbv.config import EngineConfig, GraphMode
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import Eagle1Head
from eaglegbv.engine import Engine
from eaglegbv.eval.experiment import Way, one_by_one
from eaglegbv.eval.figures import ACCEPTANCE, Estimate, Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.random_models import barrier_of, random_prompts
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import Cell, Column, counted, named, valued
from eaglegbv.loading import Pair
from eaglegbv.metrics import Phase, StepRecord, seconds_by_phase
from eaglegbv.models.hf import HFTarget
from eaglegbv.sampling import SamplingParams

STEP = "step"  # name of the whole step beside those of its phases
PHASES = (Phase.DRAFT, Phase.FORWARD, Phase.VERIFY, Phase.COMMIT)
_FLOOR_RUNS = 8


def tokens_of(setting: Setting, steps: int) -> int:
    """Return the tokens of an answer that no step ends, those that are not timed included."""
    return (setting.plan.depth + 1) * (steps + 3)


def slots_of(setting: Setting, steps: int) -> int:
    """Return the KV slots that all requests need together."""
    each = setting.context + tokens_of(setting, steps) + setting.plan.tree_slots + 64
    return setting.batch * each


def positions_of(setting: Setting, steps: int) -> int:
    """Return the positions that a text needs."""
    return setting.context + tokens_of(setting, steps) + setting.plan.depth + 1


# The time of products alone.


Products = Sequence[tuple[int, Callable[[Tensor], Tensor]]]
"""Products with weights, each after the width of what it multiplies."""


class Floors:
    """Times of a pair's products with weights, by number of rows."""

    def __init__(self, pair: Pair) -> None:
        """Find the products of a target and its drafter."""
        target = pair.target
        drafter = pair.drafter
        self._like = torch.empty(0, dtype=target.dtype, device=target.device)
        self._forward = _linears(target.model) if isinstance(target, HFTarget) else []
        self._native = target.runs_by == "native"
        self._level: Products = []
        if isinstance(drafter, StandaloneDrafter) and isinstance(drafter.model, HFTarget):
            self._level = _linears(drafter.model.model)
        elif isinstance(drafter, EagleDrafter):
            head = drafter.head
            if isinstance(head, Eagle1Head):  # its output layer is the target's
                self._level = [*_linears(head), (head.config.hidden_size, head.logits)]
            else:  # features are projected once a step, not at every level
                self._level = _linears(head, besides="fc")
        self._known: dict[tuple[int, int], float] = {}

    @property
    def weights(self) -> int:
        """Bytes of the weights that a forward of the target multiplies with."""
        entries = sum(layer.in_features * layer.out_features for _, layer in self._forward)
        return entries * self._like.itemsize

    def of(self, setting: Setting) -> dict[str, float]:
        """Return the least seconds of drafting, of the forward and of both; 0 where not known."""
        plan = setting.plan
        batch = setting.batch
        draft = forward = step = 0.0
        if plan.asks_drafter:
            draft = plan.depth * self._seconds(self._level, batch * plan.paths)
        if not self._native:
            forward = self._seconds(self._forward, batch * plan.tree_nodes)
            step = draft + forward
        return {Phase.DRAFT: draft, Phase.FORWARD: forward, STEP: step}

    @torch.inference_mode()
    def _seconds(self, products: Products, rows: int) -> float:
        known = self._known.get((id(products), rows))
        if known is not None:
            return known
        inputs = {width: self._like.new_empty((rows, width)).normal_() for width, _ in products}

        def work() -> tuple[Tensor, ...]:
            return tuple(product(inputs[width]) for width, product in products)

        cuda = self._like.is_cuda
        auto = cuda_graphs.make_recorder(GraphMode.AUTO, cuda=cuda, recordable=True)
        run = (auto or cuda_graphs.Recorder()).record(work)
        wait = barrier_of(self._like.device) or (lambda: None)
        times = []
        for _ in range(_FLOOR_RUNS):
            wait()
            start = time.perf_counter()
            run()
            wait()
            times.append(time.perf_counter() - start)
        self._known[id(products), rows] = min(times)
        return min(times)


def _linears(model: nn.Module, besides: str = "") -> list[tuple[int, nn.Linear]]:
    """Return the linear layers of a model, without the one of a name."""
    layers = (m for name, m in model.named_modules() if name != besides)
    return [(m.in_features, m) for m in layers if isinstance(m, nn.Linear)]


# Times of steps, and what a device runs.


_LAUNCHES = ("LaunchKernel", "GraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def _profiled(engine: Engine, device: torch.device) -> dict[str, float]:
    """Run a step; return its launches, and the seconds of its kernels, as the profiler has them."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        _step(engine)
        torch.cuda.synchronize()
    return launches_and_busy(profiled.key_averages())


def launches_and_busy(events: Any) -> dict[str, float]:  # noqa: ANN401  the profiler's own list
    """Return how often the host launched anything, and seconds of kernels and copies."""
    launches = sum(e.count for e in events if any(name in e.key for name in _LAUNCHES))
    on_device = (e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation)
    busy = sum(e.self_device_time_total for e in on_device) / 1e6
    return {"launches": float(launches), "busy": busy}


class _Decoded(list[StepRecord]):
    """The records of steps in which all requests decode."""

    def on_step(self, record: StepRecord) -> None:
        """Keep a record."""
        if not record.prefilling:
            self.append(record)


def time_steps(pair: Pair, setting: Setting, steps: int, floors: Floors) -> dict[str, float]:
    """Time the phases of a setting's steps.

    The same steps run once before they are timed, so that all is compiled and recorded by then.

    Args:
        pair: Target and drafter, whose pools have room for the setting.
        setting: What is timed.
        steps: Number of steps.
        floors: Times of the pair's products.

    Returns:
        By name: ``seconds.PHASE`` is the median time of each phase and of the whole step, where
        each phase waits for the device before the next begins, ``floor.PHASE`` the time of the
        products alone. ``overlapping`` is the median of a step as in normal use, where the host
        prepares a phase while the device is busy with the one before. ``busy`` is how long kernels
        run, and ``launches`` counts kernels, copies and graphs, of a step on a CUDA device alone.
        ``operations`` are the tensor operations that a step dispatches, without those within a
        CUDA graph; ``eager.REASON`` counts drafts and forwards of the timed steps that replayed no
        recording, and attention that was PyTorch's instead of FlashInfer's. ``tokens`` are those
        committed per request and step.

    Raises:
        InvalidArgument: The pair cannot run the setting.
        StepFailed: A step broke off.
    """
    config = EngineConfig(
        max_batch=setting.batch,
        prefix_cache=False,
        prefill_tokens=max(1024, setting.batch * setting.context),  # no request is ahead
    )
    make = partial(Engine, pair.target, pair.drafter, config)
    decoding = partial(_decoding, pair=pair, setting=setting, steps=steps)
    barrier = barrier_of(pair.target.device)
    with decoding(make()) as engine:
        _timed(engine, steps)
        with cuda_graphs.OperationWatch() as watched:
            _step(engine)
        facts = _profiled(engine, pair.target.device)
    before = _eager(pair)
    with decoding(make(barrier=barrier)) as engine:
        timed = _timed(engine, steps)
    if barrier is not None:
        with decoding(make()) as engine:
            facts["overlapping"] = median(one.seconds for one in _timed(engine, steps))
    phases = [seconds_by_phase(record.spans) for record in timed]
    facts |= {f"seconds.{p}": median(spent.get(p, 0.0) for spent in phases) for p in PHASES}
    facts[f"seconds.{STEP}"] = median(record.seconds for record in timed)
    facts |= {f"floor.{phase}": least for phase, least in floors.of(setting).items()}
    # Without graphs there are no counts.
    eager = dict(_eager(pair) - before) if pair.target.graph_counts else {"all": len(timed)}
    facts |= {f"eager.{reason}": float(count) for reason, count in eager.items()}
    committed = sum(record.committed for record in timed)
    tokens = committed / (len(timed) * setting.batch)
    return facts | {"operations": float(watched.count), "tokens": tokens, "steps": 1.0}


@contextmanager
def _decoding(engine: Engine, pair: Pair, setting: Setting, steps: int) -> Iterator[Engine]:
    """Let the engine answer the setting's requests, with random prompts, within this context."""
    requests = []
    usual = SamplingParams(
        temperature=setting.temperature, max_tokens=tokens_of(setting, steps), ignore_eos=True
    )
    prompts = random_prompts(pair.target.vocab_size, setting.batch, setting.context)
    try:
        for seed, prompt in enumerate(prompts):
            params = msgspec.structs.replace(usual, seed=seed)
            requests.append(engine.add(prompt, params, setting.plan))
        yield engine
    finally:
        for request in requests:
            engine.cancel(request)


def _timed(engine: Engine, steps: int) -> list[StepRecord]:
    records = _Decoded()
    engine.observe(records)
    while len(records) < steps:
        _step(engine)
    return records


def _step(engine: Engine) -> None:
    """Run a step; raise an error if it breaks off, because no further step might follow."""
    for commit in engine.step():
        if commit.request.error is not None:
            raise commit.request.error


def _eager(pair: Pair) -> Counter[str]:
    """Return what replayed no recording so far, by part and reason; prompts never do."""
    target = pair.target
    drafter = pair.drafter
    parts: dict[str, Mapping[str, int]] = {
        "forward": target.graph_counts,
        "draft": {} if drafter is None else drafter.graph_counts,
        "catch-up": drafter.read_counts if isinstance(drafter, EagleDrafter) else {},
        "attention": target.attention_fallbacks,
    }
    return Counter(
        {
            f"{part}: {reason}": count
            for part, counts in parts.items()
            for reason, count in counts.items()
            if reason not in (cuda_graphs.REPLAYED, "prefill")
        }
    )


# Steps as a way: all facts of a setting are the sums of one observation.


def steps(pair: Pair, floors: Floors, count: int) -> Way:
    """Return the way that times a pair's steps; a setting that fails is reported as it is."""

    def measure(setting: Setting) -> list[Observation]:
        try:
            sums = time_steps(pair, setting, count, floors)
            error = None
        except Exception as failure:  # noqa: BLE001  whatever it is, other settings are timed
            sums = {}
            error = f"{type(failure).__name__}: {failure}"
        return [Observation(setting=setting.name, unit="medians", sums=sums, error=error)]

    return one_by_one(measure)


def _milliseconds(name: str) -> Column:
    return lambda sums, setting: (
        Estimate.exactly(1e3 * sums.total(setting.name, name), 3)
        if sums.total(setting.name, name)
        else None
    )


def _over_floor(sums: Sums, setting: Setting) -> Cell:
    names = (f"floor.{STEP}", "overlapping", f"seconds.{STEP}")
    floor, overlapping, step = (sums.total(setting.name, name) for name in names)
    return Estimate.exactly((overlapping or step) / floor) if floor else None


def _ran_eagerly(sums: Sums, setting: Setting) -> Cell:
    counts = {n: sums.total(setting.name, f"eager.{n}") for n in sums.names("eager.", setting.name)}
    return ", ".join(f"{what} {count:.0f}" for what, count in counts.items()) or None


STEP_COLUMNS: Mapping[str, Column] = {
    "milliseconds": named,
    **{str(phase): _milliseconds(f"seconds.{phase}") for phase in (*PHASES, STEP)},
    "overlapping": _milliseconds("overlapping"),
    "floor": _milliseconds(f"floor.{STEP}"),
    "x floor": _over_floor,
    "busy": _milliseconds("busy"),
    "launches": counted("launches"),
    "operations": counted("operations"),
    "tokens": valued(ACCEPTANCE),
    "ran eagerly": _ran_eagerly,
}
"""What a table shows of a setting."""
