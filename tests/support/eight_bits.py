"""Weights of 8 bits are for CPUs that PyTorch has fast kernels for."""

import pytest
import torch

HAS_INT8 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")

needs_int8 = pytest.mark.skipif(not HAS_INT8, reason="a CPU without AVX2 multiplies no 8 bits fast")
