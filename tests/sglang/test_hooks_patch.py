"""The patch with hooks for SGLang applies to the version it names, and is what its page says."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.cli import PAGES, documented
from support.sglang_engine import STAND_IN, cpu_environment, missing_sglang, three_tokens

PATCH = PAGES["sglang_hooks.md"].with_suffix(".patch")
FOLDER = Path("python/sglang/srt/speculative")
TEXTS = 1536


def test_the_page_lists_the_files_of_the_patch():
    page = PAGES["sglang_hooks.md"].read_text(encoding="utf-8")
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


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """A folder with SGLang as the patch leaves it; what it does not touch is linked."""
    if missing_sglang() is not None:
        pytest.skip(str(missing_sglang()))
    if version("sglang") != "0.5.23":
        pytest.skip("the patch is for 0.5.23")
    spec = importlib.util.find_spec("sglang")  # without loading it
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    (tmp_path / FOLDER).parent.mkdir(parents=True)
    shutil.copytree(installed / "srt/speculative", tmp_path / FOLDER)
    package = tmp_path / FOLDER.parents[1]
    for part in (installed, installed / "srt"):
        for entry in part.iterdir():
            link = package / entry.relative_to(installed)
            if not link.exists():
                link.symlink_to(entry)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    return package.parent


def test_the_patch_applies_and_compiles(patched):
    folder = patched / FOLDER.relative_to(FOLDER.parts[0])
    assert (folder / "tree_hooks.py").is_file()
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)


@pytest.mark.timeout(1800)
def test_texts_of_the_first_user_follow_the_target(patched, pair, tmp_path):
    """Through SGLang's own workers, by the hooks alone."""
    user = Path(__file__).parent / "first_user"
    root = user.parents[2]
    paths = (patched, user, root / "tests", root, STAND_IN)
    result = subprocess.run(
        [sys.executable, str(user / "first_user.py"), str(tmp_path / "pair"), str(TEXTS)],
        env=cpu_environment() | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    texts = json.loads(result.stdout.splitlines()[-1])
    assert len(texts) == TEXTS
    assert three_tokens(pair, texts).p_value > 1e-5
