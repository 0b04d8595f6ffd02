"""A transformers model behind our attention computes what it computes alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from support.packed_trees import Text, random_tokens, random_tree, scattered
from support.tiny_models import CONFIGS, LAYERS, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from eaglegbv.attention.base import Segment
from eaglegbv.errors import InvalidArgument, ModelNotSupported
from eaglegbv.models.hf import HFTarget, load_config, load_model, load_tokenizer
from eaglegbv.models.target import FINAL

SUPPORTED = [name for name in CONFIGS if name not in {"bloom", "gptj", "stablelm"}]
FEATURE_LAYERS = (1, 2, LAYERS - 1)


@dataclass
class Plain:
    """The model alone, one text at a time."""

    model: PreTrainedModel

    @torch.no_grad()
    def run(self, text: list[int]) -> CausalLMOutput:
        return self.model(torch.tensor([text]), use_cache=False, output_hidden_states=True)

    def logits(self, text: list[int]) -> Tensor:
        return self.run(text).logits[0]

    def layer_inputs(self, text: list[int], layers: Sequence[int] = FEATURE_LAYERS) -> Tensor:
        states = self.run(text).hidden_states
        return torch.cat([states[layer][0] for layer in layers], dim=-1)


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
def test_packed_trees_equal_every_path_run_alone(name):
    plain = Plain(tiny_model(name))
    target = HFTarget(tiny_model(name), features=FEATURE_LAYERS, max_slots=96)
    generator = torch.Generator().manual_seed(3)

    def grown(text: Text, count: int) -> Segment:
        return random_tree(text, count, target.allocator, generator)

    texts = [Text(random_tokens(count, generator)) for count in (7, 3, 11)]
    ends = torch.tensor([len(text.tokens) for text in texts]).cumsum(0) - 1
    prefills = [text.prefill(target.allocator, generator) for text in texts]
    out = target.forward(prefills, logit_rows=ends)
    assert out.features is not None
    assert out.features.shape == (21, len(FEATURE_LAYERS) * plain.model.config.hidden_size)
    for i, (text, end) in enumerate(zip(texts, ends.tolist(), strict=True)):
        assert_close(out.logits[i], plain.logits(text.tokens)[-1])
        rows = slice(end + 1 - len(text.tokens), end + 1)
        assert_close(out.features[rows], plain.layer_inputs(text.tokens))

    # Siblings 1 and 2 carry one token; the second tree is a lone root, as in plain decoding.
    nodes = [5, 9, 9, 9, 4, 4, 7, 30, 31]
    slots = scattered(target.allocator, 9, generator)
    first = texts[0].tree(nodes, [0, 0, 0, 1, 1, 2, 2, 5, 7], slots)
    check_trees(target, plain, texts, [first, grown(texts[1], 1), grown(texts[2], 7)])

    texts[0].commit(7, target.allocator)
    texts[1].commit(0, target.allocator)
    texts[2].commit(3, target.allocator)
    target.allocator.check(text.slots for text in texts)
    check_trees(target, plain, texts, [grown(text, 6) for text in texts])

    # And one request alone, its keys now spread over the pool.
    texts[0].commit(4, target.allocator)
    check_trees(target, plain, texts[:1], [grown(texts[0], 3)])


def test_final_features_are_the_normed_hidden_state():
    plain = Plain(tiny_model("llama"))
    target = HFTarget(tiny_model("llama"), features=(FINAL,), max_slots=64)
    tokens = [4, 5, 6, 7]
    last = torch.tensor([3])
    slots = target.allocator.allocate(4)
    segment = Segment.causal(torch.tensor(tokens), slots[:0], slots)
    out = target.forward([segment], logit_rows=last)
    assert out.features is not None
    assert_close(out.features, plain.layer_inputs(tokens, [FINAL]))
    assert_close(out.features[last] @ target.output_layer().weight.T, out.logits)


LATER = Version(transformers.__version__) >= Version("5.18")
MAYBE = pytest.mark.skipif(LATER, reason="later versions may have it, as 5.24 does")


@pytest.mark.parametrize("name", ["bloom", "stablelm", pytest.param("gptj", marks=MAYBE)])
def test_models_off_the_attention_interface_are_refused(name):
    with pytest.raises(ModelNotSupported, match="attention"):
        HFTarget(tiny_model(name), max_slots=64)


@pytest.mark.parametrize(
    ("features", "slots", "named"),
    [
        ((1, LAYERS), 64, "features=4: expected layers from 1 to 3"),
        ((0,), 64, "features=0: expected layers from 1 to 3"),
        ((), 8, "max_slots=8"),
    ],
)
def test_bad_arguments(features, slots, named):
    with pytest.raises(InvalidArgument, match=named):
        HFTarget(tiny_model("llama"), features=features, max_slots=slots)


def test_loading_incomplete_weights(tmp_path):
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


def test_loading_what_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        load_model(tmp_path)
    with pytest.raises(InvalidArgument, match="existing model folder"):
        load_model(tmp_path / "missing")
    with pytest.raises(InvalidArgument, match="existing model folder"):
        load_model("nobody/no-such-model")
    for kind, message in (("no-such-type", "model type"), ("llama", "weights")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ModelNotSupported, match=message):
            load_model(tmp_path)


def test_a_quantised_model_without_its_package_is_refused_in_a_line(tmp_path):
    if find_spec("optimum") is not None:
        pytest.skip("optimum is installed")
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotSupported, match="gptq") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_broken_configuration_or_tokenizer_is_called_by_its_name(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "none"}}')
    with pytest.raises(InvalidArgument, match="a model with a tokenizer"):
        load_tokenizer(tmp_path)
    llama = '{"model_type": "llama", '
    for content in (llama, "[]", llama + '"hidden_size": "x"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InvalidArgument, match=r"config\.json"):
            load_config(tmp_path)
