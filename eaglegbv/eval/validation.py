"""What training asks of the engine: the target's answers, and how much of a head's is accepted."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.devices import AUTO_DTYPE, place_of, torch_as_usual
from eaglegbv.drafters.checkpoint import load_head, save_head
from eaglegbv.drafters.eagle import EagleDrafter, FeatureDrafter, head_drafter
from eaglegbv.drafters.eagle_model import Head
from eaglegbv.drafters.parallel import ParallelDrafter
from eaglegbv.drafters.parallel_model import ParallelHead
from eaglegbv.engine import Engine
from eaglegbv.errors import EagleGBVError
from eaglegbv.llm import LLM
from eaglegbv.metrics import RequestMetrics
from eaglegbv.models.hf import HFTarget, load_config, load_model
from eaglegbv.models.target import FINAL
from eaglegbv.sampling import SamplingParams

_SLOTS = 16_384  # tokens that the KV pools hold
_AT_ONCE = 64  # prompts that are answered together
# Plans are fixed, for the engine's choices depend on timing, and a seed is to reproduce its texts.
_WITH_HEAD = Plan(paths=1, depth=3)
_WITH_LOOKUP = Plan(verifier="target_only", paths=1, depth=2)


def target_answers(
    prompts: Sequence[list[int]],
    *,
    target: str | Path,
    head: Path | None = None,
    max_tokens: int,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    speculate: bool | None = None,
) -> list[list[int]]:
    """Answer prompts, many at a time, and close the engine again.

    Args:
        prompts: Token ids of each.
        target: Folder or hub name of the target.
        head: Folder of an EAGLE head that drafts for it; None for prompt lookup.
        max_tokens: Most tokens of an answer.
        temperature: Of sampling.
        dtype: What the models compute in.
        device: Where.
        seed: Seed of all answers; the same prompts, head, dtype and device give the same ones.
        speculate: Whether to draft. None is on a GPU alone: on a CPU a step of so many texts takes
            longer for every row (of the tiny pair plainly 338 tokens a second, drafted by its head
            243, with one token looked up 290).

    Returns:
        Token ids of each answer, with the token that ends it, if it does not break off.

    Raises:
        EagleGBVError: A model cannot be opened, or a prompt cannot be answered.
    """
    config = EngineConfig(max_batch=_AT_ONCE, seed=seed)
    drafter = None
    if device.startswith("cuda") if speculate is None else speculate:
        drafter = "ngram" if head is None else str(head)
    plan = PLAIN if drafter is None else _WITH_LOOKUP if head is None else _WITH_HEAD
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with LLM(str(target), drafter, plan=plan, dtype=dtype, device=device, engine=config) as llm:
        completions = llm.generate(list(prompts), params, progress=True)
    for completion in completions:
        if completion.error is not None:
            raise EagleGBVError(f"a prompt was not answered: {completion.error}")
    return [completion.token_ids for completion in completions]


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

    def __call__(self, head: Head, prompts: Sequence[Sequence[int]]) -> Mapping[str, float]:
        """Return the acceptance length, and the share of forwards that accept so many tokens.

        Raises:
            EagleGBVError: The head does not fit, or its output is invalid.
        """
        # Training may run its forward in bfloat16, but here the weights' own dtype counts.
        with torch_as_usual():
            metrics = self._answer(head, prompts)
        plan = self._plan
        forwards = max(1, sum(m.target_forwards for m in metrics))
        name = f"{plan.verifier}, {plan.paths} paths of depth {plan.depth}, temperature 1"
        by_depth = zip_longest(*(m.accepted_by_depth for m in metrics), fillvalue=0)
        shares = [sum(counts) / forwards for counts in by_depth]
        # A last forward may have accepted more than the text had room for.
        length = 1 + sum(m.accepted_tokens for m in metrics) / forwards
        return {f"acceptance length, {name}": length} | {
            f"{depth} or more accepted, {name}": share
            for depth, share in enumerate(shares, start=1)
        }

    def _answer(self, head: Head, prompts: Sequence[Sequence[int]]) -> list[RequestMetrics]:
        if self._target is None:
            place, dtype = place_of(self._device, AUTO_DTYPE)
            model = load_model(self._folder, dtype=dtype, device=place)
            features = head.config.feature_layers or (FINAL,)
            self._target = HFTarget(model, max_slots=_SLOTS, features=features)
        with TemporaryDirectory() as folder:
            save_head(head, Path(folder), torch.float32)
            loaded = load_head(
                Path(folder),
                target_config=load_config(self._folder),
                target_embedding=self._target.input_embeddings,
                read_output=self._target.output_layer,
                dtype=self._target.dtype,
                device=self._device,
            )
        block = isinstance(loaded, ParallelHead)
        kind: type[FeatureDrafter] = ParallelDrafter if block else EagleDrafter
        drafter = head_drafter(kind, loaded, slots=_SLOTS)
        engine = Engine(self._target, drafter, EngineConfig(kv_slots=_SLOTS, seed=self._seed))
        params = [self._params] * len(prompts)
        requests = engine.run(prompts, params, self._plan)
        return [request.metrics for request in requests]
