"""The patch with hooks for SGLang applies to the version it names, and is what its page says."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.cli import DOCS, documented
from support.sglang_engine import missing_sglang

PATCH = DOCS / "sglang_hooks.patch"
FOLDER = Path("python/sglang/srt/speculative")


def test_the_page_lists_the_files_of_the_patch():
    page = (DOCS / "sglang_hooks.md").read_text(encoding="utf-8")
    changed = re.findall(r"^\+\+\+ b/(\S+)$", PATCH.read_text(encoding="utf-8"), re.MULTILINE)
    assert {Path(name).parent for name in changed} == {FOLDER}
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    assert {Path(name).name for name in changed} == set(re.findall(r"`(\w+\.py)`", rows))


def test_the_first_user_has_the_methods_of_the_interfaces():
    """With the arguments in the same order."""
    text = PATCH.read_text(encoding="utf-8").partition("tree_hooks.py\n@@")[2]
    added = "\n".join(line[1:] for line in text.splitlines() if line.startswith("+"))
    hooks = _methods(added)
    users = _methods("\n".join(documented("sglang_hooks.md", "python")))
    for interface, user in (("TreeGrower", "SampledPaths"), ("TreeVerifier", "Judge")):
        assert hooks[interface].items() <= users[user].items()


def _methods(source: str) -> dict[str, dict[str, list[str]]]:
    """Return the arguments of each class's methods."""
    return {
        one.name: {
            method.name: [argument.arg for argument in method.args.args]
            for method in one.body
            if isinstance(method, ast.FunctionDef)
        }
        for one in ast.walk(ast.parse(source))
        if isinstance(one, ast.ClassDef)
    }


@pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang()))
def test_the_patch_applies_and_compiles(tmp_path):
    if version("sglang") != "0.5.23":
        pytest.skip("the patch is for 0.5.23")
    spec = importlib.util.find_spec("sglang")  # without loading it
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent / "srt" / "speculative", tmp_path / FOLDER)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    compiled = [sys.executable, "-m", "compileall", "-q", str(tmp_path / FOLDER)]
    subprocess.run(compiled, check=True)
