"""The wheel holds what the tree holds, once, and works from where it is unpacked."""

import ast
import os
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.cli import PAGES, process
from support.release import PACKAGES, build, copy_source

import eaglegbv

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(root))
for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "sglang":  # an extra of its own
            raise
        continue
    assert pathlib.Path(module.__file__).is_relative_to(root), module.__file__
"""


@pytest.mark.thorough
def test_wheel_holds_every_module_and_asset_once(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    found = set()
    for folder, folders, files in os.walk(ROOT / "eaglegbv", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        inside = Path(folder).relative_to(ROOT)
        asset = inside.parts[1:2] == ("assets",)
        found |= {
            (inside / name).as_posix()
            for name in files
            if asset or name == "py.typed" or name.endswith((".py", ".h", ".cpp"))
        }
    assert sorted(names) == sorted(found)
    assert "eaglegbv/verifiers/base.py" in names
    assert "eaglegbv/assets/questions/builtin.jsonl" in names


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout that is called like the package."""
    return copy_source(tmp_path_factory.mktemp("source") / "eaglegbv")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution and the wheel built from it."""
    return build(source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    [path] = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.thorough
def test_every_module_imports_from_the_unpacked_wheel(wheel, tmp_path):
    wheel.extractall(tmp_path)
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in wheel.namelist()
        if name.endswith(".py")
    ]
    assert len(modules) > 20
    process(sys.executable, "-I", "-c", IMPORT_ALL, tmp_path, *modules, cwd=tmp_path)


@pytest.mark.thorough
def test_wheel_carries_version_licence_and_command(wheel):
    info = f"eaglegbv-{eaglegbv.__version__}.dist-info"
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "eaglegbv = eaglegbv.__main__:run" in wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.thorough
def test_source_distribution_holds_the_top_level_packages(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"{package}/__init__.py" for package in PACKAGES} <= names


EDITABLE = "from setuptools.build_meta import build_editable; build_editable('.whl')"
IMPORTED = """
import importlib.util, site, sys
site.addsitedir(sys.argv[1])
import eaglegbv
print(eaglegbv.__version__)
for name in ("eaglegbv.drafters", "verifiers", "drafters", "scheduler"):
    spec = importlib.util.find_spec(name)
    print(spec and spec.origin)
"""


@pytest.mark.thorough
def test_an_editable_install_is_imported_from_the_checkout_s_parent_folder(source, tmp_path):
    """There, the checkout is a folder of the package's name, and no package."""
    process(sys.executable, "-c", EDITABLE, cwd=source)
    [path] = (source / ".whl").glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path)
    # Without what is installed here: this package would be found there.
    command = (sys.executable, "-S", "-c", IMPORTED, tmp_path)
    version, module, *others = process(*command, cwd=source.parent).stdout.split()
    assert version == eaglegbv.__version__
    assert Path(module).resolve() == source / "drafters" / "__init__.py"
    assert others == ["None"] * 3


def test_top_level_packages_are_linked_into_the_import_package():
    for name in PACKAGES[1:]:
        link = ROOT / "eaglegbv" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_ci_runs_the_command_of_the_readme_and_then_the_thorough_tests():
    *_, command, check, thorough = (ROOT / ".ci" / "run").read_text().splitlines()
    assert command.endswith("pytest")
    assert check.startswith("test $? -eq 0")
    assert thorough == ".venv/bin/pytest -m thorough"
    assert command in (ROOT / "README.md").read_text().splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_constraints_pin_every_direct_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    names = {spec.partition(">")[0].partition("=")[0].strip() for spec in wanted}
    assert {name.replace("-", "_") for name in names} == {n.replace("-", "_") for n in pinned}


# The linters are part of the tests: what passes here passes everywhere.

LINT_IMPORTS = (str(Path(sys.executable).parent / "lint-imports"), "--no-cache")
CHECKS = [
    *((sys.executable, "-m", *rest) for rest in (("ruff", "check"), ("ruff", "format", "--check"))),
    pytest.param((sys.executable, "-m", "mypy"), marks=pytest.mark.thorough),
    LINT_IMPORTS,  # imports go one way; the contracts stand in pyproject.toml
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", CHECKS, ids=["ruff", "format", "mypy", "imports"])
def test_passes(command):
    process(*command, cwd=ROOT)


WITHOUT_TORCH = [
    "--help",
    "generate --help",
    "chat --help",
    "inspect --help",
    "export --help",
    "convert --help",
    "serve --help",
    "serve tiny --backend local --help",
    "audit served --help",
]


@pytest.mark.parametrize("words", WITHOUT_TORCH)
def test_torch_waits_until_a_command_needs_it(words):
    code = """
import sys
from eaglegbv.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("with", *{"torch", "transformers"} & {*sys.modules})
"""
    assert process(sys.executable, "-c", code, *words.split()).stdout.splitlines()[-1] == "with"


# What the documents import exists, and what they call can be called: without SGLang or a GPU too.
# The same for the test of SGLang on a GPU, which imports the documented names when it runs.

DOCUMENTS = [ROOT / "README.md", *PAGES.values()]
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
