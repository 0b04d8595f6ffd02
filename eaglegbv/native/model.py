"""Models in the native library: their weights, their forwards, and passes over their logits."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from eaglegbv.attention import KVPool, Segment
from eaglegbv.errors import InvalidArgument
from eaglegbv.native.library import native_library
from eaglegbv.output_layer import OutputLayer
from eaglegbv.sampling import WarpSettings

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


def _address(tensor: Tensor | None) -> int | None:
    """Return where the library finds a contiguous tensor's numbers, or None."""
    return None if tensor is None else tensor.data_ptr()


Linear: TypeAlias = nn.Linear | OutputLayer  # has a weight `[outputs, inputs]`, and maybe a bias


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
            _address(weight),
            weight.dtype.itemsize,
            self.outputs,
            inputs,
            halves,
            _address(bias),
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
        layer, _, attribute = name.rpartition(".")
        placeholder = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        setattr(module.get_submodule(layer), attribute, placeholder)


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
        self._logits = torch.empty((0, self._facts.vocab))

    def __del__(self) -> None:
        self._library.model_free(self._model)

    @property
    def library_name(self) -> str:
        """The library's file, named by its sources, compiler and processor."""
        return self._library._name

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
        rows = sum(segment.num_new for segment in segments)
        num_wanted = rows if wanted is None else len(wanted)
        logits = self._room(num_wanted)
        features: Tensor | None = None
        if facts.num_features:
            width = facts.num_features * facts.hidden
            features = torch.empty((rows, width), dtype=pool.keys.dtype)
        self._library.model_forward(
            self._model,
            _described(segments),
            len(segments),
            _address(wanted),
            num_wanted,
            _address(logits),
            _address(features),
            torch.get_num_threads(),
        )
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
        states = states.contiguous()
        rows = len(states)
        following = torch.empty((rows, self._facts.hidden), dtype=pool.keys.dtype)
        logits = torch.empty((rows, self._facts.vocab)) if with_logits else None
        self._library.model_level(
            self._model,
            _described(segments),
            len(segments),
            _address(states),
            reads_features,
            _address(following),
            _address(logits),
            torch.get_num_threads(),
        )
        return following, logits

    def logits(self, states: Tensor) -> Tensor:
        """Return a head's logits ``[rows, vocab]`` float32 of its ``states`` ``[rows, hidden]``."""
        states = states.contiguous()
        logits = torch.empty((len(states), self._facts.vocab))
        self._library.model_logits(
            self._model,
            _address(states),
            len(states),
            _address(logits),
            torch.get_num_threads(),
        )
        return logits

    def _use(self, pool: KVPool) -> None:
        keys, values = _address(pool.keys), _address(pool.values)
        self._library.model_use_pool(self._model, keys, values, pool.num_slots)

    def _room(self, rows: int) -> Tensor:
        """Return the memory of the latest logits, larger where it was too small."""
        if len(self._logits) < rows:
            with torch.inference_mode(mode=False):
                self._logits = torch.empty((rows, self._facts.vocab))
        return self._logits[:rows]


def _described(segments: Sequence[Segment]) -> ctypes.Array[ctypes.c_int64]:
    """Return segments as the library reads them: where their tensors are, and their sizes."""
    numbers: list[int] = []
    for segment in segments:
        for part in (
            segment.token_ids,
            segment.positions,
            segment.context_slots,
            segment.tree_slots,
            segment.tree_positions,
        ):
            assert part.is_contiguous()
            numbers.append(part.data_ptr())
        visible = segment.visible
        assert visible is None or visible.stride(1) == 1
        numbers += (0, 0) if visible is None else (visible.data_ptr(), visible.stride(0))
        numbers += (segment.num_new, segment.num_context, segment.num_pending)
    return (ctypes.c_int64 * len(numbers))(*numbers)


# Passes over rows of logits, where tensor operations take one each.
def takes_rows(logits: Tensor, settings: WarpSettings) -> bool:
    """Return whether the library warps such rows: float32 of the host, by temperatures alone."""
    fits = logits.device.type == "cpu" and logits.dtype is torch.float32
    return fits and settings.only_tempered and native_library() is not None


def warped_rows(logits: Tensor, settings: WarpSettings) -> tuple[Tensor, Tensor]:
    """Return what :func:`eaglegbv.sampling.warped_rows` does, in one pass."""
    library = native_library()
    assert library is not None  # by `takes_rows`
    logits = logits.contiguous()
    warped = torch.empty_like(logits)
    normalisers = torch.empty(len(logits), dtype=torch.float64)
    library.rows_warp(
        _address(logits),
        *logits.shape,
        _address(settings.temperature),
        _address(warped),
        _address(normalisers),
        torch.get_num_threads(),
    )
    return warped, normalisers


def candidates(logits: Tensor, settings: WarpSettings, width: int) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens' places ``[rows, width]``, ascending, and probabilities.

    The probabilities are float64, at the rows' temperatures, of those tokens alone.
    """
    library = native_library()
    assert library is not None  # by `takes_rows`
    logits = logits.contiguous()
    places = torch.empty((len(logits), width), dtype=torch.int64)
    probs = torch.empty((len(logits), width), dtype=torch.float64)
    library.rows_candidates(
        _address(logits),
        *logits.shape,
        width,
        _address(settings.temperature),
        _address(places),
        _address(probs),
        torch.get_num_threads(),
    )
    return places, probs
