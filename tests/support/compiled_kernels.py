"""Compile the Triton kernels for a GPU (sm_90), and print what they take there.

A line for each: name and rule, registers a thread, bytes of its stack (spilt registers), bytes of
shared memory. Needs no GPU.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eaglegbv import draft_kernels, kernels, layer_kernels
from eaglegbv.backends.sglang import kernels as sglang_kernels
from eaglegbv.devices import PIECE, PIECE_WARPS
from eaglegbv.verifiers import fused

FLOAT64 = {
    *("draft_probs", "target_probs", "normalisers", "normalisers_out", "uniforms", "draft_out"),
    *(
        "target_out",
        "scratch",
        "packed",
        "probs_out",
        "tests",
        "weight_out",
        "weight_at",
        "weights",
        "top_ps",
        "min_ps",
        "chance_out",
        "chances",
        "score_at",
        "score_out",
        "branch_scores",
        "scores",
    ),
}
INT32 = {
    *("child_out", "place_out", "drafts_out", "node_faults", "child_at", "place_at", "drafts_at"),
    *("stop_out", "bonus_out", "stop_at", "bonus_at"),
}
FLOAT32 = {"logits", "warped_out", "warped", "temperatures", "likely"}
NUMBERS = {
    *("nodes", "num_draws", "width", "vocab", "length", "tests_stride", "uniforms_stride"),
    *(
        "row_stride",
        "paths",
        "inner",
        "outer_stride",
        "inner_stride",
        "heads",
        "kv_heads",
        "q_row",
        "q_head",
    ),
    *("k_row", "k_head", "angle_row", "half", "gate_row", "up_row", "keys_row", "keys_head"),
    *("values_row", "values_head", "dim", "depth", "level", "most", "window"),
}
INT8 = {"drawn", "alive_at", "alive_out", "visible", "greedy_at"}
HALF = {
    *("x", "weight", "out", "q", "k", "cos", "sin", "q_out", "k_out", "gate", "up", "keys"),
    *("values", "pool_keys", "pool_values"),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def type_of(name: str, kernel: str) -> str:
    if name in NUMBERS:
        return "i32"
    if name == "octets_out":
        return "*u8"
    if name in INT8:
        return "*i8"
    if name in ("eps", "floor"):
        return "fp32"
    if name in HALF:
        return "*bf16"
    if name in FLOAT64:
        return "*fp64"
    if name in FLOAT32:
        return "*fp32"
    if name in INT32 or (name == "faults_out" and kernel == "judge_nodes"):
        return "*i32"
    return "*i64"


def resources(kernel, constants):
    signature = {
        name: "constexpr" if name in constants else type_of(name, kernel.__name__)
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    warps = {"warp_rows": PIECE_WARPS, "draw_corrections": 2 * PIECE_WARPS}
    options = {"num_warps": warps.get(kernel.__name__, 4)}
    if kernel.__module__ == layer_kernels.__name__:
        options |= layer_kernels.ROUNDED
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if "fma.rn.bf16" in compiled.asm["ptx"]:
        sys.exit(f"{kernel.__name__} fuses products and sums that are rounded in between")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = [re.search(rf"{what}:(\d+)", usage)[1] for what in ("REG", "STACK")]
    return *numbers, str(compiled.metadata.shared)


def main() -> None:
    lists, pieces = {"BLOCK": 256}, {"PIECE": PIECE}
    work = []
    for rule in sorted(fused.RULES):
        sizes = {"RULE": rule, **lists}
        work.append((kernels.judge_nodes, {**sizes, "IN_LOGS": True, "DRAWS": 16}))
        work.append((kernels.judge_paths, {**sizes, "NODES": 16}))
    work.append((kernels.draw_corrections, {"IN_LOGS": True, "PIECES": 32, **lists, **pieces}))
    work.append((kernels.warp_rows, {"TOP_K": True, "TOP_P": True, "MIN_P": True, **pieces}))
    work.append((sglang_kernels.report_paths, {"STEPS": 32}))
    work += [
        (layer_kernels.norm_rows, {"BLOCK": 4096}),
        (layer_kernels.rotate_rows, {"SIGNED": False, "BLOCK": 64}),
        (layer_kernels.gate_rows, {"BLOCK": 1024}),
        (layer_kernels.write_rows, {"BLOCK": 1024}),
    ]
    work.append((layer_kernels.pack_masks, {"WINDOW": True, "BLOCK": 128}))
    work.append((draft_kernels.draw_children, {"LISTED": True, **lists}))
    work.append((draft_kernels.number_children, {"PATHS": 16}))
    for kernel, constants in work:
        name = f"{kernel.__name__} {constants.get('RULE', '')}"
        sys.stdout.write(" ".join((name, *resources(kernel, constants))) + "\n")


if __name__ == "__main__":
    main()
