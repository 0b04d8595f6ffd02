"""The guard refuses every way of honouring the attention function only in part."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest
import torch
import transformers
from support.tiny_models import CONFIGS, LAYERS, random_llama, tiny_model
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from eaglegbv import LLM, EngineConfig
from eaglegbv.attention.base import AttentionCall, PackedBatch, Segment, pack
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.config import PLAIN
from eaglegbv.errors import ModelNotSupported
from eaglegbv.models import hf
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.self_check import LayerCall, check_layers, heeds_window, in_float32
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import CACHE_FOLDER

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


def test_a_window_that_the_model_s_class_ignores_is_no_reason_to_refuse():
    model = tiny_model("llama")
    model.config.sliding_window = 4
    assert not heeds_window(model)
    assert HFTarget(model, max_slots=64).self_check is None
    assert heeds_window(tiny_model("mistral"))


def test_what_a_model_s_own_code_raises_is_told(monkeypatch):
    model = tiny_model("llama")
    raised = Mock(side_effect=TypeError("'NoneType' object is not subscriptable\nand more"))
    monkeypatch.setattr(model.model.layers[0], "forward", raised)
    expected = r"runs on paged attention \('NoneType' object is not subscriptable\)$"
    with pytest.raises(ModelNotSupported, match=expected):
        HFTarget(model, max_slots=64)
    raised.side_effect = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        HFTarget(model, max_slots=64)


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


def mixture(kind: str) -> PreTrainedModel:
    """Return a random mixture of experts in bfloat16 whose outputs jump with rounding."""
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "mixtral":
            config = MixtralConfig(
                **sizes, num_hidden_layers=12, num_key_value_heads=2, initializer_range=0.1
            )
            return MixtralForCausalLM(config).bfloat16()
        config = DeepseekV3Config(
            **sizes,
            num_hidden_layers=16,
            num_key_value_heads=4,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            first_k_dense_replace=1,
        )
        return DeepseekV3ForCausalLM(config).bfloat16()


@pytest.mark.parametrize("kind", ["mixtral", "deepseek"])
def test_an_experts_flip_is_told_from_a_wrong_mask(kind: str) -> None:
    model = mixture(kind)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with in_float32(model):
        assert model(torch.tensor([[1, 2]]), use_cache=False).logits.dtype is torch.float32
    assert all(torch.equal(weights[name], own) for name, own in model.state_dict().items())
    target = HFTarget(model, max_slots=64)
    assert target.self_check is None
    assert target.pool.keys.dtype is torch.bfloat16
    with pytest.raises(ModelNotSupported, match=r"within 0\.0001 .*self_check=False"):
        HFTarget(mixture(kind), max_slots=64, attention=SeesSiblings)


@pytest.fixture
def model_folder(saved_pair: tuple[Path, Path], tmp_path: Path, monkeypatch) -> Path:
    """A model that nothing is known of."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    return Path(shutil.copytree(saved_pair[0], tmp_path / "model"))


def test_a_user_may_go_on_with_what_the_check_found(model_folder, monkeypatch, caplog) -> None:
    def differs(*_: object) -> NoReturn:
        raise ModelNotSupported("model", "any", "the outputs of the plain model")

    monkeypatch.setattr("eaglegbv.models.hf.check_forward", differs)
    with pytest.raises(ModelNotSupported, match="outputs of the plain model"):
        LLM(model_folder, plan=PLAIN)
    llm = LLM(model_folder, plan=PLAIN, engine=EngineConfig(self_check=False))
    assert "the self-check failed, and is ignored" in caplog.text
    assert len(llm.generate("hello", SamplingParams(max_tokens=3)).token_ids) == 3


@pytest.mark.parametrize("native", [True, False])
def test_a_model_that_passed_is_checked_once(model_folder, monkeypatch, native) -> None:
    expected = Mock(wraps=hf.plain_outputs)
    compared = Mock(wraps=hf.check_forward)
    monkeypatch.setattr(hf, "plain_outputs", expected)
    monkeypatch.setattr(hf, "check_forward", compared)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def started(**how: object) -> tuple[int, str, list[int]]:
        expected.reset_mock()
        compared.reset_mock()
        with LLM(model_folder, plan=PLAIN, engine=EngineConfig(native=native), **how) as llm:
            ids = llm.generate("hello", params).token_ids
            return expected.call_count, llm.pair.target.runs_by, ids

    checks, runs_by, ids = started()
    assert checks == 1
    assert started() == (0, runs_by, ids)
    assert not compared.called
    assert started(dtype="bfloat16")[0] == 1
    os.utime(model_folder / "model.safetensors")
    assert started() == (1, runs_by, ids)
    monkeypatch.setattr(transformers, "__version__", "another")
    assert started() == (1, runs_by, ids)


def test_a_model_that_did_not_pass_is_checked_again(model_folder, monkeypatch) -> None:
    def differs(*_: object) -> NoReturn:
        raise ModelNotSupported("model", "any", "the outputs of the plain model")

    unchecked = EngineConfig(self_check=False)
    monkeypatch.setattr(hf, "check_forward", differs)
    for _ in range(2):
        with pytest.raises(ModelNotSupported, match="outputs of the plain model"):
            LLM(model_folder, plan=PLAIN)
        with LLM(model_folder, plan=PLAIN, engine=unchecked) as llm:
            assert llm.pair.target.self_check is not None


def test_native_forwards_that_differ_are_remembered(model_folder, monkeypatch) -> None:
    right = hf.check_forward

    def differs(name: str, target: HFTarget, *rest: object) -> None:
        if target._native is not None:
            raise ModelNotSupported("model", name, "the outputs of the plain model")
        right(name, target, *rest)

    monkeypatch.setattr(hf, "check_forward", differs)
    for _ in range(2):
        with LLM(model_folder, plan=PLAIN) as llm:
            assert llm.pair.target.runs_by == "transformers"
