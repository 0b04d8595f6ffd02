"""What cannot be served is refused before a server starts, with the reason and the remedy."""

import json
import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.sglang_pair import SGLangPair

from eaglegbv.backends.sglang.server_args import (
    REFUSED,
    REFUSED_WITH_STATE,
    UNTRIED,
    NotServed,
    settle_arguments,
)
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.errors import DrafterMismatch, InvalidArgument, SamplingMismatch


def arguments(pair: SGLangPair, **changes: object) -> SimpleNamespace:
    """SGLang's defaults on a GPU, as far as they are looked at."""
    own: dict[str, object] = {
        **{option: harmless[0] for option, (harmless, _, _) in REFUSED.items()},
        **{option: harmless[0] for option, (harmless, _, _) in REFUSED_WITH_STATE.items()},
        "model_path": str(pair.target),
        "device": "cuda",
        "revision": None,
        "trust_remote_code": False,
        "speculative_algorithm": "EAGLEGBV",
        "speculative_draft_attention_backend": None,
        "speculative_draft_model_revision": "main",
        "speculative_eagle_topk": 3,
        "speculative_num_steps": 4,
        "speculative_num_draft_tokens": None,
        "speculative_draft_model_path": str(pair.eagle1),
        "max_running_requests": None,
        "disable_overlap_schedule": False,
        "enable_mixed_chunk": False,
        "disable_cuda_graph": False,
        "attention_backend": "flashinfer",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
    }
    return SimpleNamespace(**(own | changes))


def settle(own: SimpleNamespace, verifier: str = "otbv", *, latent: bool = False) -> None:
    settle_arguments(own, Settings(verifier=verifier), latent=latent)


def test_what_is_left_open_is_filled_in(pair):
    own = arguments(pair, speculative_eagle_topk=None, speculative_num_steps=None)
    settle(own)
    assert (own.speculative_eagle_topk, own.speculative_num_steps) == (3, 4)
    assert own.speculative_num_draft_tokens == 13
    assert own.max_running_requests == 48
    assert not own.disable_overlap_schedule
    assert own.speculative_draft_model_path == str(pair.eagle1)


def test_on_a_cpu_steps_do_not_overlap(pair):
    own = arguments(pair, device="cpu", enable_mixed_chunk=True)
    settle(own)
    assert own.disable_overlap_schedule
    assert not own.enable_mixed_chunk


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("pp_size", 2, "pipeline stages; use --tp"),
        ("attn_dp_size", 2, "have not been tried"),
        ("disaggregation_mode", "prefill", "not transferred"),
        ("speculative_use_rejection_sampling", True, "EAGLEGBV_VERIFIER"),
        ("speculative_use_block_verification", True, "EAGLEGBV_VERIFIER=block"),
        ("speculative_accept_threshold_single", 0.9, "changes the distribution"),
        ("speculative_accept_threshold_acc", 0.9, "changes the distribution"),
        ("enable_custom_logit_processor", True, "does not apply custom processors"),
        ("enable_watermark", True, "forced tokens"),
        ("enable_attn_tp_input_scattered", True, "features whole"),
        ("enable_two_batch_overlap", True, "one round's random numbers"),
        ("enable_deterministic_inference", True, "order of the verifiers' sums"),
        ("enable_multi_layer_eagle", True, "heads draft chains"),
        ("dcp_size", 2, "has never run with our trees; use --tp"),
        ("attn_cp_size", 2, "has never run with our trees; use --tp"),
        ("tokenizer_worker_num", 2, "no plug-ins in further workers; leave it out"),
        ("detokenizer_worker_num", 2, "no plug-ins in further workers; leave it out"),
        *((option, "other", "has never run with our trees; leave") for option in UNTRIED),
        ("speculative_draft_attention_backend", "fa4", "it drafts chains only"),
        ("speculative_draft_attention_backend", "flashmla", "it drafts chains only"),
        ("speculative_draft_attention_backend", "trtllm_mha", "it drafts chains only"),
        ("speculative_draft_attention_backend", "torch_native", "no tree masks"),
        ("attention_backend", "torch_native", "no tree masks; use flashinfer"),
        ("attention_backend", "trtllm_mha", "chains only; use flashinfer, fa3, triton, aiter"),
        ("attention_backend", "fa4", "chains only"),
    ],
)
def test_options_that_would_be_ignored_are_refused(pair, option, value, reason):
    with pytest.raises(NotServed, match=reason) as caught:
        settle(arguments(pair, **{option: value}))
    assert str(caught.value).startswith(f"--{option.replace('_', '-')} {value}: ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("backend", ["flashinfer", "trtllm_mla", "cutedsl_mla", "aiter"])
def test_latent_attention_reads_masks_by_few_backends(pair, backend):
    settle(arguments(pair, attention_backend=backend, speculative_eagle_topk=1), latent=True)
    settle(arguments(pair, attention_backend="fa3"), latent=True)
    settle(arguments(pair, attention_backend="triton"), latent=True)
    with pytest.raises(NotServed, match=r"\(MLA\); use fa3 or triton, or --spec.*-topk 1$"):
        settle(arguments(pair, attention_backend=backend), latent=True)


@pytest.mark.parametrize("split", ["prefill_attention_backend", "decode_attention_backend"])
def test_backends_of_prompts_and_of_steps_are_both_looked_at(pair, split):
    settle(arguments(pair, attention_backend=None, **{split: "fa3"}))
    with pytest.raises(NotServed, match="fa4: it verifies chains only"):
        settle(arguments(pair, **{split: "fa4"}))


@pytest.mark.parametrize(
    ("changes", "verifier", "said"),
    [
        ({"speculative_eagle_topk": 17}, "otbv", r"_topk=17: expected .* \[1, 16\]"),
        ({"speculative_num_steps": 0}, "otbv", r"speculative_num_steps=0"),
        ({"speculative_num_draft_tokens": 8}, "otbv", r"_tokens=8: expected 13"),
        ({"speculative_draft_model_path": None}, "otbv", "speculative_draft_model_path=None"),
        ({"speculative_algorithm": "EAGLEGBV3"}, "otbv", "expected EAGLEGBV, for the head in"),
        ({}, "nosuch", "nosuch"),
    ],
)
def test_values_that_are_not_accepted_are_named(pair, changes, verifier, said):
    with pytest.raises(InvalidArgument, match=said):
        settle(arguments(pair, **changes), verifier)


def test_a_head_must_be_of_the_kind_and_fit_the_target(pair, saved_pair):
    with pytest.raises(InvalidArgument, match="expected EAGLEGBV3, for the head in"):
        settle(arguments(pair, speculative_draft_model_path=str(pair.eagle3)))
    with pytest.raises(DrafterMismatch, match="vocab_size=16"):
        settle(arguments(pair, model_path=str(saved_pair[0])))


def test_a_head_of_the_hub_is_fetched_and_checked(pair, monkeypatch):
    fetch = Mock(return_value=str(pair.eagle1))
    monkeypatch.setattr("eaglegbv.loading.snapshot_download", fetch)
    named = {"speculative_draft_model_path": "some/head"}
    own = arguments(pair, **named)
    settle(own)
    assert own.speculative_draft_model_path == str(pair.eagle1)
    fetch.assert_called_once_with("some/head", revision="main")
    with pytest.raises(InvalidArgument, match="expected EAGLEGBV, for the head in some/head"):
        settle(arguments(pair, **named, speculative_algorithm="EAGLEGBV3"))


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_layers_that_predict_further_tokens_are_refused_by_name(pair, key, tmp_path):
    config = {"architectures": ["DeepseekV3ForCausalLM"], key: 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=r"MTP layers \(DeepseekV3ForCausalLM\)"):
        settle(arguments(pair, speculative_draft_model_path=str(tmp_path)))


@pytest.mark.parametrize("verifier", ["greedy_block", "spectr_gbv"])
def test_verifiers_with_modified_target_state_ask_for_more(pair, verifier):
    own = arguments(pair, speculative_eagle_topk=1)
    settle(own, verifier)
    assert own.disable_overlap_schedule
    for option, value in (
        ("tp_size", 2),
        ("speculative_draft_window_size", 64),
        ("page_size", 64),
    ):
        with pytest.raises(
            NotServed, match="use a verifier without modified-target state"
        ) as caught:
            settle(arguments(pair, speculative_eagle_topk=1, **{option: value}), verifier)
        assert option != "page_size" or "--attention-backend flashinfer" in str(caught.value)
        settle(arguments(pair, **{option: value}), "otbv")


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_several_paths_go_into_pages_with_few_backends(pair, backend):
    settle(arguments(pair, page_size=16, attention_backend=backend))
    settle(arguments(pair, page_size=16, attention_backend="aiter", speculative_eagle_topk=1))
    with pytest.raises(NotServed, match=r"no trees in pages of tokens; use .*, or --page-size 1$"):
        settle(arguments(pair, page_size=16, attention_backend="aiter"))


def test_verifiers_must_fit_the_paths(pair):
    settle(arguments(pair, speculative_eagle_topk=1), "block")
    for verifier, said in (("block", "at most 1 for 'block'"), ("spechub", "spechub")):
        with pytest.raises(SamplingMismatch, match=said):
            settle(arguments(pair), verifier)


def test_plans_by_load_on_a_cpu_run_without_graphs(pair):
    several = Settings(plans="3x4,none")
    settle_arguments(arguments(pair), several, latent=False)
    settle_arguments(arguments(pair, device="cpu", disable_cuda_graph=True), several, latent=False)
    with pytest.raises(NotServed, match=r"^--plans 3x4,none: .*; add --disable-cuda-graph$"):
        settle_arguments(arguments(pair, device="cpu"), several, latent=False)
