"""The Python API served by SGLang, and what SGLang's own arguments are refused for."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.saved_pair import save_pair
from support.sglang_engine import (
    CPU_ARGUMENTS,
    STAND_IN,
    cpu_environment,
    environment,
    missing_sglang,
    pair_arguments,
)
from support.sglang_pair import save_sglang_pair

pytestmark = [
    pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang())),
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # what SGLang says of this machine
]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(STAND_IN), *sys.path])


@pytest.mark.parametrize(
    ("verifier", "paths"), [("otbv", 2), ("gbv", 2), ("block", 1), ("spectr_gbv", 2)]
)
def test_llm_serves_through_sglang(verifier: str, paths: int, tmp_path: Path) -> None:
    """Text: the Python API, a head in another format, grammars, stop strings, streams."""
    from eaglegbv import LLM, InvalidArgument, SamplingParams

    target, head = save_pair(tmp_path)
    with environment(cpu_environment()):
        cpu = {k: v for k, v in CPU_ARGUMENTS.items() if k not in ("dtype", "device")}
        plan = {"verifier": verifier, "paths": paths, "depth": 3}
        llm = LLM(target, head, backend="sglang", device="cpu", **plan, **cpu)
    try:
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)
        one = llm.generate("hello", params)
        assert len(one.token_ids) == 20
        assert one.metrics.committed_tokens == 19
        assert one.metrics.target_forwards >= 19 / 4
        assert one.metrics.block_efficiency == pytest.approx(
            one.metrics.acceptance_length + 1, abs=0.5
        )
        pieces = list(llm.stream("hello", params))
        assert "".join(piece.text for piece in pieces) == one.text
        assert [t for piece in pieces for t in piece.token_ids] == one.token_ids
        chat = [{"role": "user", "content": "hi"}]
        many = llm.generate(["a", chat, "", [1, 2, 3]], params, progress=True)
        assert [c.finish_reason for c in many] == ["length", "length", "error", "length"]
        stop = one.text[5]
        cut = llm.generate(
            "hello", SamplingParams(max_tokens=20, seed=4, ignore_eos=True, stop=(stop,))
        )
        assert cut.text == one.text[: one.text.index(stop)]
        assert cut.finish_reason == "stop"
        with pytest.raises(InvalidArgument, match="plan"):
            llm.generate("hello", plan=llm.plan.__class__(paths=5))
        _check_grammar(llm._sglang)
    finally:
        llm.shutdown()


def test_plans_that_sglang_cannot_draw_are_refused() -> None:
    from eaglegbv import LLM, InvalidArgument, Plan
    from eaglegbv.config import Source
    from eaglegbv.tree import DraftSampling

    with pytest.raises(InvalidArgument, match=r"^source='lookup': expected 'drafter'"):
        LLM(backend="sglang", plan=Plan(paths=1, depth=4, source=Source.LOOKUP))
    with pytest.raises(InvalidArgument, match=r"^draft_sampling='wor': expected 'iid'"):
        LLM(backend="sglang", plan=Plan(draft_sampling=DraftSampling.WOR))
    with pytest.raises(InvalidArgument, match=r"^whole_vocab=4096: expected 0"):
        LLM(backend="sglang", plan=Plan(paths=1, whole_vocab=4096))
    with pytest.raises(InvalidArgument, match=r"^min_confidence=0.1: expected 0"):
        LLM(backend="sglang", plan=Plan(min_confidence=0.1))


def _check_grammar(engine: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    params = {"temperature": 1.0, "max_new_tokens": 80, "json_schema": json.dumps(schema)}
    answers = engine.generate(prompt=["say"] * 6, sampling_params=params)
    whole = [a["text"] for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert whole
    assert all(set(json.loads(text)) == {"n", "ok"} for text in whole)


def test_what_cannot_be_served_is_refused_at_start(tmp_path: Path) -> None:
    """Through SGLang's own arguments: its start ends with our message."""
    pair = save_sglang_pair(tmp_path)
    import sglang.srt.server_args as sglang_arguments
    from sglang.srt.plugins import load_plugins

    from eaglegbv.errors import EagleGBVError

    load_plugins()
    own = CPU_ARGUMENTS | pair_arguments(pair, "eagle1", 3, 3)
    refused = {
        "speculative_eagle_topk": 99,
        "speculative_num_draft_tokens": 7,
        "enable_custom_logit_processor": True,
        "page_size": 16,
        "speculative_algorithm": "EAGLEGBV3",
    }
    for name, value in refused.items():
        with environment(cpu_environment()), pytest.raises(EagleGBVError) as caught:
            sglang_arguments.ServerArgs(**(own | {name: value})).resolve_once()
        assert name.replace("_", "-") in str(caught.value).replace("_", "-")


@pytest.mark.parametrize(
    "spelling", [{"enable_dp_attention": True, "dp_size": 2}, {"attn_dp_size": 2}]
)
def test_attention_data_parallelism_is_refused_by_either_spelling(
    spelling: dict[str, Any], tmp_path: Path
) -> None:
    """SGLang turns the old one into the new one before it asks us."""
    pair = save_sglang_pair(tmp_path)
    import sglang.srt.server_args as sglang_arguments
    from sglang.srt.plugins import load_plugins

    from eaglegbv.errors import EagleGBVError

    load_plugins()
    own = CPU_ARGUMENTS | pair_arguments(pair, "eagle1", 3, 3) | {"tp_size": 2}
    with environment(cpu_environment()), pytest.raises(EagleGBVError, match="--attn-dp-size 2"):
        sglang_arguments.ServerArgs(**(own | spelling)).resolve_once()


def test_targets_with_latent_attention_need_a_backend_that_reads_masks(tmp_path: Path) -> None:
    """Whether attention is latent, SGLang says."""
    pair = save_sglang_pair(tmp_path)
    import sglang.srt.server_args as sglang_arguments
    from sglang.srt.plugins import load_plugins
    from transformers import DeepseekV3Config

    from eaglegbv.errors import EagleGBVError

    load_plugins()
    config = DeepseekV3Config(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        architectures=["DeepseekV3ForCausalLM"],
    )
    config.save_pretrained(tmp_path / "latent")
    own = CPU_ARGUMENTS | pair_arguments(pair, "eagle1", 3, 3)
    own |= {"model_path": str(tmp_path / "latent")}
    own |= {"prefill_attention_backend": None, "decode_attention_backend": None}
    with environment(cpu_environment()):
        sglang_arguments.ServerArgs(**(own | {"attention_backend": "triton"})).resolve_once()
        with pytest.raises(EagleGBVError, match=r"flashinfer: it verifies chains only .* \(MLA\)"):
            sglang_arguments.ServerArgs(
                **(own | {"attention_backend": "flashinfer"})
            ).resolve_once()


def test_a_head_of_another_target_and_a_verifier_of_one_path_are_refused_at_start(
    tmp_path: Path,
) -> None:
    pair = save_sglang_pair(tmp_path)
    target, _ = save_pair(tmp_path / "other")
    import sglang.srt.server_args as sglang_arguments
    from sglang.srt.plugins import load_plugins

    from eaglegbv.errors import DrafterMismatch, SamplingMismatch

    load_plugins()
    own = CPU_ARGUMENTS | pair_arguments(pair, "eagle1", 3, 3)
    with environment(cpu_environment()), pytest.raises(DrafterMismatch, match="vocab_size=16"):
        sglang_arguments.ServerArgs(**(own | {"model_path": str(target)})).resolve_once()
    block = cpu_environment({"EAGLEGBV_VERIFIER": "block"})
    with environment(block), pytest.raises(SamplingMismatch, match="paths=3: expected at most 1"):
        sglang_arguments.ServerArgs(**own).resolve_once()
