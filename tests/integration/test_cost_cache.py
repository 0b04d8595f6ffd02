"""What was learned of costs is kept, and used from the first choice of the next run on."""

import gc
import json
import logging
import math
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

from eaglegbv import LLM, SamplingParams, devices
from eaglegbv.config import PLAIN, AutoPlan, EngineConfig, Plan
from eaglegbv.cost_cache import cost_cache, shape_of
from eaglegbv.metrics import STEPS
from eaglegbv.scheduler.costs import KnownCosts, Measured, StepShape
from eaglegbv.utils import CACHE_FOLDER, CacheFile

KNOWN = tuple(Measured(StepShape.of([plan], 1, 100), 0.01) for plan in (PLAIN, Plan()))
LIMITS, SIZES = AutoPlan(max_paths=2, max_depth=2), EngineConfig(kv_slots=4096, max_batch=1)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)


def cache_of(*facts: object, dtype: torch.dtype = torch.float32) -> CacheFile[KnownCosts]:
    return cost_cache(*facts, device=torch.device("cpu"), dtype=dtype)


def costs_in(cache: Path) -> list[Path]:
    return [*cache.glob("costs-*")]


def test_nothing_runs_first_and_what_was_learned_is_kept_at_close(cache, caplog):
    with LLM("tiny", plan=LIMITS, engine=SIZES) as llm:
        assert not costs_in(cache)
        assert llm.metrics.value(STEPS) == 0
        llm.generate("Hello", PARAMS)
    [kept] = costs_in(cache)
    known = msgspec.json.decode(kept.read_bytes(), type=KnownCosts)
    assert not known.greedy
    assert {step.shape.levels > 0 for step in known.sampled} == {True, False}
    for damaged in (kept.read_bytes()[:-20], b"[]"):
        kept.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            llm = LLM("tiny", plan=LIMITS, engine=SIZES)
        assert "found out anew" in caplog.text
        caplog.clear()
    kept.unlink()
    llm = LLM("tiny", plan=LIMITS, engine=SIZES)
    llm.generate("Hello", PARAMS)
    del llm
    gc.collect()
    assert costs_in(cache) == [kept]
    assert msgspec.json.decode(kept.read_bytes(), type=KnownCosts).sampled


def test_kept_costs_that_the_first_steps_refute_are_scaled(cache):
    with LLM("tiny", plan=LIMITS, engine=SIZES) as llm:
        llm.generate("Hello", PARAMS)
    [kept] = costs_in(cache)
    known = msgspec.json.decode(kept.read_bytes(), type=KnownCosts)
    wrong = tuple(Measured(step.shape, 1e3 * step.seconds) for step in known.sampled)
    kept.write_bytes(msgspec.json.encode(KnownCosts(sampled=wrong)))
    with LLM("tiny", plan=LIMITS, engine=SIZES) as llm:
        llm.generate("Hello", PARAMS)
    again = msgspec.json.decode(kept.read_bytes(), type=KnownCosts)
    assert max(step.seconds for step in again.sampled) < min(step.seconds for step in wrong)


def test_fixed_plans_and_unused_engines_keep_nothing(cache):
    with LLM("tiny", plan=Plan(), engine=SIZES) as llm:
        llm.generate("Hello", PARAMS)
    LLM("tiny", plan=LIMITS, engine=SIZES).close()
    assert not costs_in(cache)


def test_what_is_measured_first_can_no_longer_be_asked():
    with pytest.raises(TypeError, match="calibrate"):
        EngineConfig(calibrate=False)


def test_without_a_home_costs_are_learned_and_not_kept(monkeypatch, caplog):
    for name in (CACHE_FOLDER, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    with LLM("tiny") as llm:
        answer = llm.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(answer.token_ids) == 2
    assert cache_of("a").read() is None
    cache_of("a").write(KnownCosts())
    assert "is not kept: no home directory" in caplog.text


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        cache_of("a").write(KnownCosts(greedy=KNOWN, sampled=KNOWN))
        assert cache_of("a").read() is None
    assert "is not kept" in caplog.text


def test_other_settings_and_processors_have_other_files(monkeypatch):
    caches = (cache_of("a", "b"), cache_of("a", "c"), cache_of("a", "b", dtype=torch.bfloat16))
    assert len({cache.path for cache in caches}) == 3
    assert cache_of("a", "b") == caches[0]
    # The home folder of a cluster: as many threads, and other processors.
    monkeypatch.setattr(devices, "processor_name", lambda: "another")
    assert cache_of("a", "b") != caches[0]


def test_models_of_one_shape_share_a_file(tmp_path):
    for name, path in (("a", "here"), ("b", "there"), ("c", "here")):
        config = {"hidden_size": 64 if name == "c" else 32, "x": math.inf, "_name_or_path": path}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    a, b, c = (shape_of(str(tmp_path / name)) for name in "abc")
    assert a == b != c
    assert shape_of("some/model") == "some/model"
    assert shape_of(None) is None
