"""The kit of a first run on a GPU: a dry run, on a CPU, in a folder of only what travels."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.cli import process

import eaglegbv
from eaglegbv.eval.observations import project_version

ROOT = Path(__file__).parents[2]
PHASES = ("probe", "smoke", "steps", "kernels", "lossless", "efficiency", "tests")
NVCC = """#!/bin/sh
exec {home}/bin/nvcc "$@"
"""
REAL_NVCC = """#!/bin/sh
echo "#\\$ TOP={home}/bin/.." >&2
"""

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="scripts of bash"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what travels is what git tracks"),
]


def alone(*command: str) -> list[str]:
    """Put before a command, where the system allows it, what leaves it without a network."""
    for without in (["unshare", "-n"], ["unshare", "-rn"]):
        if shutil.which("unshare") and not subprocess.call([*without, "true"]):
            return [*without, *command]
    return list(command)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that travels; this machine has the packages."""
    folder = tmp_path_factory.mktemp("kit") / "travels"
    settings = {**os.environ, "PACKAGES": "none"}
    done = process("bash", "tools/gpu/prepare.sh", folder, cwd=ROOT, env=settings)
    said = done.stdout.split()
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
    assert abs(int(said[said.index("bytes") - 1]) - size) < 1000  # links count as what they name
    return folder


def first_run(folder: Path, scratch: Path, *phases: str, **settings: str) -> str:
    """Run phases with nothing in the environment but the settings; return what was printed."""
    own = {
        "DRY": "yes",
        "EFFICIENCY": "2.5",
        "LIMIT": "3000",
        "PATH": os.environ["PATH"],
        "PY": sys.executable,
        "OUT": str(scratch / "out"),
        "TMPDIR": str(scratch),
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    command = alone("bash", "tools/gpu/first_run.sh", *phases)
    return process(*command, cwd=folder, env=own).stdout


@pytest.mark.timeout(1800)  # seven processes, each of which loads PyTorch
@pytest.mark.thorough
def test_every_phase_runs_dry(prepared, tmp_path):
    shown = first_run(prepared, tmp_path, *PHASES)
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert files == ["logs.tar.gz", "steps.jsonl", "summary.txt"]
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as packed:
        packed.extractall(tmp_path / "back", filter="data")
    logs = {path.stem: path.read_text() for path in (tmp_path / "back").glob("*.log")}
    for phase in PHASES:
        assert f"END {phase}: rc 0" in shown, logs[phase]
        assert "Traceback" not in logs[phase], logs[phase]
        assert "FAILED" not in logs[phase], logs[phase]
    assert "same as transformers for {'eager none': 4" in logs["smoke"]
    assert logs["lossless"].count(" lossless\n") == 4
    assert "The acceptance length, 2.5, is told" in logs["efficiency"]
    assert " skipped" in logs["tests"]
    lines = (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    first, *steps = map(json.loads, lines)
    commit = (prepared / ".gpu" / "commit").read_text().strip()
    version = first["environment"]["versions"]["eaglegbv"]
    assert version == f"{eaglegbv.__version__}+{commit}"
    observed = [one for step in steps for one in step.get("observations", ())]
    assert [one["setting"].split()[0] for one in observed] == ["otbv", "none"]
    assert not any(name.startswith("eager.") for one in observed for name in one["sums"])


def test_phases_share_the_time_and_pass_on_what_they_leave(prepared, tmp_path):
    """A phase ends by its share of the limit; one that is left less than 15 seconds is left out."""
    shown = first_run(prepared, tmp_path, "tiny", "eager", PY="/bin/false", LIMIT="500")
    first, second = map(int, re.findall(r"BEGIN \w+ \(at most (\d+) s\)", shown))
    assert 200 <= first <= 250  # half of 500 seconds, less what the start took
    assert 450 <= second <= 500
    assert shown.count("rc 1") == 2
    assert "SKIP eager" in first_run(prepared, tmp_path, "eager", PY="/bin/false", LIMIT="14")


def test_the_home_of_cuda_is_what_nvcc_says(prepared, tmp_path):
    """And nvcc on the path may be a script, which says nothing by where it is."""
    home = tmp_path / "cuda-13"
    for place, script in ((tmp_path / "bin", NVCC), (home / "bin", REAL_NVCC)):
        place.mkdir(parents=True)
        (place / "nvcc").write_text(script.format(home=home))
        (place / "nvcc").chmod(0o755)
    (home / "lib").mkdir()
    (home / "lib" / "libcudart.so").touch()
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert f"CUDA_HOME {home};" in first_run(prepared, tmp_path, "tiny", PY="/bin/false", PATH=path)
    assert (tmp_path / "stub" / "libcudart.so").resolve() == home / "lib" / "libcudart.so"
    assert (tmp_path / "stub" / "libcuda.so").stat().st_size > 0


def test_a_checkout_names_its_commit(monkeypatch):
    monkeypatch.delenv("EAGLEGBV_COMMIT", raising=False)
    assert re.fullmatch(rf"{eaglegbv.__version__}\+[0-9a-f]+(-dirty)?", project_version())
