"""A compiled head computes what the plain one does, for any number of rows.

As with targets the compiler's front end is what can go wrong, so its graphs are run as they are.
"""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from support.compilers import needs_compiler
from support.drafting import HEAD_DIM, HIDDEN, KV_HEADS, Pair, random_pair
from support.eight_bits import needs_int8
from torch import Tensor
from torch._dynamo.config import patch
from torch._dynamo.utils import counters

from eaglegbv.attention.base import Segment
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.drafters.eagle_model import Arch, HeadForward, Rows
from eaglegbv.errors import InvalidArgument
from eaglegbv.fused_linears import Quantization

OF_8_BITS = 0.03
"""Activations are rounded to bfloat16, by 2^-9 each, for five products in turn and four rows deep;
which of generated operations round is the compiler's to say."""

OF_SUMS = 1e-4
"""Generated code adds up in another order than PyTorch does."""

SLOTS = 1100
"""More than the positions whose angles are known from the start."""

PRODUCTS = 2 * 5 + 2 * 5 + 2 * 1
"""Of all graphs, each of one row and of any number: to read, to go on, and for logits.

To read it takes fc, joint q, k and v, o, joint gate and up, and down; to go on lm_head and not fc.
"""


def pool() -> KVPool:
    return KVPool(1, SLOTS, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))


def forward(pair: Pair, quantization: Quantization, backend: str | None) -> HeadForward:
    head = copy.deepcopy(pair.head)
    attention = TorchPagedAttention(pool())
    return HeadForward(head, attention, quantization=quantization, compile_backend=backend)


def results(head: HeadForward, pair: Pair, *, lengths: Sequence[int]) -> list[Tensor]:
    """Read a text, then go on from it by several numbers of rows, of one text and of two."""
    generator = torch.Generator().manual_seed(4)
    found: list[Tensor] = []
    for length in lengths:
        slots = torch.randperm(SLOTS, generator=generator)
        features = torch.randn((length, pair.head.config.feature_size), generator=generator)
        tokens = torch.arange(length) % 7
        text = Segment.causal(tokens, slots[:0], slots[:length])
        hidden = head.read([text], features)[-1:]
        found.append(hidden)
        used = length
        for rows in (1, 3, 1, 2):
            new = slots[used : used + rows]
            segments = [Segment.causal(torch.arange(rows), slots[:used], new)]
            above = hidden.repeat(rows, 1)
            if rows == 2:  # two texts, one of them a single token
                segments.append(Segment.causal(torch.tensor([5]), slots[:0], slots[-1:]))
                above = hidden.repeat(3, 1)
            found += head.go_on(segments, above)
            found.append(head.logits(above))
            used += rows
    return found


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize(
    "quantization", [Quantization.NONE, pytest.param(Quantization.INT8, marks=needs_int8)]
)
@pytest.mark.parametrize("arch", Arch)
@torch.inference_mode()
def test_compiled_rows_equal_plain_ones(arch: Arch, quantization: Quantization) -> None:
    pair = random_pair(arch)
    plain = results(forward(pair, quantization, None), pair, lengths=(6, 1050))
    compiled = forward(pair, quantization, "eager")
    with patch(error_on_recompile=True):  # one row and any number: all there is, from the start
        ours = results(compiled, pair, lengths=(6, 1050))
    for own, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
@torch.inference_mode()
def test_levels_of_a_recorded_loop_equal_plain_ones(backend: str, arch: Arch) -> None:
    """Their attention is the loop's own, called back from the graph."""
    pair = random_pair(arch)
    plain, ours = (
        levels(
            copy.deepcopy(pair.head), TorchPagedAttention(pool()), quantization=Quantization.NONE
        )
        for levels in (
            HeadForward,
            partial(HeadForward, compile_backend=backend, recorded=True),
        )
    )
    called: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        called.append(len(q))
        return q + (k * v).sum(dim=1, keepdim=True)

    with patch(error_on_recompile=True):
        for rows in (1, 2, 8, 1, 5):
            hidden = torch.randn((rows, HIDDEN))
            angles = pair.head.rotary(torch.arange(rows) + 40, hidden.dtype)
            level = Rows(torch.arange(rows) % 7, angles)
            found, expected = (each.level(level, hidden, attend) for each in (ours, plain))
            for own, other in zip(found, expected, strict=True):
                torch.testing.assert_close(own, other, atol=OF_SUMS, rtol=OF_SUMS)
    assert called == [1, 1, 2, 2, 8, 8, 1, 1, 5, 5]
    text = [Segment.causal(torch.arange(6), torch.arange(0), torch.arange(6))]
    features = torch.randn((6, pair.head.config.feature_size))
    torch.testing.assert_close(ours.read(text, features), plain.read(text, features))


@needs_compiler
@needs_int8
@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.13 generates all products")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
@torch.inference_mode()
def test_generated_products_are_the_heads_and_no_row_depends_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    pair = random_pair(Arch.EAGLE3)
    compiled, plain = (forward(pair, Quantization.INT8, backend) for backend in ("inductor", None))
    assert counters["inductor"]["cpp_templated_kernel_counter"] == PRODUCTS
    expected = results(plain, pair, lengths=(6,))
    for own, other in zip(results(compiled, pair, lengths=(6,)), expected, strict=True):
        if own.is_floating_point():  # a token may be another, by rounding
            assert (own - other).norm() < OF_8_BITS * other.norm()
    every = alone(compiled, 12)
    for rows in (1, 2, 3, 7):
        assert torch.equal(alone(compiled, rows), every[:rows])


@pytest.mark.parametrize("arch", Arch)
def test_products_that_will_be_compiled_compute_the_same(arch: Arch) -> None:
    head = copy.deepcopy(random_pair(arch).head)
    hidden = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(2))
    expected = head.logits(hidden)
    head.prepare_products(Quantization.NONE, compiled=True)
    torch.testing.assert_close(head.logits(hidden), expected)


def alone(head: HeadForward, count: int) -> Tensor:
    """Return logits after texts of one token each, which see nothing else, in one forward."""
    above = torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(8))
    none = torch.arange(0)
    segments = [
        Segment.causal(torch.tensor([row]), none, torch.tensor([row])) for row in range(count)
    ]
    return head.go_on(segments, above).logits


def test_a_backend_that_does_not_exist() -> None:
    with pytest.raises(InvalidArgument, match=r"^compile_backend='nope': expected 'inductor', or"):
        forward(random_pair(Arch.EAGLE3), Quantization.NONE, "nope")
