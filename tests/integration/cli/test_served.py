"""``bench served`` beside stand-ins for SGLang's servers: what is started, asked and written."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cli import documented_commands
from support.fake_llm import answer

from eaglegbv.backends.sglang.launch import Launch
from eaglegbv.eval.observations import Run
from eaglegbv.loading import TINY_TARGET
from eaglegbv.metrics import RequestMetrics
from eaglegbv.text import Completion

QUICK = ["--questions-set", "builtin", "--questions", "2", "--max-tokens", "6", "--paths", "2"]


def fake_answer(*_: object, **__: object) -> Completion:
    metrics = RequestMetrics(target_forwards=2, committed_tokens=5, accepted_tokens=3)
    return answer("yes", [*range(6)], metrics)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands of the servers that were started, with the names of their logs."""
    commands: list[str] = []

    @contextmanager
    def running(launch: Launch, log: Path) -> Iterator[str]:
        commands.append(f"{log.stem}: {' '.join(launch.command)}")
        yield "http://nowhere"

    home = "eaglegbv.backends.sglang"
    monkeypatch.setattr(f"{home}.ready.check_ready", lambda _: None)
    monkeypatch.setattr(f"{home}.launch.running", running)
    monkeypatch.setattr(f"{home}.llm.Endpoint", lambda *_: fake_answer)
    monkeypatch.setattr("eaglegbv.eval.observations.metadata.version", lambda name: f"{name} 1")
    return commands


def test_one_server_a_plan_and_nothing_twice(cli, started, tmp_path):
    command = ["bench", "served", *QUICK, "--verifiers", "none,gbv", "--temperature", "0.5,1"]
    command += ["--eagle", "0", "--seed", "7", "--out", str(tmp_path), "--tp", "2"]
    result = cli(*command)
    assert [line.partition(":")[0] for line in started] == [
        *("none T0.5", "gbv 2x4 T0.5", "eagle 2x4 T0")
    ]
    assert all(f"--model-path {TINY_TARGET}" in line and "--tp 2" in line for line in started)
    assert ["draft-model-path" in line for line in started] == [False, True, True]
    run = Run.read(tmp_path)
    setup, [settings] = run.head.setup, run.head.sheets.values()
    assert [setting.name for setting in settings] == [
        *("none T0.5", "gbv 2x4 T0.5", "none", "gbv 2x4", "eagle 2x4 T0")
    ]
    assert (setup["model"], setup["drafter"], setup["suite"]) == ("tiny", "eagle3", "builtin")
    assert setup["seed"] == 7
    assert setup["questions_sha256"]
    assert setup["backend"] == "sglang server"
    assert (setup["backend_arguments"], setup["at_once"]) == ("--tp 2", 16)
    assert run.head.environment.device == "SGLang's"
    assert run.head.environment.versions["sglang"] == "sglang 1"
    assert len(run.observations("conversations")) == 5 * 2
    rows = result.out.splitlines()
    assert len(rows) == 1 + 5
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in page for name in ("none T0.5", "eagle 2x4 T0"))

    del started[:]  # all measured: nothing is started again
    assert cli(*command).out == result.out
    assert started == []


def test_the_documented_command(cli, started, tmp_path):
    *_, command = documented_commands("sglang.md", **{"mt-bench": "builtin"})
    cli(*command[1:], "--questions", "1", "--out", str(tmp_path))
    assert all("--tp 2" in line for line in started)
    assert any(line.startswith("eagle") for line in started)


def test_other_models_keep_their_names(cli, pair, started, tmp_path):
    named = [*pair[:2], "--verifiers", "none", "--out", str(tmp_path)]
    cli("bench", "served", *QUICK, *named)
    header = json.loads((tmp_path / "head.json").read_bytes())["setup"]
    assert (header["model"], header["drafter"]) == (pair[1], None)
    refused = cli(
        "bench", "served", *QUICK, *named[:-1], str(tmp_path / "e"), "--eagle", "0", status=2
    )
    assert "no --drafter: expected folder or hub name of an EAGLE head, for --eagle" in refused.err
