"""Our speculative algorithms' answers to SGLang's questions, and the arguments settled at start."""

import os
from typing import Any, ClassVar

from sglang.srt.arg_groups.overrides import use_mla_backend
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from eaglegbv.backends.sglang.guard import check_override_points, check_version
from eaglegbv.backends.sglang.launch import settle_arguments
from eaglegbv.backends.sglang.settings import Settings


class EagleAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Sampled trees of an EAGLE-1 or EAGLE-2 head."""

    title: ClassVar[str] = "EAGLEGBV"

    def is_eagle(self) -> bool:
        """Use SGLang's code for EAGLE: its workers, its KV layout, its CUDA graphs."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """Whether grammars may overlap: only the verification kernel differs from SGLang's own."""
        return True

    def carries_draft_hidden_states(self) -> bool:
        """Answer as EAGLE does; SGLang asks every algorithm, including plug-ins."""
        return True

    def need_topk(self) -> bool:
        """Carry the hidden states of the head from round to round, as for EAGLE."""
        return True

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """Return the object that carries tensors from round to round, as for EAGLE."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def handle_server_args(self, server_args: Any) -> None:
        """Check and complete the arguments; refuse what cannot be served.

        Raises:
            EagleGBVError: The error names the argument, its value, the reason and the remedy.
        """
        check_version()
        settle_arguments(
            server_args,
            Settings.from_environment(os.environ),
            eagle3=self.is_eagle3(),
            latent=use_mla_backend(server_args),
        )


class Eagle3Algorithm(EagleAlgorithm):
    """Sampled trees of an EAGLE-3 head, possibly with a reduced draft vocabulary."""

    title: ClassVar[str] = "EAGLEGBV3"

    def is_eagle3(self) -> bool:
        """Let SGLang feed the head from several of the target's layers."""
        return True


def worker_class(server_args: Any) -> type:  # noqa: ARG001
    """Return the worker; only the process that runs the model imports it."""
    check_version()
    check_override_points()
    from eaglegbv.backends.sglang import tree_kernels
    from eaglegbv.backends.sglang.worker import SampledTreeWorker

    tree_kernels.install()
    return SampledTreeWorker
