"""Compile the FlashInfer kernels of the project for sm_90a, without a GPU, to OUT/NAME/NAME.so.

usage: python aot.py OUT [JOBS]      (environment: CUDA_HOME, FLASHINFER_WORKSPACE_BASE)
"""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

out = Path(sys.argv[1]).resolve()
jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 2
stub = out.parent / "aot-stub"
for folder in (out, stub):
    folder.mkdir(parents=True, exist_ok=True)
# Linked against by name only; the driver brings the real one.
if not (stub / "libcuda.so").exists():
    named = ["-o", str(stub / "libcuda.so"), "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null"]
    subprocess.run(["gcc", "-shared", *named], check=True)
for name, value in (
    ("FLASHINFER_CUDA_ARCH_LIST", "9.0a"),
    ("FLASHINFER_WORKSPACE_BASE", str(out.parent / "aot-work")),
    ("FLASHINFER_EXTRA_LDFLAGS", f"-L{stub}"),
    ("MAX_JOBS", "1"),
):
    os.environ.setdefault(name, value)

import torch  # noqa: E402
from flashinfer.jit.attention.modules import gen_batch_prefill_module  # noqa: E402


def prefill(dtype, head_dim, cap=False):
    """Return the kernels of trees, prompts and single tokens."""
    return gen_batch_prefill_module(
        "fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, cap, False
    )


SPECS = [
    prefill(torch.bfloat16, 128),  # Llama-3.1-8B
    prefill(torch.bfloat16, 64),  # the tiny pair
    prefill(torch.float16, 64),  # tests/integration/test_engine_graphs.py
    prefill(torch.bfloat16, 64, cap=True),  # tests/unit/attention, from here on
    prefill(torch.bfloat16, 256),
]


def build(spec):
    """Compile one module, and put it in its place whole: other processes may look for it."""
    target = out / spec.name / f"{spec.name}.so"
    if target.exists():
        return f"have  {target.stat().st_size:9d}  {spec.name}"
    start = time.time()
    spec.build(verbose=False)
    part = out / f"{spec.name}.part"
    shutil.copy(spec.jit_library_path, part)
    subprocess.run(["strip", "--strip-unneeded", str(part)], check=False)
    target.parent.mkdir(exist_ok=True)
    part.replace(target)
    return f"built {target.stat().st_size:9d}  {spec.name}  {time.time() - start:.0f} s"


with ThreadPoolExecutor(jobs) as pool:
    for done in as_completed([pool.submit(build, spec) for spec in SPECS]):
        print(done.exception() or done.result(), flush=True)
