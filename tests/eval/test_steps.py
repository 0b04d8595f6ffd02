"""bench step: random weights of any shape run in the engine; figures follow from its records."""

import time
from functools import partial

import msgspec
import pytest
import torch
from torch._dynamo.config import patch

from eaglegbv.config import PLAIN, Plan
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.eval.machine import Machine
from eaglegbv.eval.random_models import Shape, StepSetting, build_rig
from eaglegbv.eval.step_bench import StepReport, step_table, time_steps

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
