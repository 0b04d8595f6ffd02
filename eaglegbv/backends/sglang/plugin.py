"""The entry point ``sglang.srt.plugins``: SGLang calls :func:`register` in all its processes."""

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.model_override_base import ResolvedView, resolving_view
from sglang.srt.arg_groups.overrides import use_mla_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from eaglegbv.backends.sglang import metrics
from eaglegbv.backends.sglang.book import seed_copies
from eaglegbv.backends.sglang.server_args import settle_arguments
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.version_check import check_override_points, check_version


def register() -> None:
    """Register ``EAGLEGBV`` (EAGLE-1 and -2 heads) and ``EAGLEGBV3`` (EAGLE-3 heads)."""
    for title in metrics.TITLES:
        SpeculativeAlgorithm.register(title, supports_overlap=True, spec_class=SampledTrees)(
            worker_class
        )
    tokenizers = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    results = "sglang.srt.managers.scheduler_components.batch_result_processor"
    adapters = "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility"
    for place, hook in (
        (adapters, check_adapters),
        (f"{tokenizers}._send_one_request", seed_copies),
        (f"{tokenizers}._calculate_spec_decoding_metrics", metrics.add_figures),
        (
            f"{results}.SchedulerBatchResultProcessor.process_batch_result_decode",
            metrics.Delivered().process,
        ),
    ):
        HookRegistry.register(place, hook, HookType.AROUND)


def check_adapters(original: Callable[[Any], None], server_args: Any) -> None:
    """SGLang's check of LoRA beside speculation, which asks by name: ours are as its own EAGLE.

    Adapters change the target's distribution, which is what verifiers keep. The head has none.
    """
    view = resolving_view(server_args)
    if str(view.speculative_algorithm).upper() in metrics.TITLES:
        as_eagle = {"speculative_algorithm": "EAGLE", "_resolved_overrides": ()}
        server_args = ResolvedView(view, overlay=as_eagle)
    original(server_args)


class SampledTrees(CustomSpecAlgo):  # type: ignore[misc]
    """Our algorithms: most of what SGLang asks them, they answer as EAGLE does."""

    def yes(self) -> bool:
        """Use SGLang's code for EAGLE: only the kernel that accepts and rejects is ours."""
        return True

    is_eagle = supports_grammar_overlap = yes
    # SGLang asks these of every algorithm, but its base class does not know them.
    carries_draft_hidden_states = need_topk = yes

    def is_eagle3(self) -> bool:
        """Whether SGLang is to feed the head from several of the target's layers."""
        return bool(self.name == "EAGLEGBV3")

    def create_future_map(self, device: Any, *arguments: Any, **named: Any) -> Any:
        """Return the object that carries tensors from round to round, as for EAGLE."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, *arguments, **named)

    def handle_server_args(self, server_args: Any) -> None:
        """Check and complete the arguments; refuse what cannot be served.

        Raises:
            EagleGBVError: The error names the argument, its value, the reason and the remedy.
        """
        check_version()
        settings = Settings.from_environment(os.environ)
        settle_arguments(server_args, settings, latent=use_mla_backend(server_args))


def worker_class(server_args: Any) -> type:  # noqa: ARG001
    """Return the worker; only the process that runs the model imports it."""
    check_version()
    check_override_points()
    from eaglegbv.backends.sglang.worker import SampledTreeWorker

    return SampledTreeWorker
