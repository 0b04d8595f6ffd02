"""Checks, before anything is overridden at a server's start, that SGLang is of a known version."""

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import MappingProxyType

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
        expected = f"{PLUGIN!r} among them; install eaglegbv again: pip install 'eaglegbv[sglang]'"
        raise InvalidArgument(f"entry points {group}", names, expected)
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    if any(allowed) and PLUGIN not in allowed:
        raise InvalidArgument("SGLANG_PLUGINS", ",".join(allowed), f"{PLUGIN!r} among them")


class OverridePointChanged(EagleGBVError):
    """A name in SGLang that we override is gone or takes other parameters."""

    def __init__(self, point: str, found: str, expected: str) -> None:
        super().__init__(
            f"SGLang's {point}: found {found}, expected {expected}; "
            f"install sglang=={SUPPORTED[-1]}, which this version of eaglegbv was made for"
        )
        self.arguments = point, found, expected

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self.arguments


@dataclass(frozen=True, slots=True)
class OverridePoint:
    """A function of SGLang that is replaced, wrapped or overridden."""

    module: str  # module in which it is looked up
    name: str  # its name there, dotted for a method
    parameters: tuple[str, ...]  # the parameters we rely on, in order; more may follow

    def check(self) -> None:
        """Raise :class:`OverridePointChanged` unless it exists and takes the parameters."""
        title, expected = f"{self.module}.{self.name}", f"({', '.join(self.parameters)})"
        found: object = import_module(self.module)
        for part in self.name.split("."):
            if part not in dir(found):
                raise OverridePointChanged(title, "nothing", expected)
            found = getattr(found, part)
        if found is None:  # SGLang has no such kernel on this platform
            return
        if not callable(found):
            raise OverridePointChanged(title, repr(found), expected)
        parameters = tuple(inspect.signature(found).parameters)
        if parameters[: len(self.parameters)] != self.parameters:
            raise OverridePointChanged(title, f"({', '.join(parameters)})", expected)


_WORKER = "sglang.srt.speculative.eagle_worker_v2", "EAGLEWorkerV2."
_DRAFTER = "sglang.srt.speculative.eagle_worker_v2", "EagleDraftWorker."
_UTILS = "sglang.srt.speculative.eagle_utils", ""
_SAMPLER = "sglang.srt.layers.sampler", "Sampler."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager", "TokenizerManager."
_RESULTS = (
    "sglang.srt.managers.scheduler_components.batch_result_processor",
    "SchedulerBatchResultProcessor.",
)

OVERRIDE_POINTS = tuple(
    OverridePoint(module, prefix + name, tuple(parameters.split()))
    for (module, prefix), name, parameters in (
        (_WORKER, "verify", "self batch"),
        (_WORKER, "init_cuda_graphs", "self"),
        (_WORKER, "_forward_prefill_batch", "self batch"),
        (_DRAFTER, "draft", "self batch"),
        (_DRAFTER, "draft_forward", "self forward_batch"),
        (_DRAFTER, "_draft_forward_idle", "self forward_batch"),
        (
            _DRAFTER,
            "_draft_extend_for_prefill",
            "self batch target_hidden_states next_token_ids",
        ),
        (_DRAFTER, "_draft_extend_for_decode", "self batch batch_result"),
        (_DRAFTER, "_capture_cuda_graphs", "self"),
        (_DRAFTER, "alloc_memory_pool", "self"),
        (_UTILS, "per_step_draft_out_cache_loc", "out_cache_loc batch_size topk num_steps"),
        (_UTILS, "sampling_softmax", "logits temperatures"),
        (
            _UTILS,
            "verify_tree_greedy_func",
            "predicts accept_index accept_token_num candidates retrieve_index "
            "retrieve_next_token retrieve_next_sibling target_predict",
        ),
        (_UTILS, "tree_speculative_sampling_target_only", "predicts accept_index"),
        (_UTILS, "_verify_uses_greedy", "is_all_greedy"),
        (_UTILS, "top_k_renorm_prob", "probs"),
        (_UTILS, "top_p_renorm_prob", "probs"),
        (
            _SAMPLER,
            "_sample_from_probs",
            "self probs sampling_info positions simple_sampling_case",
        ),
        (_TOKENIZER, "_send_one_request", "self tokenized_obj"),
        (_TOKENIZER, "_calculate_spec_decoding_metrics", "self meta_info recv_obj i"),
        (_RESULTS, "process_batch_result_decode", "self batch result"),
    )
)
"""All functions of SGLang that we replace, wrap or override."""


NAMES_READ: Mapping[str, str] = MappingProxyType(
    {
        f"{_WORKER[0]}.EAGLEWorkerV2": "target_worker _draft_worker topk speculative_num_steps",
        f"{_DRAFTER[0]}.EagleDraftWorker": (
            "draft_runner draft_attn_backend hot_token_id topk speculative_num_steps device "
            "req_to_token_pool parallel_layout cuda_graph_runner_for_draft_extend "
            "index_share_for_mtp_iteration dsa_index_topk"
        ),
        "sglang.srt.speculative.eagle_info.EagleDraftInput": "hidden_states",
        "sglang.srt.speculative.eagle_info.EagleVerifyInput": "draft_token draft_probs",
        "sglang.srt.managers.schedule_batch.ScheduleBatch": (
            "reqs req_pool_indices seq_lens input_ids spec_info forward_mode chunked_req "
            "sampling_info"
        ),
        "sglang.srt.managers.schedule_batch.Req": (
            "origin_input_ids output_ids sampling_params finished_len is_retracted finished"
        ),
        "sglang.srt.managers.utils.GenerationBatchResult": "num_correct_drafts_per_req_cpu",
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter": (
            "forward_ct_decode decode_log_interval is_stats_logging_rank metrics_collector "
            "current_scheduler_metrics_enabled"
        ),
        "sglang.srt.sampling.sampling_params.SamplingParams": "top_k sampling_seed n",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": (
            "temperatures top_ks top_ps min_ps is_any_greedy need_top_k_sampling "
            "need_top_p_sampling need_min_p_sampling sampling_mask_batch_indices"
        ),
    }
)
"""Members of SGLang's classes that we read, by the class's full name."""


def check_override_points() -> None:
    """Raise :class:`OverridePointChanged` for the first thing of SGLang's that has changed."""
    for point in OVERRIDE_POINTS:
        point.check()
    for title, names in NAMES_READ.items():
        missing = sorted({*names.split()} - members(title))
        if missing:
            raise OverridePointChanged(f"{title}.{missing[0]}", "nothing", "what we read there")


def members(title: str) -> set[str]:
    """Return the names that a class and its bases define, declare, or mention in their methods."""
    module, _, name = title.rpartition(".")
    kind = vars(import_module(module)).get(name)
    found: set[str] = set()
    for part in kind.__mro__ if isinstance(kind, type) else ():
        found |= {*vars(part), *inspect.get_annotations(part)}
        for function in filter(inspect.isfunction, vars(part).values()):
            found |= {*function.__code__.co_names}
    return found
