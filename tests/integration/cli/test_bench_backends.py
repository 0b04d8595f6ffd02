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
from eaglegbv.eval.figures import ACCEPTANCE, SPEED, Sums
from eaglegbv.eval.observations import Run
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
    observed = Run.read(tmp_path).observations("conversations")
    settings = ["none T0", "otbv 3x2 T0", *(f"{name} T0" for name in names)]
    first, second = observed[:6], observed[6:]
    assert [one.setting for one in first] == settings
    assert [one.setting for one in second] == [*settings[1:], settings[0]]
    for some in (first, second):
        assert len({one.texts for one in some}) == 1  # greedy: whoever decodes
    sums = Sums(observed)
    for name in settings:
        assert sums.errors[name] == 0
        assert sums.ratio(SPEED, [name], ["none T0"]).value > 0
        assert sums.value(ACCEPTANCE, name) >= 1
    assert set(sums.names("seconds.", "transformers T0")) == {"prefill", "other"}
    assert "forward" in sums.names("seconds.", "none T0")
    assert "| transformers T0 | " in (tmp_path / "results.md").read_text(encoding="utf-8")


def test_transformers_alone_runs_no_plan(cli, pair, tmp_path):
    result = bench(cli, pair, "--backend", "transformers", "--out", str(tmp_path))
    run = Run.read(tmp_path)
    [settings] = run.head.sheets.values()
    assert [setting.name for setting in settings] == ["transformers"]
    assert (run.head.setup["backend"], run.head.setup["dtype"]) == ("transformers", "float32")
    _, row = result.out.splitlines()
    assert row.split()[-2:] == ["-", "-"]  # nothing to compare with
    assert row.split()[1] == "1.00"


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
    monkeypatch.setattr("eaglegbv.eval.observations.metadata.version", lambda name: f"{name} 1")
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
    run = Run.read(tmp_path)
    assert run.head.setup["backend"] == "sglang"
    assert run.head.setup["backend_arguments"] == {"mem_fraction_static": 0.5}
    assert run.head.environment.versions["sglang"] == "sglang 1"
    observed = run.observations("conversations")
    assert len(observed) == 3 * 2 * 2
    for one in observed:
        if one.setting.startswith("gbv"):
            assert "too long for SGLang" in one.error
            continue
        assert one.texts == ("abcde",) * 2
        assert 2 * 0.02 <= one.sums["seconds.prefill"] < one.sums["wall_seconds"]
        assert one.sums["seconds"] >= 2 * 0.01
        assert one.sums["tokens"] == 2 * one.sums["steps"]
    report = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "mem_fraction_static" in report

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
        records = out / "observations.jsonl"
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
    assert not (out / "results.md").exists()
    # What a kill in the middle of a write would leave behind.
    with (out / "observations.jsonl").open("ab") as file:
        file.write(measured[0][:50])

    again = cli(*command)
    after = lines()
    assert after[: len(measured)] == measured
    keys = [part["key"] for part in map(json.loads, after)]
    assert len(keys) == len(set(keys)) == whole
    assert f": {len(measured)} observations of it are measured" in again.err
    assert len(Run.read(out).observations("conversations")) == whole
