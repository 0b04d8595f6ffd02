"""Products with a matrix: packed, as it is, or of 8 bits."""

from collections.abc import Sequence

import pytest
import torch
from support.eight_bits import needs_int8
from support.packing import needs_packing
from torch import Tensor

from eaglegbv import fused_linears as products
from eaglegbv.fused_linears import (
    DenseProduct,
    PackedProduct,
    Product,
    QuantisedProduct,
    Quantization,
    packing_pays,
    product_of,
)


@needs_packing
def test_a_row_of_a_packed_product_does_not_depend_on_the_others() -> None:
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
def test_the_faster_product_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {"DenseProduct"}

    def seconds(timed: Sequence[Product], x: Tensor) -> float:
        [kind] = {type(product).__name__ for product in timed}
        return 3.0 if kind in slower else 1.0

    monkeypatch.setattr(products, "_time", seconds)
    # Sizes that nothing else asks for: what was found is kept.
    assert isinstance(product_of(torch.ones(23, 29), None, Quantization.NONE), PackedProduct)
    slower.add("PackedProduct")
    slower.remove("DenseProduct")
    assert isinstance(product_of(torch.ones(29, 23), None, Quantization.NONE), DenseProduct)
    assert isinstance(product_of(torch.ones(23, 29), None, Quantization.NONE), PackedProduct)
    assert packing_pays(1024, 1024, torch.float32, (1,))  # too large to be timed


@needs_packing
@torch.no_grad()
def test_one_row_is_multiplied_as_is_faster_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(timed: Sequence[Product], x: Tensor) -> float:
        return float(isinstance(timed[0], PackedProduct) == (len(x) == 1))

    monkeypatch.setattr(products, "_time", seconds)
    ran: list[int] = []
    run = PackedProduct.run

    def noted(product: PackedProduct, x: Tensor) -> Tensor:
        ran.append(x.numel() // x.shape[-1])
        return run(product, x)

    monkeypatch.setattr(PackedProduct, "run", noted)
    torch.manual_seed(0)
    weight, bias = torch.randn(19, 31), torch.randn(19)
    product = product_of(weight, bias, Quantization.NONE)
    assert isinstance(product, PackedProduct)
    for shape in ((1, 31), (1, 1, 31), (31,), (3, 31), (1, 2, 31), (0, 31)):
        x = torch.randn(shape)
        torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight, bias))
    assert ran == [3, 2, 0]


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 96), (12, 11), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_quantised_products_err_by_no_more_than_rounding(
    dtype: torch.dtype, sizes: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(0)
    inputs, outputs = sizes
    weight = torch.randn(outputs, inputs).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    x = torch.randn(2, 3, inputs).to(dtype)
    found = QuantisedProduct(weight, offset)(x)
    assert (found.dtype, found.shape) == (dtype, (2, 3, outputs))
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    # Half a step of 127 of the row's largest weight, and its scale in bfloat16; bfloat16 of what
    # is multiplied and of the result.
    size = x.double().abs().sum(dim=-1, keepdim=True) * weight.double().abs().amax(dim=1)
    bound = size * (0.5 / 127 + 2 * 2**-8) + (expected.abs() + 1) * 2**-7
    assert ((found.double() - expected).abs() <= bound).all()


@needs_int8
def test_integers_of_one_byte_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-126, 127, (40, 24), generator=generator).float()
    weight[:, 0] = 127  # so that a step is 1
    weight *= 2.0 ** torch.randint(-3, 4, (40, 1), generator=generator)
    x = torch.eye(24)
    assert torch.equal(QuantisedProduct(weight, None)(x), x @ weight.T)


@needs_int8
def test_a_row_of_a_quantised_product_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    product, x = QuantisedProduct(torch.randn(96, 64), None), torch.randn(70, 64)
    whole = product(x)
    for rows in (1, 2, 3, 4, 5, 7, 16, 33):
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])
    assert product(x[:0]).shape == (0, 96)
    strided = torch.randn(5, 128)[:, ::2]
    assert torch.equal(product(strided), product(strided.contiguous()))


@needs_int8
def test_rows_of_zeros_and_broken_inputs_stay_what_they_are() -> None:
    product = QuantisedProduct(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), None)
    found = product(torch.tensor([[1.0, 1.0], [torch.nan, 1.0]]))
    assert found[0].tolist() == [0.0, 3.0]
    assert found[1].isnan().all()
