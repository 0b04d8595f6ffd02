"""The wheel, installed as README says into an empty environment outside the checkout.

PyTorch and the other dependencies are those of the environment that runs the tests: nothing is
downloaded. SmolLM2 is not there, so that the packaged pair takes its place.
"""

import os
import re
import site
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.cli import ROOT, process
from support.http_server import wait_for
from support.release import build, copy_source

import eaglegbv

pytestmark = pytest.mark.thorough
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("release")
    build(copy_source(folder / "source"), folder / "dist")
    process(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    [inside] = (folder / "env" / "lib").glob("python*/site-packages")
    (inside / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    [command] = re.findall(r"pip install '(dist/\S+)'", README)
    assert eaglegbv.__version__ in command
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index")
    process(*pip, "--no-deps", "--force-reinstall", command.partition("[")[0], cwd=folder)
    if find_spec("gguf") is not None:  # else the extra's dependencies would be downloaded
        process(*pip, command, cwd=folder)
    return python.parent


def run(installed: Path, *words: str, **how: object) -> str:
    environment = {
        "HOME": str(installed.parent),
        "OMP_NUM_THREADS": "1",
        "PATH": os.environ["PATH"],
    }
    environment["HF_HUB_OFFLINE"] = "1"
    done = process(*words, cwd=installed.parent, env=environment, **how)
    return done.stdout


def test_it_is_the_wheel_that_runs(installed):
    code = "import eaglegbv; print(eaglegbv.__file__, eaglegbv.__version__)"
    place, version = run(installed, str(installed / "python"), "-c", code).split()
    assert Path(place).is_relative_to(installed.parent)
    assert version == eaglegbv.__version__


def test_the_demo_and_a_chat(installed):
    command = str(installed / "eaglegbv")
    said = run(installed, command, "demo", "--questions", "2", "--max-tokens", "8")
    assert "The default plan, for text of the same distribution: " in said
    assert run(installed, command, "chat", "--show-drafts", "-n", "8", input="Hello\n").strip()


def test_the_python_of_readme(installed):
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert run(installed, str(installed / "python"), "-c", code).strip()


def test_the_server(installed, free_port):
    words = [str(installed / "eaglegbv"), "serve", "tiny", "--port", str(free_port)]
    with subprocess.Popen(words, cwd=installed.parent) as server:
        try:
            wait_for(f"http://127.0.0.1:{free_port}/health", server)
        finally:
            server.terminate()
