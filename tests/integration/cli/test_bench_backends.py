"""``bench mt-bench`` beside other engines, and killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest
from support.fake_llm import answer
from transformers.utils import logging

from eaglegbv.backends.sglang import llm as sglang_llm
from eaglegbv.eval.runner import read_results
from eaglegbv.metrics import RequestMetrics
from eaglegbv.text import Delta

QUICK = ["--questions-set", "builtin", "--questions", "2", "--max-tokens", "6", "--repeats", "1"]


@pytest.fixture(autouse=True)
def verbosity() -> Iterator[None]:
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


def bench(cli, pair, *arguments: str, **ends: int):
    return cli("bench", "mt-bench", *pair, *QUICK, *arguments, **ends)


def test_baselines_take_turns_with_the_engine(cli, pair, tmp_path):
    names = ["transformers", "lookup:2", "exit:1:2", f"assistant:{pair[1]}"]
    options = ["--verifiers", "none,otbv", "--depth", "2", "--baselines", ",".join(names)]
    bench(cli, pair, *options, "--temperature", "0", "--out", str(tmp_path))
    results = read_results(tmp_path / "results.json")
    settings = ["none T0", "otbv K3 L2 T0", *(f"{name} T0" for name in names)]
    first, second = results.records[:6], results.records[6:]
    assert [record.setting for record in first] == settings
    assert [record.setting for record in second] == [*settings[1:], settings[0]]
    for records in (first, second):
        texts = {tuple(turn.text for turn in record.turns) for record in records}
        assert len(texts) == 1  # greedy: whoever decodes
    content = json.loads((tmp_path / "results.json").read_bytes())
    for summary in content["summary"]:
        assert summary["errors"] == 0
        assert summary["speedup"]["value"] > 0
        assert summary["block_efficiency"]["value"] >= 1
    alone = {s["setting"]: set(s["milliseconds_by_phase"]) for s in content["summary"]}
    assert alone["transformers T0"] == {"prefill", "other"}
    assert "forward" in alone["none T0"]
    report = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| transformers T0 | " in report
    assert "Of transformers' ways prefill is" in report
    assert "question by question in turns" in report


def test_transformers_alone_runs_no_plan(cli, pair, tmp_path):
    bench(cli, pair, "--backend", "transformers", "--out", str(tmp_path))
    results = read_results(tmp_path / "results.json")
    assert [setting.name for setting in results.settings.settings] == ["transformers"]
    assert (results.settings.backend, results.settings.dtype) == ("transformers", "float32")
    content = json.loads((tmp_path / "results.json").read_bytes())
    [summary] = content["summary"]
    assert summary["speedup"] is None  # nothing to compare with
    assert summary["block_efficiency"]["value"] == 1


class FakeSGLang:
    """Answers as SGLang's LLM does; notes what was started and stopped."""

    log: ClassVar[list[tuple[str, object]]] = []

    def __init__(self, model=None, drafter=None, *, plan, **arguments: object) -> None:
        self.plan = plan
        self.log.append(("start", plan.verifier))
        self.log.append(("arguments", arguments))

    def stream(self, prompt, sampling_params=None, *, plan=None, priority=0) -> Iterator[Delta]:
        assert plan == self.plan
        if len(prompt) > 1 and plan.verifier == "gbv":
            raise ValueError("too long for SGLang")
        metrics = RequestMetrics(prompt_tokens=9, target_forwards=2, committed_tokens=4)
        time.sleep(0.02)
        yield Delta(text="a", token_ids=[97])
        time.sleep(0.01)
        yield Delta(text="bcde", token_ids=[98, 99, 100, 101])
        whole = answer("abcde", [*range(97, 102)], metrics)
        yield Delta(text="", token_ids=[], completion=whole)

    def shutdown(self) -> None:
        self.log.append(("stop", self.plan.verifier))


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    monkeypatch.setattr(FakeSGLang, "log", [])
    monkeypatch.setattr(sglang_llm, "SGLangLLM", FakeSGLang)
    monkeypatch.setattr("eaglegbv.eval.records.metadata.version", lambda name: f"{name} 1")
    return FakeSGLang.log


def test_sglang_answers_one_engine_a_plan(cli, pair, sglang, tmp_path):
    options = ["--backend", "sglang", "--verifiers", "none,otbv,gbv", "--temperature", "0.5,1"]
    options += ["--backend-arguments", '{"mem_fraction_static": 0.5}']
    bench(cli, pair, *options, "--out", str(tmp_path))
    assert [entry for entry in sglang if entry[0] != "arguments"] == [
        (event, verifier) for verifier in ("none", "otbv", "gbv") for event in ("start", "stop")
    ]
    arguments = dict(sglang)["arguments"]
    assert arguments["mem_fraction_static"] == 0.5
    assert arguments["disable_radix_cache"] is True
    results = read_results(tmp_path / "results.json")
    assert results.settings.backend == "sglang"
    assert results.settings.backend_arguments == {"mem_fraction_static": 0.5}
    assert results.environment.versions["sglang"] == "sglang 1"
    assert len(results.records) == 3 * 2 * 2
    for record in results.records:
        if record.setting.startswith("gbv"):
            assert "too long for SGLang" in record.error
            continue
        assert [turn.text for turn in record.turns] == ["abcde"] * 2
        for turn in record.turns:
            assert 0.02 <= turn.metrics.seconds["prefill"] < turn.wall_seconds
            assert turn.decode_seconds >= 0.01
    content = json.loads((tmp_path / "results.json").read_bytes())
    assert all(s["block_efficiency"]["value"] in (0, 2) for s in content["summary"])
    report = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "- Backend: sglang, mem_fraction_static=0.5" in report
    assert "settings did not take turns" in report

    del sglang[:]  # all measured: nothing is started again
    bench(cli, pair, *options, "--out", str(tmp_path))
    assert sglang == []


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL on Windows")
def test_a_killed_process_is_resumed_and_nothing_measured_is_lost(cli, pair, tmp_path):
    out = tmp_path / "run"
    settings, repeats = ["none", "token", "otbv"], 4
    command = ["bench", "mt-bench", *pair, "--questions-set", "builtin", "--questions", "4"]
    command += ["--max-tokens", "24", "--repeats", str(repeats), "--paths", "1", "--depth", "2"]
    command += ["--verifiers", ",".join(settings), "--out", str(out)]
    whole = 4 * repeats * len(settings)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def lines() -> list[bytes]:
        records = out / "records.jsonl"
        return records.read_bytes().splitlines(keepends=True) if records.is_file() else []

    start = [sys.executable, "-c", "from eaglegbv.cli.main import main; main()", *command]
    process = subprocess.Popen(start, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while len(lines()) < 5 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    measured = [line for line in lines() if line.endswith(b"\n")]
    assert 5 <= len(measured) < whole
    assert not (out / "results.json").exists()
    # What a kill in the middle of a write would leave behind.
    with (out / "records.jsonl").open("ab") as file:
        file.write(measured[0][:50])

    again = cli(*command)
    after = lines()
    assert after[: len(measured)] == measured
    keys = [(r["setting"], r["question_id"], r["repeat"]) for r in map(json.loads, after)]
    assert len(keys) == len(set(keys)) == whole
    assert f"{len(measured)}/{whole}" in again.err  # it goes on where it stopped
    assert len(read_results(out / "results.json").records) == whole
