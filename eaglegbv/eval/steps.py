"""Step time by phase at any model shape, random weights, against what the machine allows.

The floor of a forward is the larger of two times: all its weights, and the keys and values it
attends to, read once at the measured bandwidth; and its multiplications at the measured rate. Time
above it goes to launches, to small kernels, to Python. Verification and commit have no floor here:
what they compute is small.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from eaglegbv.compiling import check_backend
from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_head import Eagle3Head, EagleHead
from eaglegbv.drafters.eagle_head_config import Arch, EagleHeadConfig, default_feature_layers
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument
from eaglegbv.frames import roomy
from eaglegbv.graphs import GraphMode
from eaglegbv.loading import head_drafter
from eaglegbv.params import SamplingParams
from eaglegbv.request import Request
from eaglegbv.step_record import StepRecord
from eaglegbv.stopwatch import Phase, Stopwatch, seconds_by_phase
from eaglegbv.targets.base import FeatureSpec
from eaglegbv.targets.hf import HFTarget
from eaglegbv.targets.static_forward import REPLAYED

WARM_UP_STEPS = 3

_GAIN = 0.64
"""Standard deviation of random weights, times the square root of the width.

By transformers' own deviation, 0.02, it is 1.28 at a width of 4096: 32 layers then magnify so much
the rounding of bfloat16 that sums in another order give logits a twentieth apart, which nobody
takes for the same model (:mod:`eaglegbv.targets.guard`). Of much less, wrong masks hardly show.
"""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-like target and of an EAGLE-3 head for it.

    Attributes:
        hidden: Width.
        layers: Decoder layers, at least 4.
        heads: Query heads.
        kv_heads: Key and value heads.
        intermediate: Width of the feed-forward layers.
        vocab: Tokens.
        draft_vocab: Tokens the head can draft.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    draft_vocab: int

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if value < 1:
                raise InvalidArgument(name, value, "an integer of at least 1")
        if self.layers < 4:
            raise InvalidArgument("layers", self.layers, "at least 4, of which a head reads three")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise InvalidArgument(
                "heads", self.heads, f"a divisor of {self.hidden}, multiple of {self.kv_heads}"
            )


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(
        hidden=256, layers=12, heads=4, kv_heads=2, intermediate=640, vocab=4096, draft_vocab=4096
    ),
    "llama-3.1-8b": Shape(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        intermediate=14336,
        vocab=128_256,
        draft_vocab=32_000,
    ),
}
"""Shapes by name."""


class StepSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What is timed.

    Attributes:
        plan: How requests speculate.
        batch: Requests.
        context: Tokens of each prompt.
        temperature: Of sampling.
        steps: Steps timed, after some that are not.
    """

    plan: Plan
    batch: int = 1
    context: int = 512
    temperature: float = 1.0
    steps: int = 30

    def __post_init__(self) -> None:
        for name, value in (
            ("batch", self.batch),
            ("context", self.context),
            ("steps", self.steps),
        ):
            if value < 1:
                raise InvalidArgument(name, value, "an integer of at least 1")

    @property
    def tokens(self) -> int:
        """Tokens of an answer: enough for all steps, and those that count what they launch."""
        return (self.plan.depth + 1) * (WARM_UP_STEPS + self.steps + 3)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a device was measured to do.

    Attributes:
        bandwidth: Bytes a second read by a large copy, counted once for reading and once for
            writing.
        flops: Multiplications and additions a second of a large matrix product.
    """

    bandwidth: float
    flops: float


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a phase of a step.

    Attributes:
        phase: Its name, or ``step`` for all.
        seconds: Median.
        floor: What the machine allows at best; None where that is not counted.
    """

    phase: str
    seconds: float
    floor: float | None


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """A setting's times.

    Attributes:
        phases: In order, the whole step last, each waited for before the next begins.
        overlapping: Seconds of a step, median, where the host prepares a phase while the device is
            busy with the one before, as it is in use; None where a device does nothing by itself.
        operations: Tensor operations a step dispatches; those within a CUDA graph do not count.
        launches: Kernels, copies and graphs that a step launches on a CUDA device; None elsewhere.
        replayed: Forwards of the target that replayed a recording, of all since the start.
        machine: What the floors rest on.
        weights: Bytes of the weights a forward of the target reads.
        block_efficiency: Tokens committed per request and step; of random weights, so near 1.
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
class Collector:
    """Keeps the records of steps in which all decode."""

    records: list[StepRecord] = field(default_factory=list)

    def on_step(self, record: StepRecord) -> None:
        """Keep a record."""
        if not record.prefilling:
            self.records.append(record)


class OperationCounter(TorchDispatchMode):
    """Counts the tensor operations dispatched within it; views count too."""

    def __init__(self) -> None:
        parent: Any = super()
        parent.__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let compiled code run: torch.compile takes other modes for a change of what it traced."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Count and run an operation."""
        del types
        self.count += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Rig:
    """An engine of random weights.

    Attributes:
        engine: The engine; it waits for the device at the end of every phase.
        overlapping: Another of the same models, which does not; None where there is no difference.
        target: Its target.
        drafter: Its drafter.
        shape: Their sizes.
    """

    engine: Engine
    overlapping: Engine | None
    target: HFTarget
    drafter: EagleDrafter
    shape: Shape


def build(
    shape: Shape,
    setting: StepSetting,
    *,
    dtype: torch.dtype,
    device: torch.device,
    compile_backend: str | None = None,
    graphs: GraphMode = GraphMode.OFF,
) -> Rig:
    """Make a target and a head of random weights, and an engine with room for the setting.

    Args:
        shape: Sizes of both.
        setting: What will be timed.
        dtype: Type of the weights.
        device: Where they live.
        compile_backend: Compile models and verifier by this backend of ``torch.compile``; None for
            not.
        graphs: Whether tree forwards and drafting are recorded and replayed.
    """
    if compile_backend is not None:  # before anything is made
        check_backend(compile_backend)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=setting.context + setting.tokens + setting.plan.depth + 1,
        tie_word_embeddings=False,
        initializer_range=_GAIN / sqrt(shape.hidden),
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    head_config = EagleHeadConfig(
        arch=Arch.EAGLE3,
        hidden_size=shape.hidden,
        target_hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        draft_vocab_size=shape.draft_vocab,
        feature_layers=default_feature_layers(shape.layers),
    )
    slots = setting.batch * (setting.context + setting.tokens + setting.plan.tree_slots + 64)
    features = FeatureSpec.layer_inputs(head_config.feature_layers)
    target = HFTarget(
        model, features=features, max_slots=slots, compile_backend=compile_backend, graphs=graphs
    )
    drafter = head_drafter(
        random_head(head_config, target.input_embeddings),
        slots=slots,
        graphs=graphs,
        max_context=target.max_context,
        compile_backend=compile_backend,
    )
    sizes = EngineConfig(
        kv_slots=slots,
        max_batch=setting.batch,
        prefix_cache=False,
        prefill_tokens=max(1024, setting.context),
    )
    barrier = barrier_of(device)
    engine = Engine(target, drafter, sizes, barrier=barrier, compile_backend=compile_backend)
    overlapping = None
    if barrier is not None:
        overlapping = Engine(target, drafter, sizes, compile_backend=compile_backend)
    return Rig(engine, overlapping, target, drafter, shape)


def random_head(config: EagleHeadConfig, embedding: Tensor) -> EagleHead:
    """Return a head of random weights, where a target's embedding is, and of its type."""
    device = embedding.device
    with device:
        head = Eagle3Head(config, embedding, torch.arange(config.draft_vocab_size))
    # Weights alone: the frequencies of its rotations stay as exact as they are.
    weights = {name: weight.to(embedding.dtype) for name, weight in head.state_dict().items()}
    head.load_state_dict(weights, assign=True)
    # What a head computes for itself, its rotations say, begins on the host.
    return head.to(device).train(mode=False)


@roomy
def run(rig: Rig, setting: StepSetting, machine: Machine) -> StepReport:
    """Time the setting's steps."""
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
        weights=_target_bytes(rig),
        block_efficiency=committed / (len(timed) * setting.batch),
    )


def _add(engine: Engine, shape: Shape, setting: StepSetting) -> list[Request]:
    """Queue the setting's requests, of random prompts."""
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
    """Return the records of the steps that count."""
    collector = Collector()
    engine.observe(collector)
    while len(collector.records) < WARM_UP_STEPS + setting.steps:
        _step(engine)
    return collector.records[WARM_UP_STEPS : WARM_UP_STEPS + setting.steps]


def _step(engine: Engine) -> None:
    """Run a step; one that breaks off is an error, else there might be no further one."""
    for commit in engine.step():
        if commit.request.error is not None:
            raise commit.request.error


_LAUNCHES = ("LaunchKernel", "GraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def _launches(rig: Rig) -> int | None:
    """Return what a further step launches, by the profiler."""
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
    rows = setting.batch * setting.plan.tree_nodes
    floors: dict[Phase, float] = {
        Phase.FORWARD: _forward_floor(rig, setting, machine, rows),
        Phase.DRAFT: _draft_floor(rig, setting, machine),
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


def _forward_floor(rig: Rig, setting: StepSetting, machine: Machine, rows: int) -> float:
    cached = setting.batch * setting.context * rig.target.pool.bytes_per_slot
    read = (_target_bytes(rig) + cached) / machine.bandwidth
    return max(read, 2 * rows * _target_weights(rig) / machine.flops)


def _draft_floor(rig: Rig, setting: StepSetting, machine: Machine) -> float:
    """Every level of a tree reads the head once; the features' projection is read once a step."""
    if not setting.plan.speculative:
        return 0.0
    weights = sum(p.numel() for name, p in rig.drafter.head.named_parameters() if "fc" not in name)
    size = rig.target.dtype.itemsize
    rows = setting.batch * setting.plan.paths
    level = max(weights * size / machine.bandwidth, 2 * rows * weights / machine.flops)
    return setting.plan.depth * level


def _target_weights(rig: Rig) -> int:
    """Return the number of weights that a forward multiplies with; the embedding is looked up."""
    every: int = sum(p.numel() for p in rig.target.model.parameters())
    return every - rig.target.input_embeddings.numel()


def _target_bytes(rig: Rig) -> int:
    return _target_weights(rig) * rig.target.dtype.itemsize


def measure_machine(dtype: torch.dtype, device: torch.device, *, megabytes: int = 256) -> Machine:
    """Measure a large copy and a large matrix product, the best of some runs each."""
    barrier = barrier_of(device)
    source = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    copy = _best(lambda: sink.copy_(source), barrier)
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn((size, size), device=device).to(dtype)
    b = torch.randn((size, size), device=device).to(dtype)
    product = _best(lambda: torch.mm(a, b), barrier)
    return Machine(bandwidth=2 * source.numel() / copy, flops=2 * size**3 / product)


def barrier_of(device: torch.device) -> Callable[[], None] | None:
    """Return what waits until a device has done all it was given; None where nothing needs it."""
    return torch.cuda.synchronize if device.type == "cuda" else None


def _best(work: Callable[[], object], barrier: Callable[[], None] | None, runs: int = 6) -> float:
    """Return the shortest time of some runs, in seconds."""
    times = []
    for _ in range(runs):
        watch = Stopwatch(barrier)
        with watch.phase(Phase.FORWARD):
            work()
        times.append(watch.seconds[Phase.FORWARD])
    return min(times)


def table(report: StepReport) -> list[list[str]]:
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
