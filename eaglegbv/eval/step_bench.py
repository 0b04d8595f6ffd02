"""Step time by phase for models of any shape, beside the least time that the machine allows.

The floor of a forward is the larger of two times: reading all its weights, and the keys and values
it attends to, once at the measured bandwidth; and doing its multiplications at the measured rate.
Time above the floor goes to launches, small kernels and Python. Verification and commit have no
floor here, because they compute little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eaglegbv.cuda_graphs import REPLAYED
from eaglegbv.engine import Engine
from eaglegbv.eval.random_models import WARM_UP_STEPS, Rig, Shape, StepSetting, barrier_of
from eaglegbv.metrics import Phase, StepRecord, Stopwatch, seconds_by_phase
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams

# What the machine can do.


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rates of a device.

    Attributes:
        bandwidth: Bytes a second that a large copy moves; each byte counts once for reading and
            once for writing.
        flops: Multiplications and additions a second of a large matrix product.
    """

    bandwidth: float
    flops: float


def measure_machine(dtype: torch.dtype, device: torch.device, *, megabytes: int = 256) -> Machine:
    """Time a large copy and a large matrix product, and keep the best of several runs of each.

    Args:
        dtype: Dtype of the matrices.
        device: Device to measure.
        megabytes: Size of the copy, in MiB.
    """
    barrier = barrier_of(device)
    source = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    copy = _best(lambda: sink.copy_(source), barrier)
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn((size, size), device=device).to(dtype)
    b = torch.randn((size, size), device=device).to(dtype)
    product = _best(lambda: torch.mm(a, b), barrier)
    return Machine(bandwidth=2 * source.numel() / copy, flops=2 * size**3 / product)


def _best(work: Callable[[], object], barrier: Callable[[], None] | None, runs: int = 6) -> float:
    """Return the shortest time of several runs, in seconds."""
    times = []
    for _ in range(runs):
        watch = Stopwatch(barrier)
        with watch.phase(Phase.FORWARD):
            work()
        times.append(watch.seconds[Phase.FORWARD])
    return min(times)


# The least time of a phase.


def forward_floor(rig: Rig, setting: StepSetting, machine: Machine) -> float:
    """Return the least seconds of a forward of the target."""
    rows = setting.batch * setting.plan.tree_nodes
    cached = setting.batch * setting.context * rig.target.pool.bytes_per_slot
    read = (target_bytes(rig) + cached) / machine.bandwidth
    return max(read, 2 * rows * _target_weights(rig) / machine.flops)


def draft_floor(rig: Rig, setting: StepSetting, machine: Machine) -> float:
    """Return the least seconds of drafting.

    Every level of a tree reads the head once. The projection of features is left out because it
    is read only once a step.
    """
    if not setting.plan.speculative:
        return 0.0
    weights = sum(p.numel() for name, p in rig.drafter.head.named_parameters() if "fc" not in name)
    size = rig.target.dtype.itemsize
    rows = setting.batch * setting.plan.paths
    level = max(weights * size / machine.bandwidth, 2 * rows * weights / machine.flops)
    return setting.plan.depth * level


def _target_weights(rig: Rig) -> int:
    """Return the number of weights in a forward's products; the embedding is only looked up."""
    every: int = sum(p.numel() for p in rig.target.model.parameters())
    return every - rig.target.input_embeddings.numel()


def target_bytes(rig: Rig) -> int:
    """Return the bytes of the weights that a forward of the target reads."""
    return _target_weights(rig) * rig.target.dtype.itemsize


# Counts of the tensor operations that code dispatches.


class OperationCounter(TorchDispatchMode):
    """Counts the tensor operations dispatched within it; views count too."""

    def __init__(self) -> None:
        parent: Any = super()
        parent.__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, since torch.compile takes other modes for a change in what it traced."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Count an operation and run it."""
        del types
        self.count += 1
        return func(*args, **(kwargs or {}))


# Times of steps.


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a phase of a step.

    Attributes:
        phase: Name of the phase, or ``step`` for the whole step.
        seconds: Median time.
        floor: Least time that the machine allows; None if it is not computed.
    """

    phase: str
    seconds: float
    floor: float | None


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a setting's steps.

    Attributes:
        phases: Phases in order, then the whole step; each phase waits for the device before the
            next begins.
        overlapping: Median seconds of a step as in normal use, where the host prepares a phase
            while the device is busy with the one before; None if the device does not run
            asynchronously.
        operations: Tensor operations a step dispatches, without those within a CUDA graph.
        launches: Kernels, copies and graphs that a step launches on a CUDA device; None on others.
        replayed: Forwards of the target that replayed a recording, among all since the start.
        machine: Measured rates from which the floors are computed.
        weights: Bytes of the weights a forward of the target reads.
        block_efficiency: Tokens committed per request and step; near 1 because weights are random.
    """

    phases: tuple[PhaseTime, ...]
    overlapping: float | None
    operations: int
    launches: int | None
    replayed: int
    machine: Machine
    weights: int
    block_efficiency: float


@dataclass(slots=True)
class _Collector:
    """Keeps the records of steps in which all requests decode."""

    records: list[StepRecord] = field(default_factory=list)

    def on_step(self, record: StepRecord) -> None:
        """Keep a record."""
        if not record.prefilling:
            self.records.append(record)


def time_steps(rig: Rig, setting: StepSetting, machine: Machine) -> StepReport:
    """Time the phases of a setting's steps.

    Args:
        rig: The engines that run the steps.
        setting: What is timed.
        machine: Measured rates from which to compute the floors.

    Raises:
        StepFailed: A step broke off.
    """
    requests = _add(rig.engine, rig.shape, setting)
    timed = _timed(rig.engine, setting)
    with OperationCounter() as counter:
        _step(rig.engine)
    launches = _launches(rig)
    for request in requests:
        rig.engine.cancel(request)
    overlapping = None
    if rig.overlapping is not None:
        _add(rig.overlapping, rig.shape, setting)
        overlapping = median(record.seconds for record in _timed(rig.overlapping, setting))
    committed = sum(record.committed for record in timed)
    return StepReport(
        phases=_phase_times(rig, setting, machine, timed),
        overlapping=overlapping,
        operations=counter.count,
        launches=launches,
        replayed=rig.target.graph_counts.get(REPLAYED, 0),
        machine=machine,
        weights=target_bytes(rig),
        block_efficiency=committed / (len(timed) * setting.batch),
    )


def _add(engine: Engine, shape: Shape, setting: StepSetting) -> list[Request]:
    """Queue the setting's requests, with random prompts."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for n in range(setting.batch):
        prompt = torch.randint(shape.vocab, (setting.context,), generator=generator)
        params = SamplingParams(
            temperature=setting.temperature,
            max_tokens=setting.tokens,
            ignore_eos=True,
            seed=n,
        )
        requests.append(engine.add(prompt.tolist(), params, setting.plan))
    return requests


def _timed(engine: Engine, setting: StepSetting) -> list[StepRecord]:
    """Return the records of the timed steps."""
    collector = _Collector()
    engine.observe(collector)
    while len(collector.records) < WARM_UP_STEPS + setting.steps:
        _step(engine)
    return collector.records[WARM_UP_STEPS : WARM_UP_STEPS + setting.steps]


def _step(engine: Engine) -> None:
    """Run a step; raise an error if it breaks off, because no further step might follow."""
    for commit in engine.step():
        if commit.request.error is not None:
            raise commit.request.error


_LAUNCHES = ("LaunchKernel", "GraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def _launches(rig: Rig) -> int | None:
    """Return how much a further step launches, as the profiler counts it."""
    if rig.target.device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _step(rig.engine)
        torch.cuda.synchronize()
    events = profile.key_averages()
    launches: int = sum(e.count for e in events if any(name in e.key for name in _LAUNCHES))
    return launches


def _phase_times(
    rig: Rig, setting: StepSetting, machine: Machine, timed: Sequence[StepRecord]
) -> tuple[PhaseTime, ...]:
    seconds = [seconds_by_phase(record.spans) for record in timed]
    floors: dict[Phase, float] = {
        Phase.FORWARD: forward_floor(rig, setting, machine),
        Phase.DRAFT: draft_floor(rig, setting, machine),
    }
    times = [
        PhaseTime(
            phase=phase,
            seconds=median(s.get(phase, 0.0) for s in seconds),
            floor=floors.get(phase),
        )
        for phase in (Phase.DRAFT, Phase.FORWARD, Phase.VERIFY, Phase.COMMIT)
    ]
    whole = median(record.seconds for record in timed)
    return (*times, PhaseTime(phase="step", seconds=whole, floor=sum(floors.values())))


def step_table(report: StepReport) -> list[list[str]]:
    """Return rows for a terminal, headings first."""
    rows = [["phase", "ms", "floor ms", "times the floor"]]
    rows += [_row(phase.phase, phase.seconds, phase.floor) for phase in report.phases]
    if report.overlapping is not None:
        rows.append(_row("step, overlapping", report.overlapping, report.phases[-1].floor))
    return rows


def _row(name: str, seconds: float, floor: float | None) -> list[str]:
    if not floor:
        return [name, f"{1e3 * seconds:.3f}", "-", "-"]
    return [name, f"{1e3 * seconds:.3f}", f"{1e3 * floor:.3f}", f"{seconds / floor:.2f}"]
