"""bench step: random weights of any shape run in the engine; figures follow from its records."""

import time
from functools import partial
from math import sqrt

import msgspec
import pytest
import torch
from torch._dynamo.config import patch

from eaglegbv.config import PLAIN, Plan
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.drafters.eagle_model import Arch, EagleHeadConfig, RotaryEmbedding
from eaglegbv.errors import InvalidArgument, ModelNotSupported, StepFailed
from eaglegbv.eval.random_models import SHAPES, Shape, StepSetting, build_rig, random_head
from eaglegbv.eval.step_bench import (
    Machine,
    OperationCounter,
    StepReport,
    measure_machine,
    step_table,
    time_steps,
)

CPU = torch.device("cpu")
SMALL = Shape(hidden=32, layers=4, heads=2, kv_heads=1, intermediate=48, vocab=64, draft_vocab=24)
MACHINE = Machine(bandwidth=1e9, flops=1e10)


def report(setting: StepSetting, dtype: torch.dtype = torch.float32) -> StepReport:
    return time_steps(build_rig(SMALL, setting, dtype=dtype, device=CPU), setting, MACHINE)


def test_phases_of_a_step_and_their_floors() -> None:
    setting = StepSetting(plan=Plan(paths=2, depth=3), batch=2, context=16, steps=4)
    found = report(setting)
    phases = {phase.phase: phase for phase in found.phases}
    assert list(phases) == ["draft", "forward", "verify", "commit", "step"]
    parts = sum(phase.seconds for name, phase in phases.items() if name != "step")
    assert 0 < parts < 1.5 * phases["step"].seconds
    # Attention 2 x 32 x 32 and 2 x 32 x 16, feed-forward 3 x 32 x 48, two norms; the last norm, and
    # the output layer.
    weights = 4 * (3 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32 + 32 * 64
    assert found.weights == 4 * weights
    cached = 2 * 16 * 4 * 2 * 16 * 4
    read = (4 * weights + cached) / MACHINE.bandwidth
    multiply = 2 * 2 * 7 * weights / MACHINE.flops
    assert phases["forward"].floor == pytest.approx(max(read, multiply))
    assert phases["step"].floor == pytest.approx(phases["forward"].floor + phases["draft"].floor)
    assert phases["verify"].floor is None
    assert found.operations > 100
    assert 1 <= found.block_efficiency <= 4
    assert msgspec.json.decode(msgspec.json.encode(found), type=StepReport) == found


def test_plain_decoding_has_no_draft() -> None:
    setting = StepSetting(plan=PLAIN, context=8, steps=2)
    found = report(setting, torch.bfloat16)
    assert found.block_efficiency == 1
    assert next(p.floor for p in found.phases if p.phase == "draft") == 0
    lines = step_table(found)
    assert [line[0] for line in lines] == ["phase", "draft", "forward", "verify", "commit", "step"]
    assert lines[1][2:] == ["-", "-"]
    assert lines[2][2] != "-"


def test_steps_that_wait_for_no_phase_are_timed_where_a_device_works_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = StepSetting(plan=Plan(paths=2, depth=3), context=8, steps=3)
    assert report(setting).overlapping is None
    monkeypatch.setattr(
        "eaglegbv.eval.random_models.barrier_of", lambda _: partial(time.sleep, 0.02)
    )
    found = report(setting)
    assert found.overlapping is not None
    step = found.phases[-1]
    assert step.seconds > found.overlapping + 4 * 0.02 / 2  # four phases, each waited for
    name, milliseconds, floor, ratio = step_table(found)[-1]
    assert (name, floor) == ("step, overlapping", step_table(found)[-2][2])
    assert float(milliseconds) == pytest.approx(1e3 * found.overlapping, abs=1e-3)
    assert float(ratio) == pytest.approx(found.overlapping / step.floor, abs=1e-2)


def test_a_step_that_breaks_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = StepSetting(plan=PLAIN, context=8, steps=2)
    rig = build_rig(SMALL, setting, dtype=torch.float32, device=CPU)

    def forward(*arguments: object, **named: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rig.target, "forward", forward)
    with pytest.raises(StepFailed, match="no memory"):
        time_steps(rig, setting, MACHINE)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize("graphs", [GraphMode.OFF, GraphMode.EAGER])
def test_operations_of_compiled_steps_are_counted(graphs: GraphMode) -> None:
    """To count is no reason to look at a graph's inputs again, or to refuse it."""
    setting = StepSetting(plan=Plan(paths=2, depth=3), context=16, steps=2)
    rig = build_rig(
        SMALL, setting, dtype=torch.float32, device=CPU, compile_backend="eager", graphs=graphs
    )
    rig.engine.check_plan(setting.plan)  # what is compiled is compiled now
    with patch(error_on_recompile=True):
        found = time_steps(rig, setting, MACHINE)
    assert 100 < found.operations < 4000


def test_a_setting_of_no_steps_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="steps=0"):
        StepSetting(plan=PLAIN, steps=0)


def test_a_machine_is_measured() -> None:
    machine = measure_machine(torch.float32, CPU, megabytes=1)
    assert machine.bandwidth > 1e6
    assert machine.flops > 1e6


def test_operations_are_counted_as_they_are_dispatched() -> None:
    with OperationCounter() as counter:
        torch.ones(3).add(1).mul(2)
    assert counter.count == 3


def test_known_shapes_are_sound() -> None:
    assert {"tiny", "llama-3.1-8b"} <= set(SHAPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "layers=3"),
        ({"heads": 3}, "heads=3"),
        ({"vocab": 0}, "vocab=0"),
        ({"kv_heads": 4}, "heads=2"),
    ],
)
def test_sizes_that_fit_no_model_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        msgspec.structs.replace(SMALL, **changes).__post_init__()


HEAD = EagleHeadConfig(
    arch=Arch.EAGLE3,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=64,
    draft_vocab_size=24,
    feature_layers=(1, 2, 3),
)


def test_a_deep_random_target_in_bfloat16_passes_for_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each layer magnifies rounding as one of width 4096 would.
    deep = Shape(
        hidden=256, layers=32, heads=2, kv_heads=1, intermediate=512, vocab=8000, draft_vocab=50
    )
    setting = StepSetting(plan=Plan(paths=2, depth=3), context=8, steps=1)
    assert build_rig(deep, setting, dtype=torch.bfloat16, device=CPU).target.vocab_size == 8000
    monkeypatch.setattr(
        "eaglegbv.eval.random_models._GAIN", 0.02 * sqrt(4096)
    )  # as transformers has it
    with pytest.raises(ModelNotSupported, match="of the plain model within"):
        build_rig(deep, setting, dtype=torch.bfloat16, device=CPU)


def test_all_of_a_random_head_is_on_the_device() -> None:
    embedding = torch.zeros(64, 32, device="meta", dtype=torch.bfloat16)
    head = random_head(HEAD, embedding)
    state = [*head.parameters(), *head.buffers()]
    assert {part.device.type for part in state} == {"meta"}
    assert {part.dtype for part in head.parameters()} == {torch.bfloat16}


def test_a_random_head_shares_the_embedding_and_rotates_exactly() -> None:
    embedding = torch.zeros(64, 32, dtype=torch.bfloat16)
    head = random_head(HEAD, embedding)
    assert head.embedding.data_ptr() == embedding.data_ptr()
    assert {part.dtype for part in head.parameters()} == {torch.bfloat16}
    assert head.rotary.frequencies.equal(RotaryEmbedding(HEAD).frequencies)
    assert head.rotary.frequencies.dtype is torch.float32


def test_weights_are_the_same_again_and_the_callers_random_numbers_go_on() -> None:
    setting = StepSetting(plan=PLAIN, context=8, steps=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first, second = (
            build_rig(SMALL, setting, dtype=torch.float32, device=CPU) for _ in range(2)
        )
        assert torch.get_rng_state().equal(before)
    assert first.target.output_embeddings.equal(second.target.output_embeddings)
    heads = [rig.drafter.head.state_dict()["lm_head.weight"] for rig in (first, second)]
    assert heads[0].device == CPU
    assert heads[0].equal(heads[1])
