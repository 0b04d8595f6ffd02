"""The processor of this machine."""

import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux describes it."""


def processor_name() -> str:
    """Return its name, such as ``AMD EPYC 9B45``, or its architecture where the system has none."""
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
