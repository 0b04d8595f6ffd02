import weakref
from typing import Any

import pytest
import torch
from support.compilers import needs_packing
from support.tiny_models import tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eaglegbv import fused_linears
from eaglegbv.fused_linears import DenseProduct, PackedProduct, Product, prepare, product_of
from eaglegbv.models.hf import HFTarget


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything packed that can be, however small."""
    monkeypatch.setattr(fused_linears, "_PACKED_FROM", 0)


class Layers(nn.Module):
    """Three layers that read one tensor, one behind them, one never used, an output layer."""

    def __init__(self, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12, dtype=dtype)
        self.q, self.k, self.v = (nn.Linear(12, n, bias=bias, dtype=dtype) for n in (8, 4, 4))
        self.o = nn.Linear(16, 12, bias=bias, dtype=dtype)
        self.idle = nn.Linear(12, 3, dtype=dtype)
        self.output = nn.Linear(12, 11, bias=False, dtype=dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.embedding(token_ids)
        parts = torch.cat((self.q(x), self.k(x), self.v(x)), dim=-1)
        result: Tensor = self.output(x + self.o(parts))
        return result


TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize(
    ("dtype", "bias", "pays"),
    [
        (torch.float32, True, True),
        (torch.bfloat16, False, True),
        (torch.float64, True, True),
        (torch.float32, False, False),
    ],
)
@torch.no_grad()
def test_prepared_modules_compute_the_same(dtype, bias, pays, monkeypatch):
    monkeypatch.setattr(fused_linears, "_PACKED_FROM", 0 if pays else 1 << 20)
    torch.manual_seed(0)
    module = Layers(bias=bias, dtype=dtype)
    expected, names, before = module(TOKENS), list(module.state_dict()), torch.get_rng_state()
    prepare(module, lambda: module(TOKENS[:, :1]))
    assert torch.equal(torch.get_rng_state(), before)  # preparing draws no random numbers
    # bfloat16: a bit of a result's last place, of eight.
    rounded = 0.02 if dtype is torch.bfloat16 else None
    torch.testing.assert_close(module(TOKENS), expected, atol=rounded, rtol=rounded)
    assert list(module.state_dict()) == names
    # q, k and v are one product; what is not packed is joined all the same. bfloat16 is packed
    # where the CPU has it.
    packs = pays and fused_linears.can_pack(torch.zeros(1, dtype=dtype))
    assert module.q.weight.is_meta
    assert module.o.weight.is_meta == packs
    assert not module.idle.weight.is_meta
    assert not module.output.weight.is_meta


@torch.no_grad()
def test_parts_of_a_joint_product_never_mix_inputs():
    torch.manual_seed(0)
    module = Layers(bias=True, dtype=torch.float32)
    layers, (x, y) = (module.q, module.k, module.v), torch.randn(2, 3, 12)
    expected = [[layer(z) for layer in layers] for z in (x, y)]
    prepare(module, lambda: module(TOKENS))
    q, k, v = module.q, module.k, module.v
    torch.testing.assert_close(q(x), expected[0][0])
    torch.testing.assert_close(k(y), expected[1][1])  # another tensor in between
    torch.testing.assert_close(v(x), expected[0][2])
    torch.testing.assert_close(v(y), expected[1][2])  # out of order, alone
    for layer, found in ((v, expected[1][2]), (q, expected[1][0]), (k, expected[1][1])):
        torch.testing.assert_close(layer(y), found)


@torch.no_grad()
def test_layers_that_run_twice_and_shared_weights_stay():
    module = nn.Sequential(nn.Embedding(5, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False))
    twice = module[1]
    module[2].weight = module[0].weight

    def run() -> Tensor:
        result: Tensor = module[2](twice(twice(module[0](torch.arange(5)))))
        return result

    expected = run()
    prepare(module, run)
    assert module[1] is twice
    assert module[2].weight.data_ptr() == module[0].weight.data_ptr()
    torch.testing.assert_close(run(), expected)


@torch.no_grad()
def test_no_more_than_one_product_is_held_twice(monkeypatch):
    """Weights leave as they are joined: no model has to fit into memory twice."""
    module = nn.Sequential(*(Layers(bias=True, dtype=torch.float32) for _ in range(4)))
    joined = [weakref.ref(m.q.weight) for m in module]
    there = []

    def counted(weight: Tensor, *arguments: Any, **named: Any) -> Product:
        if len(weight) == 16:  # q, k and v
            there.append(sum(ref() is not None for ref in joined))
        return product_of(weight, *arguments, **named)

    monkeypatch.setattr(fused_linears, "product_of", counted)
    prepare(module, lambda: [part(TOKENS) for part in module])
    assert there == [4, 3, 2, 1]
    assert not any(ref() for ref in joined)


@pytest.mark.usefixtures("packing")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@torch.no_grad()
def test_what_is_compiled_is_joined_but_not_packed():
    module = Layers(bias=True, dtype=torch.float32)
    expected = module(TOKENS)
    prepare(module, lambda: module(TOKENS), compiled=module)
    assert module.q.weight.is_meta
    assert type(module.o) is nn.Linear
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS), expected)


@needs_packing
@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_oss"])
def test_no_linear_layer_of_a_model_is_left_out(name):
    target = HFTarget(tiny_model(name), max_slots=64)  # checks what it computes when it is built
    assert not any(type(m) is nn.Linear for m in target.model.modules())


@needs_packing
def test_a_row_of_a_packed_product_does_not_depend_on_the_others():
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64), torch.randn(33, 64)
    packed, dense = PackedProduct(weight, None), DenseProduct(weight, None)
    whole = packed(x)
    torch.testing.assert_close(whole, dense(x))
    for rows in (1, 2, 7, 16):
        assert torch.equal(packed(x[:rows]), whole[:rows])
    assert packed(x[:0]).shape == (0, 96)
    assert packed(x.view(1, 3, 11, 64)).shape == (1, 3, 11, 96)
    strided = torch.randn(5, 128)[:, ::2]
    torch.testing.assert_close(packed(strided), dense(strided))


@needs_packing
@torch.no_grad()
def test_matrices_are_packed_from_a_size_on():
    sizes = [(512, 512), (512, 511)]
    kinds = [type(product_of(torch.zeros(size), None)) for size in sizes]
    assert kinds == [PackedProduct, DenseProduct]
    compiled = product_of(torch.zeros(sizes[0]), torch.zeros(512), compiled=True)
    assert type(compiled) is DenseProduct


class RowCounts(TorchDispatchMode):
    """Notes how many rows oneDNN was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.seen.add(args[0].shape[:-1].numel())
        return func(*args, **(kwargs or {}))


@needs_packing
@torch.inference_mode()
def test_few_numbers_of_rows_reach_onednn_which_keeps_a_kernel_for_each():
    torch.manual_seed(0)
    weight = torch.randn(24, 16)
    packed, dense = PackedProduct(weight, None), DenseProduct(weight, None)
    counts = RowCounts()
    for rows in range(1, 520):
        x = torch.randn(1, rows, 16)
        with counts:
            product = packed(x)
        torch.testing.assert_close(product, dense(x))
    assert counts.seen >= set(range(1, 17))  # the rows of a draft tree are not padded
    assert len(counts.seen) <= 60
    assert max(counts.seen) <= 520 * 9 / 8
