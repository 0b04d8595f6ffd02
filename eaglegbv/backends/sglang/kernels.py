"""Triton kernels between SGLang's numbers of nodes and the numbers of a draft tree.

:mod:`eaglegbv.backends.sglang.numbering` launches them, and has the tensor code that is their
reference. Both compute whole numbers and copy probabilities, so they agree in every bit.
"""

import triton
import triton.language as tl


@triton.jit
def number_nodes(
    tokens,
    packed,
    token_ids_out,
    parents_out,
    depth_out,
    rows_out,
    num_nodes_out,
    draws_out,
    ids_out,
    probs_out,
    paths,
    length,
    width,
    PATHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the place of one of SGLang's nodes in its request's tree, and write it there."""
    request, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nodes = 1 + paths * length
    depth = (node + paths - 1) // paths
    path = (node + paths - 1) % paths
    every = tl.arange(0, PATHS)
    real = every < paths
    standing = tl.zeros_like(every)  # which path represents each, down to the level
    count = tl.zeros_like(paths) + 1  # nodes of the tree above the level; the root is one
    parent = tl.zeros_like(paths)
    place = tl.zeros_like(paths)  # of the node that represents this one
    before = tl.zeros_like(paths)  # nodes of the tree with lower numbers of SGLang's
    stands = path >= 0  # whether it represents itself, as the root does
    for level in range(length):
        at = tokens + request * nodes + 1 + level * paths
        drawn = tl.load(at + every, mask=real, other=-1)
        same = (drawn[:, None] == drawn[None, :]) & (standing[:, None] == standing[None, :])
        same &= real[None, :]
        standing = tl.min(tl.where(same, every[None, :], PATHS), axis=1)
        new = real & (standing == every)
        if level < depth:
            representative = tl.sum(tl.where(every == path, standing, 0), axis=0)
            parent = place
            place = count + tl.sum((new & (every < representative)).to(tl.int32), axis=0)
            before = count + tl.sum((new & (every < path)).to(tl.int32), axis=0)
            stands = representative == path
        count += tl.sum(new.to(tl.int32), axis=0)

    tree_at = request * nodes
    draws_at = draws_out + request * (nodes - 1)
    tl.store(draws_at + node - 1, place.to(tl.int64), mask=node > 0)
    tl.store(num_nodes_out + request, count.to(tl.int64), mask=node == 0)
    # Nodes that represent no path come last, as padding.
    to = tree_at + tl.where(stands, place, count + node - before)
    token = tl.load(tokens + tree_at + node)
    tl.store(token_ids_out + to, tl.where(stands, token, 0).to(tl.int64))
    tl.store(parents_out + to, tl.where(stands, parent, 0).to(tl.int64))
    tl.store(depth_out + to, tl.where(stands, depth, 0).to(tl.int64))
    tl.store(rows_out + to, tree_at + tl.where(stands, node, 0))

    lanes = tl.arange(0, BLOCK)
    in_list = lanes < width
    # The last nodes are leaves, so they have no distribution.
    distributions = nodes - paths
    has_list = in_list & stands & (node < distributions)
    list_at = packed + (request * distributions + node) * 2 * width
    ids = tl.load(list_at + lanes, mask=has_list, other=0.0)
    probs = tl.load(list_at + width + lanes, mask=has_list, other=0.0)
    tl.store(ids_out + to * width + lanes, ids.to(tl.int64), mask=in_list)
    tl.store(probs_out + to * width + lanes, probs, mask=in_list)


@triton.jit
def report_paths(
    path_nodes,
    accepted,
    last_tokens,
    token_ids,
    rows,
    tokens_out,
    nodes_out,
    length,
    nodes,
    STEPS: tl.constexpr,
    NODES: tl.constexpr,
):
    """Write a request's verdict as SGLang's kernels do."""
    request = tl.program_id(0).to(tl.int64)
    tree_at = request * nodes
    every = tl.arange(0, NODES)
    tl.store(tokens_out + tree_at + every, tl.zeros_like(every).to(tl.int64), mask=every < nodes)
    tl.debug_barrier()
    steps = tl.arange(0, STEPS)
    count = tl.load(accepted + request)
    within = steps <= count
    inner = within & (steps > 0)
    path_at = path_nodes + request * length
    node = tl.load(path_at + steps - 1, mask=inner, other=0)
    row = tl.load(rows + tree_at + node, mask=within, other=-1)
    tl.store(nodes_out + request * (length + 1) + steps, row, mask=steps <= length)
    following = tl.load(path_at + steps, mask=steps < count, other=0)
    token = tl.load(token_ids + tree_at + following, mask=steps < count, other=0)
    token = tl.where(steps == count, tl.load(last_tokens + request), token)
    tl.store(tokens_out + row, token, mask=within)
