"""The examples and the README's Python run as they are."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.saved_pair import save_pair

from eaglegbv.loading import TINY_TARGET

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, head = save_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--drafter", str(head)]


def run(*command: str, text: str = "") -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, *command],
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, pair: list[str], text: str = "") -> str:
    return run(str(ROOT / "examples" / name), *pair, "--max-tokens", "8", text=text)


def test_quickstart(pair: list[str]) -> None:
    out = example("quickstart.py", pair)
    assert len(re.findall(r"-- \d+ tokens in \d+ target forwards", out)) == 2


def test_compare_verifiers(pair: list[str]) -> None:
    rows = [line for line in example("compare_verifiers.py", pair).splitlines() if " path" in line]
    assert len(rows) == 4


def test_chat_stream(pair: list[str]) -> None:
    out = example("chat_stream.py", pair, text="Hello\nAnd you?\n\nnot read\n")
    assert out.count("you> ") == 3


def test_chat_stream_starts_over_when_the_context_is_full(pair: list[str]) -> None:
    out = example("chat_stream.py", pair, text="a" * 400 + "\nHello\n")
    assert out.count("starting over") == 1
    assert out.count("you> ") == 3


def test_my_verifier() -> None:
    audit = ["audit", "--module", str(ROOT / "examples" / "my_verifier.py"), "--instances", "5"]
    out = run("-c", f"from eaglegbv.cli.main import main; main({audit!r})")
    assert out.splitlines()[-1].endswith(" lossless")


def test_train_tiny_pair(tmp_path: Path) -> None:
    rows = [f"{i} and {i}" for i in range(300)]
    for name in ("dolly15k", "books"):
        text = "".join(json.dumps({"text": f"{name} {row}"}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    sizes = "--layers 1 --hidden 16 --heads 2 --intermediate 16 --vocab-size 270 --window 32"
    pace = "--batch 2 --tokens 64 --device cpu --no-bf16"
    files = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    script = str(ROOT / "examples" / "train_tiny_pair.py")
    assert "Training of the target" in run(script, "target", *files, *sizes.split(), *pace.split())
    report = json.loads((tmp_path / "out" / "training_report.json").read_text())
    assert report["config"]["mixture"]["dolly15k"] == 0.46
    assert report["config"]["final_mixture"]["books"] == 0.0


@pytest.mark.skipif(not TINY_TARGET.is_dir(), reason="the tiny pair is not trained yet")
def test_my_drafter() -> None:
    out = run(str(ROOT / "examples" / "my_drafter.py"))
    assert float(out.splitlines()[-1].split()[1]) > 1
    page = (ROOT / "docs" / "add_a_drafter.md").read_text("utf-8")
    assert (ROOT / "examples" / "my_drafter.py").read_text("utf-8") in page


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_tested(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40
    assert path.name in Path(__file__).read_text(encoding="utf-8")


@pytest.mark.skipif(not TINY_TARGET.is_dir(), reason="the tiny pair is not trained yet")
def test_python_of_the_readme() -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert run("-c", code).strip()
