"""Small layers of a model by one kernel each, on a GPU: norms, rotations, activations.

Between its products, a layer of Llama launches some thirty kernels that take longer to start than
to run. Here they are five. Which layers compute what ours do is not guessed from names: the code of
a layer's forward must be that of Llama's, as it is in most architectures of transformers. All other
layers stay as they are, and are counted.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    rotate_half,
)

from eaglegbv.utils import power_of_two

_ROTATE = apply_rotary_pos_emb.__name__
_WIDEST_NORM = 1 << 16  # entries of the longest row that a program norms
_LANES = 1024  # entries of a row that a program gates


def fuse_layers(model: nn.Module) -> Counter[str]:
    """Let the layers of ``model`` run by kernels where they can; it is on their device.

    Returns how many norms, activations and rotations do, and as ``"other norms"`` and so on how
    many of each do not.
    """
    counts: Counter[str] = Counter()
    for module in model.modules():
        kind: Any = type(module)  # a type checker does not know classes as keys
        code = _code(kind.forward)
        if "norm" in kind.__name__.lower() and not [*module.children()]:
            fits = code == _code(LlamaRMSNorm.forward) and _fits_norm(module)
            _change(module, _norm if fits else None, "norms", counts)
        elif isinstance(getattr(module, "act_fn", None), nn.Module):
            unit = isinstance(module.act_fn, SiLUActivation | nn.SiLU)
            fits = code == _code(LlamaMLP.forward) and unit
            _change(module, _mlp if fits else None, "activations", counts)
        elif _ROTATE in kind.forward.__code__.co_names:
            _change(module, _rotating(kind), "rotations", counts)
    return counts


def _code(function: Callable[..., Any]) -> tuple[object, ...]:
    """Return what a function does, apart from its name and place."""
    code = inspect.unwrap(function).__code__
    return code.co_code, code.co_names, code.co_consts, code.co_varnames


def _change(
    module: nn.Module, forward: Callable[..., Tensor] | None, what: str, counts: Counter[str]
) -> None:
    """Give a module another ``forward``, unless it is None, and count it."""
    if forward is None:
        counts[f"other {what}"] += 1
        return
    # A function on the module itself would make a cycle, and keep the weights after their user.
    kind: Any = type(module)
    module.__class__ = _variant(kind, forward)
    counts[what] += 1


@cache
def _variant(kind: Any, forward: Callable[..., Tensor]) -> type[nn.Module]:  # noqa: ANN401
    named = {"__module__": kind.__module__, "forward": forward}
    variant: type[nn.Module] = type(kind.__name__, (kind,), named)
    return variant


def _fits_norm(norm: nn.Module) -> bool:
    weight = norm.weight
    return isinstance(weight, Tensor) and weight.dim() == 1 and len(weight) <= _WIDEST_NORM


@cache
def _rotating(kind: Any) -> Callable[..., Any] | None:  # noqa: ANN401
    """Return the forward of an attention with our rotation in place of its module's, or None."""
    forward = kind.forward
    module_names = forward.__globals__
    half = module_names.get(rotate_half.__name__)
    known = half is not None and _code(half) == _code(rotate_half)
    if not known or _code(module_names[_ROTATE]) != _code(apply_rotary_pos_emb):
        return None
    changed = FunctionType(
        forward.__code__,
        {**module_names, _ROTATE: rotated},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _norm(norm: Any, hidden_states: Tensor) -> Tensor:  # noqa: ANN401  any of many classes
    return normed(hidden_states, norm.weight, norm.variance_epsilon)


def _mlp(mlp: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    down: Tensor = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
    return down


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` ``[..., width]``, each row divided by its root mean square, times ``weight``.

    The quotient is rounded to the dtype of ``x`` before it is multiplied.
    """
    from eaglegbv.layer_kernels import ROUNDED, norm_rows

    width = x.shape[-1]
    rows = _rows_of_heads(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(width)
    norm_rows[(rows.shape[0] * rows.shape[1],)](
        rows,
        weight,
        out,
        eps,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        width,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **ROUNDED,
    )
    return out if weight.dtype is x.dtype else out.to(torch.promote_types(x.dtype, weight.dtype))


def rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as transformers' ``apply_rotary_pos_emb`` does.

    Args:
        q: ``[1, heads, rows, dim]``.
        k: ``[1, kv_heads, rows, dim]``.
        cos: ``[1, rows, dim]``, the cosines, twice; of the same dtype.
        sin: ``[1, rows, dim]``, likewise.
        unsqueeze_dim: 1; others are rotated by transformers itself.
    """
    alone = unsqueeze_dim == 1 and len(q) == len(k) == len(cos) == 1
    if not alone or {k.dtype, cos.dtype, sin.dtype} != {q.dtype}:
        turned: tuple[Tensor, Tensor] = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
        return turned
    rows = rotated_rows(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    queries, keys = (part.transpose(0, 1).unsqueeze(0) for part in rows)
    return queries, keys


def rotated_rows(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate ``q`` ``[rows, heads, dim]`` and ``k`` ``[rows, kv_heads, dim]``.

    Angles are ``[rows, dim]``; the first half of the sines is negative if they are ``signed``.
    """
    from eaglegbv.layer_kernels import ROUNDED, rotate_rows

    q = _contiguous_lanes(q)
    k = _contiguous_lanes(k)
    cos = cos.contiguous()
    sin = sin.contiguous()
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    queries = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    keys = torch.empty((rows, kv_heads, dim), dtype=k.dtype, device=k.device)
    rotate_rows[(rows, heads + kv_heads)](
        q,
        k,
        cos,
        sin,
        queries,
        keys,
        heads,
        kv_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        dim,
        dim // 2,
        SIGNED=signed,
        BLOCK=power_of_two(dim // 2),
        num_warps=1,
        **ROUNDED,
    )
    return queries, keys


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, both ``[..., width]``; the first factor is rounded before."""
    from eaglegbv.layer_kernels import ROUNDED, gate_rows

    width = gate.shape[-1]
    gates, ups = (_contiguous_lanes(part.reshape(-1, width)) for part in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_rows[(len(gates), -(-width // _LANES))](
        gates, ups, out, gates.stride(0), ups.stride(0), width, BLOCK=_LANES, **ROUNDED
    )
    return out


def _rows_of_heads(x: Tensor) -> Tensor:
    """Return ``x`` ``[..., heads, width]`` as ``[rows, heads, width]``, a view if possible."""
    x = x.unsqueeze(0) if x.dim() < 3 else x
    return _contiguous_lanes(x.reshape(-1, *x.shape[-2:]))


def _contiguous_lanes(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
