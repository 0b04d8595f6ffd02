"""bench step, and pairs with made weights of any shape, which run in the engine."""

import time
from functools import partial
from math import sqrt
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch._C._autograd import DeviceType
from torch._dynamo.config import patch

from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.cuda_graphs import GraphMode, OperationWatch
from eaglegbv.drafters.eagle_model import RotaryEmbedding
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.eval import random_models
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.simulated import simulated
from eaglegbv.eval.tables import by_setting
from eaglegbv.eval.ways import steps
from eaglegbv.loading import Pair
from eaglegbv.sampling import SamplingParams

CPU = torch.device("cpu")
SMALL = random_models.Shape(
    hidden=32, layers=4, heads=2, kv_heads=1, intermediate=48, vocab=64, draft_vocab=24
)


def made(shape: random_models.Shape = SMALL, dtype=torch.float32, **options: object) -> Pair:
    pair = random_models.random_pair(
        shape, slots=2048, max_context=256, dtype=dtype, device=CPU, **{"native": False, **options}
    )
    return Pair(*pair)


def setting_of(plan: Plan, context: int, batch: int = 1) -> Setting:
    return Setting(plan=plan, batch=batch, context=context)


def report(setting: Setting, count: int, pair: Pair | None = None) -> dict[str, float]:
    pair = made() if pair is None else pair
    return steps.time_steps(pair, setting, count, steps.Floors(pair))


def row(setting: Setting, found: dict[str, float]) -> dict[str, str]:
    """Cells by heading."""
    sums = Sums([Observation(setting=setting.name, unit="medians", sums=found)])
    return dict(zip(*by_setting(sums, [setting], steps.STEP_COLUMNS).texts, strict=True))


def test_phases_of_a_step_and_their_floors() -> None:
    setting = setting_of(Plan(paths=2, depth=3), 16, batch=2)
    pair = made()
    found = report(setting, 4, pair)
    phases = ["draft", "forward", "verify", "commit", "step"]
    *parts, step = (found[f"seconds.{phase}"] for phase in phases)
    assert 0 < sum(parts) < 1.5 * step
    for phase in ("draft", "forward"):
        assert 0 < found[f"floor.{phase}"] < found[f"seconds.{phase}"]
    assert found["floor.step"] == found["floor.draft"] + found["floor.forward"]
    assert found["operations"] > 100
    assert 1 <= found["tokens"] <= 4
    assert row(setting, found)["ran eagerly"] == "all 4"  # nothing is recorded here
    # Attention 2 x 32 x 32 and 2 x 32 x 16, feed-forward 3 x 32 x 48, and the output layer.
    assert steps.Floors(pair).weights == 4 * (4 * (3 * 32 * 32 + 3 * 32 * 48) + 32 * 64)


def test_products_run_over_the_rows_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = made()
    head, layer = pair.drafter.head, pair.target.model.lm_head
    calls = []
    for name, module in (("fc", head.fc), ("draft", head.lm_head), ("forward", layer)):
        module.register_forward_hook(lambda *_, name=name: calls.append((name, _[1][0].shape[0])))
    floors = steps.Floors(pair)
    setting = setting_of(Plan(paths=2, depth=3), 8, batch=3)
    found = floors.of(setting)
    assert set(calls) == {("draft", 3 * 2), ("forward", 3 * 7)}
    calls.clear()
    assert floors.of(setting) == found
    assert calls == []  # measured once


def test_plain_decoding_has_no_draft() -> None:
    setting = setting_of(PLAIN, 8)
    found = report(setting, 2, made(dtype=torch.bfloat16))
    assert found["tokens"] == 1
    assert found["floor.draft"] == 0
    cells = row(setting, found)
    assert cells["milliseconds"] == setting.name
    assert (cells["overlapping"], cells["busy"]) == ("-", "-")  # of CUDA devices alone
    ratio = found["seconds.step"] / found["floor.forward"]
    assert float(cells["x floor"]) == pytest.approx(ratio, abs=0.01)


def test_steps_that_wait_for_no_phase_are_timed_where_a_device_works_by_itself(monkeypatch) -> None:
    setting = setting_of(Plan(paths=2, depth=3), 8)
    monkeypatch.setattr("eaglegbv.eval.ways.steps.barrier_of", lambda _: partial(time.sleep, 0.02))
    found = report(setting, 3)
    # Four phases, each waited for.
    assert found["seconds.step"] > found["overlapping"] + 4 * 0.02 / 2
    shown = float(row(setting, found)["overlapping"])
    assert shown == pytest.approx(1e3 * found["overlapping"], abs=1e-3)


def test_what_ran_eagerly_is_listed_with_its_reason(monkeypatch) -> None:
    pair = made(graphs=GraphMode.EAGER)
    setting = setting_of(Plan(paths=2, depth=3), 8)
    assert row(setting, report(setting, 3, pair))["ran eagerly"] == "-"
    monkeypatch.setattr("eaglegbv.drafters.graph_drafting.MAX_ROWS", 1)  # of two paths
    assert row(setting, report(setting, 3, pair))["ran eagerly"] == "draft: too many rows 3"


def test_a_profile_is_read() -> None:
    """As torch has it: operations of the host carry their kernels' time a second time."""

    names = ("key", "count", "self_device_time_total", "device_type", "is_user_annotation")
    events = [
        SimpleNamespace(**dict(zip(names, (*own, False), strict=True)))
        for own in (
            ("aten::mm", 3, 5e5, DeviceType.CPU),
            ("cudaLaunchKernel", 5, 0, DeviceType.CPU),
            ("cudaGraphLaunch", 2, 0, DeviceType.CPU),
            ("sort", 3, 2e5, DeviceType.CUDA),
            ("gemm", 3, 5e5, DeviceType.CUDA),
        )
    ]
    assert steps.launches_and_busy(events) == {"launches": 7, "busy": pytest.approx(0.7)}


def test_a_step_that_breaks_off_is_an_error_and_leaves_nothing(monkeypatch) -> None:
    setting, pair = setting_of(PLAIN, 8), made()

    with monkeypatch.context() as patched:
        patched.setattr(pair.target, "forward", Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(StepFailed, match="no memory"):
            report(setting, 2, pair)
    assert pair.target.allocator.num_used == 0
    assert report(setting, 2, pair)["tokens"] == 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize("graphs", [GraphMode.OFF, GraphMode.EAGER])
def test_operations_of_compiled_steps_are_counted(graphs: GraphMode) -> None:
    """To count is no reason to look at a graph's inputs again, or to refuse it."""
    setting = setting_of(Plan(paths=2, depth=3), 16)
    pair = made(compile_backend="eager", graphs=graphs)
    report(setting, 2, pair)  # what is compiled is compiled now
    with patch(error_on_recompile=True):
        found = report(setting, 2, pair)
    assert 100 < found["operations"] < 4000


def test_operations_are_counted_as_they_are_dispatched() -> None:
    with OperationWatch() as counter:
        torch.ones(3).add(1).mul(2)
    assert counter.count == 3


@pytest.mark.parametrize("length", [1.0, 2.0, 3.25])
def test_a_step_commits_as_many_tokens_as_are_told(length: float) -> None:
    """Whatever is drafted, and however good that is; a tree too small commits what it has."""
    pair = made()
    name = simulated("otbv", length)
    assert name == f"otbv~{length:g}"
    assert simulated("otbv", length) == name  # it is known by now
    params = [SamplingParams(max_tokens=200, ignore_eos=True, seed=n) for n in range(4)]
    for depth in (4, 1):
        plan = Plan(verifier=name, paths=2, depth=depth)
        engine = Engine(pair.target, pair.drafter, EngineConfig(kv_slots=2048))
        requests = engine.run([[1, 2, 3]] * 4, params, plan)
        forwards = sum(one.metrics.target_forwards for one in requests)
        tokens = sum(one.metrics.committed_tokens for one in requests)
        assert tokens / forwards == pytest.approx(min(length, depth + 1), abs=0.15)
    for wrong in (("otbv", 0.5), ("greedy_block", 2.0), ("nope", 2.0)):
        with pytest.raises(InvalidArgument):
            simulated(*wrong)


@pytest.mark.thorough
def test_a_deep_random_target_in_bfloat16_passes_for_what_it_is(monkeypatch) -> None:
    # Each layer magnifies rounding as one of width 4096 would.
    deep = random_models.Shape(
        hidden=256, layers=32, heads=2, kv_heads=1, intermediate=512, vocab=8000, draft_vocab=50
    )
    target = made(deep, torch.bfloat16).target
    assert (target.vocab_size, target.self_check) == (8000, None)
    # As transformers has it: in float32 the check shows that it is rounding alone.
    monkeypatch.setattr(random_models, "_GAIN", 0.02 * sqrt(4096))
    assert made(deep, torch.bfloat16).target.self_check is None


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_random_head_is_on_the_device_shares_the_embedding_and_rotates_exactly(device) -> None:
    config = made().drafter.head.config
    embedding = torch.zeros(64, 32, device=device, dtype=torch.bfloat16)
    head = random_models.random_head(config, embedding)
    assert head.embedding.data_ptr() == embedding.data_ptr()
    assert {part.device.type for part in (*head.parameters(), *head.buffers())} == {device}
    assert {part.dtype for part in head.parameters()} == {torch.bfloat16}
    assert head.rotary.frequencies.dtype is torch.float32
    exact = RotaryEmbedding(config).frequencies
    assert device == "meta" or head.rotary.frequencies.equal(exact)


def test_weights_are_the_same_again_and_the_callers_random_numbers_go_on() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first, second = made(), made()
        assert torch.get_rng_state().equal(before)
    assert first.target.output_layer().weight.equal(second.target.output_layer().weight)
    heads = [pair.drafter.head.state_dict()["lm_head.weight"] for pair in (first, second)]
    assert heads[0].device == CPU
    assert heads[0].equal(heads[1])
