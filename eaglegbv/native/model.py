"""Models in the native library: their weights, and forwards of packed segments over a KV pool."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eaglegbv.attention.base import Segment
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.errors import InvalidArgument

DTYPES = (torch.float32, torch.bfloat16)
UNIT = 16  # widths are multiples of it

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32


class LayerFacts(ctypes.Structure):
    """As ``LayerFacts`` of model.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "attention_output", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("window", ctypes.c_int64),
    )


class ModelFacts(ctypes.Structure):
    """As ``ModelFacts`` of model.h."""

    _fields_ = (
        *((name, _INT) for name in ("element_bytes", "num_layers", "hidden", "intermediate")),
        *((name, _INT) for name in ("heads", "kv_heads", "head_dim", "vocab", "num_features")),
        *((name, _INT) for name in ("feature_parts", "norm_before_residual", "norm_output")),
        *((name, ctypes.c_float) for name in ("eps", "rotary_scale")),
        *((name, _POINTER) for name in ("embedding", "frequencies", "norm", "hidden_norm")),
        *((name, _POINTER) for name in ("feature_norm", "output", "fc", "layers", "features")),
    )


class Linear(Protocol):
    """A layer that multiplies its rows with ``weight`` ``[outputs, inputs]``."""

    @property
    def weight(self) -> Tensor: ...  # noqa: D102
    @property
    def bias(self) -> Tensor | None: ...  # noqa: D102


class Matrix:
    """Weights packed by the library, which need not be kept by anybody else."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[Linear]) -> None:
        """Pack layers that read the same rows, with their biases if they have any."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = torch.cat(biases).float() if biases else None
        self.outputs, inputs = weight.shape
        # What is exact in bfloat16 has float32's numbers for half the bytes.
        halves = weight.dtype is torch.bfloat16 or (
            inputs % 2 == 0 and torch.equal(weight, weight.bfloat16().float())
        )
        self._free = library.matrix_free
        self.pointer = library.matrix_new(
            *(weight.data_ptr(), weight.dtype.itemsize, self.outputs, inputs, halves),
            None if bias is None else bias.data_ptr(),
        )

    def __del__(self) -> None:
        self._free(self.pointer)


@dataclass(slots=True)
class Parts:
    """What a model points to, so that it lives as long."""

    library: ctypes.CDLL
    matrices: list[Matrix] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def matrix(self, *layers: Linear) -> int:
        """Pack layers that read the same rows; return the pointer to their matrix."""
        self.matrices.append(Matrix(self.library, layers))
        pointer: int = self.matrices[-1].pointer
        return pointer

    def norm(self, module: nn.Module | None) -> int | None:
        """Return the pointer to the weights of a norm, None of what has none."""
        return self.numbers(getattr(module, "weight", None))

    def numbers(self, tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        """Return the pointer to a contiguous copy of a tensor, or None."""
        if tensor is None:
            return None
        self.tensors.append(tensor.detach().to(dtype).contiguous())
        return self.tensors[-1].data_ptr()


def layer_facts(
    parts: Parts,
    attention: Any,  # noqa: ANN401  transformers' attentions have no common class
    mlp: Any,  # noqa: ANN401
    norms: Sequence[nn.Module | None],
    window: int,
) -> LayerFacts:
    """Return a decoder layer of Llama's names; its ``norms`` are before attention and after it."""
    of_heads = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return LayerFacts(
        parts.matrix(attention.q_proj, attention.k_proj, attention.v_proj),
        parts.matrix(attention.o_proj),
        parts.matrix(mlp.gate_proj, mlp.up_proj),
        parts.matrix(mlp.down_proj),
        *(parts.norm(norm) for norm in (*norms, *of_heads)),
        window,
    )


def drop_weights(module: nn.Module) -> None:
    """Free the weights of a module, which the library has packed."""
    for name, weight in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        placeholder = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        setattr(module.get_submodule(owner), own, placeholder)


class NativeModel:
    """A model that runs in the library: a target, or the layer of a head."""

    def __init__(self, parts: Parts, layers: Sequence[LayerFacts], **facts: float | None) -> None:
        """Make a model of its parts; ``facts`` are those of ``ModelFacts``."""
        array = (LayerFacts * len(layers))(*layers)
        self._parts = parts
        self._facts = ModelFacts(num_layers=len(layers), **facts)
        self._facts.layers = ctypes.addressof(array)  # read at once
        self._library = parts.library
        self._model = parts.library.model_new(ctypes.byref(self._facts))
        self._pool: KVPool | None = None
        self._logits = torch.empty((0, self._facts.vocab))

    def __del__(self) -> None:
        self._library.model_free(self._model)

    def forward(
        self, pool: KVPool, segments: Sequence[Segment], wanted: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a target's rows; see :meth:`eaglegbv.models.target.Target.forward`.

        ``wanted`` ``[rows]`` int64 are those whose logits are computed, None all. Returns logits
        ``[wanted, vocab]`` float32, valid until the next call, and features or None.
        """
        if not segments:
            raise InvalidArgument("segments", segments, "at least one segment")
        self._use(pool)
        facts = self._facts
        described, kept = _described(segments)
        rows = sum(segment.num_new for segment in segments)
        num_wanted = rows if wanted is None else len(wanted)
        logits = self._room(num_wanted)
        features: Tensor | None = None
        if facts.num_features:
            width = facts.num_features * facts.hidden
            features = torch.empty((rows, width), dtype=pool.keys.dtype)
        self._library.model_forward(
            *(self._model, described, len(segments)),
            *(None if wanted is None else wanted.data_ptr(), num_wanted, logits.data_ptr()),
            *(None if features is None else features.data_ptr(), torch.get_num_threads()),
        )
        del kept
        return logits, features

    def level(
        self,
        pool: KVPool,
        segments: Sequence[Segment],
        states: Tensor,
        *,
        reads_features: bool = False,
        with_logits: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a head's rows on ``states`` ``[rows, hidden]``, or on the features that ``fc`` reads.

        Returns the next states ``[rows, hidden]``, and logits ``[rows, vocab]`` float32 or None.
        """
        self._use(pool)
        described, kept = _described(segments)
        states = states.contiguous()
        rows = len(states)
        following = torch.empty((rows, self._facts.hidden), dtype=pool.keys.dtype)
        logits = torch.empty((rows, self._facts.vocab)) if with_logits else None
        self._library.model_level(
            *(self._model, described, len(segments), states.data_ptr(), reads_features),
            *(following.data_ptr(), None if logits is None else logits.data_ptr()),
            torch.get_num_threads(),
        )
        del kept
        return following, logits

    def logits(self, states: Tensor) -> Tensor:
        """Return a head's logits ``[rows, vocab]`` float32 of its ``states`` ``[rows, hidden]``."""
        states = states.contiguous()
        logits = torch.empty((len(states), self._facts.vocab))
        self._library.model_logits(
            *(self._model, states.data_ptr(), len(states), logits.data_ptr()),
            torch.get_num_threads(),
        )
        return logits

    def _use(self, pool: KVPool) -> None:
        if pool is self._pool:
            return
        self._pool = pool
        pointers = pool.keys.data_ptr(), pool.values.data_ptr()
        self._library.model_use_pool(self._model, *pointers, pool.num_slots)

    def _room(self, rows: int) -> Tensor:
        """Return the memory of the latest logits, larger where it was too small."""
        if len(self._logits) < rows:
            with torch.inference_mode(mode=False):
                self._logits = torch.empty((rows, self._facts.vocab))
        return self._logits[:rows]


def _described(segments: Sequence[Segment]) -> tuple[ctypes.Array[ctypes.c_int64], object]:
    """Return segments as the library reads them, and the tensors that they point to."""
    numbers: list[int] = []
    kept: list[Tensor] = []
    for segment in segments:
        tensors = (
            *(segment.token_ids, segment.positions, segment.context_slots),
            *(segment.tree_slots, segment.tree_positions),
        )
        parts = [part.contiguous() for part in tensors]
        numbers += [part.data_ptr() for part in parts]
        visible = segment.visible
        if visible is None:
            numbers += (0, 0)
        else:
            visible = visible if visible.stride(1) == 1 else visible.contiguous()
            kept.append(visible)
            numbers += (visible.data_ptr(), visible.stride(0))
        numbers += (segment.num_new, segment.num_context, segment.num_pending)
        kept += parts
    return (ctypes.c_int64 * len(numbers))(*numbers), kept
