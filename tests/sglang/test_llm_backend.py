"""The Python API served by SGLang, and what SGLang's own arguments are refused for."""

import json
import os
import sys
from typing import Any
from unittest.mock import patch

import pytest
from support.sglang_engine import (
    CPU_ARGUMENTS,
    NEEDS_SGLANG,
    STAND_IN,
    cpu_environment,
    pair_arguments,
)
from support.sglang_pair import SGLangPair
from transformers import DeepseekV3Config

from eaglegbv import LLM, InvalidArgument, SamplingParams
from eaglegbv.errors import EagleGBVError

pytestmark = NEEDS_SGLANG


SCHEMA = """{
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": false
}"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(STAND_IN), *sys.path])


@pytest.mark.parametrize(
    ("verifier", "paths"), [("otbv", 2), ("gbv", 2), ("block", 1), ("spectr_gbv", 2)]
)
def test_llm_serves_through_sglang(verifier, paths, saved_pair):
    """Text: the Python API, a head in another format, grammars, stop strings, streams."""
    with patch.dict(os.environ, cpu_environment(), clear=True):
        cpu = {k: v for k, v in CPU_ARGUMENTS.items() if k not in ("dtype", "device")}
        plan = {"verifier": verifier, "paths": paths, "depth": 3}
        llm = LLM(*saved_pair, backend="sglang", device="cpu", **plan, **cpu)
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
        asked = {"temperature": 1.0, "max_new_tokens": 80, "json_schema": SCHEMA}
        answers = llm._sglang.generate(prompt=["say"] * 6, sampling_params=asked)
        whole = [a["text"] for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
        assert whole
        assert all(set(json.loads(text)) == {"n", "ok"} for text in whole)
    finally:
        llm.shutdown()


def resolve(pair: SGLangPair, changes: dict[str, Any]) -> None:
    """Let SGLang check its own arguments, as at its start."""
    import sglang.srt.server_args as sglang_arguments
    from sglang.srt.plugins import load_plugins

    load_plugins()
    arguments = CPU_ARGUMENTS | pair_arguments(pair, "eagle1", 3, 3) | changes
    with patch.dict(os.environ, cpu_environment(), clear=True):
        sglang_arguments.ServerArgs(**arguments).resolve_once()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative_eagle_topk": 99}, "speculative_eagle_topk"),
        ({"speculative_num_draft_tokens": 7}, "speculative_num_draft_tokens"),
        ({"enable_custom_logit_processor": True}, "--enable-custom-logit-processor"),
        ({"page_size": 16}, "--page-size"),
        ({"speculative_algorithm": "EAGLEGBV3"}, "speculative_algorithm"),
        # SGLang turns the first spelling into the second before it asks us.
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "--attn-dp-size 2"),
        ({"tp_size": 2, "attn_dp_size": 2}, "--attn-dp-size 2"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(pair, changes, said):
    with pytest.raises(EagleGBVError, match=said):
        resolve(pair, changes)


def test_targets_with_latent_attention_need_a_backend_that_reads_masks(pair, tmp_path):
    """Whether attention is latent, SGLang says."""
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
    config.save_pretrained(tmp_path)
    own = {"model_path": str(tmp_path)}
    own |= dict.fromkeys(("prefill_attention_backend", "decode_attention_backend"))
    resolve(pair, own | {"attention_backend": "triton"})
    with pytest.raises(EagleGBVError, match=r"flashinfer: it verifies chains only .* \(MLA\)"):
        resolve(pair, own | {"attention_backend": "flashinfer"})
