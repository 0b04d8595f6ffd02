"""FlashInfer's kernels agree with PyTorch's attention; on a CPU, stand-ins read their plans."""

import pytest
import torch
from support.cuda.runtime import HostRuntime
from support.flashinfer_place import Place, check_kernels
from support.plan_stand import StandKernels
from support.ragged_batches import BATCHES, LAYERS, SCALE, SIZES, Sizes, new_rows, pools

from eaglegbv.attention.base import pack
from eaglegbv.attention.flashinfer import FlashInferPagedAttention
from eaglegbv.attention.torch import TorchPagedAttention


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", BATCHES)
def test_plans_mean_what_pytorchs_attention_does(
    name: str, softcap: float | None, window: int | None
) -> None:
    ours, reference = pools()
    kernels = StandKernels()
    attention = FlashInferPagedAttention(ours, kernels)
    expected_by = TorchPagedAttention(reference)
    batch = pack(BATCHES[name])
    for layer in range(LAYERS):
        q, k, v = new_rows(batch.rows)
        found, expected = (
            a.attend(layer, q, k, v, batch, scale=SCALE, window=window, softcap=softcap)
            for a in (attention, expected_by)
        )
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert torch.equal(ours.keys, reference.keys)
    assert torch.equal(ours.values, reference.values)
    # Planned once for both layers.
    assert [stand.plans for stand in kernels.made] == [1]
    assert not attention.fallbacks


def test_heads_may_come_in_another_order_in_memory() -> None:
    """As from models that turn queries by joining halves; kernels look at no strides of them."""
    ours, reference = pools()
    batch = pack(BATCHES["ragged trees"])
    q, k, v = new_rows(batch.rows)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    found = FlashInferPagedAttention(ours, StandKernels()).attend(
        0, turned, k, v, batch, scale=SCALE
    )
    expected = TorchPagedAttention(reference).attend(0, q, k, v, batch, scale=SCALE)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_each_work_has_its_kernel() -> None:
    for name, kind, causal in [
        ("plain decoding", "decode", True),
        ("prompts", "prefill", True),
        ("ragged trees", "prefill", False),
        ("trees and a prompt", "prefill", False),
    ]:
        kernels = StandKernels()
        batch = pack(BATCHES[name])
        q, k, v = new_rows(batch.rows)
        attention = FlashInferPagedAttention(pools()[0], kernels)
        attention.attend(0, q, k, v, batch, scale=SCALE)
        [stand] = kernels.made
        assert (stand.kind, stand.named["causal"]) == (kind, causal), name


def test_wrappers_are_planned_again_for_a_new_batch_and_kept_apart_by_window() -> None:
    kernels = StandKernels()
    attention = FlashInferPagedAttention(pools()[0], kernels)
    for _ in range(2):
        batch = pack(BATCHES["ragged trees"])
        q, k, v = new_rows(batch.rows)
        for layer in range(LAYERS):
            for window in (None, 4, 1000):
                attention.attend(layer, q, k, v, batch, scale=SCALE, window=window)
    # A window no text reaches is none.
    assert [stand.plans for stand in kernels.made] == [2, 2]


def test_sinks_are_counted_and_served_by_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    ours, reference = pools()
    attention = FlashInferPagedAttention(ours, StandKernels())
    batch = pack(BATCHES["ragged trees"])
    q, k, v = new_rows(batch.rows)
    sinks = torch.linspace(-1, 1, SIZES.heads)
    for _ in range(2):
        found = attention.attend(0, q, k, v, batch, scale=SCALE, sinks=sinks)
    expected = TorchPagedAttention(reference).attend(0, q, k, v, batch, scale=SCALE, sinks=sinks)
    assert torch.equal(found, expected)
    assert attention.fallbacks == {"sinks": 2}
    assert len([r for r in caplog.records if "sinks" in r.getMessage()]) == 1


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", BATCHES)
def test_kernels_agree_with_pytorchs_attention(
    name: str, softcap: float | None, window: int | None, place: Place
) -> None:
    check_kernels(place, name, softcap=softcap, window=window)


@pytest.mark.parametrize("name", ["ragged trees", "prompts", "plain decoding"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, 2, 128),
        Sizes(8, 2, 64),  # decoded by the kernels of prompts
        Sizes(16, 1, 128),
        Sizes(4, 2, 256),
        Sizes(4, 2, 64, torch.float16),
    ],
    ids=str,
)
def test_kernels_of_other_sizes_agree(name: str, sizes: Sizes, place: Place) -> None:
    check_kernels(place, name, sizes)


@pytest.mark.on_host
@pytest.mark.parametrize("name", ["long texts", "plain decoding of long texts"])
def test_long_texts_are_split_among_blocks(name: str, host: Place, on_host: HostRuntime) -> None:
    check_kernels(host, name)
    assert any("MergeStates" in kernel for kernel in on_host.launched)
