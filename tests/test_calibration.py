"""Costs are measured before the first request, kept, and used from the first choice on."""

import json
import logging
from pathlib import Path

import msgspec
import pytest
import torch
from support.simulated_engine import Simulation, World

from eaglegbv import LLM, SamplingParams
from eaglegbv import calibration as cost_cache
from eaglegbv.calibration import CostCache, calibrate, shape_of
from eaglegbv.config import AUTO, AutoPlan, EngineConfig, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.request import PlanReason
from eaglegbv.scheduler.costs import KnownCosts, StepCosts, StepShape
from eaglegbv.scheduler.planner import Planner
from eaglegbv.utils import CACHE_FOLDER

SHAPES = [StepShape(r, 100 * r, r if k else 0, k, d) for r in (1, 4) for k, d in ((0, 0), (2, 3))]


def some_costs() -> StepCosts:
    costs = StepCosts()
    for _ in range(5):
        for n, shape in enumerate(SHAPES):
            costs.observe(shape, 0.01 * (n + 1))
    return costs


def known_of(world: World) -> KnownCosts:
    costs = StepCosts()
    for _ in range(4):
        for paths, depth in ((0, 0), (1, 1), (3, 4), (2, 6), (1, 3)):
            base, (once, request, level, node) = world.step[0], world.draft
            drafts = once + request + level * depth + node * paths * depth if paths else 0.0
            shape = StepShape(1, 100, 1 if paths else 0, paths, depth)
            costs.observe(shape, (base + drafts) / 1000)
    return KnownCosts(greedy=costs.table(), sampled=costs.table())


def test_a_table_says_what_the_costs_say() -> None:
    costs = some_costs()
    again = StepCosts.of_table(costs.table())
    assert again.steps == costs.steps
    costs._pace = 0.0
    for shape in [*SHAPES, StepShape(2, 300, 2, 3, 5), StepShape(2, 300, 0, 0, 0)]:
        assert again.seconds(shape) == pytest.approx(costs.seconds(shape), rel=0.02)
    assert again.table() == costs.table()


def test_known_costs_need_no_lessons() -> None:
    world = World()
    taught = Simulation(world, planner=Planner(known_of(world)))
    taught.run(1, 20)
    assert taught.share(lambda plan, reason: reason is PlanReason.LEARNING, 20) == 0
    untaught = Simulation(world)
    untaught.run(1, 20)
    assert untaught.share(lambda plan, reason: reason is PlanReason.LEARNING, 20) > 0.4
    assert taught.run(1, 200) > 0.9 * taught.best(1)


def drafting() -> LLM:
    return LLM(plan=Plan(), engine=EngineConfig(kv_slots=4096))


def test_calibration_leaves_nothing_behind_and_keeps_to_its_time() -> None:
    pair = drafting().pair
    free = pair.target.allocator.num_free
    one = calibrate(pair, AUTO, EngineConfig(), seconds=0.0)
    assert {(c.size, c.paths) for c in one.sampled.cells} == {(0, 0)}
    assert not one.sampled.knows_drafts
    few = calibrate(pair, AutoPlan(max_paths=2, max_depth=2), EngineConfig(max_batch=1))
    assert pair.target.allocator.num_free == free
    assert pair.target.allocator.num_kept == 0
    for table in (few.greedy, few.sampled):
        # Of long texts too, by plans that draft and by none.
        assert {cell.paths for cell in table.cells if cell.row[2] > 0.4} == {0, 2}
        cells = {(c.size, c.paths, c.depth) for c in table.cells}
        assert (0, 0, 0) in cells
        assert any(paths == 2 for _, paths, _ in cells)
        assert table.knows_drafts
        assert {size for size, _, _ in cells} == {0}
        assert all(seconds >= 0 for seconds in table.dist)
    costs = StepCosts.of_table(few.sampled)
    assert all(costs.seconds(shape) > 0 for shape in SHAPES)


def test_costs_are_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    limits = AutoPlan(max_paths=2, max_depth=2)
    sizes = EngineConfig(kv_slots=4096, max_batch=1)
    first = LLM(plan=limits, engine=sizes)
    [kept] = (tmp_path / "cache").iterdir()
    written = kept.read_bytes()
    answer = first.generate("Hello", SamplingParams(max_tokens=6, ignore_eos=True))
    assert len(answer.token_ids) == 6
    LLM(plan=limits, engine=sizes)
    assert kept.read_bytes() == written
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept.name]
    short = msgspec.json.decode(written)
    short["sampled"]["draft_sampling"].pop()
    for damaged in (b"{", written[:-20], msgspec.json.encode(short)):
        kept.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            LLM(plan=limits, engine=sizes)
        assert "measured again" in caplog.text
        assert kept.stat().st_size > 100


def test_nothing_is_measured_where_plans_are_fixed_or_it_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    LLM(plan=Plan(), engine=EngineConfig(kv_slots=4096))
    LLM(engine=EngineConfig(kv_slots=4096, calibrate=False))
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "file"))
    cache = CostCache.of("a", device=torch.device("cpu"), dtype=torch.float32)
    table = some_costs().table()
    with caplog.at_level(logging.WARNING):
        cache.write(KnownCosts(greedy=table, sampled=table))
        assert cache.read() is None
    assert "not kept" in caplog.text


def test_other_settings_have_other_files() -> None:
    cpu, usual = torch.device("cpu"), torch.float32
    files = {
        CostCache.of("a", "b", device=cpu, dtype=usual).path,
        CostCache.of("a", "c", device=cpu, dtype=usual).path,
        CostCache.of("a", "b", device=cpu, dtype=torch.bfloat16).path,
    }
    assert len(files) == 3
    assert CostCache.of("a", "b", device=cpu, dtype=usual).path in files


def test_machines_that_share_a_folder_measure_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The home folder of a cluster: as many threads, and other processors."""
    files = set()
    for processor in ("fast", "slow", "slow"):
        monkeypatch.setattr(cost_cache, "processor_name", lambda name=processor: name)
        cache = CostCache.of("a", device=torch.device("cpu"), dtype=torch.float32)
        files.add(cache.path)
    assert len(files) == 2


def test_what_has_no_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = drafting().pair
    monkeypatch.setattr(pair.target, "max_context", 30)
    nothing = calibrate(pair, AUTO, EngineConfig())
    assert (nothing.greedy.steps, nothing.sampled.steps) == (0, 0)
    # Where nothing was learned the first steps teach.
    untaught = Simulation(World(), planner=Planner(nothing))
    assert untaught.run(1, 100) > 0
    assert untaught.share(lambda plan, reason: reason is PlanReason.LEARNING, 100) > 0


def test_plans_that_cannot_run_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(InvalidArgument, match="one without state over steps"):
        calibrate(drafting().pair, AutoPlan(verifier="greedy_block", max_paths=1), EngineConfig())


def test_models_of_one_shape_share_a_file(tmp_path: Path) -> None:
    for name, path in (("a", "here"), ("b", "there"), ("c", "here")):
        config = {"hidden_size": 64 if name == "c" else 32, "_name_or_path": path}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    a, b, c = (shape_of(str(tmp_path / name)) for name in "abc")
    assert a == b != c
    assert shape_of("some/model") == "some/model"
    assert shape_of(None) is None
