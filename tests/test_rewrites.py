"""Rewritten graphs compute the same numbers, bit for bit, by the operations they are meant to."""

import operator

import pytest
import torch
from support.kept_graphs import KeptGraphs, changing
from torch import Tensor, nn

from eaglegbv.compiling import making_graphs
from eaglegbv.rewrites import rewrite

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations

WIDTHS = (8, 100, 257)
"""Not powers of two alone, by which a quotient and a product with the inverse are the same."""


@pytest.fixture
def rewritten() -> KeptGraphs:
    return KeptGraphs(changing(rewrite))


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", WIDTHS)
def test_mean_squares_are_sums_and_quotients(
    rewritten: KeptGraphs, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn((5, width), generator=generator, dtype=dtype)
    weight = torch.rand(width, generator=generator, dtype=dtype)
    found = rewritten.run(llama_norm, x, weight)
    assert torch.equal(found, llama_norm(x, weight))
    assert rewritten.targets() == [
        operator.mul,
        torch.sum,
        operator.truediv,
        operator.add,
        torch.rsqrt,
        operator.mul,
        operator.mul,
    ]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_torch_are_written_out(rewritten: KeptGraphs, width: int, affine: bool) -> None:
    norm = nn.RMSNorm(width, eps=1e-5, elementwise_affine=affine)
    if affine:
        nn.init.uniform_(norm.weight)
    x = torch.randn((2, 3, width), generator=torch.Generator().manual_seed(width))
    with torch.no_grad():
        assert torch.equal(rewritten.run(norm, x), norm(x))
    assert torch.rms_norm not in rewritten.targets()
    assert torch.rsqrt in rewritten.targets()


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (nn.RMSNorm(8, eps=1e-5), torch.bfloat16),  # computed in floats that are wider
        (nn.RMSNorm((4, 8), eps=1e-5), torch.float32),  # of more than rows
        (nn.RMSNorm(8), torch.float32),  # whose addend is torch's to choose
    ],
)
def test_other_norms_are_left_as_they_are(
    rewritten: KeptGraphs, norm: nn.RMSNorm, dtype: torch.dtype
) -> None:
    norm = norm.to(dtype)
    x = torch.randn((3, 4, 8), generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        assert torch.equal(rewritten.run(norm, x), norm(x))
    assert rewritten.targets() == [torch.rms_norm]


def other_means_and_powers(x: Tensor, halves: Tensor) -> tuple[Tensor, ...]:
    return (
        x.mean(),
        x.mean(0, keepdim=True),
        x.mean(-1),
        x.pow(3),
        halves.pow(2).mean(-1, keepdim=True),
    )


def test_other_means_and_powers_are_left_as_they_are(rewritten: KeptGraphs) -> None:
    x = torch.randn((3, 7), generator=torch.Generator().manual_seed(0))
    found = rewritten.run(other_means_and_powers, x, x.half())
    for own, expected in zip(found, other_means_and_powers(x, x.half()), strict=True):
        assert torch.equal(own, expected)
    assert rewritten.targets() == ["mean"] * 3 + ["pow"] * 2 + ["mean"]


def arithmetic(x: Tensor, halves: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
    return x * 3 + 1e-5, x / 7 - 1e-5, 2 - x, x + True, halves * 1e-5, whole * 3, x.double() * 1e-5


def test_numbers_are_kept_where_they_round_alike(rewritten: KeptGraphs) -> None:
    x = torch.randn((3, 7), generator=torch.Generator().manual_seed(0))
    inputs = x, x.half(), torch.arange(5)
    found = rewritten.run(arithmetic, *inputs)
    for own, expected in zip(found, arithmetic(*inputs), strict=True):
        assert own.dtype is expected.dtype
        assert torch.equal(own, expected)
    [graph] = rewritten.graphs
    # 3, 1e-5, 7 of floats, and 1e-5 of doubles.
    assert sorted(value.item() for value in graph.buffers()) == pytest.approx([1e-5, 1e-5, 3, 7])
    assert all(not value.is_inference() for value in graph.buffers())


def test_kept_numbers_are_no_tensors_of_the_trace(rewritten: KeptGraphs) -> None:
    with torch.inference_mode():
        found = rewritten.run(lambda x: x * 3, torch.ones(2))
    assert torch.equal(found, torch.full((2,), 3.0))
    [graph] = rewritten.graphs
    assert [type(value) for value in graph.buffers()] == [Tensor]


def looked_at(x: Tensor, y: Tensor) -> Tensor:
    unused = y.shape[0]
    del unused
    return x * y.unsqueeze(1) + x * y.unsqueeze(1) + x * y.unsqueeze(0).squeeze(0)[None].mT


def test_calls_alike_are_one_and_what_is_unused_goes(rewritten: KeptGraphs) -> None:
    x, y = torch.rand(3, 4), torch.rand(3)
    assert torch.equal(rewritten.run(looked_at, x, y), looked_at(x, y))
    assert rewritten.targets().count("unsqueeze") == 2
    assert "size" not in rewritten.targets()


def odd_calls(x: Tensor, wide: Tensor, one: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.rms_norm(x, (7,), wide, 1e-5),  # stays of the type of x
        torch.rms_norm(x, normalized_shape=(7,), eps=1e-5),
        one.mean(-1, keepdim=True),
    )


def test_odd_calls_are_left_as_they_are(rewritten: KeptGraphs) -> None:
    x = torch.randn((3, 7), generator=torch.Generator().manual_seed(0))
    inputs = x, torch.rand(7).double(), torch.tensor(3.0)
    found = rewritten.run(odd_calls, *inputs)
    for own, expected in zip(found, odd_calls(*inputs), strict=True):
        assert own.dtype is expected.dtype
        assert torch.equal(own, expected)
    assert rewritten.targets() == [torch.rms_norm, torch.rms_norm, "mean"]


def test_zeros_keep_their_signs(rewritten: KeptGraphs) -> None:
    x = torch.ones(2)
    over, under = rewritten.run(lambda x: (x / 0.0, x / -0.0), x)
    assert torch.equal(over, x * torch.inf)
    assert torch.equal(under, x * -torch.inf)


def test_widths_that_may_change_are_left_alone() -> None:
    x = torch.rand(3, 4)
    rewritten = KeptGraphs(changing(rewrite))
    with making_graphs():
        compiled = torch.compile(
            lambda x: x.view(x.shape[0], x.shape[1]).mean(-1, keepdim=True),
            backend=rewritten,
            dynamic=True,
        )
        for wide in (x, torch.rand(5, 6)):
            assert torch.equal(compiled(wide), wide.mean(-1, keepdim=True))
    assert rewritten.targets() == ["view", "mean"]


def test_elsewhere_than_on_a_cpu_nothing_is_written_out(rewritten: KeptGraphs) -> None:
    x = torch.empty((3, 8), device="meta")
    norm = nn.RMSNorm(8, eps=1e-5, device="meta")
    rewritten.run(lambda x: norm(x) * 3 + x.pow(2).mean(-1, keepdim=True), x)
    assert torch.rms_norm in rewritten.targets()
    assert {"pow", "mean"} <= set(rewritten.targets())
    assert not list(rewritten.graphs[0].buffers())
