"""Costs are measured before the first request, kept, and used from the first choice on."""

import json
import logging
import math

import msgspec
import pytest
import torch

from eaglegbv import LLM, SamplingParams
from eaglegbv import calibration as cost_cache
from eaglegbv.calibration import CostCache, calibrate, shape_of, was_disturbed
from eaglegbv.config import AUTO, PLAIN, AutoPlan, EngineConfig, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.loading import Pair
from eaglegbv.scheduler.planner import KnownCosts, Measured, Planner, StepCosts, StepShape
from eaglegbv.utils import CACHE_FOLDER

STEPS = tuple(Measured(StepShape.of([plan], 1, 100), 0.01) for plan in (PLAIN, Plan()))
LIMITS, SIZES = AutoPlan(max_paths=2, max_depth=2), EngineConfig(kv_slots=4096, max_batch=1)


def cache_of(*facts: object, dtype: torch.dtype = torch.float32) -> CostCache:
    return CostCache.of(*facts, device=torch.device("cpu"), dtype=dtype)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return LLM(plan=Plan(), engine=EngineConfig(kv_slots=4096)).pair


def test_calibration_leaves_nothing_behind_and_keeps_to_its_time(pair):
    free = pair.target.allocator.num_free
    one = calibrate(pair, AUTO, EngineConfig(), seconds=0.0)
    assert {step.shape.cell for step in one.sampled} == {(0, 0, 0, 0)}
    few = calibrate(pair, LIMITS, EngineConfig(max_batch=1), seconds=600.0)
    assert pair.target.allocator.num_free == free
    assert pair.target.allocator.num_kept == 0
    for steps in (few.greedy, few.sampled):
        cells = {step.shape.cell for step in steps}
        assert {cell[0] for cell in cells} == {0}
        assert {cell[1] for cell in cells} == {0, 1, 2}
        # Of long texts too, by plans that draft and by none.
        assert {step.shape.paths for step in steps if step.shape.context > 500} == {0, 2}
        costs = StepCosts(steps)
        assert (costs.seconds([step.shape for step in (*steps, *STEPS)]) > 0).all()


def test_costs_are_measured_once_and_kept(cache, caplog):
    first = LLM(plan=LIMITS, engine=SIZES)
    [kept] = cache.iterdir()
    written = kept.read_bytes()
    answer = first.generate("Hello", SamplingParams(max_tokens=6, ignore_eos=True))
    assert len(answer.token_ids) == 6
    LLM(plan=LIMITS, engine=SIZES)
    assert kept.read_bytes() == written
    assert [path.name for path in cache.iterdir()] == [kept.name]
    wrong = msgspec.json.decode(written)
    wrong["sampled"][0][1] = -1.0
    for damaged in (written[:-20], msgspec.json.encode(wrong)):
        kept.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            LLM(plan=LIMITS, engine=SIZES)
        assert "measured again" in caplog.text
        assert msgspec.json.decode(kept.read_bytes(), type=KnownCosts).sampled


def test_kept_costs_that_the_first_steps_refute_are_replaced(cache):
    LLM(plan=LIMITS, engine=SIZES)
    [kept] = cache.iterdir()
    known = msgspec.json.decode(kept.read_bytes(), type=KnownCosts)
    wrong = tuple(Measured(step.shape, min(3600.0, 1e3 * step.seconds)) for step in known.sampled)
    kept.write_bytes(msgspec.json.encode(KnownCosts(greedy=known.greedy, sampled=wrong)))
    llm = LLM(plan=LIMITS, engine=SIZES)
    params = SamplingParams(max_tokens=150, ignore_eos=True, seed=1)
    for _ in range(2):
        llm.generate("Hello", params)
    again = msgspec.json.decode(kept.read_bytes(), type=KnownCosts)
    assert again.greedy == StepCosts(known.greedy).known
    assert max(step.seconds for step in again.sampled) < min(step.seconds for step in wrong)


@pytest.mark.parametrize(
    ("repeats", "share", "disturbed"),
    [
        ([[1.0, 1.1], [2.0, 2.1], [3.0, 9.0]], 0.95, False),  # a single step was held up
        ([[1.0, 1.4], [2.0, 1.5], [3.0, 3.1]], 0.95, True),
        ([[1.0, 1.0]], 0.6, True),
        ([], 1.0, False),
    ],
)
def test_a_machine_that_was_busy_is_noticed(repeats, share, disturbed):
    assert was_disturbed(repeats, share) == disturbed


@pytest.mark.parametrize("answers", [(True, False), (True, True)])
def test_a_disturbed_calibration_says_so_and_measures_again(pair, monkeypatch, caplog, answers):
    left = list(answers)
    monkeypatch.setattr(cost_cache, "was_disturbed", lambda *_: left.pop(0))
    with caplog.at_level(logging.WARNING):
        calibrate(pair, LIMITS, EngineConfig(max_batch=1), seconds=0.0)
    assert left == []
    assert "busy" in caplog.text
    assert "measured once more" in caplog.text
    assert ("the first steps will check them" in caplog.text) == answers[1]


def test_nothing_is_measured_where_plans_are_fixed_or_it_is_turned_off(cache):
    LLM(plan=Plan(), engine=EngineConfig(kv_slots=4096))
    LLM(engine=EngineConfig(kv_slots=4096, calibrate=False))
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        cache_of("a").write(KnownCosts(greedy=STEPS, sampled=STEPS))
        assert cache_of("a").read() is None
    assert "not kept" in caplog.text


def test_other_settings_and_processors_have_other_files(monkeypatch):
    caches = (cache_of("a", "b"), cache_of("a", "c"), cache_of("a", "b", dtype=torch.bfloat16))
    assert len({cache.path for cache in caches}) == 3
    assert cache_of("a", "b") == caches[0]
    # The home folder of a cluster: as many threads, and other processors.
    monkeypatch.setattr(cost_cache, "processor_name", lambda: "another")
    assert cache_of("a", "b") != caches[0]


def test_what_has_no_room_is_left_out(pair, monkeypatch):
    monkeypatch.setattr(pair.target, "max_context", 30)
    nothing = calibrate(pair, AUTO, EngineConfig())
    assert nothing == KnownCosts()
    assert Planner(nothing).known == nothing


def test_plans_that_cannot_run_are_refused_before_anything_is_measured(pair):
    with pytest.raises(InvalidArgument, match="one without state over steps"):
        calibrate(pair, AutoPlan(verifier="greedy_block", max_paths=1), EngineConfig())


def test_models_of_one_shape_share_a_file(tmp_path):
    for name, path in (("a", "here"), ("b", "there"), ("c", "here")):
        config = {"hidden_size": 64 if name == "c" else 32, "x": math.inf, "_name_or_path": path}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    a, b, c = (shape_of(str(tmp_path / name)) for name in "abc")
    assert a == b != c
    assert shape_of("some/model") == "some/model"
    assert shape_of(None) is None
