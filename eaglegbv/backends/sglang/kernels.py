"""A Triton kernel that reports a verdict as SGLang's kernels do."""

import triton
import triton.language as tl


@triton.jit
def report_paths(
    path_nodes,
    accepted,
    last_tokens,
    token_ids,
    tokens_out,
    nodes_out,
    lengths_out,
    length,
    nodes,
    STEPS: tl.constexpr,
):
    """Write a request's accepted nodes, and the token after each; ``tokens_out`` holds zeros."""
    request = tl.program_id(0).to(tl.int64)
    tree_at = request * nodes
    steps = tl.arange(0, STEPS)
    count = tl.load(accepted + request)
    tl.store(lengths_out + request, count + 1)
    within = steps <= count
    path_at = path_nodes + request * length
    node = tl.load(path_at + steps - 1, mask=within & (steps > 0), other=0)
    row = tl.where(within, tree_at + node, -1)
    tl.store(nodes_out + request * (length + 1) + steps, row, mask=steps <= length)
    following = tl.load(path_at + steps, mask=steps < count, other=0)
    token = tl.load(token_ids + tree_at + following, mask=steps < count, other=0)
    token = tl.where(steps == count, tl.load(last_tokens + request), token)
    tl.store(tokens_out + row, token, mask=within)
