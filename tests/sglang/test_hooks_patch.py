"""The patches for SGLang apply to the version they name, and do what their page says."""

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
PENALTIES = PATCH.with_name("sglang_penalties.patch")
FOLDER = Path("python/sglang/srt/speculative")
TEXTS = 1536
LENGTHS = """
import json
from support.sglang_engine import sglang_engine
from eaglegbv.backends.sglang.launch import served_head
from eaglegbv.loading import TINY, TINY_TARGET
head, _ = served_head(TINY / "eagle3", TINY_TARGET)
drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}
tree = {"speculative_eagle_topk": 3, "speculative_num_steps": 4, "speculative_num_draft_tokens": 13}
with sglang_engine(model_path=str(TINY_TARGET), **drafts, **tree) as engine:
    def lengths(params):
        answers = engine.generate(["User: Tell me about a fox.\\nAssistant:"] * len(params), params)
        return [answer["meta_info"]["completion_tokens"] for answer in answers]
    greedy = {"temperature": 0, "max_new_tokens": 200}
    [free] = lengths([greedy])
    held = lengths([greedy | {"min_new_tokens": free - less} for less in (8, 20)])
print(json.dumps([free, *held]))
"""


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
    """SGLang with the hooks."""
    return with_patch(PATCH, tmp_path)


def with_patch(patch: Path, home: Path) -> Path:
    """Return a folder with SGLang as a patch leaves it; what it does not touch is linked."""
    if missing_sglang() is not None:
        pytest.skip(str(missing_sglang()))
    if version("sglang") != "0.5.23":
        pytest.skip("the patches are for 0.5.23")
    spec = importlib.util.find_spec("sglang")  # without loading it
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    source = home / FOLDER.parts[0] / "sglang"
    changed = re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    folders = {(home / name).parent for name in changed}
    _link(installed, source, folders)
    subprocess.run(["git", "init", "-q"], cwd=home, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=home, check=True)
    return source.parent


def _link(installed: Path, place: Path, folders: set[Path]) -> None:
    """Copy the files of ``folders``, and link all else beside them and above."""
    place.mkdir(parents=True)
    for entry in installed.iterdir():
        link = place / entry.name
        if any(link == folder or link in folder.parents for folder in folders):
            _link(entry, link, folders)
        elif place in folders and entry.is_file():
            shutil.copy(entry, link)
        else:
            link.symlink_to(entry)


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


@pytest.mark.timeout(1800)
def test_sglangs_own_eagle_counts_every_token_with_the_patch_of_penalties(tmp_path):
    """An answer longer than its least number of tokens ends where it ends without one."""
    root = Path(__file__).parents[2]
    paths = (with_patch(PENALTIES, tmp_path), root / "tests", root, STAND_IN)
    result = subprocess.run(
        [sys.executable, "-c", LENGTHS],
        env=cpu_environment() | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    free, *held = json.loads(result.stdout.splitlines()[-1])
    assert 30 < free < 200
    assert held == [free, free]
