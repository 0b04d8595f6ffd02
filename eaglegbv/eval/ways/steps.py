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
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from eaglegbv import cuda_graphs
from eaglegbv.config import EngineConfig, GraphMode, Plan
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import Eagle1Head
from eaglegbv.engine import Engine
from eaglegbv.eval.experiment import Part
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.random_models import barrier_of, random_prompts
from eaglegbv.eval.settings import Setting
from eaglegbv.loading import Pair
from eaglegbv.metrics import Phase, StepRecord, seconds_by_phase
from eaglegbv.models.hf import HFTarget
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import require_integers

STEP = "step"  # name of the whole step beside those of its phases
PHASES = (Phase.DRAFT, Phase.FORWARD, Phase.VERIFY, Phase.COMMIT)
_FLOOR_RUNS = 8


class StepSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Setting of a measurement of steps."""

    plan: Plan  # how requests speculate
    batch: int = 1  # number of requests
    context: int = 512  # tokens of each prompt
    temperature: float = 1.0  # sampling temperature
    steps: int = 30  # number of timed steps

    def __post_init__(self) -> None:
        require_integers(self, batch=(1, None), context=(1, None), steps=(1, None))

    @property
    def max_tokens(self) -> int:
        """Tokens of an answer that no step ends, those whose operations are counted included."""
        return (self.plan.depth + 1) * (self.steps + 3)

    @property
    def slots(self) -> int:
        """KV slots that all requests need together."""
        return self.batch * (self.context + self.max_tokens + self.plan.tree_slots + 64)

    @property
    def max_context(self) -> int:
        """Positions that a text needs."""
        return self.context + self.max_tokens + self.plan.depth + 1


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a setting's steps."""

    # Median time of each phase, and of the whole step; each phase waits for the device before the
    # next begins.
    seconds: dict[str, float]
    # Time of the products alone of drafting, of the forward, and of both as the step's.
    floors: dict[str, float]
    # Median seconds of a step as in normal use, where the host prepares a phase while the device is
    # busy with the one before; None if the device does not run asynchronously.
    overlapping: float | None
    busy: float | None  # seconds of a step in which kernels run on a CUDA device; None on others
    # Kernels, copies and graphs that a step launches on a CUDA device; None on others.
    launches: int | None
    operations: int  # tensor operations a step dispatches, without those within a CUDA graph
    # How often drafts and forwards of the timed steps replayed no recording, and attention was
    # PyTorch's instead of FlashInfer's, by part and reason.
    eager: dict[str, int]
    block_efficiency: float  # tokens committed per request and step


# The time of products alone.


Products = Sequence[tuple[int, Callable[[Tensor], Tensor]]]
"""Products with weights, each after the width of what it multiplies."""


class Floors:
    """Times of a pair's products with weights, by number of rows."""

    def __init__(self, pair: Pair) -> None:
        """Find the products of a target and its drafter."""
        target, drafter = pair.target, pair.drafter
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

    def of(self, setting: StepSetting) -> dict[str, float]:
        """Return the least seconds of drafting, of the forward and of both; 0 where not known."""
        plan, batch = setting.plan, setting.batch
        draft = 0.0
        if plan.asks_drafter:
            draft = plan.depth * self._seconds(self._level, batch * plan.paths)
        if self._native:
            return {Phase.DRAFT: draft, Phase.FORWARD: 0.0, STEP: 0.0}
        forward = self._seconds(self._forward, batch * plan.tree_nodes)
        return {Phase.DRAFT: draft, Phase.FORWARD: forward, STEP: draft + forward}

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


def _profiled(engine: Engine, device: torch.device) -> tuple[int | None, float | None]:
    """Run a step; return its launches, and the seconds of its kernels, as the profiler has them."""
    if device.type != "cuda":
        return None, None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        _step(engine)
        torch.cuda.synchronize()
    return launches_and_busy(profiled.key_averages())


def launches_and_busy(events: Any) -> tuple[int, float]:  # noqa: ANN401  the profiler's own list
    """Return how often the host launched anything, and seconds of kernels and copies."""
    launches = sum(e.count for e in events if any(name in e.key for name in _LAUNCHES))
    on_device = (e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation)
    return launches, sum(e.self_device_time_total for e in on_device) / 1e6


class _Decoded(list[StepRecord]):
    """The records of steps in which all requests decode."""

    def on_step(self, record: StepRecord) -> None:
        """Keep a record."""
        if not record.prefilling:
            self.append(record)


def time_steps(pair: Pair, setting: StepSetting, floors: Floors) -> StepReport:
    """Time the phases of a setting's steps.

    The same steps run once before they are timed, so that all is compiled and recorded by then.

    Args:
        pair: Target and drafter, whose pools have room for the setting.
        setting: What is timed.
        floors: Times of the pair's products.

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
    barrier = barrier_of(pair.target.device)
    with _decoding(make(), pair, setting) as engine:
        _timed(engine, setting)
        with cuda_graphs.OperationWatch() as watched:
            _step(engine)
        launches, busy = _profiled(engine, pair.target.device)
    before = _eager(pair)
    with _decoding(make(barrier=barrier), pair, setting) as engine:
        timed = _timed(engine, setting)
    overlapping = None
    if barrier is not None:
        with _decoding(make(), pair, setting) as engine:
            overlapping = median(record.seconds for record in _timed(engine, setting))
    phases = [seconds_by_phase(record.spans) for record in timed]
    seconds = {str(p): median(spent.get(p, 0.0) for spent in phases) for p in PHASES}
    return StepReport(
        seconds={**seconds, STEP: median(record.seconds for record in timed)},
        floors=floors.of(setting),
        overlapping=overlapping,
        busy=busy,
        launches=launches,
        operations=watched.count,
        # Without graphs there are no counts.
        eager=dict(_eager(pair) - before) if pair.target.graph_counts else {"all": len(timed)},
        block_efficiency=sum(r.committed for r in timed) / (len(timed) * setting.batch),
    )


@contextmanager
def _decoding(engine: Engine, pair: Pair, setting: StepSetting) -> Iterator[Engine]:
    """Let the engine answer the setting's requests, with random prompts, within this context."""
    requests = []
    usual = SamplingParams(
        temperature=setting.temperature, max_tokens=setting.max_tokens, ignore_eos=True
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


def _timed(engine: Engine, setting: StepSetting) -> list[StepRecord]:
    records = _Decoded()
    engine.observe(records)
    while len(records) < setting.steps:
        _step(engine)
    return records


def _step(engine: Engine) -> None:
    """Run a step; raise an error if it breaks off, because no further step might follow."""
    for commit in engine.step():
        if commit.request.error is not None:
            raise commit.request.error


def _eager(pair: Pair) -> Counter[str]:
    """Return what replayed no recording so far, by part and reason; prompts never do."""
    target, drafter = pair.target, pair.drafter
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


@dataclass(frozen=True, slots=True)
class Steps:
    """The phases of a pair's steps in every setting; one that fails is reported as it is."""

    pair: Pair
    floors: Floors
    steps: int = 30

    def __call__(self, settings: Sequence[Setting]) -> Iterator[Part]:
        """Yield a part for each setting."""
        for setting in settings:
            yield Part(setting.name, 1, partial(self._measure, setting))

    def _measure(self, setting: Setting) -> list[Observation]:
        timed = step_setting(setting, self.steps)
        try:
            sums, error = facts_of(time_steps(self.pair, timed, self.floors)), None
        except Exception as failure:  # noqa: BLE001  whatever it is, other settings are timed
            sums, error = {}, f"{type(failure).__name__}: {failure}"
        return [Observation(setting=setting.name, unit="medians", sums=sums, error=error)]


def step_setting(setting: Setting, steps: int) -> StepSetting:
    """Return what is timed of a setting."""
    return StepSetting(
        plan=setting.plan,
        batch=setting.batch,
        context=setting.context,
        temperature=setting.temperature,
        steps=steps,
    )


def facts_of(report: StepReport) -> dict[str, float]:
    """Return a report as sums."""
    facts: dict[str, float | None] = {
        "overlapping": report.overlapping,
        "busy": report.busy,
        "launches": report.launches,
        "operations": report.operations,
        "tokens": report.block_efficiency,
        "steps": 1.0,
    }
    facts |= {f"seconds.{phase}": spent for phase, spent in report.seconds.items()}
    facts |= {f"floor.{phase}": spent for phase, spent in report.floors.items()}
    facts |= {f"eager.{reason}": count for reason, count in report.eager.items()}
    return {name: float(value) for name, value in facts.items() if value is not None}


_COLUMNS = (*PHASES, STEP, "overlapping", "floor", "x floor", "busy", "launches", "operations")
HEADINGS = ["milliseconds", *_COLUMNS, "tokens", "ran eagerly"]


def step_table(sums: Sums, settings: Sequence[Setting]) -> list[list[str]]:
    """Return a row for each setting, headings first."""
    return [HEADINGS, *(step_row(sums, own.name) for own in settings if sums.has(own.name))]


def step_row(sums: Sums, setting: str) -> list[str]:
    """Return the cells of a setting under :data:`HEADINGS`."""

    def fact(name: str) -> float:
        return sums.total(setting, name)

    def milliseconds(name: str) -> str:
        return f"{1e3 * fact(name):.3f}" if fact(name) else "-"

    floor, step = fact(f"floor.{STEP}"), fact("overlapping") or fact(f"seconds.{STEP}")
    eager = {name: fact(f"eager.{name}") for name in sums.names("eager.", [setting])}
    return [
        setting,
        *(milliseconds(f"seconds.{phase}") for phase in (*PHASES, STEP)),
        milliseconds("overlapping"),
        milliseconds(f"floor.{STEP}"),
        f"{step / floor:.2f}" if floor else "-",
        milliseconds("busy"),
        f"{fact('launches'):.0f}" if fact("launches") else "-",
        f"{fact('operations'):.0f}",
        f"{fact('tokens'):.2f}",
        ", ".join(f"{what} {n:.0f}" for what, n in eager.items()) or "-",
    ]
