"""bench step, and pairs with made weights of any shape, which run in the engine."""

import time
from functools import partial
from math import sqrt
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch._C._autograd import DeviceType
from torch._dynamo.config import patch

from eaglegbv.config import PLAIN, Plan
from eaglegbv.cuda_graphs import GraphMode, OperationWatch
from eaglegbv.drafters.eagle_model import RotaryEmbedding
from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.eval import random_models
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.ways import steps
from eaglegbv.loading import Pair

CPU = torch.device("cpu")
SMALL = random_models.Shape(
    hidden=32, layers=4, heads=2, kv_heads=1, intermediate=48, vocab=64, draft_vocab=24
)


def made(shape: random_models.Shape = SMALL, dtype=torch.float32, **options: object) -> Pair:
    pair = random_models.random_pair(
        shape, slots=512, max_context=256, dtype=dtype, device=CPU, **{"native": False, **options}
    )
    return Pair(*pair)


def report(setting: steps.StepSetting, pair: Pair | None = None) -> steps.StepReport:
    pair = made() if pair is None else pair
    return steps.time_steps(pair, setting, steps.Floors(pair))


def row(found: steps.StepReport) -> list[str]:
    sums = Sums([Observation(setting="s", unit="medians", sums=steps.facts_of(found))])
    return steps.step_row(sums, "s")


def test_phases_of_a_step_and_their_floors() -> None:
    setting = steps.StepSetting(plan=Plan(paths=2, depth=3), batch=2, context=16, steps=4)
    pair = made()
    found = report(setting, pair)
    *parts, step = found.seconds.values()
    assert list(found.seconds) == ["draft", "forward", "verify", "commit", "step"]
    assert 0 < sum(parts) < 1.5 * step
    assert 0 < found.floors["draft"] < found.seconds["draft"]
    assert 0 < found.floors["forward"] < found.seconds["forward"]
    assert found.floors["step"] == found.floors["draft"] + found.floors["forward"]
    assert found.operations > 100
    assert 1 <= found.block_efficiency <= 4
    assert found.eager == {"all": 4}  # nothing is recorded here
    assert msgspec.json.decode(msgspec.json.encode(found), type=steps.StepReport) == found
    # Attention 2 x 32 x 32 and 2 x 32 x 16, feed-forward 3 x 32 x 48, and the output layer.
    assert steps.Floors(pair).weights == 4 * (4 * (3 * 32 * 32 + 3 * 32 * 48) + 32 * 64)


def test_products_run_over_the_rows_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = made()
    head, layer = pair.drafter.head, pair.target.model.lm_head
    calls = []
    for name, module in (("fc", head.fc), ("draft", head.lm_head), ("forward", layer)):
        module.register_forward_hook(lambda *_, name=name: calls.append((name, _[1][0].shape[0])))
    floors = steps.Floors(pair)
    setting = steps.StepSetting(plan=Plan(paths=2, depth=3), batch=3, context=8, steps=1)
    found = floors.of(setting)
    assert set(calls) == {("draft", 3 * 2), ("forward", 3 * 7)}
    calls.clear()
    assert floors.of(setting) == found
    assert calls == []  # measured once


def test_plain_decoding_has_no_draft() -> None:
    setting = steps.StepSetting(plan=PLAIN, context=8, steps=2)
    found = report(setting, made(dtype=torch.bfloat16))
    assert found.block_efficiency == 1
    assert found.floors["draft"] == 0
    cells = dict(zip(steps.HEADINGS, row(found), strict=True))
    assert cells["milliseconds"] == "s"
    assert cells["overlapping"] == cells["busy"] == "-"
    assert float(cells["x floor"]) == pytest.approx(
        found.seconds["step"] / found.floors["forward"], abs=0.01
    )


def test_steps_that_wait_for_no_phase_are_timed_where_a_device_works_by_itself(monkeypatch) -> None:
    setting = steps.StepSetting(plan=Plan(paths=2, depth=3), context=8, steps=3)
    monkeypatch.setattr("eaglegbv.eval.ways.steps.barrier_of", lambda _: partial(time.sleep, 0.02))
    found = report(setting)
    assert found.seconds["step"] > found.overlapping + 4 * 0.02 / 2  # four phases, each waited for
    cells = dict(zip(steps.HEADINGS, row(found), strict=True))
    assert float(cells["overlapping"]) == pytest.approx(1e3 * found.overlapping, abs=1e-3)


def test_what_ran_eagerly_is_listed_with_its_reason(monkeypatch) -> None:
    pair = made(graphs=GraphMode.EAGER)
    setting = steps.StepSetting(plan=Plan(paths=2, depth=3), context=8, steps=3)
    assert report(setting, pair).eager == {}
    monkeypatch.setattr("eaglegbv.drafters.graph_drafting.MAX_ROWS", 1)  # of two paths
    found = report(setting, pair)
    assert found.eager == {"draft: too many rows": 3}
    assert row(found)[-1] == "draft: too many rows 3"


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
    assert steps.launches_and_busy(events) == (7, pytest.approx(0.7))


def test_a_step_that_breaks_off_is_an_error_and_leaves_nothing(monkeypatch) -> None:
    setting = steps.StepSetting(plan=PLAIN, context=8, steps=2)
    pair = made()

    with monkeypatch.context() as patched:
        patched.setattr(pair.target, "forward", Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(StepFailed, match="no memory"):
            report(setting, pair)
    assert pair.target.allocator.num_used == 0
    assert report(setting, pair).block_efficiency == 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize("graphs", [GraphMode.OFF, GraphMode.EAGER])
def test_operations_of_compiled_steps_are_counted(graphs: GraphMode) -> None:
    """To count is no reason to look at a graph's inputs again, or to refuse it."""
    setting = steps.StepSetting(plan=Plan(paths=2, depth=3), context=16, steps=2)
    pair = made(compile_backend="eager", graphs=graphs)
    report(setting, pair)  # what is compiled is compiled now
    with patch(error_on_recompile=True):
        found = report(setting, pair)
    assert 100 < found.operations < 4000


def test_operations_are_counted_as_they_are_dispatched() -> None:
    with OperationWatch() as counter:
        torch.ones(3).add(1).mul(2)
    assert counter.count == 3


LESS = msgspec.structs.replace(
    SMALL, hidden=64, heads=4, kv_heads=2, intermediate=96, vocab=256, draft_vocab=200
)


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float32, 2.0), (torch.bfloat16, 3.2)])
def test_a_made_pair_accepts_as_much_as_is_asked_for(dtype: torch.dtype, wanted: float) -> None:
    target, drafter = random_models.random_pair(
        LESS, slots=2048, max_context=128, dtype=dtype, device=CPU, memoryless=True
    )
    assert target.self_check is None
    plan = Plan(paths=2, depth=4)
    reached = random_models.tune(target, drafter, plan, wanted, temperature=1.0)
    assert reached == pytest.approx(wanted, rel=0.05)
    assert not drafter.head.embedding.equal(target.input_embeddings)
    # Without noise nearly all is accepted, also of a chain.
    chain = Plan(paths=1, depth=4)
    assert random_models.block_efficiency(target, drafter, chain, 0.0, temperature=1.0) > 4
    for impossible in (1.0, 4.99, 6.0):
        with pytest.raises(InvalidArgument, match=f"acceptance_length={impossible}"):
            random_models.tune(target, drafter, plan, impossible, temperature=1.0)


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
    assert first.target.output_embeddings.equal(second.target.output_embeddings)
    heads = [pair.drafter.head.state_dict()["lm_head.weight"] for pair in (first, second)]
    assert heads[0].device == CPU
    assert heads[0].equal(heads[1])
