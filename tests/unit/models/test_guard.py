"""The guard refuses every way of honouring the attention function only in part."""

from dataclasses import replace

import pytest
from support.tiny_models import CONFIGS, LAYERS, random_llama, tiny_model
from torch import Tensor

from eaglegbv.attention.base import AttentionCall, PackedBatch, Segment, pack
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.errors import ModelNotSupported
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.self_check import LayerCall, check_layers

MAX_CONTEXT = 128


def calls(**changes: object) -> list[LayerCall]:
    """Return calls as they should be, the last one changed."""
    good = [LayerCall(layer, 2, 16, 16, None) for layer in range(LAYERS)]
    return [*good[:-1], replace(good[-1], **changes)]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ([], "one attention call"),
        (calls()[:-1], "one attention call"),
        ([*calls(), calls()[-1]], "one attention call"),
        (calls(layer=0), "one attention call"),
        (calls(kv_heads=4), "one shape"),
        (calls(head_dim=8), "one shape"),
        (calls(value_dim=8), "one shape"),
        (calls(window=7), "window None"),
    ],
)
def test_calls_that_differ_are_refused(bad, named):
    with pytest.raises(ModelNotSupported, match=named):
        check_layers("model", bad, CONFIGS["llama"](), MAX_CONTEXT)


def test_a_window_that_never_reaches_attention_is_refused():
    with pytest.raises(ModelNotSupported, match="window 4 of its configuration in layer 0"):
        check_layers("model", calls(), CONFIGS["mistral"](), MAX_CONTEXT)


def test_a_window_beyond_the_context_does_not_matter():
    config = CONFIGS["mistral"]()
    config.sliding_window = MAX_CONTEXT
    check_layers("model", calls(), config, MAX_CONTEXT)


def test_other_kinds_of_attention_are_refused():
    config = CONFIGS["qwen3"]()
    config.layer_types = ["full_attention"] * (LAYERS - 1) + ["chunked_attention"]
    with pytest.raises(ModelNotSupported, match="chunked_attention"):
        check_layers("model", calls(), config, MAX_CONTEXT)


class SeesSiblings(TorchPagedAttention):
    """Ignores who sees whom."""

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch):
        changed = pack([self.change(segment) for segment in batch.segments])
        return super().attend(call, q, k, v, changed)

    def change(self, segment: Segment) -> Segment:
        return replace(segment, visible=None)


class ForgetsContext(SeesSiblings):
    """Attends to the tree alone."""

    def change(self, segment: Segment) -> Segment:
        return replace(segment, context_slots=segment.context_slots[:0])


class IgnoresWindow(TorchPagedAttention):
    """Attends without a window."""

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch):
        return super().attend(call._replace(window=None), q, k, v, batch)


@pytest.mark.parametrize("broken", [SeesSiblings, ForgetsContext, IgnoresWindow])
def test_wrong_attention_is_noticed(broken):
    with pytest.raises(ModelNotSupported, match="logits of the plain model"):
        HFTarget(tiny_model("mistral"), max_slots=64, attention=broken)


def test_a_benchmark_may_go_on_with_what_the_check_found(caplog):
    model = tiny_model("mistral")
    target = HFTarget(model, max_slots=64, attention=SeesSiblings, must_pass=False)
    assert target.self_check is not None
    assert "logits of the plain model" in target.self_check
    assert ["self-check" in record.getMessage() for record in caplog.records] == [True]
    assert HFTarget(tiny_model("mistral"), max_slots=64, must_pass=False).self_check is None


def test_even_a_freshly_initialised_model_shows_it():
    with pytest.raises(ModelNotSupported, match="logits of the plain model"):
        HFTarget(random_llama(64, seed=0), max_slots=64, attention=SeesSiblings)
