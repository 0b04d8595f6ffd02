"""The native library computes what transformers does, and a row's numbers are its own."""

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from eaglegbv.attention.base import Segment
from eaglegbv.models import hf
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.self_check import plain_outputs, worst_error
from eaglegbv.models.target import FINAL, TargetOutput
from eaglegbv.native.model import NativeModel

SIZES = {
    "vocab_size": 99,  # no whole number of panels
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied, with biases": LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama3's positions": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "as many key heads": LlamaConfig(**SIZES | {"num_key_value_heads": 6}),
    "five heads a key head": Qwen3Config(**SIZES | {"num_attention_heads": 10}),
    "wide heads": LlamaConfig(**SIZES | {"head_dim": 80}),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, some windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES),
}
FEATURES = (1, 2, FINAL)
DTYPES = (torch.float32, torch.bfloat16)


def random_model(config: PreTrainedConfig, dtype: torch.dtype, *, halves: bool = False):
    """A random model; ``halves`` gives one of float32 weights that bfloat16 holds exactly."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases are 0 at first
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.bfloat16().float() if halves else model.to(dtype)


def native_target(model: PreTrainedModel) -> HFTarget:
    target = HFTarget(model, features=FEATURES, max_slots=512)
    assert target.runs_by == "native"
    return target


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_those_of_the_plain_model(name):
    model = random_model(CONFIGS[name], torch.float32)
    model.set_attn_implementation("eager")
    plain = plain_outputs(model, FEATURES)
    target = native_target(model)
    assert max(worst_error(name, target, plain, text)[0] for text in range(4)) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_in_bfloat16_they_are_nearer_to_float32_than_the_plain_models(name):
    exact = random_model(CONFIGS[name], torch.float32, halves=True)
    half = random_model(CONFIGS[name], torch.bfloat16)
    outputs = []
    for model in (exact, half):
        model.set_attn_implementation("eager")
        outputs.append(plain_outputs(model, FEATURES))
    target = native_target(half)
    ours = [worst_error(name, target, outputs[0], text)[0] for text in range(4)]
    theirs = [
        float((a.logits - b.logits).abs().max() / b.logits.abs().max())
        for a, b in zip(outputs[1], outputs[0], strict=True)
    ]
    assert sum(ours) <= sum(theirs)


def test_weights_exact_in_bfloat16_keep_the_numbers_of_float32():
    model = random_model(CONFIGS["qwen2"], torch.float32, halves=True)
    model.set_attn_implementation("eager")
    plain = plain_outputs(model, FEATURES)
    target = native_target(model)
    assert max(worst_error("", target, plain, text)[0] for text in range(4)) < 1e-5


class Requests:
    """Texts of a target, and their slots, the highest first."""

    def __init__(self, target: HFTarget, lengths: tuple[int, ...]) -> None:
        self.target = target
        self.texts = [torch.arange(n) * 7 % SIZES["vocab_size"] for n in lengths]
        self.slots = [target.allocator.allocate(len(t) + 20).flip(0) for t in self.texts]

    def run(self, segments: list[Segment]) -> TargetOutput:
        out = self.target.forward(segments)
        return TargetOutput(out.logits.clone(), out.features)

    def chunk(self, request: int, first: int, end: int) -> Segment:
        text, slots = self.texts[request], self.slots[request]
        return Segment.causal(text[first:end], slots[:first], slots[first : min(end, len(text))])

    def in_chunks(self, size: int) -> tuple[Tensor, Tensor]:
        outputs = [
            self.run([self.chunk(request, first, first + size)])
            for request, text in enumerate(self.texts)
            for first in range(0, len(text), size)
        ]
        return joined(outputs)

    def together(self) -> tuple[Tensor, Tensor]:
        return joined([self.run([self.chunk(r, 0, len(t)) for r, t in enumerate(self.texts)])])


def joined(outputs: list[TargetOutput]) -> tuple[Tensor, Tensor]:
    features = [out.features for out in outputs if out.features is not None]
    return torch.cat([out.logits for out in outputs]), torch.cat(features)


def assert_same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_rows_numbers_do_not_depend_on_what_runs_beside_it(name, dtype, monkeypatch):
    target = native_target(random_model(CONFIGS[name], dtype))
    requests = Requests(target, (41, 29, 3))
    together = requests.together()
    for size in (1, 2, 5, 7, 13, 64):
        assert_same(requests.in_chunks(size), together)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert_same(requests.in_chunks(7), together)
    assert_same(requests.together(), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trees_path_has_the_numbers_of_plain_decoding(dtype):
    requests = Requests(native_target(random_model(CONFIGS["llama"], dtype)), (41,))
    requests.together()
    parents = [-1, 0, 0, 1, 1, 2, 5, 6]
    visible = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    [text], [slots] = requests.texts, requests.slots
    tokens = torch.arange(len(parents)) * 11 + 3
    positions = len(text) + visible.sum(1) - 1
    free = slots[len(text) : len(text) + len(parents)]
    tree = requests.run([Segment(tokens, positions, slots[: len(text)], free, positions, visible)])
    path = [0, 2, 5, 6, 7]
    steps = []
    for depth, node in enumerate(path):
        at = len(text) + depth
        steps.append(requests.run([Segment.causal(tokens[[node]], slots[:at], slots[at : at + 1])]))
    assert tree.features is not None
    assert_same((tree.logits[path], tree.features[path]), joined(steps))


def test_only_the_rows_asked_for_have_logits():
    requests = Requests(native_target(random_model(CONFIGS["llama"], torch.float32)), (9,))
    every = requests.run([requests.chunk(0, 0, 9)])
    some = requests.target.forward([requests.chunk(0, 0, 9)], logit_rows=torch.tensor([7, 2]))
    assert torch.equal(some.logits, every.logits[[7, 2]])


def test_a_forward_that_computes_otherwise_is_left_to_transformers(monkeypatch, caplog):
    right = NativeModel.forward
    monkeypatch.setattr(
        NativeModel, "forward", lambda *call: (right(*call)[0] * 1.1, right(*call)[1])
    )
    target = HFTarget(random_model(CONFIGS["llama"], torch.float32), max_slots=64)
    assert target.runs_by == "transformers"
    assert "native forwards differ" in caplog.text
    assert target.forward_counts["transformers"] > 0


def test_what_the_library_does_not_know_runs_through_transformers(caplog):
    caplog.set_level("INFO")
    narrow = LlamaConfig(**SIZES | {"head_dim": 8})
    target = HFTarget(random_model(narrow, torch.float32), max_slots=64)
    assert target.runs_by == "transformers"
    assert "widths" in caplog.text


def test_nothing_native_where_it_is_not_wanted():
    model = random_model(CONFIGS["llama"], torch.float32)
    assert HFTarget(model, max_slots=64, native=False).runs_by == "transformers"


def test_without_the_library_forwards_run_through_transformers(monkeypatch):
    monkeypatch.setattr(hf, "native_target", lambda *_: None)
    model = random_model(CONFIGS["llama"], torch.float32)
    assert HFTarget(model, max_slots=64).runs_by == "transformers"


def test_weights_are_not_kept_twice():
    target = native_target(random_model(CONFIGS["llama"], torch.float32))
    layers = target.model.model.layers
    assert all(weight.is_meta for weight in layers.parameters())
    assert not target.output_layer().weight.is_meta
