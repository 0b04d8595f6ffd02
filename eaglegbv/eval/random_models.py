"""Pairs of a target and an EAGLE-3 head with made weights, of any shape.

The weights are random, and the head's drafts are hardly ever right. With ``memoryless`` they are
made so that they are right as often as one wants, at full size and without published weights:

- the residual branches of the target are scaled down, so that the next token depends nearly only on
  the last one, x, through its embedding: the logits are about ``W e(x)``;
- the head carries the same map. Its attention sees its own position only and replaces the state of
  the token before by the embedding of the last one: ``h + v``, where ``v = e(x) - h``;
- the head has its own embedding: the target's and *noise*, which :func:`tune` chooses by measuring.

Values of attention must hold an embedding, so only as many of its entries as they have are not 0.
"""

from collections.abc import Callable, Mapping
from math import log, sqrt

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eaglegbv.compiling import check_backend
from eaglegbv.config import EngineConfig, GraphMode, Plan
from eaglegbv.drafters.eagle import EagleDrafter, head_drafter
from eaglegbv.drafters.eagle_model import Arch, Eagle3Head, EagleHead, EagleHeadConfig
from eaglegbv.drafters.training.heads import head_config_of
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.target import FINAL
from eaglegbv.sampling import SamplingParams
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

_BRANCH = 0.01
"""Factor on the residual branches of a memoryless pair, and on what its head does not need."""

_SHARPNESS = 0.9
"""Deviation of a memoryless target's logits, by the one at which few tokens have all the mass,
``sqrt(2 ln V)``: the entropy is then about ``0.19 ln V``, 2 nats for 32k tokens."""

_FOCUS = 2.0
"""Factor on the queries of a memoryless head: its scores of its own position exceed all others."""

_DECAY, _TRIES, _TUNED_WITHIN = 2.5, 8, 0.05
_TUNED_REQUESTS, _TUNED_PROMPT, _TUNED_TOKENS = 16, 8, 32


def random_pair(
    shape: Shape,
    *,
    slots: int,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    compile_backend: str | None = None,
    graphs: GraphMode = GraphMode.OFF,
    memoryless: bool = False,
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
        memoryless: Whether the head drafts what the target says; see this module.
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
        if memoryless:
            _forget(model, shape)
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
        if memoryless:
            _follow(head, target.output_embeddings)
    drafter = head_drafter(
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


@torch.no_grad()
def _forget(model: LlamaForCausalLM, shape: Shape) -> None:
    """Make the next token depend nearly only on the last one."""
    embedding = model.model.embed_tokens.weight
    embedding[:, shape.kv_heads * shape.hidden // shape.heads :] = 0
    embedding.mul_(sqrt(shape.hidden) / embedding.float().norm(dim=1, keepdim=True))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_BRANCH)
        layer.mlp.down_proj.weight.mul_(_BRANCH)
    # What the head cannot draft is left with next to no mass.
    deviation = _SHARPNESS * sqrt(2 * log(shape.draft_vocab))
    model.lm_head.weight[: shape.draft_vocab].mul_(deviation / _GAIN)


@torch.no_grad()
def _follow(head: EagleHead, output_embeddings: Tensor) -> None:
    """Give a head the target's map from the last token to the next; see this module."""
    config, state = head.config, head.state_dict()
    for name, weight in state.items():
        if "norm" not in name:
            weight.mul_(_BRANCH)
    attention = {part: state[f"layer.self_attn.{part}_proj.weight"] for part in "qkvo"}
    state["fc.weight"].diagonal().add_(1)  # the features of the lowest layer
    attention["k"].diagonal().add_(1)  # embeddings come before states in what attention reads
    attention["v"].diagonal().add_(1)
    attention["v"][:, config.hidden_size :].diagonal().sub_(1)
    group = config.num_heads // config.num_kv_heads
    entries = torch.arange(config.num_kv_heads * config.head_dim, device=state["fc.weight"].device)
    head_of, entry = entries // config.head_dim, entries % config.head_dim
    for member in range(group):  # the query heads that read the same values
        places = (head_of * group + member) * config.head_dim + entry
        attention["q"][places, entries] += _FOCUS
        attention["o"][entries, places] += 1 / group
    state["lm_head.weight"].copy_(output_embeddings[: config.draft_vocab_size])
    head.embedding = head.embedding.clone()


def tune(
    target: HFTarget, drafter: EagleDrafter, plan: Plan, wanted: float, *, temperature: float
) -> float:
    """Choose the noise of a memoryless pair's head, by measuring; return what is reached.

    Args:
        target: The target.
        drafter: What drafts for it; its head gets the noise.
        plan: A fixed plan.
        wanted: Tokens that a step of the plan is to commit for a request on average.
        temperature: Sampling temperature.

    Raises:
        InvalidArgument: No noise leads to so many tokens.
    """
    noise, reached = 0.0, plan.depth + 0.5  # about what a step commits without noise
    if 1 < wanted < reached:
        for _ in range(_TRIES):
            # Measured: the logarithm of the drafted tokens falls by about as much as noise grows.
            noise += log(max(reached - 1, _BRANCH) / (wanted - 1)) / _DECAY
            if noise < 0:
                break
            reached = block_efficiency(target, drafter, plan, noise, temperature=temperature)
            if abs(reached - wanted) <= _TUNED_WITHIN * wanted:
                return reached
    expected = f"a number above 1 that this pair and plan can reach, not {reached:.2f} or more"
    raise InvalidArgument("acceptance_length", wanted, expected)


@torch.no_grad()
def block_efficiency(
    target: HFTarget, drafter: EagleDrafter, plan: Plan, noise: float, *, temperature: float
) -> float:
    """Return the tokens that a step commits for a request, after giving the head so much noise."""
    embedding, table = target.input_embeddings, drafter.head.embedding
    config = drafter.head.config
    generator = torch.Generator(embedding.device).manual_seed(1)
    width = config.num_kv_heads * config.head_dim
    shape, scale = (len(embedding), width), noise * sqrt(config.hidden_size / width)
    drawn = torch.randn(shape, generator=generator, device=embedding.device, dtype=table.dtype)
    table.copy_(embedding)
    table[:, :width].add_(drawn, alpha=scale)
    engine = Engine(target, drafter, EngineConfig(prefix_cache=False))
    prompts = random_prompts(config.draft_vocab_size, _TUNED_REQUESTS, _TUNED_PROMPT)
    usual = SamplingParams(temperature=temperature, max_tokens=_TUNED_TOKENS, ignore_eos=True)
    params = [msgspec.structs.replace(usual, seed=seed) for seed in range(len(prompts))]
    requests = engine.run(prompts, params, plan)
    forwards = sum(request.metrics.target_forwards for request in requests)
    return sum(request.metrics.committed_tokens for request in requests) / forwards


def random_prompts(vocab: int, count: int, length: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` random tokens, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = torch.randint(vocab, (count, length), generator=generator).tolist()
    return prompts


def barrier_of(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits for ``device`` to finish its work; None if none is needed."""
    return torch.cuda.synchronize if device.type == "cuda" else None
