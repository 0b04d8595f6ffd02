"""The library of C++ in this folder: built by the compiler that is there, and opened by ctypes.

It is built once for a source, a compiler and a processor, at the first start that needs it, and
kept with what else is kept between runs. Whoever cannot have it computes by PyTorch.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from eaglegbv.devices import processor_fact
from eaglegbv.utils import cache_folder

SOURCES = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wno-psabi", "-Wno-ignored-attributes", "-fopenmp", "-shared", "-fPIC"),
)
"""Flags beside the machine's. None allows sums in another order than the source has."""

COMPILERS = ("g++", "clang++", "c++")
_BUILD_SECONDS = 300

_log = logging.getLogger(__name__)


class NotBuilt(Exception):
    """The library cannot be had here; the message says why."""


def compiler() -> list[str]:
    """Return the command of a C++ compiler: ``$CXX``, or the first there is.

    Raises:
        NotBuilt: There is none.
    """
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        path = shutil.which(name)
        if path is not None:
            return [path]
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise NotBuilt("there is no C++ compiler; g++ or clang++ makes forwards faster")


def build(
    folder: Path, command: Sequence[str], machine: Sequence[str] = ("-march=native",)
) -> Path:
    """Return the library in ``folder``, made by a compiler's ``command`` unless it is there.

    Processes may build it at once: each writes a file of its own, and renames it.

    Raises:
        NotBuilt: The compiler fails, or the folder cannot be written.
    """
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[hc]*"))]
    try:
        version = subprocess.run(
            [*command, "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS
        ).stdout
        # The compiler's choice of instructions depends on the processor's flags.
        processor = processor_fact("flags", "Features")
        facts = (sources, version, (*FLAGS, *machine), processor)
        name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        library = folder / f"native-{name}.so"
        if library.is_file():
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix="build-") as unfinished:
            made = Path(unfinished) / library.name
            source = SOURCES / "library.cpp"
            subprocess.run(
                [*command, *FLAGS, *machine, str(source), "-o", str(made)],
                capture_output=True,
                check=True,
                timeout=_BUILD_SECONDS,
            )
            made.replace(library)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [str(error)]
        raise NotBuilt(f"{command[0]} fails: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"it cannot be built: {error}") from error
    return library


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_FUNCTIONS = {
    "matrix_new": (_POINTER, (_POINTER, _INT, _INT, _INT, _INT, _POINTER)),
    "matrix_free": (None, (_POINTER,)),
    "model_new": (_POINTER, (_POINTER,)),
    "model_free": (None, (_POINTER,)),
    "model_use_pool": (None, (_POINTER, _POINTER, _POINTER, ctypes.c_int64)),
    "model_forward": (None, (_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT)),
    "model_level": (None, (_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT)),
    "rows_warp": (None, (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT)),
    "rows_candidates": (
        None,
        (_POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT),
    ),
    "model_logits": (None, (_POINTER, _POINTER, _INT, _POINTER, _INT)),
}
"""What each function returns and takes; see library.cpp."""


def open_library(path: Path) -> ctypes.CDLL:
    """Open a library that was built.

    Raises:
        NotBuilt: The system refuses to.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuilt(f"it cannot be opened: {error}") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the library, built if need be; None, and one warning, where it cannot be had."""
    try:
        return open_library(build(cache_folder() / "native", compiler()))
    except (NotBuilt, FileNotFoundError) as error:
        _log.warning("no native forwards, so forwards take about three times as long: %s", error)
        return None
