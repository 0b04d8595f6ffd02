"""Checks, before anything is overridden at a server's start, that SGLang is of a known version."""

import inspect
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version

from eaglegbv.errors import EagleGBVError, InvalidArgument, NotInstalled

SUPPORTED = ("0.5.23",)
"""Versions of SGLang whose override points are known."""

PLUGIN = "eaglegbv"
"""Name of our entry point for plug-ins."""


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
    """A function of SGLang that is replaced, wrapped or overridden.

    Attributes:
        module: Module in which it is looked up.
        name: Its name there, dotted for a method.
        parameters: The parameters we rely on, in order; more may follow.
    """

    module: str
    name: str
    parameters: tuple[str, ...]

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


def check_override_points() -> None:
    """Raise :class:`OverridePointChanged` for the first override point that has changed."""
    for point in OVERRIDE_POINTS:
        point.check()
