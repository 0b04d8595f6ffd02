"""Pairs of a target and an EAGLE-3 head with random weights, of any shape.

Their drafts are hardly ever right. What a step would cost with better ones is measured with a
simulated acceptance length (:mod:`eaglegbv.eval.simulated`).
"""

from collections.abc import Callable, Mapping
from math import sqrt

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from eaglegbv.compiling import check_backend
from eaglegbv.config import GraphMode
from eaglegbv.drafters.eagle import EagleDrafter, head_drafter
from eaglegbv.drafters.eagle_model import Arch, Eagle3Head, EagleHead, EagleHeadConfig
from eaglegbv.drafters.training.heads import head_config_of
from eaglegbv.errors import InvalidArgument
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.target import FINAL
from eaglegbv.utils import require_integer


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-like target and of an EAGLE-3 head for it."""

    hidden: int  # width of a hidden state
    layers: int  # number of decoder layers, at least 4
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads
    intermediate: int  # width of the feed-forward layers
    vocab: int  # number of tokens
    draft_vocab: int  # number of tokens the head can draft

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            require_integer(name, value, 1)
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

_GAIN = 0.64
"""Standard deviation of random weights, times the square root of the width.

With transformers' own deviation, 0.02, the product is 1.28 at a width of 4096. 32 layers then
magnify the rounding of bfloat16 so much that sums in another order give logits a twentieth apart,
and :mod:`eaglegbv.models.self_check` must ask float32. With a much smaller one, wrong masks hardly
show.
"""


def random_pair(
    shape: Shape,
    *,
    slots: int,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    compile_backend: str | None = None,
    graphs: GraphMode = GraphMode.OFF,
    native: bool = True,
) -> tuple[HFTarget, EagleDrafter]:
    """Make a target and what drafts for it.

    The weights are the same every time, and the caller's random state is not changed.

    Args:
        shape: Sizes of both models.
        slots: Tokens the KV pools hold.
        max_context: Most positions of a text.
        dtype: Dtype of the weights.
        device: Device of the weights.
        compile_backend: Backend of ``torch.compile`` with which to compile the target; None for no
            compilation.
        graphs: Whether tree forwards and drafting are recorded and replayed.
        native: Whether the native library runs forwards, where it can.
    """
    if compile_backend is not None:  # fail before anything is made
        check_backend(compile_backend)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=max_context,
        tie_word_embeddings=False,
        initializer_range=_GAIN / sqrt(shape.hidden),
        bos_token_id=None,
        eos_token_id=None,
    )
    head_config = head_config_of(config, Arch.EAGLE3, draft_vocab=shape.draft_vocab)
    # Draws from seed 0; afterwards the generators continue as before.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        target = HFTarget(
            model,
            features=head_config.feature_layers or (FINAL,),
            max_slots=slots,
            compile_backend=compile_backend,
            graphs=graphs,
            native=native,
            must_pass=False,  # what it finds is logged, and reported with the times
        )
        head = random_head(head_config, target.input_embeddings)
    drafter = head_drafter(
        EagleDrafter,
        head,
        slots=slots,
        graphs=graphs,
        max_context=target.max_context,
        recorder=target.recorder,
    )
    return target, drafter


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


def random_prompts(vocab: int, count: int, length: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` random tokens, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = torch.randint(vocab, (count, length), generator=generator).tolist()
    return prompts


def barrier_of(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits for ``device`` to finish its work; None if none is needed."""
    return torch.cuda.synchronize if device.type == "cuda" else None
