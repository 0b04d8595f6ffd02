"""A transformers model behind our attention computes what it computes alone."""

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from support.packed_trees import Text, prefills, random_tokens, random_trees, scattered
from support.tiny_models import CONFIGS, LAYERS, VOCAB, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from eaglegbv.attention.base import AttentionCall, PackedBatch, Segment, pack
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.errors import InvalidArgument, ModelNotSupported
from eaglegbv.models.hf import HFTarget, load_config, load_model, load_tokenizer
from eaglegbv.models.self_check import LayerCall, check_layers
from eaglegbv.models.target import FeatureSpec

SUPPORTED = sorted(CONFIGS.keys() - {"bloom", "gptj", "stablelm"})
FEATURE_LAYERS = (1, 2, LAYERS - 1)


@dataclass
class Plain:
    """The model alone, one text at a time."""

    model: PreTrainedModel

    def logits(self, text: list[int]) -> Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([text]), use_cache=False).logits[0]

    def states(self, text: list[int]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            ids = torch.tensor([text])
            out = self.model(ids, use_cache=False, output_hidden_states=True)
        return tuple(state[0] for state in out.hidden_states)

    def layer_inputs(self, text: list[int]) -> Tensor:
        states = self.states(text)
        return torch.cat([states[layer] for layer in FEATURE_LAYERS], dim=-1)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def check_trees(target: HFTarget, plain: Plain, texts: list[Text], segments: list[Segment]) -> None:
    out = target.forward(segments)
    assert out.features is not None
    row = 0
    for text in texts:
        for node in range(len(text.nodes)):
            path = text.text_at(node)
            assert_close(out.logits[row], plain.logits(path)[-1])
            assert_close(out.features[row], plain.layer_inputs(path)[-1])
            row += 1
    assert row == out.logits.shape[0]


@pytest.mark.parametrize("name", SUPPORTED)
def test_packed_trees_equal_every_path_run_alone(name: str) -> None:
    plain = Plain(tiny_model(name))
    features = FeatureSpec.layer_inputs(FEATURE_LAYERS)
    target = HFTarget(tiny_model(name), features=features, max_slots=96)
    generator = torch.Generator().manual_seed(3)

    own = target.allocator, generator
    texts = [Text(random_tokens(count, generator)) for count in (7, 3, 11)]
    ends = torch.tensor([len(text.tokens) for text in texts]).cumsum(0) - 1
    out = target.forward(prefills(texts, *own), logit_rows=ends)
    assert out.features is not None
    assert out.features.shape == (21, len(FEATURE_LAYERS) * target.hidden_size)
    for i, (text, end) in enumerate(zip(texts, ends.tolist(), strict=True)):
        assert_close(out.logits[i], plain.logits(text.tokens)[-1])
        rows = slice(end + 1 - len(text.tokens), end + 1)
        assert_close(out.features[rows], plain.layer_inputs(text.tokens))

    # Siblings 1 and 2 carry one token; the second tree is a lone root, as in plain decoding.
    nodes = [5, 9, 9, 9, 4, 4, 7, 30, 31]
    first = texts[0].tree(
        nodes, [0, 0, 0, 1, 1, 2, 2, 5, 7], scattered(target.allocator, 9, generator)
    )
    check_trees(target, plain, texts, [first, *random_trees(texts[1:], [1, 7], *own)])

    texts[0].commit(7, target.allocator)
    texts[1].commit(0, target.allocator)
    texts[2].commit(3, target.allocator)
    target.allocator.check(text.slots for text in texts)
    check_trees(target, plain, texts, random_trees(texts, [6] * 3, *own))

    # And one request alone, its keys now spread over the pool.
    texts[0].commit(4, target.allocator)
    check_trees(target, plain, texts[:1], random_trees(texts[:1], [3], *own))


def test_chunked_prefill_equals_one_prefill() -> None:
    plain = Plain(tiny_model("mistral"))
    target = HFTarget(tiny_model("mistral"), max_slots=64)
    tokens = torch.arange(13) % VOCAB
    slots = target.allocator.allocate(13)
    for start, end in ((0, 5), (5, 6), (6, 13)):
        segment = Segment.causal(tokens[start:end], slots[:start], slots[start:end])
        out = target.forward([segment])
        assert_close(out.logits, plain.logits(tokens[:end].tolist())[start:])


def test_final_features_are_the_normed_hidden_state() -> None:
    plain = Plain(tiny_model("llama"))
    target = HFTarget(tiny_model("llama"), features=FeatureSpec.final(), max_slots=64)
    tokens = [4, 5, 6, 7]
    last = torch.tensor([3])
    slots = target.allocator.allocate(4)
    segment = Segment.causal(torch.tensor(tokens), slots[:0], slots)
    out = target.forward([segment], logit_rows=last)
    assert out.features is not None
    assert_close(out.features, plain.states(tokens)[-1])
    assert_close(out.features[last] @ target.output_embeddings.T, out.logits)


def test_bfloat16_passes_its_own_guard() -> None:
    target = HFTarget(tiny_model("llama", dtype=torch.bfloat16), max_slots=64)
    assert target.pool.keys.dtype == torch.bfloat16
    slots = target.allocator.allocate(2)
    out = target.forward([Segment.causal(torch.tensor([1, 2]), slots[:0], slots)])
    assert out.logits.dtype == torch.float32


@pytest.mark.parametrize(
    "name",
    [
        "bloom",
        pytest.param(
            "gptj",
            marks=pytest.mark.skipif(
                Version(transformers.__version__) >= Version("5.18"),
                reason="later versions may have it on the interface, as 5.24 does",
            ),
        ),
        "stablelm",
    ],
)
def test_models_off_the_attention_interface_are_refused(name: str) -> None:
    with pytest.raises(ModelNotSupported, match="attention"):
        HFTarget(tiny_model(name), max_slots=64)


@pytest.mark.parametrize(
    ("features", "slots", "named"),
    [
        (FeatureSpec.layer_inputs([1, LAYERS]), 64, "features.layers=4"),
        (FeatureSpec.layer_inputs([0]), 64, "features.layers=0"),
        (FeatureSpec.layer_inputs([]), 64, "features.layers"),
        (FeatureSpec(), 8, "max_slots=8"),
    ],
)
def test_bad_arguments(features: FeatureSpec, slots: int, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        HFTarget(tiny_model("llama"), features=features, max_slots=slots)


def test_loading_incomplete_weights(tmp_path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelNotSupported, match=r"not without .*layers\.1\.mlp\.up_proj"):
        load_model(tmp_path)
    file.write_bytes(b"\0" * 100)
    with pytest.raises(ModelNotSupported, match="weights of a causal language model"):
        load_model(tmp_path)


def test_loading_what_is_not_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        load_model(tmp_path)
    with pytest.raises(InvalidArgument, match="existing model folder"):
        load_model(tmp_path / "missing")
    with pytest.raises(InvalidArgument, match="existing model folder"):
        load_model("nobody/no-such-model")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ModelNotSupported, match="model type"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotSupported, match="weights"):
        load_model(tmp_path)


def test_a_quantised_model_without_its_package_is_refused_in_a_line(tmp_path) -> None:
    if find_spec("optimum") is not None:
        pytest.skip("optimum is installed")
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotSupported, match="gptq") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_broken_configuration_or_tokenizer_is_called_by_its_name(tmp_path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "none"}}')
    with pytest.raises(InvalidArgument, match="a model with a tokenizer"):
        load_tokenizer(tmp_path)
    for content in (
        '{"model_type": "llama", ',
        "[]",
        '{"model_type": "llama", "hidden_size": "x"}',
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InvalidArgument, match=r"config\.json"):
            load_config(tmp_path)


# --- the guard refuses every way of honouring the attention function only in part
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
def test_calls_that_differ_are_refused(bad: list[LayerCall], named: str) -> None:
    with pytest.raises(ModelNotSupported, match=named):
        check_layers("model", bad, CONFIGS["llama"](), MAX_CONTEXT)


def test_a_window_that_never_reaches_attention_is_refused() -> None:
    with pytest.raises(ModelNotSupported, match="window 4 of its configuration in layer 0"):
        check_layers("model", calls(), CONFIGS["mistral"](), MAX_CONTEXT)


def test_a_window_beyond_the_context_does_not_matter() -> None:
    config = CONFIGS["mistral"]()
    config.sliding_window = MAX_CONTEXT
    check_layers("model", calls(), config, MAX_CONTEXT)


def test_other_kinds_of_attention_are_refused() -> None:
    config = CONFIGS["qwen3"]()
    config.layer_types = ["full_attention"] * (LAYERS - 1) + ["chunked_attention"]
    with pytest.raises(ModelNotSupported, match="chunked_attention"):
        check_layers("model", calls(), config, MAX_CONTEXT)


class SeesSiblings(TorchPagedAttention):
    """Ignores who sees whom."""

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch):
        return super().attend(call, q, k, v, self.blind(batch))

    def blind(self, batch: PackedBatch) -> PackedBatch:
        return pack([self.change(segment) for segment in batch.segments])

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
def test_wrong_attention_is_noticed(broken: type[TorchPagedAttention]) -> None:
    with pytest.raises(ModelNotSupported, match="logits of the plain model"):
        HFTarget(tiny_model("mistral"), max_slots=64, attention=broken)


def test_a_benchmark_may_go_on_with_what_the_check_found(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("mistral")
    target = HFTarget(model, max_slots=64, attention=SeesSiblings, must_pass=False)
    assert target.self_check is not None
    assert "logits of the plain model" in target.self_check
    assert ["self-check" in record.getMessage() for record in caplog.records] == [True]
    assert HFTarget(tiny_model("mistral"), max_slots=64, must_pass=False).self_check is None


def test_even_a_freshly_initialised_model_shows_it() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelNotSupported, match="logits of the plain model"):
        HFTarget(model, max_slots=64, attention=SeesSiblings)
