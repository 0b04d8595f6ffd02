"""Triton kernels for what a step decides on a GPU: warped rows of logits, and verdicts on trees.

The tensor code of :mod:`eaglegbv.sampling` and :mod:`eaglegbv.verifiers` is the reference, and what
runs on a CPU. Here the same numbers are computed in four kernels, where tensor code launches one
for each of its operations:

    warp_rows         one program a row       temperature, top-k, top-p, min-p; the normaliser
    judge_nodes       one program a node      faults; p at the node's draft tokens; their transport;
                                              the child that is selected
    judge_paths       one program a request   down the selected children: weights and tests, up to
                                              the node where acceptance ends
    draw_corrections  one program a request   a token of the residual there, of the whole vocabulary

A row of the vocabulary is read in pieces of ``PIECE`` lanes, a list of draft tokens is worked on in
one block of ``BLOCK``. A program that needs a list in another order, or shifted by one, writes it
and reads it again, with a barrier between.

:func:`eaglegbv.sampling.warp_on_device` and :mod:`eaglegbv.verifiers.fused` launch them.
"""

import triton
import triton.language as tl

# Flags and tolerance of `verifiers.base.Fault`.
_TARGET_NOT_FINITE, _DRAFT_NOT_NORMALISED = tl.constexpr(1), tl.constexpr(2)
_IMPOSSIBLE_DRAFT, _TOLERANCE = tl.constexpr(4), tl.constexpr(1e-6)
_TRACE = tl.constexpr(1e-280)  # see `verifiers.paths._TRACE`
_LEAST_UNIFORM = tl.constexpr(1e-140)  # a uniform of exactly 0 must not find a trace
_LARGEST_LOG = tl.constexpr(709.782712893384)  # logarithm of the largest float64
_TINY = tl.constexpr(2.2250738585072014e-308)  # smallest normal float64
COMPARED = tl.constexpr(16)  # entries that a list is compared with at once, to rank it
_INFINITY = tl.constexpr(0x7F800000)  # bits of float32 infinity
_LEAST = tl.constexpr(0x44400000)  # bits of float32 768: exp(-768) is 0 in float64
_SEARCHES = tl.constexpr(31)  # halvings that find one number among those up to it


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _scalar(number):
    """Return an int32 that loops and branches may change; an argument of 1 is no tensor."""
    return tl.full((), number, tl.int32)


@triton.jit
def entry(values, lanes, place):
    """Return the entry of ``values`` in lane ``place``."""
    return tl.sum(tl.where(lanes == place, values, tl.zeros_like(values)), axis=0)


@triton.jit
def _first_lane(matches, lanes, BLOCK: tl.constexpr):
    """Return the first lane that matches, 0 if none does."""
    first = tl.min(tl.where(matches, lanes, BLOCK), axis=0)
    return tl.where(first < BLOCK, first, 0)


@triton.jit
def _power(base, n):
    """Return ``base^n``, for a whole number n of at least 0."""
    result = tl.zeros_like(base) + 1.0
    for _ in range(n):
        result *= base
    return result


@triton.jit
def _power_step(upper, step, n):
    """Return ``upper^n - (upper - step)^n``, 0 <= step <= upper, as a sum of positive terms."""
    lower = tl.maximum(upper - step, 0.0)
    terms = tl.zeros_like(upper)
    power = tl.zeros_like(upper) + 1.0
    for _ in range(n):
        terms = terms * lower + power
        power *= upper
    return step * terms


@triton.jit
def _normalised(values, normaliser, IN_LOGS: tl.constexpr):
    """Return p in float64, of warped logits or of probabilities that need not sum to 1."""
    if IN_LOGS:
        return tl.exp(values.to(tl.float64) - normaliser)
    return values.to(tl.float64) / normaliser


# Warped rows. The logits of a row, relative to its largest and divided by its temperature, are 0 or
# negative, so the bits of their negatives are in the order of the numbers: the edge of top-k or
# top-p is found by halving the range of bits, with one pass each time: over the row for top-k, for
# top-p over a list of the few tokens that can matter.


@triton.jit
def _bits(row_at, columns, vocab, largest, temperature):
    """Return the bits of the negated warped logits at ``columns``; beyond the row, of infinity."""
    values = tl.load(row_at + columns, mask=columns < vocab, other=-float("inf"))
    warped = tl.div_rn(values.to(tl.float32) - largest, temperature)
    return (-warped + 0.0).to(tl.int32, bitcast=True)


@triton.jit
def _weights(bits):
    return tl.exp(-bits.to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit
def _top_k_edge(row_at, top_k, vocab, largest, temperature, PIECE: tl.constexpr):
    """Return the bits of the ``top_k``-th largest logit."""
    low = _scalar(0)
    high = _scalar(_INFINITY)
    for _ in range(_SEARCHES):
        middle = low + (high - low) // 2
        counts = tl.zeros((PIECE,), tl.int32)
        for start in range(0, vocab, PIECE):
            columns = start + tl.arange(0, PIECE)
            bits = _bits(row_at, columns, vocab, largest, temperature)
            counts += ((bits <= middle) & (columns < vocab)).to(tl.int32)
        enough = tl.sum(counts, axis=0) >= top_k
        high = tl.where(enough, middle, high)
        low = tl.where(enough | (low >= high), low, middle + 1)
    return high


@triton.jit
def _list_likely(row_at, list_at, top_p, edge, vocab, largest, temperature, PIECE: tl.constexpr):
    """List the bits of all tokens that top-p may keep; return their number, and the mass wanted.

    Top-p cuts less than a share ``1 - top_p``. Tokens lighter than that share of an average token
    have less together, so none of them decides where the edge is. Of a language model, a few
    hundred tokens are left of a hundred thousand. Half of the share leaves room for rounding.
    """
    masses = tl.zeros((PIECE,), tl.float64)
    for start in range(0, vocab, PIECE):
        columns = start + tl.arange(0, PIECE)
        bits = _bits(row_at, columns, vocab, largest, temperature)
        masses += tl.where(bits <= edge, _weights(bits), 0.0)
    total = tl.sum(masses, axis=0)
    least = (1 - top_p) * total / (2.0 * vocab)
    count = _scalar(0)
    for start in range(0, vocab, PIECE):
        columns = start + tl.arange(0, PIECE)
        bits = _bits(row_at, columns, vocab, largest, temperature)
        likely = (bits <= edge) & (_weights(bits) >= least) & (columns < vocab)
        places = count + tl.cumsum(likely.to(tl.int32), axis=0) - 1
        tl.store(list_at + places, bits.to(tl.float32, bitcast=True), mask=likely)
        count += tl.sum(likely.to(tl.int32), axis=0)
    tl.debug_barrier()
    return count, top_p * total


@triton.jit
def _listed(list_at, places, count):
    """Return the bits of :func:`_list_likely` at ``places``; beyond the list, of infinity."""
    values = tl.load(list_at + places, mask=places < count, other=float("inf"))
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _mass(list_at, count, below, PIECE: tl.constexpr):
    """Return the sum of the exponentials of what is listed with bits less than ``below``."""
    masses = tl.zeros((PIECE,), tl.float64)
    for start in range(0, count, PIECE):
        bits = _listed(list_at, start + tl.arange(0, PIECE), count)
        masses += tl.where(bits < below, _weights(bits), 0.0)
    return tl.sum(masses, axis=0)


@triton.jit
def _top_p_edge(row_at, list_at, top_p, edge, vocab, largest, temperature, PIECE: tl.constexpr):
    """Return the bits of the last logit that stays, and how many tokens of that logit stay.

    ``edge`` has the bits of the last one that top-k leaves; ``list_at`` is room for a row.
    """
    count, wanted = _list_likely(row_at, list_at, top_p, edge, vocab, largest, temperature, PIECE)
    low = _scalar(0)
    high = _scalar(_LEAST)
    for _ in range(_SEARCHES):
        middle = low + (high - low + 1) // 2
        room = _mass(list_at, count, middle, PIECE) < wanted
        low = tl.where(room, middle, low)
        high = tl.where(room, high, middle - 1)
    # ``low`` may lie between two logits: the edge is the nearest one that is not less likely.
    nearest_of_lanes = tl.zeros((PIECE,), tl.int32)
    for start in range(0, count, PIECE):
        bits = _listed(list_at, start + tl.arange(0, PIECE), count)
        nearest_of_lanes = tl.maximum(nearest_of_lanes, tl.where(bits <= low, bits, 0))
    nearest = tl.max(nearest_of_lanes, axis=0)
    missing = wanted - _mass(list_at, count, nearest, PIECE)
    ties = tl.ceil(missing / tl.maximum(_weights(nearest), _TINY))
    tl.debug_barrier()  # the row is written where the list was
    return nearest, tl.maximum(ties, 1.0).to(tl.int32)


@triton.jit
def warp_rows(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    warped_out,
    normalisers_out,
    vocab,
    row_stride,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Warp a row; see :func:`eaglegbv.sampling.warp`."""
    row = tl.program_id(0).to(tl.int64)
    row_at = logits + row * row_stride
    out_at = warped_out + row * vocab
    columns = tl.arange(0, PIECE)
    # Every lane keeps its largest logit, and where that was first.
    tops = tl.full((PIECE,), -float("inf"), tl.float32)
    firsts = tl.zeros((PIECE,), tl.int32) + vocab
    flaws = tl.zeros((PIECE,), tl.int32)
    for start in range(0, vocab, PIECE):
        at = start + columns
        values = tl.load(row_at + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        flaws |= ((values != values) | (values == float("inf"))).to(tl.int32)
        firsts = tl.where((values > tops) | (start == 0), at, firsts)
        tops = tl.where((values > tops) | (start == 0), values, tops)
    largest = tl.max(tops, axis=0)
    best = tl.min(tl.where(tops == largest, firsts, vocab), axis=0)
    broken = tl.sum(flaws, axis=0) + (largest == -float("inf")).to(tl.int32)

    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    edge = _scalar(_INFINITY)  # everything stays
    last = edge
    ties = _scalar(0) + vocab
    if TOP_K:
        top_k = tl.load(top_ks + row)
        if (top_k < vocab) & ~greedy:
            edge = _top_k_edge(row_at, top_k, vocab, largest, temperature, PIECE)
            last = edge
    if TOP_P:
        top_p = tl.load(top_ps + row)
        if (top_p < 1) & ~greedy:
            last, ties = _top_p_edge(
                row_at, out_at, top_p, edge, vocab, largest, temperature, PIECE
            )
    least = -float("inf")
    if MIN_P:
        least = tl.log(tl.load(min_ps + row))
    masses = tl.zeros((PIECE,), tl.float64)
    seen = _scalar(0)
    for start in range(0, vocab, PIECE):
        at = start + columns
        real = at < vocab
        bits = _bits(row_at, at, vocab, largest, temperature)
        warped = -bits.to(tl.float32, bitcast=True)
        kept = bits <= last
        if TOP_P:
            equal = (bits == last) & real
            count = seen + tl.cumsum(equal.to(tl.int32), axis=0)
            kept = (bits < last) | (equal & (count <= ties))
            seen += tl.sum(equal.to(tl.int32), axis=0)
        if MIN_P:
            kept &= warped.to(tl.float64) >= least
        kept = tl.where(greedy, at == best, kept)
        warped = tl.where(kept, warped, -float("inf"))
        warped = tl.where(broken > 0, float("nan"), warped)
        tl.store(out_at + at, warped, mask=real)
        masses += tl.where(real, tl.exp(warped.to(tl.float64)), 0.0)
    tl.store(normalisers_out + row, tl.log(tl.sum(masses, axis=0)))


# Verdicts. Lists of draft tokens are short; every sum is taken in float64.


@triton.jit
def _ranks(ids, draft, ratio, lanes, ids_at, keys_at, width):
    """Return each entry's rank: lowest p/q first, ties by token id; what q lacks comes last."""
    # A ratio that is no number, of a broken target, must not share a rank with another.
    key = tl.where((draft > 0) & (ratio == ratio), ratio, float("inf"))
    tl.store(keys_at + lanes, key, mask=lanes < width)
    tl.debug_barrier()
    ranks = tl.zeros_like(lanes)
    for start in range(0, width, COMPARED):
        others = start + tl.arange(0, COMPARED)
        real = others < width
        other_keys = tl.load(keys_at + others, mask=real, other=0.0)[None, :]
        other_ids = tl.load(ids_at + others, mask=real, other=0)[None, :]
        # Several entries may be padding with one id: the place decides among those.
        earlier_place = others[None, :] < lanes[:, None]
        earlier_id = other_ids < ids[:, None]
        earlier_id |= (other_ids == ids[:, None]) & earlier_place
        earlier = other_keys < key[:, None]
        earlier |= (other_keys == key[:, None]) & earlier_id
        ranks += tl.sum((earlier & real[None, :]).to(tl.int32), axis=1)
    tl.debug_barrier()
    return ranks


@triton.jit
def _selected(draft, target, n, lanes, shifted_at, width):
    """Return b and v of n drafts, over a ranked list; see `transport._selected`."""
    F = tl.cumsum(draft, axis=0)
    v = _power_step(F, draft, n)
    D = _power(F, n) - tl.cumsum(target, axis=0)
    real = lanes < width
    from_left = tl.maximum(tl.associative_scan(D, 0, _larger), 0.0)
    from_right = tl.associative_scan(tl.where(real, D, -float("inf")), 0, _larger, reverse=True)
    g = tl.minimum(from_left, from_right)
    tl.store(shifted_at + lanes, tl.where(g == D, g, float("inf")), mask=real)
    tl.store(shifted_at + width + lanes, g, mask=real)
    tl.debug_barrier()
    before = real & (lanes > 0)
    touching = tl.load(shifted_at + lanes - 1, mask=before, other=0.0) < float("inf")
    change = g - tl.load(shifted_at + width + lanes - 1, mask=before, other=0.0)
    tl.debug_barrier()
    along = touching & (g == D) & (change != 0)
    return tl.where(along, v, tl.maximum(target + change, 0.0)), v


@triton.jit
def _label(q, b, v, rank, uniform, test, lanes, width):
    """Return the label of a draft of a given rank; see `transport.labels`."""
    moved = tl.where(lanes < width, b - v, 0.0)
    excess = entry(moved, lanes, rank)
    side = tl.where(excess > 0, 1.0, tl.where(excess < 0, -1.0, 0.0))
    moved *= side
    reach = entry(tl.cumsum(tl.maximum(moved, 0.0), axis=0), lanes, rank)
    position = uniform * tl.abs(excess) - reach
    passed = tl.cumsum(tl.minimum(moved, 0.0), axis=0) > position
    partner = tl.minimum(tl.sum((passed & (lanes < width)).to(tl.int32), axis=0), width - 1)
    density = v / tl.maximum(q, _TINY)
    gap = (entry(density, lanes, partner) - entry(density, lanes, rank)) * side
    takes = test * (entry(q, lanes, rank) * gap) < tl.abs(excess)
    # A giver that does not rank above its receiver is matched by rounding only: no exchange.
    takes &= (gap > 0) & ((partner - rank) * side > 0)
    return tl.where(takes, partner, rank)


@triton.jit
def judge_nodes(
    token_ids,
    parents,
    draws,
    draft_ids,
    draft_probs,
    logits,
    normalisers,
    rows,
    uniforms,
    ids_out,
    draft_out,
    target_out,
    scratch,
    child_out,
    place_out,
    drafts_out,
    faults_out,
    nodes,
    num_draws,
    width,
    vocab,
    RULE: tl.constexpr,
    IN_LOGS: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Look for the faults of a node, and select one of its children."""
    request, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    real = lanes < width
    tree_at, place = request * nodes, request * nodes + node
    list_at = place * width
    row = tl.load(rows + place)
    normaliser = tl.load(normalisers + row)
    ids = tl.load(draft_ids + list_at + lanes, mask=real, other=0)
    draft = tl.load(draft_probs + list_at + lanes, mask=real, other=0.0)
    values = tl.load(logits + row * vocab + ids, mask=real, other=0.0)
    target = _normalised(values, normaliser, IN_LOGS)

    order = tl.arange(0, DRAWS)
    within = order < num_draws
    draws_at = request * num_draws
    children = tl.load(draws + draws_at + order, mask=within, other=0)
    here = (children > 0) & (tl.load(parents + tree_at + children, mask=within, other=-1) == node)
    drafts = tl.sum(here.to(tl.int32), axis=0)

    faults = tl.where(normaliser - normaliser != 0, _TARGET_NOT_FINITE, 0)
    sum_is_one = tl.abs(tl.sum(draft, axis=0) - 1) <= _TOLERANCE
    # Written so that NaN is a fault too.
    sound = sum_is_one & (tl.sum((real & ~(draft >= 0)).to(tl.int32), axis=0) == 0)
    faults |= tl.where((drafts > 0) & ~sound, _DRAFT_NOT_NORMALISED, 0)

    ranked = drafts > 0 if RULE == "gbv" else (drafts > 1) & (RULE == "otbv")
    selected = draft
    highest = draft
    if ranked:
        ratio = target / tl.where(draft > 0, draft, 1.0)
        ranks = _ranks(ids, draft, ratio, lanes, draft_ids + list_at, scratch + 2 * list_at, width)
        to = list_at + ranks
        tl.store(ids_out + to, ids, mask=real)
        tl.store(draft_out + to, draft, mask=real)
        tl.store(target_out + to, tl.where(draft > 0, target, 0.0), mask=real)
        tl.debug_barrier()
        ids = tl.load(ids_out + list_at + lanes, mask=real, other=0)
        draft = tl.load(draft_out + list_at + lanes, mask=real, other=0.0)
        target = tl.load(target_out + list_at + lanes, mask=real, other=0.0)
        tl.debug_barrier()
        selected = draft
        if RULE == "otbv":
            selected, highest = _selected(
                draft, target, drafts, lanes, scratch + 2 * list_at, width
            )

    best_score = -1
    best_child = 0
    best_place = 0
    for number in range(num_draws):
        child = tl.load(draws + draws_at + number)
        is_here = tl.load(parents + tree_at + child) == node
        if is_here & (child > 0):
            token = tl.load(token_ids + tree_at + child)
            matches = real & (ids == token) & (draft > 0)
            faults |= tl.where(tl.sum(matches.to(tl.int32), axis=0) == 0, _IMPOSSIBLE_DRAFT, 0)
            token_place = _first_lane(matches, lanes, BLOCK)
            label = token_place
            if RULE == "otbv":
                if drafts > 1:
                    numbers = uniforms + (request * num_draws + number) * 2
                    label = _label(
                        draft,
                        selected,
                        highest,
                        token_place,
                        tl.load(numbers),
                        tl.load(numbers + 1),
                        lanes,
                        width,
                    )
            # The highest label wins, the first drafted among equals.
            if label > best_score:
                best_score = label
                best_child = child.to(tl.int32)
                best_place = token_place
    tl.store(ids_out + list_at + lanes, ids, mask=real)
    tl.store(draft_out + list_at + lanes, selected, mask=real)
    tl.store(target_out + list_at + lanes, target, mask=real)
    tl.store(child_out + place, best_child)
    tl.store(place_out + place, best_place)
    tl.store(drafts_out + place, drafts)
    tl.store(faults_out + place, faults)


@triton.jit
def judge_paths(
    draft_probs,
    target_probs,
    child_at,
    place_at,
    drafts_at,
    node_faults,
    tests,
    path_nodes,
    accepted_out,
    stop_out,
    weight_out,
    bonus_out,
    faults_out,
    nodes,
    length,
    width,
    tests_stride,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    """Follow the selected children of a request's tree, and test every prefix of that path."""
    request = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    real = lanes < width
    tree_at = request * nodes

    all_nodes = tl.arange(0, NODES)
    flags = tl.load(node_faults + tree_at + all_nodes, mask=all_nodes < nodes, other=0)
    tl.store(faults_out + request, tl.reduce(flags, 0, _either).to(tl.int64))

    K = tl.load(drafts_at + tree_at)
    node = tl.zeros_like(K)
    depth = tl.zeros_like(K)
    below = tl.zeros_like(tl.load(draft_probs + tree_at * width))
    joint = below + 1.0
    log_ratio = below
    largest = below
    weight = below + 1.0
    stop_weight = below + 1.0
    accepted = tl.zeros_like(K)
    stop = tl.zeros_like(K)
    bonus = tl.where(K > 0, 0, 1)
    going = K >= 0  # true: the path goes on, or for `token` every test has passed
    for step in range(length + 1):
        ends = tl.where(step < length, tl.load(drafts_at + tree_at + node) == 0, True)
        list_at = (tree_at + node) * width
        inner = real & ~ends
        draft = tl.load(draft_probs + list_at + lanes, mask=inner, other=0.0)
        target = tl.load(target_probs + list_at + lanes, mask=inner, other=0.0)
        place = tl.load(place_at + tree_at + node)
        if RULE == "gbv":
            F = tl.cumsum(draft, axis=0)
            chance = entry(draft, lanes, place)
            beneath = entry(F, lanes, place) - chance
            if K > 1:
                whole = _power_step(tl.zeros_like(joint) + 1.0, joint, K)
                draft = _power_step(below + joint * F, joint * draft, K)
                draft /= tl.where(whole > 0, whole, 1.0)
                tl.store(draft_probs + list_at + lanes, draft, mask=inner & going)
            below += joint * beneath
            joint *= chance
            total = below + joint
            total = tl.where(total > 0, total, 1.0)
            below /= total
            joint /= total

        test_at = tests + request * tests_stride + step
        if RULE != "token":
            kept = tl.sum(tl.minimum(weight * target, draft), axis=0)
            rest = tl.maximum(weight - kept, 0.0)
            missing = tl.where(weight == 1, 1.0, 1 - weight)
            chance = tl.where(weight == 1, 1.0, rest / (rest + missing))
            chance = tl.where(ends, weight, chance)
            uniform = tl.load(test_at - 1, mask=step > 0, other=2.0)
            if going & (uniform < chance):
                accepted = depth
                stop = node
                stop_weight = tl.where(ends, 1.0, weight)
                bonus = ends.to(tl.int32)

        p = entry(target, lanes, place)
        b = entry(draft, lanes, place)
        ratio = tl.where(b > 0, p / tl.where(b > 0, b, 1.0), (p > 0).to(tl.float64))
        if RULE == "token":
            if going:
                stop = node
                accepted = depth
                bonus = ends.to(tl.int32)
            uniform = tl.load(test_at, mask=~ends, other=2.0)
            going = going & ~ends & (uniform < ratio)
        else:
            going = going & ~ends
            log = tl.where(ratio > 0, tl.log(tl.maximum(ratio, _TINY)), -float("inf"))
            log_ratio += tl.minimum(log, _LARGEST_LOG)
            largest = tl.maximum(largest, log_ratio)
            weight = tl.where(going, tl.exp(log_ratio - largest), weight)
        if going:
            node = tl.load(child_at + tree_at + node)
            depth += 1
        tl.store(path_nodes + request * length + step, node.to(tl.int64), mask=step < length)
    tl.store(accepted_out + request, accepted.to(tl.int64))
    tl.store(stop_out + request, stop)
    tl.store(weight_out + request, stop_weight)
    tl.store(bonus_out + request, bonus)


@triton.jit
def draw_corrections(
    ids_at,
    draft_probs,
    logits,
    normalisers,
    rows,
    stop_at,
    weight_at,
    bonus_at,
    uniforms,
    weights,
    token_out,
    nodes,
    width,
    vocab,
    uniforms_stride,
    IN_LOGS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Draw a request's last token from ``max(weight p - draft, 0)``, in vocabulary order."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.load(stop_at + request)
    weight = tl.load(weight_at + request)
    row = tl.load(rows + request * nodes + node)
    normaliser = tl.load(normalisers + row)
    row_at, weights_at = logits + row * vocab, weights + request * vocab
    columns = tl.arange(0, PIECE)
    for start in range(0, vocab, PIECE):
        real = start + columns < vocab
        values = tl.load(row_at + start + columns, mask=real, other=0.0)
        p = _normalised(values, normaliser, IN_LOGS)
        tl.store(weights_at + start + columns, p * tl.maximum(weight, _TRACE), mask=real)
    tl.debug_barrier()

    lanes = tl.arange(0, BLOCK)
    list_at = (request * nodes + node) * width
    listed = (lanes < width) & (tl.load(bonus_at + request) == 0)
    ids = tl.load(ids_at + list_at + lanes, mask=listed, other=0)
    draft = tl.load(draft_probs + list_at + lanes, mask=listed, other=0.0)
    listed &= draft > 0  # padding has the ids of other tokens
    p = _normalised(tl.load(row_at + ids, mask=listed, other=0.0), normaliser, IN_LOGS)
    tl.store(weights_at + ids, tl.maximum(weight * p - draft, p * _TRACE), mask=listed)
    tl.debug_barrier()

    # The piece in which the token lies, then the token within it.
    pieces = tl.arange(0, PIECES)
    masses = tl.zeros((PIECES,), tl.float64)
    for start in range(0, vocab, PIECE):
        part = tl.load(weights_at + start + columns, mask=start + columns < vocab, other=0.0)
        masses = tl.where(pieces == start // PIECE, tl.sum(part, axis=0), masses)
    ends = tl.cumsum(masses, axis=0)
    uniform = tl.maximum(tl.load(uniforms + request * uniforms_stride), _LEAST_UNIFORM)
    threshold = uniform * entry(ends, pieces, PIECES - 1)
    piece = _first_lane((ends > threshold) & (masses > 0), pieces, PIECES)
    before = entry(ends, pieces, piece) - entry(masses, pieces, piece)
    at = piece * PIECE + columns
    part = tl.load(weights_at + at, mask=at < vocab, other=0.0)
    above = (before + tl.cumsum(part, axis=0) > threshold) & (part > 0)
    first = tl.min(tl.where(above, at, vocab), axis=0)
    # The last token that can be drawn, should rounding leave the threshold unreached.
    last = tl.max(tl.where(part > 0, at, 0), axis=0)
    token = tl.where(first < vocab, first, last)
    tl.store(token_out + request, token.to(tl.int64))
