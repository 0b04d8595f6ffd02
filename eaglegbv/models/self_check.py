"""The check that a transformers model honours the attention function it is given."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from eaglegbv.attention import AttentionCall, Segment, attend_for_layer, attend_opaque
from eaglegbv.config import MIN_SLOTS
from eaglegbv.devices import machine_facts
from eaglegbv.errors import EagleGBVError, ModelNotSupported, first_line
from eaglegbv.models.target import Target, TargetOutput
from eaglegbv.utils import CacheFile

PLAIN = "eaglegbv_paged"  # name of the attention function of an uncompiled model
COMPILED = "eaglegbv_paged_opaque"  # name of the attention function of a compiled model


AttentionInterface.register(PLAIN, attend_for_layer)
AttentionInterface.register(COMPILED, partial(attend_for_layer, eaglegbv_attend=attend_opaque))

# Check, when a target is built, that a transformers model honours the paged attention.
#
# Some models never call the attention function they are given, and some drop its arguments; their
# logits would be plausible and wrong. So a model must
#
# 1. call the function once in every layer, with the sliding window its configuration names;
# 2. return, for a packed forward of two draft trees, the logits and features that the plain model
# returns path by path.
#
# Rounding moves outputs too, and not always a little: where two experts are nearly tied, a router
# picks the other one. So trees of several sequences are tried, and one that agrees is enough: a
# model that attends in another way agrees on none, as its nodes see their siblings. In half
# precision a deep mixture of experts may agree on none either. Such a model is checked once more in
# float32.
#
# That takes seconds on a CPU, so the verdict on a model that passed is kept.


TOLERANCE = 1e-4
HALF_TOLERANCE = 5e-2
"""Largest difference allowed, as a fraction of the largest value; the second is for bfloat16 and
float16. A model that attends in another way misses them by far."""
HALVES = (torch.bfloat16, torch.float16)
_SEQUENCES = 4  # sequences that are tried


class Verdict(msgspec.Struct, frozen=True):
    """What was found of a model that passed."""

    native: bool  # whether the native library computes the same


def kept_verdict(folder: Path, device: torch.device, *facts: object) -> CacheFile[Verdict]:
    """Return where the verdict on a model's files is kept, and on other ``facts`` of its forwards.

    A changed file of the model or of this package is checked anew, and so is another version of
    PyTorch or transformers.
    """
    package = Path(__file__).parents[1]
    paths = [*folder.iterdir(), *package.rglob("*.py"), *package.glob("native/*.[hc]*")]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]
    versions = transformers.__version__, *machine_facts(device)
    return CacheFile.of("checked", Verdict, files, versions, *facts)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A prompt and a draft tree after it: tokens before the root, and each node's parent."""

    prompt: int
    parents: tuple[int, ...]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to ``node``."""
        return [0] if node == 0 else [*self.path(self.parents[node]), node]


_SAMPLES = (_Sample(5, (0, 0, 0, 1, 1, 2)), _Sample(2, (0, 0, 1, 1)))


def _tokens(sample: _Sample, number: int, vocab_size: int) -> list[int]:
    """Return arbitrary tokens for the prompt and the nodes, all different if possible."""
    count = sample.prompt + len(sample.parents)
    first = sample.prompt + 101 * number
    return [(7919 * (first + i) + 13) % vocab_size for i in range(count)]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The attention that one layer asked for."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None


class Probe:
    """Attention of a single first token, which sees only itself; records each layer's call."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    @staticmethod
    def segment() -> Segment:
        """Return the segment of that token."""
        zero = torch.zeros(1, dtype=torch.int64)
        return Segment.causal(zero, zero[:0], zero)

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the token's value, once per query head."""
        self.calls.append(LayerCall(call.layer, k.shape[1], k.shape[2], v.shape[2], call.window))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def check_layers(
    name: str,
    calls: Sequence[LayerCall],
    config: PreTrainedConfig,
    max_context: int,
    *,
    windowed: bool = True,
) -> None:
    """Check the calls of one probing forward; ``windowed`` is :func:`heeds_window`.

    Raises:
        ModelNotSupported: A layer did not call the function, layers differ in shape, or a window
            differs from the configuration's.
    """
    layers, count = [call.layer for call in calls], config.num_hidden_layers
    if layers != list(range(count)):
        expected = f"one attention call in each of {count} layers, got {layers}"
        raise ModelNotSupported("model", name, expected)
    shapes = {(call.kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1 or any(call.value_dim != call.head_dim for call in calls):
        expected = f"keys and values of one shape in all layers, got {sorted(shapes)}"
        raise ModelNotSupported("model", name, expected)
    facts = config.to_dict()
    kinds = facts.get("layer_types") or [None] * len(calls)
    for call, kind in zip(calls, kinds, strict=True):
        if kind not in (None, "full_attention", "sliding_attention"):
            raise ModelNotSupported("model", name, f"full or sliding attention, got {kind!r}")
        named_window = facts.get("sliding_window") if windowed else None
        window = None if kind == "full_attention" else named_window
        windows = {min(w or max_context, max_context) for w in (call.window, window)}
        if len(windows) > 1:
            where = f"of its configuration in layer {call.layer}, got {call.window}"
            raise ModelNotSupported("model", name, f"the window {window} {where}")


@contextmanager
def foreign_code(name: str) -> Iterator[None]:
    """Say of whatever a model's own code raises in this context that the model is not supported.

    A device that runs out of memory is no fault of the model.
    """
    try:
        yield
    except (EagleGBVError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        expected = f"a model that runs on paged attention ({first_line(error)})"
        raise ModelNotSupported("model", name, expected) from error


def heeds_window(model: PreTrainedModel) -> bool:
    """Whether a plain model attends otherwise where its configuration names a window of 2.

    Some configurations name one that the model's class does not know of.
    """
    config = model.config.get_text_config(decoder=True)
    named = config.sliding_window
    tokens = torch.tensor([_tokens(_SAMPLES[0], 0, int(config.vocab_size))], device=model.device)
    with torch.no_grad():
        usual = model(input_ids=tokens, use_cache=False).logits
        try:
            config.sliding_window = 2
            narrow = model(input_ids=tokens, use_cache=False).logits
        finally:
            config.sliding_window = named
    return not torch.equal(usual, narrow)


def plain_outputs(model: PreTrainedModel, features: Sequence[int]) -> list[TargetOutput]:
    """Return the plain model's outputs at every node of the sample trees, for every sequence."""
    vocab = int(model.config.get_text_config(decoder=True).vocab_size)
    return [_plain_output(model, features, number, vocab) for number in range(_SEQUENCES)]


def _plain_output(
    model: PreTrainedModel, features: Sequence[int], number: int, vocab: int
) -> TargetOutput:
    """Return the output at every node for one sequence, each leaf's path run on its own."""
    paths: list[list[int]] = []
    ends: list[tuple[int, int]] = []  # a path that holds a node, and the node's place in it
    for sample in _SAMPLES:
        tokens = _tokens(sample, number, vocab)
        prompt, nodes = tokens[: sample.prompt], tokens[sample.prompt :]
        place_of_node: dict[int, tuple[int, int]] = {}
        for leaf in set(range(len(nodes))) - set(sample.parents):
            path = sample.path(leaf)
            place_of_node |= {node: (len(paths), len(prompt) + i) for i, node in enumerate(path)}
            paths.append(prompt + [nodes[i] for i in path])
        ends += [place_of_node[node] for node in range(len(nodes))]
    width = max(map(len, paths))  # no token sees the padding after it
    padded = [path + [0] * (width - len(path)) for path in paths]
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(padded, device=model.device),
            use_cache=False,
            output_hidden_states=bool(features),
        )
    rows = tuple(torch.tensor(ends, device=model.device).T)
    states = [out.hidden_states[layer][rows] for layer in features]
    return TargetOutput(out.logits[rows].float(), torch.cat(states, dim=-1) if states else None)


def check_forward(
    name: str, target: Target, expected: Sequence[TargetOutput], allowed: float
) -> None:
    """Check packed prefills and packed tree forwards of the sample trees, sequence by sequence.

    Raises:
        ModelNotSupported: Of every sequence, logits or features differ from ``expected`` by more
            than the ``allowed`` fraction of the largest value.
    """
    errors = []
    for number in range(len(expected)):
        error, what = worst_error(name, target, expected, number)
        if error <= allowed:
            return
        errors.append((error, what))
    error, what = min(errors)
    wanted = f"{what} of the plain model within {allowed:.2g} of the largest, off by {error:.2g}"
    hint = "EngineConfig(self_check=False) serves it all the same"
    raise ModelNotSupported("model", name, f"{wanted} ({hint})")


def worst_error(
    name: str, target: Target, expected: Sequence[TargetOutput], number: int
) -> tuple[float, str]:
    """Return how far the outputs of a sequence are off, of the largest value, and which of them is.

    Raises:
        ModelNotSupported: There are not the logits that were asked for.
    """
    taken = target.allocator.allocate(MIN_SLOTS)
    slots = taken.flip(0)  # the order of slots must not matter
    prefills: list[Segment] = []
    trees: list[Segment] = []
    start = 0
    for sample in _SAMPLES:
        tokens = torch.tensor(_tokens(sample, number, target.vocab_size))
        part = slots[start : start + len(tokens)]
        start += len(tokens)
        prompt = part[: sample.prompt]
        prefills.append(Segment.causal(tokens[: sample.prompt], prompt[:0], prompt))
        trees.append(_tree_segment(sample, tokens[sample.prompt :], prompt, part[sample.prompt :]))
    last_rows = torch.tensor([s.prompt for s in _SAMPLES]).cumsum(0) - 1
    prefill = target.forward(prefills, logit_rows=last_rows)
    if prefill.logits.shape != (len(_SAMPLES), target.vocab_size):
        raise ModelNotSupported("model", name, "logits of the rows asked for (logits_to_keep)")
    actual = target.forward(trees)
    target.allocator.release(taken)
    plain = expected[number]
    errors = [(_error(actual.logits, plain.logits), "logits")]
    if plain.features is not None and actual.features is not None:
        errors.append((_error(actual.features, plain.features), "features"))
    return max(errors)


def _tree_segment(sample: _Sample, tokens: Tensor, prompt: Tensor, slots: Tensor) -> Segment:
    nodes = range(len(sample.parents))
    visible = torch.zeros((len(nodes), len(nodes)), dtype=torch.bool)
    for node in nodes:
        visible[node, sample.path(node)] = True
    positions = sample.prompt + visible.sum(1) - 1
    return Segment(tokens, positions, prompt, slots, positions, visible)


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a fraction of the largest value; infinity for no number."""
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual.float() - expected.float()).abs().max()
    error = float(difference / expected.float().abs().max())
    return error if math.isfinite(error) else math.inf


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Have a model of half precision compute in float32, with the same weights, in this context.

    The weights of a part, such as a decoder layer, are widened while it runs: at no time do those
    of more than one part take twice their memory.
    """
    hooks: list[RemovableHandle] = []
    kept: list[tuple[Tensor, Tensor]] = []

    def widen(
        part: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for tensor in (*part.parameters(), *part.buffers()):
            if tensor.dtype in HALVES:
                kept.append((tensor, tensor.data))
                tensor.data = tensor.data.float()
        return tree_map(_widened, inputs), tree_map(_widened, named)

    def restore(*_: object) -> None:
        while kept:
            tensor, data = kept.pop()
            tensor.data = data

    for part in _parts(model):
        hooks.append(part.register_forward_pre_hook(widen, with_kwargs=True))
        hooks.append(part.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()


def _widened(value: object) -> object:
    half = isinstance(value, Tensor) and value.dtype in HALVES
    return value.float() if isinstance(value, Tensor) and half else value


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts that hold all weights: decoder layers, and what stands beside them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif any(isinstance(part, nn.ModuleList) for part in child.modules()):
            yield from _parts(child)
        else:
            yield child
