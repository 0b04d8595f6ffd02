"""Queries and keys are rotated together, where nothing is in the way; numbers stay the same."""

from collections.abc import Callable

import pytest
import torch
from support.kept_graphs import KeptGraphs, changing
from torch import Tensor

from eaglegbv.twins import join_twins

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations

HEADS, KEY_HEADS, DIM = 4, 2, 8
SIZES = [HEADS * DIM, KEY_HEADS * DIM, KEY_HEADS * DIM]


@pytest.fixture
def joined() -> KeptGraphs:
    return KeptGraphs(changing(lambda module: join_twins(module.graph)))


def tensors(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a product of ``rows``, cosines and sines."""
    generator = torch.Generator().manual_seed(rows)
    product = torch.randn((1, rows, sum(SIZES)), generator=generator)
    angles = torch.rand((1, rows, DIM), generator=generator)
    return product, angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = DIM // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def heads_of(part: Tensor) -> Tensor:
    return part.view((1, part.shape[1], -1, DIM)).transpose(1, 2)


def rows_of(heads: Tensor) -> Tensor:
    return heads.squeeze(0).transpose(0, 1)


def as_in_transformers(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (heads_of(part) for part in product.split_with_sizes(SIZES, dim=-1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(rows_of(x) for x in (rotated(q, cos, sin), rotated(k, cos, sin), v))


def with_as_many_keys(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k = (heads_of(part) for part in product.split_with_sizes([32, 32], dim=-1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotated(q, cos, sin), rotated(k, cos, sin)


def as_in_a_head(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos[0].unsqueeze(-2), sin[0].unsqueeze(-2)
    q, k, v = (p.unflatten(-1, (-1, DIM)) for p in product[0].split_with_sizes(SIZES, dim=-1))
    turned = []
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        turned.append(torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin))
    return *turned, v


def with_values_first(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    v, q, k = (heads_of(part) for part in product.split_with_sizes([16, 32, 16], dim=-1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def read_on_the_way(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (heads_of(part) for part in product.split_with_sizes(SIZES, dim=-1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = rotated(q, cos, sin), rotated(k, cos, sin)
    return *turned, v, k.sum()  # of keys as they were


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "attention",
    [as_in_transformers, with_as_many_keys, as_in_a_head, with_values_first, read_on_the_way],
)
def test_what_rotates_alike_rotates_at_once(
    joined: KeptGraphs, attention: Callable[..., tuple[Tensor, ...]], rows: int
) -> None:
    inputs = tensors(rows)
    found = joined.run(attention, *inputs)
    for own, expected in zip(found, attention(*inputs), strict=True):
        assert torch.equal(own, expected)
    assert joined.targets().count(torch.cat) == 1
    assert joined.targets().count("split_with_sizes") == 1
    assert joined.targets().count("narrow") == (4 if attention is read_on_the_way else 2)


def test_rows_are_told_apart_behind_all_that_is_alike(joined: KeptGraphs) -> None:
    joined.run(as_in_transformers, *tensors(5))
    assert joined.targets().count("squeeze") == 2  # of queries with keys, and of values
    assert joined.targets()[-2:] == ["narrow", "narrow"]


def by_angles_of_their_own(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (heads_of(part) for part in product.split_with_sizes(SIZES, dim=-1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotated(q, cos, sin), rotated(k, sin, cos), v


def by_angles_for_each_head(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k = (heads_of(part) for part in product.split_with_sizes([32, 32], dim=-1))
    cos, sin = (torch.cat([part.unsqueeze(1) * n for n in range(4)], dim=1) for part in (cos, sin))
    return rotated(q, cos, sin), rotated(k, cos, sin)


def in_another_order(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (heads_of(part) for part in product.split_with_sizes(SIZES, dim=-1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = rotated(q, cos, sin)
    scale = turned.square().sum()  # is needed before keys are rotated
    return turned, rotated(k, cos, sin), v * scale


def along_the_heads(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k = (heads_of(part) for part in product.split_with_sizes([32, 32], dim=-1))
    return tuple(
        torch.cat((-x[:, 2:], x[:, :2]), dim=1) * cos.unsqueeze(1) + sin.unsqueeze(1)
        for x in (q, k)
    )


def a_part_read_as_it_is(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = product.split_with_sizes(SIZES, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotated(heads_of(q), cos, sin), rotated(heads_of(k), cos, sin), q.sum() + v.sum()


def a_part_taken_twice(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    parts = product.split_with_sizes(SIZES, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = rotated(heads_of(parts[0]), cos, sin), rotated(heads_of(parts[1]), cos, sin)
    return q, k, parts[0].sum(), parts[2]


def rows_become_heads(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    parts = product[0].split_with_sizes([32, 32], dim=-1)
    q, k = (part.contiguous().view((-1, DIM)) for part in parts)
    return rotated(q, cos[0, :1], sin[0, :1]), rotated(k, cos[0, :1], sin[0, :1])


def split_by_rows(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    parts = product[0].split_with_sizes([1, 2], dim=0)
    cos, sin = cos[:, :1], sin[:, :1]
    return tuple(rotated(part.unflatten(-1, (-1, DIM)), cos, sin) for part in parts)


def split_by_place(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k = (heads_of(part) for part in product.split_with_sizes([32, 32], -1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotated(q, cos, sin), rotated(k, cos, sin)


def of_more_dimensions(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    parts = product[0].split_with_sizes([32, 32], dim=-1)
    q, k = (part.unflatten(-1, (-1, DIM)) for part in parts)
    cos, sin = cos[:, :1].unsqueeze(1), sin[:, :1].unsqueeze(1)
    return rotated(q, cos, sin), rotated(k, cos, sin)


def angles_changed_between(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k = (heads_of(part) for part in product.split_with_sizes([32, 32], dim=-1))
    cos, sin = cos.unsqueeze(1) + 0, sin.unsqueeze(1)
    turned = rotated(q, cos, sin)
    cos.mul_(2)
    return turned, rotated(k, cos, sin)


def angles_changed_by_an_operator(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k = (heads_of(part) for part in product.split_with_sizes([32, 32], dim=-1))
    cos, sin = cos.unsqueeze(1) + 0, sin.unsqueeze(1)
    turned = rotated(q, cos, sin)
    cos *= 2
    return turned, rotated(k, cos, sin)


def gated(product: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    gate, up = product.split_with_sizes([32, 32], dim=-1)
    return (torch.nn.functional.silu(gate) * up,)


@pytest.mark.parametrize(
    "attention",
    [
        by_angles_of_their_own,
        by_angles_for_each_head,
        in_another_order,
        along_the_heads,
        a_part_read_as_it_is,
        a_part_taken_twice,
        rows_become_heads,
        split_by_rows,
        split_by_place,
        of_more_dimensions,
        angles_changed_between,
        angles_changed_by_an_operator,
        gated,
    ],
)
def test_others_are_left_as_they_are(
    joined: KeptGraphs, attention: Callable[..., tuple[Tensor, ...]]
) -> None:
    inputs = tensors(3)
    found = joined.run(attention, *inputs)
    for own, expected in zip(found, attention(*inputs), strict=True):
        assert torch.equal(own, expected)
    assert "narrow" not in joined.targets()


def of_two_products(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    k, q = (heads_of(part) for part in product.split_with_sizes([32, 32], dim=-1))
    k, q = rotated(k, cos, sin), rotated(q, cos, sin)
    again = (product * 2).split_with_sizes([32, 32], dim=-1)
    own, other = (rotated(heads_of(part), cos, sin) for part in again)
    return k, own + q, other + q


def test_what_was_joined_may_be_read_by_other_twins(joined: KeptGraphs) -> None:
    inputs = tensors(3)
    found = joined.run(of_two_products, *inputs)
    for own, expected in zip(found, of_two_products(*inputs), strict=True):
        assert torch.equal(own, expected)
    assert joined.targets().count(torch.cat) == 2


def test_angles_may_be_changed_behind_twins(joined: KeptGraphs) -> None:
    def changed_behind(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        found = with_as_many_keys(product, cos + 0, sin)
        return *found, found[0].clone().add_(1)

    inputs = tensors(3)
    found = joined.run(changed_behind, *inputs)
    for own, expected in zip(found, changed_behind(*inputs), strict=True):
        assert torch.equal(own, expected)
    assert "narrow" in joined.targets()
