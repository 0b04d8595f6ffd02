"""The native library is built once, or a line says why it is not."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eaglegbv.native import library
from eaglegbv.native.library import NotBuilt, build, compiler, native_library, open_library
from eaglegbv.utils import CACHE_FOLDER

# Compiles nothing, but a file that can be told from others.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 1.0 && exit
echo built >> "{log}"
for last; do :; done
echo library > "$last"
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> list[str]:
    """A compiler that notes its calls in a file ``log`` beside it."""
    path = tmp_path / "compiler"
    path.write_text(COMPILER.format(log=tmp_path / "log"))
    path.chmod(0o755)
    return [str(path)]


def test_it_is_built_once(stand_in, tmp_path):
    first = build(tmp_path / "cache", stand_in)
    assert first.read_text() == "library\n"
    assert build(tmp_path / "cache", stand_in) == first
    assert (tmp_path / "log").read_text() == "built\n"
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_other_machines_compilers_and_sources_have_their_own(stand_in, tmp_path, monkeypatch):
    names = {build(tmp_path, stand_in), build(tmp_path, stand_in, ["-march=x86-64-v3"])}
    Path(stand_in[0]).write_text(Path(stand_in[0]).read_text().replace("1.0", "1.1"))
    names.add(build(tmp_path, stand_in))
    monkeypatch.setattr(library, "processor_fact", lambda *_: "another")
    names.add(build(tmp_path, stand_in))
    (tmp_path / "library.cpp").write_text("other")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    names.add(build(tmp_path, stand_in))
    assert len(names) == 5


def test_two_may_build_at_once(stand_in, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build(tmp_path / "cache", stand_in), range(4)))
    assert len(set(paths)) == 1
    assert paths[0].read_text() == "library\n"


def test_a_compiler_that_fails_says_why(tmp_path):
    path = tmp_path / "compiler"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho no room left >&2\nexit 1\n')
    path.chmod(0o755)
    with pytest.raises(NotBuilt, match="no room left"):
        build(tmp_path / "cache", [str(path)])
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written_says_so(stand_in, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotBuilt, match="cannot be built"):
        build(tmp_path / "file" / "cache", stand_in)


def test_what_is_no_library_is_not_opened(stand_in, tmp_path):
    with pytest.raises(NotBuilt, match="cannot be opened"):
        open_library(build(tmp_path, stand_in))


def test_a_compiler_is_looked_for(monkeypatch, tmp_path, stand_in):
    monkeypatch.setenv("CXX", stand_in[0])
    assert compiler() == stand_in
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "find_spec", lambda _: None)
    with pytest.raises(NotBuilt, match=r"g\+\+"):
        compiler()
    monkeypatch.setattr(library, "find_spec", lambda name: name)
    assert compiler() == [sys.executable, "-m", "ziglang", "c++"]


def test_without_a_compiler_one_line_says_so(monkeypatch, tmp_path, caplog):
    native_library.cache_clear()
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert native_library() is None
    assert native_library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "three times as long" in caplog.text
    native_library.cache_clear()


FORWARDS = Path(__file__).parent / "test_native_forward.py"
ROWS = Path(__file__).parent / "test_rows.py"
MACHINES = ["x86-64-v2", "x86-64-v3", "x86-64-v4", "sapphirerapids"]


@pytest.mark.thorough
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="instructions of x86 alone")
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_built_for_other_machines(machine, tmp_path):
    assert build(tmp_path, compiler(), [f"-march={machine}"]).is_file()


def run_tests(tests: list[str], flags: str, folder: Path, **environment: str) -> None:
    """Run tests with a library built with other flags, in a process of its own."""
    script = f"""
import sys, pytest
from pathlib import Path
from eaglegbv.native import library
build = library.build
library.build = lambda _, command: build(Path({str(folder)!r}), command, {flags.split()!r})
sys.exit(pytest.main(["-q", "-n", "0", *{tests!r}]))
"""
    command = [sys.executable, "-c", script]
    own = os.environ | environment
    ran = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("flags", ["-march=x86-64-v2", "-march=native -DEAGLEGBV_PAIRED"])
def test_other_builds_compute_the_same(flags, tmp_path):
    if "x86" in flags and os.uname().machine != "x86_64":
        pytest.skip("instructions of x86 alone")
    run_tests([str(FORWARDS)], flags, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sanitizer", "library_name"), [("address,undefined", "libasan.so"), ("thread", "libtsan.so")]
)
def test_sanitizers_find_nothing(sanitizer, library_name, tmp_path):
    runtime = compilers_file(library_name)
    if not runtime.is_file():
        pytest.skip(f"the compiler has no {library_name}")
    # Python brings no C++ runtime; the sanitizer must find the one that PyTorch throws by.
    preloaded = (runtime, compilers_file("libstdc++.so"))
    run_tests(
        [str(FORWARDS), str(ROWS)],
        f"-march=native -g -fsanitize={sanitizer} -fno-sanitize-recover",
        tmp_path,
        LD_PRELOAD=" ".join(map(str, preloaded)),
        ASAN_OPTIONS="detect_leaks=0",  # Python's own
        TSAN_OPTIONS="ignore_noninstrumented_modules=1",
    )


def compilers_file(name: str) -> Path:
    command = [*compiler(), f"-print-file-name={name}"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
