"""Engines over a target and an EAGLE-3 head with random weights, of any shape."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from eaglegbv.compiling import check_backend
from eaglegbv.config import EngineConfig, Plan
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import (
    Arch,
    Eagle3Head,
    EagleHead,
    EagleHeadConfig,
    default_feature_layers,
)
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument
from eaglegbv.loading import feature_spec, head_drafter
from eaglegbv.models.hf import HFTarget
from eaglegbv.sampling import SamplingParams


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-like target and of an EAGLE-3 head for it.

    Attributes:
        hidden: Width of a hidden state.
        layers: Number of decoder layers, at least 4.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        intermediate: Width of the feed-forward layers.
        vocab: Number of tokens.
        draft_vocab: Number of tokens the head can draft.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    draft_vocab: int

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if value < 1:
                raise InvalidArgument(name, value, "an integer of at least 1")
        if self.layers < 4:
            raise InvalidArgument("layers", self.layers, "at least 4, of which a head reads three")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise InvalidArgument(
                "heads", self.heads, f"a divisor of {self.hidden}, multiple of {self.kv_heads}"
            )


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(
        hidden=256, layers=12, heads=4, kv_heads=2, intermediate=640, vocab=4096, draft_vocab=4096
    ),
    "llama-3.1-8b": Shape(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        intermediate=14336,
        vocab=128_256,
        draft_vocab=32_000,
    ),
}
"""Shapes by name."""

# How requests decode while the time of their steps is measured.


WARM_UP_STEPS = 3
"""Number of steps before those that are timed."""


class StepSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Setting of a measurement of steps.

    Attributes:
        plan: How requests speculate.
        batch: Number of requests.
        context: Tokens of each prompt.
        temperature: Sampling temperature.
        steps: Number of timed steps, after those that warm up.
    """

    plan: Plan
    batch: int = 1
    context: int = 512
    temperature: float = 1.0
    steps: int = 30

    def __post_init__(self) -> None:
        for name, value in (
            ("batch", self.batch),
            ("context", self.context),
            ("steps", self.steps),
        ):
            if value < 1:
                raise InvalidArgument(name, value, "an integer of at least 1")

    @property
    def tokens(self) -> int:
        """Tokens of an answer, enough for all steps, including those whose launches are counted."""
        return (self.plan.depth + 1) * (WARM_UP_STEPS + self.steps + 3)


# An engine with random weights, for a target and an EAGLE-3 head of any shape.


_GAIN = 0.64
"""Standard deviation of random weights, times the square root of the width.

With transformers' own deviation, 0.02, the product is 1.28 at a width of 4096. 32 layers then
magnify the rounding of bfloat16 so much that sums in another order give logits a twentieth apart,
too far for :mod:`eaglegbv.models.self_check` to accept. With a much smaller one, wrong masks hardly
show.
"""


@dataclass(frozen=True, slots=True)
class Rig:
    """Engines over models with random weights.

    Attributes:
        engine: Engine that waits for the device at the end of every phase.
        overlapping: Another engine with the same models, which does not wait; None if the device
            does not run asynchronously.
        target: Target of both engines.
        drafter: Drafter of both engines.
        shape: Sizes of both models.
    """

    engine: Engine
    overlapping: Engine | None
    target: HFTarget
    drafter: EagleDrafter
    shape: Shape


def build_rig(
    shape: Shape,
    setting: StepSetting,
    *,
    dtype: torch.dtype,
    device: torch.device,
    compile_backend: str | None = None,
    graphs: GraphMode = GraphMode.OFF,
) -> Rig:
    """Make a target and a head with random weights, and an engine with room for the setting.

    The weights are the same every time, and the caller's random state is not changed.

    Args:
        shape: Sizes of both models.
        setting: What will be timed.
        dtype: Dtype of the weights.
        device: Device of the weights.
        compile_backend: Backend of ``torch.compile`` with which to compile models and verifier;
            None for no compilation.
        graphs: Whether tree forwards and drafting are recorded and replayed.
    """
    if compile_backend is not None:  # fail before anything is made
        check_backend(compile_backend)
    slots = setting.batch * (setting.context + setting.tokens + setting.plan.tree_slots + 64)
    head_config = _head_config(shape)
    with _seeded(device):
        with device:
            model = AutoModelForCausalLM.from_config(_target_config(shape, setting), dtype=dtype)
        target = HFTarget(
            model,
            features=feature_spec(head_config),
            max_slots=slots,
            compile_backend=compile_backend,
            graphs=graphs,
            must_pass=False,  # what it finds is logged, and reported with the times
        )
        head = random_head(head_config, target.input_embeddings)
    drafter = head_drafter(
        head,
        slots=slots,
        graphs=graphs,
        max_context=target.max_context,
        compile_backend=compile_backend,
    )
    make_engine = partial(
        Engine, target, drafter, _engine_config(setting, slots), compile_backend=compile_backend
    )
    barrier = barrier_of(device)
    overlapping = None if barrier is None else make_engine()
    engine = make_engine(barrier=barrier)
    engine.record(setting.plan, SamplingParams(temperature=setting.temperature))
    return Rig(engine, overlapping, target, drafter, shape)


def random_head(config: EagleHeadConfig, embedding: Tensor) -> EagleHead:
    """Return a head with random weights, on the device and in the dtype of ``embedding``.

    Args:
        config: Sizes and settings.
        embedding: ``[vocab, hidden]``; shared, not copied.
    """
    device = embedding.device
    with device:
        head = Eagle3Head(config, embedding, torch.arange(config.draft_vocab_size))
    # The frequencies of its rotations, which the head computes on the CPU, stay in float32.
    return head.to(device, embedding.dtype).train(mode=False)


def barrier_of(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits for ``device`` to finish its work; None if none is needed."""
    return torch.cuda.synchronize if device.type == "cuda" else None


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Draw from seed 0 in this context; afterwards the generators continue as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _target_config(shape: Shape, setting: StepSetting) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=setting.context + setting.tokens + setting.plan.depth + 1,
        tie_word_embeddings=False,
        initializer_range=_GAIN / sqrt(shape.hidden),
        bos_token_id=None,
        eos_token_id=None,
    )


def _head_config(shape: Shape) -> EagleHeadConfig:
    return EagleHeadConfig(
        arch=Arch.EAGLE3,
        hidden_size=shape.hidden,
        target_hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        draft_vocab_size=shape.draft_vocab,
        feature_layers=default_feature_layers(shape.layers),
    )


def _engine_config(setting: StepSetting, slots: int) -> EngineConfig:
    return EngineConfig(
        kv_slots=slots,
        max_batch=setting.batch,
        prefix_cache=False,
        prefill_tokens=max(1024, setting.context),
    )
