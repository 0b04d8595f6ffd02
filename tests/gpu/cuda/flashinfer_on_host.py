"""FlashInfer on the host: its own code, compiled to PTX, with the host as its device."""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.cuda.runtime import PROCESSORS, HostRuntime

from eaglegbv.attention.flashinfer import FlashInferKernels

# Tensors may be on the host: they are.
_HEADER = """#pragma once
#include "tvm_ffi_utils.h"
#undef CHECK_CUDA
#define CHECK_CUDA(x)
"""


def missing() -> str | None:
    """Return why FlashInfer cannot be run on the host, if it cannot."""
    if importlib.util.find_spec("flashinfer") is None:
        return "needs FlashInfer"
    if torch.version.cuda is not None:
        return "needs PyTorch's CPU build: any other brings a CUDA runtime of its own"
    if not ("CUDA_HOME" in os.environ or shutil.which("nvcc") or _packaged_cuda()):
        return "needs nvcc"
    return None if shutil.which("gcc") else "needs gcc"


def _packaged_cuda() -> Path | None:
    """Return where the compiler is that comes as Python packages, if it is installed."""
    spec = importlib.util.find_spec("nvidia")
    homes = [Path(place, "cu13") for place in spec.submodule_search_locations or ()] if spec else []
    return next((home for home in homes if (home / "bin" / "nvcc").exists()), None)


class HostKernels(FlashInferKernels):
    """FlashInfer's wrappers, over tensors of the host."""

    def processors(self, device: torch.device) -> int:
        """See :meth:`Kernels.processors`."""
        return PROCESSORS


def compile_for_host(runtime: HostRuntime, patch: pytest.MonkeyPatch) -> None:
    """Have FlashInfer compile for the host: a minute for every type, head size, kind of scores.

    Args:
        runtime: In whose folder the results are kept.
        patch: Undoes it.
    """
    patch.setattr(torch, "empty", _unpinned(torch.empty))
    header = runtime.folder / "on_host.h"
    if not header.exists() or header.read_text() != _HEADER:  # a new one has all compiled again
        header.write_text(_HEADER)
    settings = {
        "FLASHINFER_WORKSPACE_BASE": runtime.folder,
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_EXTRA_CUDAFLAGS": f"-include {header} -Xfatbin -compress=false",
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{runtime.folder}",
    }
    if not ("CUDA_HOME" in os.environ or shutil.which("nvcc")):
        settings["CUDA_HOME"] = _packaged_cuda()
    for name, value in settings.items():
        patch.setenv(name, str(value))
    # Should FlashInfer have been imported before: its folders are settled by then.
    places = importlib.import_module("flashinfer.jit.env")
    folder = runtime.folder / version("flashinfer-python")
    patch.setattr(places, "FLASHINFER_JIT_DIR", folder / "compiled")
    patch.setattr(places, "FLASHINFER_GEN_SRC_DIR", folder / "generated")
    context = importlib.import_module("flashinfer.compilation_context").CompilationContext
    flags = ["-gencode=arch=compute_90a,code=compute_90a", *context.COMMON_NVCC_FLAGS]
    patch.setattr(context, "get_nvcc_flags_list", lambda self, *_, **__: flags)


def _unpinned(empty: Callable[..., Any]) -> Callable[..., Any]:
    """Without a GPU there is no pinned memory, and PyTorch refuses to make any."""

    def unpinned(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        return empty(*arguments, **named)

    return unpinned
