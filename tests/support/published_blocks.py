"""Small random block drafters in the layouts of published ones, and their forward, done plainly.

Written out by hand, one function for each layout, and so independent of what the package writes and
computes. The plain forward has no cache, no packed rows and no joint products, and runs in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM

from support.published_heads import Published
from support.tiny_models import random_llama, spread

VOCAB, HIDDEN, WIDE, HEADS, KV_HEADS, DIM, LAYERS = 40, 32, 48, 4, 2, 8, 8
MASK = 39
OUTPUTS = [1, 3, 5]
"""Target layers whose outputs are read."""
EPS = 1e-6
THETA = 5e3


def make_target() -> LlamaForCausalLM:
    """A random target whose distributions depend on the whole text."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = random_llama(
            VOCAB, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS
        )
        return spread(model, 0.25)


@dataclass
class Block:
    """A drafter's files, and what their configuration means.

    Attributes:
        files: The files.
        first: The row that says level 1.
        causal: By layer, whether rows see the block causally.
        windows: By layer, the window, or None.
        gated: Whether Markov terms are gated.
        taps: Rows that convolutions mix.
        group: Entries with a common kernel.
        top_k: Candidates of a level.
        factor: Factor on logits.
        cap: Cap of logits, or None.
        inputs: Target layers whose inputs are read.
    """

    files: Published
    first: int
    causal: Sequence[bool] = (False, False)
    windows: Sequence[int | None] = (None, None)
    gated: bool = False
    taps: int = 0
    group: int = 0
    top_k: int = 0
    factor: float = 1.0
    cap: float | None = None
    inputs: Sequence[int] = (2, 4, 6)

    def write(self, folder: Path) -> Path:
        return self.files.write(folder)


def _tensors(shapes: dict[str, tuple[int, ...]], seed: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1.0 if "norm" in name else 0.0) + 0.25 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def _backbone(layers: int = 2, *, prefix: str = "", biases: bool = False) -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        at = f"layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"{at}self_attn.q_norm.weight": (DIM,),
            f"{at}self_attn.k_norm.weight": (DIM,),
            f"{at}mlp.gate_proj.weight": (WIDE, HIDDEN),
            f"{at}mlp.up_proj.weight": (WIDE, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, WIDE),
        }
        if biases:
            shapes |= {
                f"{at}self_attn.{part}_proj.bias": (rows,)
                for part, rows in (
                    ("q", HEADS * DIM),
                    ("k", KV_HEADS * DIM),
                    ("v", KV_HEADS * DIM),
                    ("o", HIDDEN),
                )
            }
    return {prefix + name: shape for name, shape in shapes.items()}


def _layer_keys(**changes: Any) -> dict[str, Any]:
    keys = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return keys | changes


def dflash() -> Block:
    """z-lab's, its block size at the top, with tensors of the export's names."""
    tensors = _tensors(_backbone())
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    config = _layer_keys(
        architectures=["DFlashDraftModel"],
        block_size=9,
        num_target_layers=LAYERS,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": OUTPUTS},
    )
    return Block(Published(config, tensors), first=1)


def dflash_causal() -> Block:
    """z-lab's with sliding layers, causal by default, biases, and nothing said of target layers."""
    config = _layer_keys(
        architectures=["DFlashDraftModel"],
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=4,
        attention_bias=True,
        dflash_config={"mask_token_id": MASK, "block_size": 6},
    )
    tensors = _tensors(_backbone(3, prefix="model.", biases=True))
    return Block(
        Published(config, tensors),
        first=1,
        causal=(False, True, False),
        windows=(None, 4, None),
        inputs=(2, 4, 6),  # round(1 + i * 4 / 2) are 1, 3, 5
    )


def dflash2() -> Block:
    """z-lab's with convolutions and a candidate selector."""
    groups = HIDDEN // 8
    shapes = _backbone() | {
        f"layers.{i}.{part}_conv.{name}": shape
        for i in range(2)
        for part in ("attention", "mlp")
        for name, shape in (
            ("base_kernel", (2, 2, HIDDEN)),
            ("kernel_projection.weight", (2 * 2 * groups, HIDDEN)),
        )
    }
    shapes |= {
        "candidate_selector.predecessor_codebook": (VOCAB, 12),
        "candidate_selector.successor_codebook": (VOCAB, 12),
        "candidate_selector.hidden_projection.weight": (12, HIDDEN),
    }
    config = _layer_keys(
        architectures=["DFlash2DraftModel"],
        dflash_config={
            "mask_token_id": MASK,
            "target_layer_ids": OUTPUTS,
            "block_size": 9,
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 12,
            "selector_top_k": 6,
            "output_multiplier": 1.5,
            "final_logit_softcapping": 4.0,
        },
    )
    return Block(
        Published(config, _tensors(shapes)),
        first=1, taps=2, group=8, top_k=6, factor=1.5, cap=4.0,
    )  # fmt: skip


def dspark(head_type: str = "vanilla") -> Block:
    """DeepSpec's, with copies of the target's tables, and a confidence head."""
    shapes = _backbone() | {
        "markov_head.markov_w1.weight": (VOCAB, 10),
        "markov_head.markov_w2.weight": (VOCAB, 10),
        "confidence_head.proj.weight": (1, HIDDEN + 10),
        "confidence_head.proj.bias": (1,),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    if head_type == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (10, HIDDEN + 10),
            "markov_head.gate_proj.bias": (10,),
        }
    config = _layer_keys(
        architectures=["Qwen3DSparkModel"],
        block_size=8,
        layer_types=["full_attention"] * 2,
        target_layer_ids=OUTPUTS,
        mask_token_id=MASK,
        num_anchors=512,
        num_target_layers=LAYERS,
        markov_rank=10,
        markov_head_type=head_type,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    return Block(Published(config, _tensors(shapes)), first=0, gated=head_type == "gated")


def _speculators(kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": 6,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [i + 1 for i in OUTPUTS],
        "draft_vocab_size": VOCAB,
        "transformer_layer_config": _layer_keys(layer_types=["full_attention"] * 2),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    } | changes


def speculators_dflash() -> Block:
    """speculators', with an embedding and an output layer of its own."""
    own = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    return Block(Published(_speculators("dflash"), _tensors(_backbone() | own)), first=1)


DRAFT_VOCAB = 24


def speculators_dspark() -> Block:
    """speculators', of a smaller draft vocabulary; sliding layers see the block whole."""
    shapes = _backbone() | {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "markov_head.markov_w1.weight": (VOCAB, 10),
        "markov_head.markov_w2.weight": (DRAFT_VOCAB, 10),
    }
    layer = _layer_keys(
        layer_types=["sliding_attention", "full_attention"], sliding_window=3, vocab_size=VOCAB
    )
    config = _speculators(
        "dspark",
        draft_vocab_size=DRAFT_VOCAB,
        markov_rank=10,
        markov_head_type="vanilla",
        enable_confidence_head=False,
        sliding_window_non_causal=True,
        transformer_layer_config=layer,
    )
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    members = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    maps = {"d2t": chosen - torch.arange(DRAFT_VOCAB), "t2d": members}
    return Block(Published(config, _tensors(shapes) | maps), first=0, windows=(3, None))


BLOCKS: dict[str, Callable[[], Block]] = {
    "dflash": dflash,
    "dflash causal": dflash_causal,
    "dflash2": dflash2,
    "dspark": dspark,
    "dspark gated": lambda: dspark("gated"),
    "speculators dflash": speculators_dflash,
    "speculators dspark": speculators_dspark,
}


class PlainBlock:
    """The forward of a drafter's files over a target, in float64, without any cache."""

    def __init__(self, block: Block, model: LlamaForCausalLM) -> None:
        self.block = block
        self.model = model
        self.known: dict[tuple[int, ...], Tensor] = {}
        strip = {
            "encoder.fc.weight": "fc.weight",
            "encoder.output_norm_enc.weight": "hidden_norm.weight",
        }
        self.weights = {
            strip.get(name, name).removeprefix("model."): tensor.double()
            for name, tensor in block.files.tensors.items()
        }
        own = "speculators_model_type" in block.files.config
        target = model.get_input_embeddings().weight.detach().double()
        output = model.get_output_embeddings().weight.detach().double()
        self.embedding = self.weights["embed_tokens.weight"] if own else target
        self.output = self.weights["lm_head.weight"] if own else output
        self.ids = torch.arange(len(self.output))
        if "d2t" in self.weights:
            self.ids = self.ids + block.files.tensors["d2t"]

    @torch.no_grad()
    def features(self, text: Sequence[int]) -> Tensor:
        """``[text, F]``: the target's features."""
        out = self.model.model(torch.tensor([list(text)]), output_hidden_states=True)
        return torch.cat([out.hidden_states[layer][0] for layer in self.block.inputs], dim=-1)

    @torch.no_grad()
    def logits(self, text: Sequence[int], drafted: Sequence[int], levels: int) -> Tensor:
        """``[draft_vocab]``: of what follows ``text`` and ``drafted``; the block has ``levels``."""
        key = (*text, levels)
        if key not in self.known:
            features = self.features(text[:-1]).double()
            self.known[key] = self._hidden(features, text[-1], levels + self.block.first)
        said = self.known[key][self.block.first + len(drafted)]
        logits = self.block.factor * (self.output @ said)
        if self.block.cap is not None:
            logits = self.block.cap * torch.tanh(logits / self.block.cap)
        before = [text[-1], *drafted][-1]
        weights = self.weights
        if "markov_head.markov_w1.weight" in weights:
            term = weights["markov_head.markov_w1.weight"][before]
            if self.block.gated:
                gate = weights["markov_head.gate_proj.weight"] @ torch.cat((said, term))
                term = term * torch.sigmoid(gate + weights["markov_head.gate_proj.bias"])
            return logits + weights["markov_head.markov_w2.weight"] @ term
        if self.block.top_k:
            scores = torch.full_like(logits, -torch.inf)
            query = weights["candidate_selector.predecessor_codebook"][before] * (
                weights["candidate_selector.hidden_projection.weight"] @ said
            )
            for place in logits.argsort(descending=True)[: self.block.top_k]:
                key = weights["candidate_selector.successor_codebook"][place]
                scores[place] = logits[place] + query @ key
            return scores
        return logits

    def _hidden(self, features: Tensor, anchor: int, rows: int) -> Tensor:
        weights, count = self.weights, len(features)
        context = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
        x = self.embedding[[anchor] + [MASK] * (rows - 1)]
        for i in range(len(self.block.causal)):
            at = f"layers.{i}."

            def part(name: str, y: Tensor, at: str = at) -> Tensor:
                return linear(y, weights[f"{at}{name}.weight"], weights.get(f"{at}{name}.bias"))

            def attention(normed: Tensor, i: int = i, at: str = at) -> Tensor:
                q, k, v = (part(f"self_attn.{n}_proj", normed, at) for n in "qkv")
                ctx_k, ctx_v = (part(f"self_attn.{n}_proj", context, at) for n in "kv")
                q, k, ctx_k = (y.unflatten(-1, (-1, DIM)) for y in (q, k, ctx_k))
                q = _norm(q, weights[f"{at}self_attn.q_norm.weight"])
                k = _norm(torch.cat((ctx_k, k)), weights[f"{at}self_attn.k_norm.weight"])
                q = _rotated(q, torch.arange(count, count + rows))
                k = _rotated(k, torch.arange(count + rows))
                v = torch.cat((ctx_v, v)).unflatten(-1, (-1, DIM))
                seen = self._seen(i, count, rows)
                out = scaled_dot_product_attention(
                    q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
                    attn_mask=seen, enable_gqa=True,
                )  # fmt: skip
                return part("self_attn.o_proj", out.transpose(0, 1).flatten(1), at)

            def mlp(normed: Tensor, at: str = at) -> Tensor:
                gate, up = (part(f"mlp.{n}_proj", normed, at) for n in ("gate", "up"))
                return part("mlp.down_proj", silu(gate) * up, at)

            for norm, conv, run in (
                ("input_layernorm", "attention_conv", attention),
                ("post_attention_layernorm", "mlp_conv", mlp),
            ):
                normed = _norm(x, weights[f"{at}{norm}.weight"])
                x = x + self._around(f"{at}{conv}.", normed, run)
        return _norm(x, weights["norm.weight"])

    def _seen(self, layer: int, count: int, rows: int) -> Tensor:
        query = torch.arange(count, count + rows).unsqueeze(1)
        key = torch.arange(count + rows)
        seen = torch.ones((rows, count + rows), dtype=torch.bool)
        if self.block.causal[layer]:
            seen &= key <= query
        window = self.block.windows[layer]
        if window is not None:
            seen &= query - key < window
        return seen

    def _around(self, at: str, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.block.taps:
            return run(x)
        base = self.weights[f"{at}base_kernel"]
        kernels = (x @ self.weights[f"{at}kernel_projection.weight"].T).view(
            len(x), 2, self.block.taps, -1
        )

        def mixed(y: Tensor, side: int) -> Tensor:
            out = torch.zeros_like(y)
            for row in range(len(y)):
                for tap in range(min(self.block.taps, row + 1)):
                    groups = kernels[row, side, tap].repeat_interleave(self.block.group)
                    out[row] += (base[side, tap] + groups) * y[row - tap]
            return out

        return mixed(run(mixed(x, 0)), 1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = DIM // 2
    angles = positions.view(-1, 1, 1) * THETA ** (-torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
