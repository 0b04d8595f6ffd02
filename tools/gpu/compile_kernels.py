"""Compile FlashInfer's kernels of the project for sm_90a, one module after the other, on all cores.

They are put where FlashInfer looks for them (FLASHINFER_WORKSPACE_BASE), under its own lock: a
process that needs a module meanwhile waits for it. No GPU is needed.
"""

import sys
import time

import torch
from flashinfer.jit.attention.modules import gen_batch_prefill_module


def prefill(dtype: torch.dtype, head_dim: int, cap: bool = False):
    """Return the kernels of trees, prompts and single tokens."""
    return gen_batch_prefill_module(
        "fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, cap, False
    )


MODULES = [  # in the order in which the phases need them
    prefill(torch.bfloat16, 128),  # Llama-3.1-8B
    prefill(torch.bfloat16, 64),  # the tiny pair
    prefill(torch.float16, 64),  # tests/integration/test_engine_graphs.py
    prefill(torch.bfloat16, 64, cap=True),  # tests/unit/attention, from here on
    prefill(torch.bfloat16, 256),
]

failed = 0
for module in MODULES:
    start = time.monotonic()
    try:
        module.build(verbose=False)
        print(f"{time.monotonic() - start:.0f} s  {module.name}", flush=True)
    except RuntimeError as error:
        failed += 1
        print(f"FAILED {module.name}: {error}", flush=True)
sys.exit(failed > 0)
