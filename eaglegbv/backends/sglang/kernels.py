"""Triton kernels that grow a round's trees, and that give their nodes SGLang's numbers or ours.

    draw_branches   one program a branch    its distribution, and a token drawn from it; of a greedy
                                            request, the scores of its children
    join_branches   one program a request   the branches of the next level, and their numbers
    choose_nodes    one program a request   the most likely nodes of a greedy request
    number_nodes    one program a node      from SGLang's numbers to those of a draft tree
    report_paths    one program a request   from a verdict back to SGLang's numbers

:mod:`eaglegbv.backends.sglang.tree_layout` and :mod:`eaglegbv.backends.sglang.numbering` launch
them, and have the tensor code that is their reference. The last two compute whole numbers and copy
probabilities, so they agree in every bit; the trees are the same but for the rounding of sums.
"""

import triton
import triton.language as tl

from eaglegbv.draft_kernels import drawn_lane, first_equal
from eaglegbv.kernels import COMPARED, entry

_RANKED = tl.constexpr(128)  # candidates that are ranked at once
_LOWEST = tl.constexpr(-1e300)  # see `tree_growth._LOWEST`


@triton.jit
def _found(levels, paths):
    """Return how many candidates a greedy request has in so many levels, at least one."""
    return paths + (levels - 1) * paths * paths


@triton.jit
def _log_peak(row_at, largest, vocab, PIECE: tl.constexpr):
    """Return the log-probability of the most likely token of a row, whose logit is ``largest``."""
    masses = tl.zeros((PIECE,), tl.float64)
    for start in range(0, vocab, PIECE):
        columns = start + tl.arange(0, PIECE)
        values = tl.load(row_at + columns, mask=columns < vocab, other=-float("inf"))
        masses += tl.exp(values.to(tl.float32) - largest).to(tl.float64)
    return -tl.log(tl.sum(masses, axis=0))


@triton.jit
def _keys(scores_at, places, count):
    """Return scores by which to rank: NaN and the logarithm of 0 come last, and tie."""
    scores = tl.load(scores_at + places, mask=places < count, other=_LOWEST)
    return tl.where(scores > _LOWEST, scores, _LOWEST)


@triton.jit
def _best(scores_at, places, count, most):
    """Return which of ``count`` places are the best ``most``; ties by place."""
    keys = _keys(scores_at, places, count)
    ahead = tl.zeros_like(places)  # how many come before each
    for start in range(0, count, COMPARED):
        others = start + tl.arange(0, COMPARED)
        other_keys = _keys(scores_at, others, count)[None, :]
        before = others[None, :] < places[:, None]
        before &= other_keys == keys[:, None]
        before |= other_keys > keys[:, None]
        before &= others[None, :] < count
        ahead += tl.sum(before.to(tl.int32), axis=1)
    return (places < count) & (ahead < most)


@triton.jit(do_not_specialize=["level"])
def draw_branches(
    likely,
    places,
    rows,
    logits,
    target_ids,
    temperatures,
    greedy_at,
    uniforms,
    leaders,
    branch_scores,
    packed,
    tokens,
    candidates,
    scores,
    paths,
    length,
    level,
    width,
    vocab,
    row_stride,
    uniforms_stride,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Draw a child of the node at which a branch stands, from the list of the first branch there.

    At level 0 all branches stand at the root, whose list is in row ``rows[request]``. A branch of a
    greedy request scores its ``paths`` most likely children instead.
    """
    request, branch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inner = level > 0
    at = (level * tl.num_programs(0) + request) * paths + branch
    above_at = at - tl.num_programs(0) * paths
    leader = tl.load(leaders + above_at, mask=inner, other=0)
    root_row = tl.load(rows + request).to(tl.int64)
    row = tl.where(inner, request * paths + leader, root_row)
    lanes = tl.arange(0, BLOCK)
    real = lanes < width
    list_at = row * width + lanes
    ids = tl.load(places + list_at, mask=real, other=0)
    if MAPPED:
        ids = tl.load(target_ids + ids, mask=real, other=0)
    values = tl.load(likely + list_at, mask=real, other=-float("inf")).to(tl.float64)
    largest = tl.load(likely + row * width)
    greedy = tl.load(greedy_at + request) != 0
    temperature = tl.where(greedy, 1.0, tl.load(temperatures + request))
    warped = (values - largest.to(tl.float64)) / temperature.to(tl.float64)
    weights = tl.where(real, tl.exp(warped), 0.0)
    total = tl.sum(weights, axis=0)
    # A broken head drafts the first of its tokens with certainty.
    certain = tl.where(lanes == 0, 1.0, 0.0)
    probs = tl.where(total == total, weights / total, certain)

    new = real & (inner | (branch == 0))
    above = (length - 1) * paths  # branches of the levels that have children, as the root has
    number = tl.where(inner, 1 + (level - 1) * paths + branch, 0)
    packed_at = packed + (request * (1 + above) + number) * 2 * width
    tl.store(packed_at + lanes, ids.to(tl.float64), mask=new)
    tl.store(packed_at + width + lanes, probs, mask=new)
    if greedy:
        gain = tl.log(probs)
        if inner:
            peak = _log_peak(logits + row * row_stride, largest.to(tl.float32), vocab, PIECE)
            gain = tl.log(probs / entry(probs, lanes, 0)) + peak
        score = tl.load(branch_scores + above_at, mask=inner, other=0.0)
        to = request * _found(length, paths) + tl.where(inner, _found(level, paths), 0)
        to += branch * paths + lanes
        child = new & (lanes < paths)
        tl.store(candidates + to, ids, mask=child)
        tl.store(scores + to, score + gain, mask=child)
    else:
        uniform = tl.load(uniforms + request * uniforms_stride + branch * length + level)
        place = drawn_lane(probs, uniform, real, lanes, BLOCK)
        tl.store(tokens + at, entry(ids, lanes, place))


@triton.jit(do_not_specialize=["level"])
def join_branches(
    greedy_at,
    candidates,
    scores,
    tokens,
    origins,
    leaders,
    branch_scores,
    parents,
    numbers_out,
    tokens_out,
    paths,
    length,
    level,
    PATHS: tl.constexpr,
):
    """Find which branches go on from a level, which of them stand at one node, and their numbers.

    Those of a greedy request are the most likely candidates of the level, in their order.
    """
    request = tl.program_id(0).to(tl.int64)
    inner = level > 0
    at = (level * tl.num_programs(0) + request) * paths
    first = tl.where(inner, _found(level, paths), 0)  # the number of the level
    parents_at = parents + request * (1 + (length - 1) * paths)
    goes_on = level < length - 1
    tl.store(parents_at, tl.full((), -1, tl.int64), mask=goes_on)
    parents_at += 1 + level * paths
    if tl.load(greedy_at + request) != 0:
        level_at = request * _found(length, paths) + first
        count = tl.where(inner, paths * paths, paths)
        taken = tl.zeros_like(level)
        for start in range(0, count, _RANKED):
            places = start + tl.arange(0, _RANKED)
            chosen = _best(scores + level_at, places, count, paths)
            branch = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            to = at + branch
            likely = tl.load(candidates + level_at + places, mask=chosen, other=0)
            score = tl.load(scores + level_at + places, mask=chosen, other=0.0)
            origin = tl.where(inner, places // paths, places).to(tl.int64)
            number = (first + places).to(tl.int64)
            tl.store(tokens + to, likely, mask=chosen)
            tl.store(origins + to, origin, mask=chosen)
            tl.store(leaders + to, branch.to(tl.int64), mask=chosen)
            tl.store(branch_scores + to, score, mask=chosen)
            tl.store(parents_at + branch, number, mask=chosen & goes_on)
            taken += tl.sum(chosen.to(tl.int32), axis=0)
    else:
        lanes = tl.arange(0, PATHS)
        real = lanes < paths
        above_at = at - tl.num_programs(0) * paths
        above = tl.load(leaders + above_at + lanes, mask=real & inner, other=0)
        token = tl.load(tokens + at + lanes, mask=real, other=0)
        leader = first_equal(token, above, real, lanes, PATHS)
        path_number = first + paths * above + lanes
        node_at = request * paths * length + level * paths + lanes
        tl.store(origins + at + lanes, lanes.to(tl.int64), mask=real)
        tl.store(leaders + at + lanes, leader.to(tl.int64), mask=real)
        tl.store(parents_at + lanes, path_number, mask=real & goes_on)
        tl.store(numbers_out + node_at, path_number, mask=real)
        tl.store(tokens_out + node_at, token, mask=real)


@triton.jit
def choose_nodes(
    greedy_at,
    candidates,
    scores,
    numbers_out,
    tokens_out,
    paths,
    length,
):
    """Take the most likely of all candidates of a greedy request, in their order."""
    request = tl.program_id(0).to(tl.int64)
    if tl.load(greedy_at + request) != 0:
        count = _found(length, paths)
        found_at = request * count
        nodes_at = request * paths * length
        taken = tl.zeros((), tl.int32)
        for start in range(0, count, _RANKED):
            places = start + tl.arange(0, _RANKED)
            chosen = _best(scores + found_at, places, count, paths * length)
            to = nodes_at + taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            token = tl.load(candidates + found_at + places, mask=chosen, other=0)
            tl.store(numbers_out + to, places.to(tl.int64), mask=chosen)
            tl.store(tokens_out + to, token, mask=chosen)
            taken += tl.sum(chosen.to(tl.int32), axis=0)


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
        standing = first_equal(drawn, standing, real, every, PATHS)
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
