"""The kit of a first run on a GPU works with the project's names: a dry run on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.name != "posix", reason="a script of bash")
def test_every_phase_of_the_kit_runs_dry(tmp_path: Path) -> None:
    settings = {
        "DEV": "cpu",
        "SHAPE": "tiny",
        "QUICK": "--quick",
        "TOK": "4",
        "N": "16",
        "SLOW": "5",
        "STEPS": "100",
        "PY": sys.executable,
        "OUT": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "tools/gpu/first_run.sh", "probe", "smoke", "steps", "lossless"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    logs = {path.stem: path.read_text() for path in tmp_path.glob("*.log")}
    for phase in ("probe", "smoke", "steps", "lossless"):
        assert f"END {phase}: rc 0" in done.stdout, logs[phase]
        assert "Traceback" not in logs[phase], logs[phase]
        assert "FAILED" not in logs[phase], logs[phase]
    assert "same as transformers for {'eager none': 4" in logs["smoke"]
    assert "G-test" in logs["lossless"]
    lines = [json.loads(line) for line in (tmp_path / "steps-eager.jsonl").read_text().splitlines()]
    assert [line["graphs"] for line in lines if "graphs" in line] == [True, True, False, False]
    assert all(line["step_ms"] > 0 for line in lines if "step_ms" in line)
