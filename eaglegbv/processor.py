"""The processor of this machine."""

import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
"""File in which Linux describes the processor."""


def processor_name() -> str:
    """Return its name, such as ``AMD EPYC 9B45``, or the architecture if the system has no name."""
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
