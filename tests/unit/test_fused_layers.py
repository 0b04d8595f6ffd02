"""Layers by one kernel each compute what transformers' own do, interpreted on a CPU.

Triton's interpreter cuts numbers off to bfloat16, where a GPU rounds them: there they may differ by
a unit of the last place for each number on the way. How numbers are rounded shows in float16.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from support.launches import launches
from support.tiny_models import LAYERS, tiny_model
from torch import Tensor
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from eaglegbv.attention.base import AttentionCall, pack
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.drafters.eagle_model import Rotation
from eaglegbv.fused_layers import _rotating, fuse_layers, gated, normed, rotated
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.self_check import Probe

pytest.importorskip("triton", reason="Triton, which runs the kernels, is not installed")
from eaglegbv import layer_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # else interpreted
KERNELS = ("norm_rows", "rotate_rows", "gate_rows", "write_rows")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}  # a few for float32
EXACT = tuple(dtype for dtype in DTYPES if DEVICE.type == "cuda" or dtype is not torch.bfloat16)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers run by kernels on the CPU too."""
    for module in ("eaglegbv.models.hf", "eaglegbv.attention.kv_cache"):
        monkeypatch.setattr(f"{module}.runs_kernels", lambda _: True)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def assert_rounded_alike(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is expected.dtype
    ulps = 1 if expected.dtype in EXACT else 3
    torch.testing.assert_close(found, expected, rtol=ulps * ULP[expected.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (1, 3, 64), (1, 3, 4, 24)])
def test_norms(shape, dtype):
    norm = llama.LlamaRMSNorm(shape[-1]).to(DEVICE, dtype)
    norm.weight.data = numbers(shape[-1], dtype=dtype, seed=1)
    x = numbers(*shape, dtype=dtype)
    assert_rounded_alike(normed(x, norm.weight, norm.variance_epsilon), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_parts_of_a_product(dtype):
    whole = numbers(1, 3, 160, dtype=dtype)
    q = whole[..., :96].view(1, 3, 4, 24)
    assert not q.is_contiguous()
    norm = llama.LlamaRMSNorm(24).to(DEVICE, dtype)
    assert_rounded_alike(normed(q, norm.weight, norm.variance_epsilon), norm(q))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations(dtype):
    """Of parts of a joint product, in Llama's form and in that of the heads."""
    rows, heads, kv_heads, dim = 3, 4, 2, 24
    whole = numbers(1, rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, _ = whole.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q = q.view(1, rows, heads, dim).transpose(1, 2)
    k = k.view(1, rows, kv_heads, dim).transpose(1, 2)
    angles = numbers(1, rows, dim // 2, seed=2)
    cos, sin = (f(angles).repeat(1, 1, 2).to(dtype) for f in (torch.cos, torch.sin))
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    for found, wanted in zip(rotated(q, k, cos, sin), expected, strict=True):
        # A GPU may fuse a product and a sum in float32. The largest numbers are about 8.
        exact = dtype in EXACT and dtype is not torch.float32
        allowed = 0 if exact else 16 * ULP[dtype]
        torch.testing.assert_close(found, wanted, rtol=0, atol=allowed)
        assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations_of_heads(dtype, monkeypatch):
    q, k = numbers(3, 4, 24, dtype=dtype), numbers(3, 2, 24, dtype=dtype, seed=1)
    angles = numbers(3, 1, 12, seed=2)
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
    monkeypatch.setattr("eaglegbv.drafters.eagle_model.runs_kernels", lambda _: True)
    for found, wanted in zip(rotation.both(q, k), (rotation(q), rotation(k)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=16 * ULP[dtype])
    trained = q.clone().requires_grad_()
    assert rotation.both(trained, k)[0].requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype):
    both = numbers(1, 3, 2 * 1100, dtype=dtype) * 8
    gate, up = both.chunk(2, dim=-1)
    assert_rounded_alike(gated(gate, up), torch.nn.functional.silu(gate) * up)


def test_keys_and_values_are_written_where_they_belong(monkeypatch):
    monkeypatch.setattr("eaglegbv.attention.kv_cache.runs_kernels", lambda _: True)
    pool = KVPool(2, 9, 3, 5, torch.bfloat16, DEVICE)
    whole = numbers(2, 30, dtype=torch.bfloat16)
    keys, values = (part.view(2, 3, 5) for part in whole.chunk(2, dim=1))
    pool.write(1, torch.tensor([7, 2], device=DEVICE), keys, values)
    for stored, new in ((pool.keys, keys), (pool.values, values)):
        assert torch.equal(stored[1, [7, 2]], new)
        stored[1, [7, 2]] = 0
        assert not stored.any()


NORMS = 2 * LAYERS + 1
EXPECTED: dict[str, dict[str, int]] = {
    "llama": {"norms": NORMS, "activations": LAYERS, "rotations": LAYERS},
    "qwen3": {"norms": NORMS + 2 * LAYERS, "activations": LAYERS, "rotations": LAYERS},
    # Its activation is another one, and its norms add 1 to their weight.
    "gemma2": {"other norms": 4 * LAYERS + 1, "other activations": LAYERS, "rotations": LAYERS},
    "opt": {"other norms": NORMS},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_models_with_such_layers_compute_the_same(kind):
    plain = tiny_model(kind).to(DEVICE)
    fused = copy.deepcopy(plain)
    counts = fuse_layers(fused)
    assert counts == EXPECTED[kind]
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]], device=DEVICE)
    with torch.no_grad():
        found, expected = (model(tokens, use_cache=False).logits for model in (fused, plain))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [type(m).__name__ for m in fused.modules()] == [
        type(m).__name__ for m in plain.modules()
    ]


def launches_of(kind: str, layers: int) -> Counter[str]:
    """Return what a forward of a model launches, but for attention itself."""
    target = HFTarget(tiny_model(kind, layers=layers).to(DEVICE), max_slots=64, native=False)
    batch = pack([Probe.segment()], DEVICE)
    heads, dim = target.model.config.num_attention_heads, target.pool.keys.shape[3]
    attended = torch.zeros((1, heads, dim), device=DEVICE)

    def attend(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        target.pool.write(call.layer, batch.slots, k, v)
        assert q.is_contiguous()  # kernels of attention need no copy
        return attended

    with launches({layer_kernels: KERNELS}) as names:
        target.run(batch, attend)
    return Counter(names)


@pytest.mark.parametrize(("kind", "count"), [("llama", 11), ("qwen3", 13)])
def test_a_layer_is_a_dozen_launches(kind, count, by_kernels):
    """Four products, two norms (four where queries and keys are normed), two sums, and one each to
    rotate, to write keys and values and to activate. Attention itself is not counted."""
    found = launches_of(kind, layers=3) - launches_of(kind, layers=2)
    assert found.total() == count, found
    assert sum(n for name, n in found.items() if name.startswith("aten")) == 6, found


def test_no_class_of_transformers_changes():
    before = qwen3.Qwen3Attention.forward
    model: Any = tiny_model("qwen3")
    fuse_layers(model)
    assert qwen3.Qwen3Attention.forward is before
    assert type(model.model.layers[0].self_attn) is not qwen3.Qwen3Attention
    assert type(tiny_model("qwen3").model.layers[0].self_attn) is qwen3.Qwen3Attention


def test_rotations_of_other_code_stay(monkeypatch):
    """Where a module rotates in a way of its own, its attention is left alone, and counted."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos - sin, k * cos - sin

    model: Any = tiny_model("mistral")
    module = type(model.model.layers[0].self_attn).__module__
    monkeypatch.setattr(f"{module}.apply_rotary_pos_emb", turned)
    _rotating.cache_clear()
    counts = fuse_layers(model)
    _rotating.cache_clear()
    assert counts["other rotations"] == LAYERS
    assert counts["rotations"] == 0
