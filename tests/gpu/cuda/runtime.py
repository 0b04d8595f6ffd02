"""Takes the place of CUDA's runtime in this process, and runs on the host what is launched."""

import ctypes
import gc
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu.ptx.lanes import Launch, Ranges
from gpu.ptx.program import Program
from gpu.ptx.text import Kernel, parse
from torch import Tensor
from torch.nn import Parameter

PROCESSORS = 132
"""Multiprocessors of an H100."""

_Launcher = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint * 3),
    ctypes.POINTER(ctypes.c_uint * 3),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_uint64,
)
_SOURCE = Path(__file__).with_name("runtime.c")


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch with the bytes of its arguments: what a CUDA graph keeps of it."""

    program: Program
    launch: Launch

    def run(self) -> None:
        """Run it, or run it again."""
        self.program.run(self.launch)

    def run_within_tensors(self) -> None:
        """Run it; it may touch no memory but that of living tensors."""
        self.program.run(self.launch, memory_of_tensors())


class HostRuntime:
    """Stands in for ``libcudart`` and ``libcuda``, by their names, for libraries loaded later.

    Attributes:
        folder: Where the two are, to link with, and room for what is compiled for them.
        launched: Kernels by how often each was launched.
        on_launch: What becomes of a launch.
        faults: What went wrong in kernels; the library that launched them was told no more than
            that something did.
    """

    def __init__(self, folder: Path) -> None:
        """Compile and load it.

        Args:
            folder: One that exists.
        """
        self.folder = folder
        self.launched: Counter[str] = Counter()
        self.on_launch: Callable[[Launched], None] = Launched.run
        self.faults: list[BaseException] = []
        # By address: nothing that was loaded is ever unloaded.
        self._modules: dict[int, dict[str, Kernel]] = {}
        self._programs: dict[tuple[int, str], Program] = {}
        library = _load(folder, "cudart", "libcudart.so.13", _SOURCE)
        _load(folder, "cuda", "libcuda.so.1", Path("/dev/null"))  # linked with, and not called
        self._launcher = _Launcher(self._launch)  # kept: the library has no hold on it
        library.host_device(self._launcher, PROCESSORS)

    def _launch(
        self, name: bytes, module: int, grid: Any, block: Any, arguments: Any, shared_bytes: int
    ) -> int:
        """Run a kernel, given as C gives it, and return a status: no error passes through C."""
        try:
            program = self._program(module, name.decode())
            sizes = tuple(grid.contents), tuple(block.contents)
            launch = Launch(*sizes, _argument_bytes(program.kernel, arguments), shared_bytes)
            self.launched[name.decode()] += 1
            self.on_launch(Launched(program, launch))
        except BaseException as error:  # noqa: BLE001  kept, and told as a status
            self.faults.append(error)
            return 1
        return 0

    def _program(self, module: int, name: str) -> Program:
        program = self._programs.get((module, name))
        if program is None:
            if module not in self._modules:
                self._modules[module] = _kernels(module)
            program = self._programs[module, name] = Program(self._modules[module][name])
        return program


def memory_of_tensors() -> Ranges:
    """Return the memory of all living tensors, those of plans on the host among them."""
    storages = {
        (storage.data_ptr(), storage.nbytes())
        for tensor in gc.get_objects()
        if type(tensor) in (Tensor, Parameter)  # compilers keep some that have no memory
        and (tensor.layout, tensor.device.type) == (torch.strided, "cpu")
        for storage in [tensor.untyped_storage()]
    }
    starts, sizes = np.array(sorted(storages), np.uint64).reshape(-1, 2).T
    return Ranges(np.ascontiguousarray(starts), starts + sizes)


def _load(folder: Path, name: str, soname: str, source: Path) -> ctypes.CDLL:
    """Compile a stand-in under the name and version that libraries ask for, and load it."""
    with TemporaryDirectory(dir=folder) as own:  # others may be loading the file of before
        versions, fresh = Path(own, "versions"), Path(own, soname)
        versions.write_text(f"{soname} {{ global: *; }};\n")
        linking = f"-Wl,--version-script={versions},-soname,{soname}"
        command = ["gcc", "-O2", "-shared", "-fPIC", linking, "-o", str(fresh), "-x", "c"]
        subprocess.run([*command, str(source)], check=True)
        shutil.copyfile(fresh, Path(own, "copy")).replace(folder / f"lib{name}.so")
        fresh.replace(folder / soname)
    return ctypes.CDLL(str(folder / soname), mode=ctypes.RTLD_GLOBAL)


def _argument_bytes(kernel: Kernel, arguments: Any) -> bytes:
    found = bytearray(kernel.parameter_bytes)
    for place, span in enumerate(kernel.parameters.values()):
        found[span.offset : span.offset + span.size] = ctypes.string_at(arguments[place], span.size)
    return bytes(found)


def _kernels(module: int) -> dict[str, Kernel]:
    """Read the PTX out of a module: texts that end with a zero, behind a header with its size."""
    header = int.from_bytes(ctypes.string_at(module + 6, 2), "little")
    size = int.from_bytes(ctypes.string_at(module + 8, 8), "little")
    data = ctypes.string_at(module, header + size)
    found: dict[str, Kernel] = {}
    for start in re.finditer(rb"\.version \d", data):
        text = data[start.start() : data.index(b"\0", start.start())]
        found |= parse(text.decode())
    return found
