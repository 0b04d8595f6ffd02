"""Triton kernels beside the products of a model: norms, rotations, activations, keys, masks.

Each rounds where tensor operations would, so results differ by the order of a sum alone.
:mod:`eaglegbv.fused_layers` launches them.
"""

import triton
import triton.language as tl

ROUNDED = {"enable_fp_fusion": False}
"""Options of kernels that round between a product and a sum; compilers fuse them otherwise, in the
dtype of the results.
"""


@triton.jit
def norm_rows(
    x,
    weight,
    out,
    eps,
    inner,
    outer_stride,
    inner_stride,
    width,
    BLOCK: tl.constexpr,
):
    """Divide a row by its root mean square, and multiply it with the weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < width
    row_at = x + (row // inner) * outer_stride + (row % inner) * inner_stride
    values = tl.load(row_at + columns, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, axis=0) / width
    normed = (values * tl.rsqrt(mean + eps)).to(out.dtype.element_ty).to(tl.float32)
    factors = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    result = (factors * normed).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, result, mask=real)


@triton.jit
def rotate_rows(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    heads,
    kv_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    angle_row,
    half,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate one head of a row, a query's or a key's; the results are contiguous.

    ``SIGNED`` says that the sines of the first half of a head are negative.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    real = lanes < half
    is_query = real & (head < heads)
    is_key = real & (head >= heads)
    kv_head = tl.maximum(head - heads, 0)

    q_at = q + row * q_row + tl.minimum(head, heads - 1) * q_head + lanes
    k_at = k + row * k_row + kv_head * k_head + lanes
    q_first = tl.load(q_at, mask=is_query, other=0.0).to(tl.float32)
    k_first = tl.load(k_at, mask=is_key, other=0.0).to(tl.float32)
    q_second = tl.load(q_at + half, mask=is_query, other=0.0).to(tl.float32)
    k_second = tl.load(k_at + half, mask=is_key, other=0.0).to(tl.float32)
    first = tl.where(is_query, q_first, k_first)
    second = tl.where(is_query, q_second, k_second)

    dtype = q_out.dtype.element_ty
    angle_at = row * angle_row + lanes
    first_cos = tl.load(cos + angle_at, mask=real, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + angle_at, mask=real, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + angle_at + half, mask=real, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + angle_at + half, mask=real, other=0.0).to(tl.float32)
    first_sin = first_sin if SIGNED else -first_sin
    first_kept = (first * first_cos).to(dtype).to(tl.float32)
    first_turned = (second * first_sin).to(dtype).to(tl.float32)
    second_kept = (second * second_cos).to(dtype).to(tl.float32)
    second_turned = (first * second_sin).to(dtype).to(tl.float32)
    turned_first = (first_kept + first_turned).to(dtype)
    turned_second = (second_kept + second_turned).to(dtype)

    q_to = q_out + (row * heads + head) * 2 * half + lanes
    k_to = k_out + (row * kv_heads + kv_head) * 2 * half + lanes
    tl.store(q_to, turned_first, mask=is_query)
    tl.store(q_to + half, turned_second, mask=is_query)
    tl.store(k_to, turned_first, mask=is_key)
    tl.store(k_to + half, turned_second, mask=is_key)


@triton.jit
def gate_rows(gate, up, out, gate_row, up_row, width, BLOCK: tl.constexpr):
    """Multiply ``up`` with the sigmoid linear unit of ``gate``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    dtype = out.dtype.element_ty
    gates = tl.load(gate + row * gate_row + columns, mask=real, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + columns, mask=real, other=0.0).to(tl.float32)
    opened = (gates / (1.0 + tl.exp(-gates))).to(dtype).to(tl.float32)
    tl.store(out + row * width + columns, (opened * ups).to(dtype), mask=real)


@triton.jit
def write_rows(
    keys,
    values,
    slots,
    pool_keys,
    pool_values,
    keys_row,
    keys_head,
    values_row,
    values_head,
    heads,
    dim,
    BLOCK: tl.constexpr,
):
    """Copy the keys and values of a row to its slot of a pool."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    width = heads * dim
    real = columns < width
    head, lane = columns // dim, columns % dim
    to = tl.load(slots + row) * width + columns
    key = tl.load(keys + row * keys_row + head * keys_head + lane, mask=real, other=0.0)
    value = tl.load(values + row * values_row + head * values_head + lane, mask=real, other=0.0)
    tl.store(pool_keys + to, key, mask=real)
    tl.store(pool_values + to, value, mask=real)


@triton.jit
def pack_masks(
    facts,
    visible,
    positions,
    tree_positions,
    octets_out,
    window,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pack what the new tokens of a request see, one bit for each of its keys, row by row.

    A request's ``facts``, seven int64: new tokens, committed ones, pending ones; where its octets,
    its entries of ``visible``, and its positions begin, those of new tokens and of pending ones.
    ``visible`` that begin at -1 are in causal order.
    """
    header = facts + tl.program_id(1) * 7
    rows, context, pending = tl.load(header), tl.load(header + 1), tl.load(header + 2)
    octets_at, visible_at = tl.load(header + 3), tl.load(header + 4)
    keys = context + pending
    octets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, 8)
    bits = octets[:, None] * 8 + lanes[None, :].to(tl.int64)
    row = bits // keys
    key = bits - row * keys
    real = row < rows
    place = key - context  # among the pending tokens
    late = real & (place >= 0)

    named = late & (visible_at >= 0)
    listed = tl.load(visible + visible_at + row * pending + place, mask=named, other=0)
    causal = (visible_at < 0) & (place <= row + pending - rows)
    seen = real & ((place < 0) | causal)
    seen |= named & (listed != 0)
    if WINDOW:
        at = tl.load(positions + tl.load(header + 5) + row, mask=real, other=0)
        others = tl.load(tree_positions + tl.load(header + 6) + place, mask=late, other=0)
        seen &= at - tl.where(place < 0, key, others) < window
    values = tl.sum(tl.where(seen, 1, 0) << lanes[None, :], axis=1)
    last = (rows * keys + 7) // 8
    tl.store(octets_out + octets_at + octets, values.to(tl.uint8), mask=octets < last)
