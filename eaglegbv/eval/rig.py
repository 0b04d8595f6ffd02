"""An engine with random weights, for a target and an EAGLE-3 head of any shape."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from eaglegbv.compiling import check_backend
from eaglegbv.config import EngineConfig
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_head import Eagle3Head, EagleHead
from eaglegbv.drafters.eagle_head_config import Arch, EagleHeadConfig, default_feature_layers
from eaglegbv.engine import Engine
from eaglegbv.eval.machine import barrier_of
from eaglegbv.eval.shapes import Shape
from eaglegbv.eval.step_setting import StepSetting
from eaglegbv.graphs import GraphMode
from eaglegbv.loading import feature_spec, head_drafter
from eaglegbv.targets.hf import HFTarget

_GAIN = 0.64
"""Standard deviation of random weights, times the square root of the width.

With transformers' own deviation, 0.02, the product is 1.28 at a width of 4096. 32 layers then
magnify the rounding of bfloat16 so much that sums in another order give logits a twentieth apart,
too far for :mod:`eaglegbv.targets.guard` to accept. With a much smaller one, wrong masks hardly
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
    return Rig(make_engine(barrier=barrier), overlapping, target, drafter, shape)


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
