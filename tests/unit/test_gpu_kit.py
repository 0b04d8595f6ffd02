"""The kit of a first run on a GPU works with the project's names: a dry run on a CPU."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.cli import process

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.name != "posix", reason="a script of bash")
@pytest.mark.timeout(1800)  # five processes, each of which loads PyTorch
def test_every_phase_of_the_kit_runs_dry(tmp_path):
    settings = {
        "DRY": "yes",
        "EFFICIENCY": "2.5",
        "LIMIT": "3000",
        "SLOW": "9",
        "PY": sys.executable,
        "OUT": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    phases = ("probe", "smoke", "steps", "efficiency", "lossless")
    environment = {**os.environ, **settings}
    done = process("bash", "tools/gpu/first_run.sh", *phases, cwd=ROOT, env=environment)
    logs = {path.stem: path.read_text() for path in tmp_path.glob("*.log")}
    for phase in phases:
        assert f"END {phase}: rc 0" in done.stdout, logs[phase]
        assert "Traceback" not in logs[phase], logs[phase]
        assert "FAILED" not in logs[phase], logs[phase]
    assert "same as transformers for {'eager none': 4" in logs["smoke"]
    assert logs["lossless"].count(" lossless\n") == 4
    assert "Made weights of shape tiny" in logs["efficiency"]
    _, *steps = map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())
    assert [step["setting"]["plan"]["verifier"] for step in steps] == ["otbv", "none"]
    assert all(step["report"]["eager"] == {} for step in steps)
