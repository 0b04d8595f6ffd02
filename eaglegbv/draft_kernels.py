"""Triton kernels that draw a level of independent paths; :mod:`drafters.drawn_paths` launches them.

    draw_children     one program a child     its parent's distribution, and a token drawn from it
    number_children   one program a request   equal siblings, and the nodes at which children stand

Distributions are stored at their nodes, so that nothing is arranged at the end.
"""

import triton
import triton.language as tl

from eaglegbv.kernels import entry


@triton.jit
def drawn_lane(probs, uniform, real, lanes, BLOCK: tl.constexpr):
    """Return the lane that ``uniform`` selects by inverse CDF; see `draft_probs.pick_places`."""
    cumulative = tl.where(probs > 0, tl.cumsum(probs, axis=0), 0.0)
    total = tl.max(cumulative, axis=0)
    # The number below the total is that of its bits less 1.
    bits = tl.where(total > 0, total.to(tl.int64, bitcast=True) - 1, 0)
    limit = tl.minimum(uniform * total, bits.to(tl.float64, bitcast=True))
    lane = tl.min(tl.where(real & (cumulative > limit), lanes, BLOCK), axis=0)
    return tl.where(lane < BLOCK, lane, 0)


@triton.jit
def first_equal(tokens, above, alive, lanes, PATHS: tl.constexpr):
    """Return the first row alive of the same token below the same row; 0 where there is none."""
    same = (above[:, None] == above[None, :]) & (tokens[:, None] == tokens[None, :])
    first = tl.min(tl.where(same & alive[None, :], lanes[None, :], PATHS), axis=1)
    return tl.where(first < PATHS, first, 0)


@triton.jit(do_not_specialize=["level"])
def draw_children(
    warped,
    normalisers,
    candidates,
    draft_to_target,
    uniforms,
    node_at,
    leader_at,
    alive_at,
    draft_ids,
    draft_probs,
    token_out,
    chance_out,
    paths,
    depth,
    level,
    width,
    most,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw a child from the distribution of the first row at its parent.

    At level 0 all children have one parent, the root. ``LISTED`` says that the distributions are
    over ``candidates``; otherwise they are over the draft vocabulary in its order.
    """
    request, child = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = request * paths + child
    lanes = tl.arange(0, BLOCK)
    real = lanes < width
    inner = level > 0
    node = tl.load(node_at + at, mask=inner, other=0)
    leader = tl.load(leader_at + at, mask=inner, other=0)
    alive = tl.load(alive_at + at, mask=inner, other=1) != 0
    row = tl.where(inner, request * paths + leader, request)

    values = tl.load(warped + row * width + lanes, mask=real, other=-float("inf"))
    probs = tl.exp(values.to(tl.float64) - tl.load(normalisers + row))
    probs = tl.where(real, probs, 0.0)
    places = lanes.to(tl.int64)
    if LISTED:
        places = tl.load(candidates + row * width + lanes, mask=real, other=0)
    ids = tl.load(draft_to_target + places, mask=real, other=0)

    uniform = tl.load(uniforms + at * depth + level)
    place = drawn_lane(probs, uniform, real, lanes, BLOCK)
    tl.store(token_out + at, entry(ids, lanes, place))
    tl.store(chance_out + at, entry(probs, lanes, place))

    first = tl.where(inner, leader == child, child == 0)
    to = (request * most + node) * width + lanes
    tl.store(draft_ids + to, ids, mask=real & alive & first)
    tl.store(draft_probs + to, probs, mask=real & alive & first)


@triton.jit(do_not_specialize=["level"])
def number_children(
    roots,
    tokens,
    chances,
    node_at,
    alive_at,
    score_at,
    nodes_at,
    node_out,
    leader_out,
    alive_out,
    score_out,
    nodes_out,
    token_ids,
    parents,
    depths,
    draws,
    floor,
    paths,
    depth,
    level,
    most,
    PATHS: tl.constexpr,
):
    """Give equal siblings one node, and number new nodes by their parents, then by first draws."""
    request = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, PATHS)
    real = lanes < paths
    inner = real & (level > 0)
    at = request * paths + lanes
    token = tl.load(tokens + at, mask=real, other=0)
    parent = tl.load(node_at + at, mask=inner, other=0)
    alive = real & (tl.load(alive_at + at, mask=inner, other=1) != 0)
    score = tl.load(score_at + at, mask=inner, other=1.0)
    nodes = tl.load(nodes_at + request, mask=level > 0, other=1)

    first = first_equal(token, parent, alive, lanes, PATHS)
    leads = alive & (first == lanes)
    key = parent * PATHS + lanes
    earlier = leads[None, :] & (key[None, :] < key[:, None])
    number = nodes + tl.sum(earlier.to(tl.int64), axis=1)
    chosen = first[:, None] == lanes[None, :]
    node = tl.sum(tl.where(chosen, number[None, :], 0), axis=1)

    score *= tl.load(chances + at, mask=real, other=0.0)
    going = alive & ~(score < floor)
    tl.store(node_out + at, tl.where(alive, node, parent), mask=real)
    tl.store(leader_out + at, tl.where(alive, first, lanes).to(tl.int64), mask=real)
    tl.store(alive_out + at, going.to(tl.int8), mask=real)
    tl.store(score_out + at, score, mask=real)
    tl.store(nodes_out + request, nodes + tl.sum(leads.to(tl.int64), axis=0))

    tree_at = request * most
    tl.store(token_ids + tree_at, tl.load(roots + request), mask=level == 0)
    tl.store(token_ids + tree_at + node, token, mask=leads)
    tl.store(parents + tree_at + node, parent, mask=leads)
    tl.store(depths + tree_at + node, tl.zeros_like(node) + level + 1, mask=leads)
    draw_at = (request * depth + level) * paths + lanes
    tl.store(draws + draw_at, tl.where(alive, node, 0), mask=real)
