"""The linters are part of the tests: what passes here passes everywhere."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = (str(Path(sys.executable).parent / "lint-imports"), "--no-cache")
CHECKS = [
    *((sys.executable, "-m", *rest) for rest in (("ruff", "check"), ("ruff", "format", "--check"))),
    (sys.executable, "-m", "mypy"),
    LINT_IMPORTS,  # imports go one way; the contracts stand in pyproject.toml
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", CHECKS, ids=["ruff", "format", "mypy", "imports"])
def test_passes(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_torch_waits_until_a_command_needs_it():
    code = (
        "import sys, eaglegbv.cli.main; print(*sorted({'torch', 'transformers'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# What the documents import exists, and what they call can be called: without SGLang or a GPU too.
# The same for the test of SGLang on a GPU, which imports the documented names when it runs.

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = {
    f"{path.name}-{number}": code
    for path in DOCUMENTS
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.S), start=1
    )
} | {"gpu": (ROOT / "tests" / "gpu" / "test_sglang_engine.py").read_text("utf-8")}


assert {"README.md-1", "sglang.md-1", "sglang.md-2"} <= SNIPPETS.keys()


@pytest.mark.parametrize("code", SNIPPETS.values(), ids=SNIPPETS.keys())
def test_imports(code):
    nodes = list(ast.walk(ast.parse(code)))
    found: dict[str, object] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eaglegbv"):
            exec(ast.unparse(node), found)
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in found:
                assert callable(found[name]), name
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in found:
                assert getattr(found[name], attribute) is not None
