"""Checks, before anything is overridden at a server's start, that SGLang is of a known version."""

import inspect
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pkgutil import resolve_name

from eaglegbv.errors import EagleGBVError, InvalidArgument, NotInstalled

SUPPORTED = ("0.5.23",)  # versions of SGLang whose override points are known
PLUGIN = "eaglegbv"  # name of our entry point for plug-ins


def check_version() -> None:
    """Raise unless the installed SGLang is of a known version.

    Raises:
        NotInstalled: SGLang is not installed.
        InvalidArgument: It is of another version.
    """
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        raise NotInstalled("SGLang", "sglang") from None
    if installed not in SUPPORTED:
        known = " or ".join(f"sglang=={number}" for number in SUPPORTED)
        raise InvalidArgument("sglang", installed, f"{known}, whose override points are known")


def check_plugin() -> None:
    """Raise :class:`InvalidArgument` unless SGLang's processes will find our plug-in."""
    group = "sglang.srt.plugins"
    names = sorted(point.name for point in entry_points(group=group))
    if PLUGIN not in names:
        expected = f"{PLUGIN!r} among them; in a checkout of eaglegbv: pip install -e '.[sglang]'"
        raise InvalidArgument(f"entry points {group}", names, expected)
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    if any(allowed) and PLUGIN not in allowed:
        raise InvalidArgument("SGLANG_PLUGINS", ",".join(allowed), f"{PLUGIN!r} among them")


class OverridePointChanged(EagleGBVError):
    """A name in SGLang that we override is gone or takes other parameters."""

    def __init__(self, place: str, found: str, expected: str) -> None:
        super().__init__(
            f"SGLang's {place}: found {found}, expected {expected}; "
            f"install sglang=={SUPPORTED[-1]}, which this version of eaglegbv was made for"
        )
        self.place, self.found, self.expected = place, found, expected


_EAGLE = "sglang.srt.speculative.eagle"
_MANAGERS = "sglang.srt.managers"
_WORKER = f"{_EAGLE}_worker_v2:EAGLEWorkerV2"
_DRAFTER = f"{_EAGLE}_worker_v2:EagleDraftWorker"
_TOKENIZER = f"{_MANAGERS}.tokenizer_manager:TokenizerManager"
_PARTS = f"{_MANAGERS}.scheduler_components"
_SAMPLER = "sglang.srt.layers.sampler"

OVERRIDE_POINTS: Mapping[str, str] = {
    f"{_WORKER}.verify": "self batch",
    f"{_WORKER}.forward_batch_generation": "self batch",
    f"{_WORKER}.build_adaptive_runtime_state": (
        "self speculative_num_steps speculative_num_draft_tokens cuda_graph_bs"
    ),
    f"{_WORKER}.apply_runtime_state": "self state",
    f"{_WORKER}._forward_prefill_batch": "self batch",
    f"{_DRAFTER}.draft": "self batch",
    f"{_DRAFTER}.draft_forward": "self forward_batch",
    f"{_DRAFTER}._draft_extend_for_prefill": "self batch target_hidden_states next_token_ids",
    f"{_DRAFTER}._draft_extend_for_decode": "self batch batch_result",
    f"{_DRAFTER}._capture_cuda_graphs": "self",
    f"{_DRAFTER}._rebuild_topk1_chain_buffers": "self",
    f"{_DRAFTER}.alloc_memory_pool": "self",
    f"{_EAGLE}_utils:per_step_draft_out_cache_loc": "out_cache_loc batch_size topk num_steps",
    f"{_EAGLE}_worker_common:eagle_sample": "verify_input batch logits_output grammar_mask",
    f"{_EAGLE}_utils:verify_tree_greedy_func": (
        "predicts accept_index accept_token_num candidates retrieve_index "
        "retrieve_next_token retrieve_next_sibling target_predict"
    ),
    f"{_SAMPLER}:register_sampler_backend": "backend factory",
    f"{_SAMPLER}:Sampler._sample_from_probs": (
        "self probs sampling_info positions simple_sampling_case"
    ),
    "sglang.srt.arg_groups.lora_hook:check_lora_speculative_compatibility": "server_args",
    f"{_TOKENIZER}._send_one_request": "self tokenized_obj",
    f"{_TOKENIZER}._calculate_spec_decoding_metrics": "self meta_info recv_obj i",
    f"{_PARTS}.batch_result_processor:SchedulerBatchResultProcessor"
    ".process_batch_result_decode": "self batch result",
}
"""The functions of SGLang that we replace, wrap, override or call by name, and the parameters we
rely on, in order; more may follow.
"""


def check_override_points() -> None:
    """Raise :class:`OverridePointChanged` for the first point that is gone or takes others."""
    for place, names in OVERRIDE_POINTS.items():
        expected = tuple(names.split())
        wanted = f"({', '.join(expected)})"
        try:
            found = resolve_name(place)
        except AttributeError:
            raise OverridePointChanged(place, "nothing", wanted) from None
        if not callable(found):
            raise OverridePointChanged(place, repr(found), wanted)
        parameters = tuple(inspect.signature(found).parameters)
        if parameters[: len(expected)] != expected:
            raise OverridePointChanged(place, f"({', '.join(parameters)})", wanted)
