"""Acceptance of a head during training, measured with the engine and a real verifier."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.checkpoint import load_head, save_head
from eaglegbv.drafters.eagle_model import EagleHead
from eaglegbv.engine import Engine
from eaglegbv.eval.statistics import Acceptance
from eaglegbv.loading import feature_spec, head_drafter
from eaglegbv.metrics import RequestMetrics
from eaglegbv.models.hf import HFTarget, load_config, load_model
from eaglegbv.sampling import SamplingParams

_SLOTS = 16_384
"""Tokens that the KV pools hold."""


class HeadValidator:
    """Lets heads draft for their target on prompts, each answered once.

    A head is saved and loaded in the same way as users load it. The target is a second copy, opened
    once, for one kind of head.
    """

    def __init__(
        self, target: Path, plan: Plan, *, max_tokens: int, device: str = "cpu", seed: int = 0
    ) -> None:
        """Let heads speculate by ``plan``, in answers of ``max_tokens`` and seeds from ``seed``."""
        self._folder, self._plan = target, plan
        self._params = SamplingParams(temperature=1.0, max_tokens=max_tokens)
        self._device = torch.device(device)
        self._seed = seed
        self._target: HFTarget | None = None

    def __call__(self, head: EagleHead, prompts: Sequence[Sequence[int]]) -> Mapping[str, float]:
        """Return the acceptance length, and the share of forwards that accept so many tokens.

        Raises:
            EagleGBVError: The head does not fit, or its output is invalid.
        """
        # Training may run its forward in bfloat16, but here the weights' own dtype counts.
        with torch.autocast(self._device.type, enabled=False):
            metrics = self._answer(head, prompts)
        plan, found = self._plan, Acceptance.of(metrics, self._plan.depth)
        name = f"{plan.verifier}, {plan.paths} paths of depth {plan.depth}, temperature 1"
        return {f"acceptance length, {name}": found.length} | {
            f"{depth} or more accepted, {name}": share
            for depth, share in enumerate(found.shares, start=1)
        }

    def _answer(self, head: EagleHead, prompts: Sequence[Sequence[int]]) -> list[RequestMetrics]:
        if self._target is None:
            dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
            model = load_model(self._folder, dtype=dtype, device=self._device)
            self._target = HFTarget(model, max_slots=_SLOTS, features=feature_spec(head.config))
        with TemporaryDirectory() as folder:
            save_head(head, Path(folder), torch.float32)
            loaded = load_head(
                Path(folder),
                target_config=load_config(self._folder),
                target_embedding=self._target.input_embeddings,
                target_lm_head=self._target.output_embeddings,
                dtype=self._target.dtype,
                device=self._device,
            )
        drafter = head_drafter(loaded, slots=_SLOTS)
        engine = Engine(self._target, drafter, EngineConfig(kv_slots=_SLOTS, seed=self._seed))
        requests = [engine.add(prompt, self._params, self._plan) for prompt in prompts]
        while engine.has_work:
            engine.step()
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.metrics for request in requests]
