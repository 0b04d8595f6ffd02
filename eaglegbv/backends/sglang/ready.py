"""Checks that SGLang can start here, made before anything that takes seconds to import."""

import argparse
import ctypes
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from eaglegbv.backends.sglang.version_check import check_plugin, check_version
from eaglegbv.errors import InvalidArgument

OWN_ENGINE = "'eaglegbv serve MODEL --backend local' serves on a CPU"


def check_ready(
    others: Sequence[str] = (), *, device: str | None = None, accelerator: bool = True
) -> None:
    """Check, before SGLang loads for a minute, that it can start here.

    ``others`` are its own arguments, as on a command line; ``device`` is given otherwise. Without
    ``accelerator``, the command may be for another machine.

    Raises:
        NotInstalled: SGLang is not installed.
        InvalidArgument: It is of another version, would not find our plug-in, or cannot run on the
            device, or without one that was named.
    """
    device = device or read_options(others).device
    if device == "cpu":
        _check_cpu_kernels()
    if accelerator and device is None and not accelerator_exists():
        expected = f"an accelerator, and there is none here; {OWN_ENGINE}"
        raise InvalidArgument("device", None, expected)
    check_version()
    check_plugin()


def accelerator_exists() -> bool:
    """Return whether PyTorch finds an accelerator; where there is no driver it is not asked."""
    if not _drivers_exist():
        return False
    import torch

    return torch.accelerator.is_available()


def _drivers_exist() -> bool:
    """Return whether PyTorch, which takes seconds to import, may find an accelerator.

    It finds none if it was built for none, or for CUDA alone and there is no driver of CUDA's.
    """
    package = find_spec("torch")
    if package is None or package.origin is None:
        return True
    if sys.platform != "linux" or entry_points(group="torch.backends"):
        return True
    built = runpy.run_path(str(Path(package.origin).with_name("version.py")))
    if built.get("hip") or built.get("xpu"):
        return True
    if not built.get("cuda"):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _check_cpu_kernels() -> None:
    try:
        from sgl_kernel import copy_all_layer_kv_cache_cpu  # noqa: F401
    except ImportError as error:
        missing = f"SGLang's packages have no kernels for CPUs; {OWN_ENGINE}"
        raise InvalidArgument("device", "cpu", f"an accelerator: {missing}") from error


def read_options(others: Sequence[str]) -> argparse.Namespace:
    """Return those of SGLang's arguments that are looked at before it starts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    parser.add_argument("--revision")
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_known_args(others)[0]
