"""SGLang's arguments, checked and completed before a server starts.

SGLang does this for its own EAGLE, but not for plug-ins. Everything is refused that we would get
wrong or ignore.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeAlias

import msgspec

from eaglegbv.backends.sglang.launch import LAUNCHER, Launch, served_head, target_config
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.config import MAX_DEPTH, MAX_PATHS, Plan
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.utils import require_integer
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS

_log = logging.getLogger(__name__)

DEFAULT_RUNNING = 48
WITHOUT_OVERLAP = frozenset({"cpu"})  # devices on which SGLang has no kernels for it
MASKLESS_BACKENDS = ("torch_native", "flex_attention")
TREE_BACKENDS = ("flashinfer", "fa3", "triton", "aiter", "wave", "intel_amx", "intel_xpu")
"""Attention backends that read the masks of trees."""
LATENT_TREE_BACKENDS = ("fa3", "triton")
"""Backends that do so if the target's attention is latent (MLA). FlashInfer's treats any tree as a
chain there, without a warning.
"""
PAGED_TREE_BACKENDS = ("flashinfer", "fa3", "triton", "intel_amx")
"""Backends that draft several paths into pages of several tokens."""
Refusals: TypeAlias = Mapping[str, tuple[tuple[object, ...], str, str]]
"""By option: the values it may have, why it may have no other, and what the user can do."""

_OURS, _CHOOSE = "verification is ours", "choose a verifier by EAGLEGBV_VERIFIER"
_BLOCK = "set EAGLEGBV_VERIFIER=block and --speculative-eagle-topk 1"
_LOSSY = "it changes the distribution of the text"
_PROCESSORS = "SGLang does not apply custom processors to draft trees"
_HALVES = "the two halves of a batch would share one round's random numbers"
_SUMS = "the order of the verifiers' sums is not fixed; seeds fix random numbers without it"
_DROP = "leave it out"
_UNTRIED = "it has never run with our trees"
_NO_PLUGINS = "SGLang loads no plug-ins in further workers"

UNTRIED: Mapping[str, tuple[object, ...]] = {
    "kv_cache_dtype": ("auto",),
    "speculative_draft_kv_cache_dtype": (None, "auto"),
    "speculative_token_map": (None,),
    "enable_hierarchical_cache": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_hisparse": (False,),
    "enable_unified_memory": (False,),
    "enable_unified_cache_external_linker": (False,),
    "enable_page_major_kv_layout": (False,),
    "enable_kv_cache_sharding": (False,),
    "enable_prefill_cp": (False,),
    "enable_single_batch_overlap": (False,),
    "enable_pdmux": (False,),
    "enable_streaming_session": (False,),
    "enable_lora_overlap_loading": (False, None),
    "enable_dp_attention": (False, None),
    "enable_torch_compile": (False,),
    "rl_on_policy_target": (None,),
    "decoupled_spec_role": ("null",),
}
"""By option: the values with which our trees have run."""

REFUSED: Refusals = {
    "pp_size": ((1,), "sampled trees are not relayed between pipeline stages", "use --tp"),
    "attn_dp_size": ((1,), "other requests on other ranks have not been tried", "use --dp"),
    "disaggregation_mode": (
        (None, "null"),
        "draft distributions are not transferred between prefill and decode servers",
        "use one server",
    ),
    "speculative_use_rejection_sampling": ((False,), _OURS, _CHOOSE),
    "speculative_use_block_verification": ((False,), _OURS, _BLOCK),
    "speculative_accept_threshold_single": ((1.0,), _LOSSY, _CHOOSE),
    "speculative_accept_threshold_acc": ((1.0,), _LOSSY, _CHOOSE),
    "enable_custom_logit_processor": ((False,), _PROCESSORS, "use logit_bias or a grammar"),
    "enable_watermark": ((False,), "watermarks are forced tokens, not a distribution", _DROP),
    "enable_attn_tp_input_scattered": ((False,), "the head needs features whole", _DROP),
    "enable_two_batch_overlap": ((False,), _HALVES, _DROP),
    "enable_deterministic_inference": ((False,), _SUMS, _DROP),
    "enable_multi_layer_eagle": ((False, None), "its heads draft chains", _DROP),
    "tokenizer_worker_num": ((1,), _NO_PLUGINS, _DROP),
    "detokenizer_worker_num": ((1,), _NO_PLUGINS, _DROP),
    "dcp_size": ((1,), _UNTRIED, "use --tp"),
    "attn_cp_size": ((1,), _UNTRIED, "use --tp"),
    **{option: (harmless, _UNTRIED, _DROP) for option, harmless in UNTRIED.items()},
}
"""Options that are refused rather than ignored."""

_STATELESS = "use a verifier without modified-target state, such as otbv"
_OR_DROP = f"leave it out, or {_STATELESS}"
_OWN_STATE = "every rank would keep a state of its own, by distributions that differ in last bits"
_WHOLE = "earlier draft distributions are replayed over the whole text"

_ONE_TOKEN = f"use --page-size 1 with --attention-backend flashinfer or triton, or {_STATELESS}"

REFUSED_WITH_STATE: Refusals = {
    "page_size": ((None, 1), _UNTRIED, _ONE_TOKEN),
    "tp_size": ((1,), _OWN_STATE, _STATELESS),
    "speculative_draft_window_size": ((None,), _WHOLE, _OR_DROP),
}
"""Options that verifiers with modified-target state (``greedy_block``, ``spectr_gbv``) refuse."""


class NotServed(EagleGBVError):
    """An option of SGLang that this backend cannot honour."""

    def __init__(self, option: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"--{option.replace('_', '-')} {value}: {reason}; {remedy}")
        self.option, self.value, self.reason, self.remedy = option, value, reason, remedy


class _Options(argparse.ArgumentParser):
    """Parser of SGLang's options that raises instead of printing hundreds of them."""

    def error(self, message: str) -> NoReturn:
        raise EagleGBVError(f"SGLang's options: {message}")


def check_command(start: Launch) -> None:
    """Check a server's command by SGLang's own parser, and as it will be when it starts.

    Nothing is loaded, and no accelerator is needed.

    Raises:
        EagleGBVError: SGLang has no such option, or does not take its value; or see
            :func:`settle_arguments`.
    """
    from sglang.srt.server_args import ServerArgs

    parser = _Options(add_help=False)
    ServerArgs.add_cli_args(parser)
    arguments, unknown = parser.parse_known_args(start.command[len(LAUNCHER) :])
    if unknown:
        names = [name for action in vars(parser)["_actions"] for name in action.option_strings]
        close = get_close_matches(unknown[0].partition("=")[0], names, n=1)
        perhaps = f" ({close[0]}, perhaps)" if close else ""
        raise InvalidArgument("option", unknown[0], f"an option of SGLang{perhaps}")
    if arguments.speculative_algorithm is None:
        return
    config = target_config(
        arguments.model_path,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    )
    latent = config.to_dict().get("kv_lora_rank") is not None
    settle_arguments(arguments, Settings.from_environment(start.environment), latent=latent)


def settle_arguments(server_args: Any, settings: Settings, *, latent: bool) -> None:
    """Check SGLang's arguments and fill in what depends on K and L.

    ``latent`` says whether the target's attention is (MLA).

    Raises:
        InvalidArgument: A value is out of range, or the verifier cannot use so many paths.
        NotServed: An option cannot be honoured.
        DrafterMismatch: The head is not of the named kind, or does not fit the target.
    """
    stateful = settings.verifier in STATEFUL_VERIFIERS
    refused = {**REFUSED, **(REFUSED_WITH_STATE if stateful else {})}
    for option, (harmless, reason, remedy) in refused.items():
        value = getattr(server_args, option)
        if value not in harmless:
            raise NotServed(option, value, reason, remedy)
    _settle_shape(server_args, settings)
    for plan in settings.served_plans(
        server_args.speculative_eagle_topk, server_args.speculative_num_steps
    ):
        if plan.speculative:
            msgspec.structs.replace(settings, verifier=plan.verifier).check_paths(plan.paths)
    _check_attention(server_args, latent=latent)
    _settle_head(server_args)
    if server_args.max_running_requests is None:
        server_args.max_running_requests = DEFAULT_RUNNING
    alone = stateful or server_args.device in WITHOUT_OVERLAP
    if alone and not server_args.disable_overlap_schedule:
        server_args.disable_overlap_schedule = True
        why = "targets depend on the round before" if stateful else "SGLang has none on a CPU"
        _log.warning("overlap scheduling is off: %s", why)
    if settings.plans and server_args.device == "cpu" and not server_args.disable_cuda_graph:
        why = "SGLang would capture graphs of several plans, and has none on a CPU"
        raise NotServed("plans", settings.plans, why, "add --disable-cuda-graph")
    if server_args.enable_mixed_chunk:
        server_args.enable_mixed_chunk = False
        _log.warning("mixed chunked prefill is off: it decodes running requests without drafts")


def _settle_shape(server_args: Any, settings: Settings) -> None:
    paths, depth = settings.widest() or (Plan().paths, Plan().depth)
    if server_args.speculative_eagle_topk is None:
        server_args.speculative_eagle_topk = paths
    if server_args.speculative_num_steps is None:
        server_args.speculative_num_steps = depth
    K, L = server_args.speculative_eagle_topk, server_args.speculative_num_steps
    require_integer("speculative_eagle_topk", K, 1, MAX_PATHS)
    require_integer("speculative_num_steps", L, 1, MAX_DEPTH)
    nodes = server_args.speculative_num_draft_tokens
    if nodes not in (None, K * L + 1):
        expected = f"{K * L + 1} (K * L + 1), which is also what it is when left out"
        raise InvalidArgument("speculative_num_draft_tokens", nodes, expected)
    server_args.speculative_num_draft_tokens = K * L + 1


def _settle_head(server_args: Any) -> None:
    drafter = server_args.speculative_draft_model_path
    if drafter is None:
        expected = "the folder or hub name of an EAGLE head; MTP layers of the target do not serve"
        raise InvalidArgument("speculative_draft_model_path", None, expected)
    folder, algorithm = served_head(
        drafter,
        server_args.model_path,
        revision=server_args.revision,
        trust_remote_code=server_args.trust_remote_code,
        draft_revision=server_args.speculative_draft_model_revision,
    )
    if algorithm != server_args.speculative_algorithm.upper():
        expected = f"{algorithm}, for the head in {drafter}"
        raise InvalidArgument("speculative_algorithm", server_args.speculative_algorithm, expected)
    server_args.speculative_draft_model_path = str(folder)


def _check_attention(server_args: Any, *, latent: bool) -> None:
    trees = LATENT_TREE_BACKENDS if latent else TREE_BACKENDS
    paged = (server_args.page_size or 1) > 1
    chains = server_args.speculative_eagle_topk == 1
    target = server_args.attention_backend
    draft = server_args.speculative_draft_attention_backend
    for option, backend, does in (
        ("speculative_draft_attention_backend", draft, "drafts"),
        ("attention_backend", server_args.prefill_attention_backend or target, "verifies"),
        ("attention_backend", server_args.decode_attention_backend or target, "verifies"),
    ):
        if backend is None:  # SGLang chooses one that fits
            continue
        if backend in MASKLESS_BACKENDS:
            remedy = "use flashinfer, fa3 or triton, or intel_amx on a CPU"
            raise NotServed(option, backend, "it has no tree masks", remedy)
        if not chains and backend not in trees:
            where = " where attention is latent (MLA)" if latent else ""
            remedy = f"use {_listed(trees)}, or --speculative-eagle-topk 1"
            raise NotServed(option, backend, f"it {does} chains only{where}", remedy)
        if not chains and paged and backend not in PAGED_TREE_BACKENDS:
            remedy = f"use {_listed(PAGED_TREE_BACKENDS)}, or --page-size 1"
            raise NotServed(option, backend, f"it {does} no trees in pages of tokens", remedy)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
