"""Whether this machine has a compiler for the code that ``torch.compile`` generates."""

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)
