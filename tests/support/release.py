"""The distributions of the package, built from a copy, so that the checkout stays as it is."""

import shutil
import sys
from pathlib import Path

from support.cli import ROOT, process

PACKAGES = ("eaglegbv", "drafters", "verifiers", "scheduler")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def copy_source(folder: Path) -> Path:
    """Copy what the package is made of into a folder, and return it."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=NOT_SHIPPED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(source: Path, out: Path) -> Path:
    """Return a folder with a source distribution and the wheel built from it."""
    process(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out
