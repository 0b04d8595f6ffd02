"""What this machine may lack: a compiler for generated code, packed weights."""

import os
import shutil

import pytest
import torch

from eaglegbv.fused_linears import can_pack

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)


needs_packing = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1)), reason="PyTorch without oneDNN packs no weights"
)
