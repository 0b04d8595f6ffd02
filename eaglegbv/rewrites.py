"""Rewrites of a traced graph: the same numbers, bit for bit, with fewer and cheaper operations.

A small forward consists of hundreds of operations on a few rows. Each takes longer to start than to
compute, and starting takes even longer because a model's weights pass through the caches meanwhile.

    norms                x.pow(2).mean(-1) + eps        =>  (x * x).sum(-1) / width + eps
    queries and keys     each rotated by the angles     =>  rotated as one, and then split
    numbers              made tensors in every call     =>  tensors that are kept
"""

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from eaglegbv.twins import join_twins

_FLOATS = frozenset({torch.float32, torch.float64})
"""Dtypes in which PyTorch computes directly; it widens narrower ones first."""

_ARITHMETIC = frozenset({operator.add, operator.sub, operator.mul, operator.truediv})

_UNUSED = frozenset({"size", "unsqueeze", operator.getitem})
"""Operations that may be removed if nothing reads their result."""


def rewrite(graph: GraphModule) -> None:
    """Rewrite a graph in place; recompiling it is left to the caller."""
    _drop_unused(graph.graph)
    _write_out_norms(graph.graph)
    _write_out_means(graph.graph)
    _share_views(graph.graph)
    _hold_numbers(graph)
    join_twins(graph.graph)


def _drop_unused(graph: Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and node.op.startswith("call_") and node.target in _UNUSED:
            graph.erase_node(node)


def _share_views(graph: Graph) -> None:
    """Merge identical calls on a tensor, since every layer views the angles in the same way."""
    known: dict[object, Node] = {}
    for node in graph.find_nodes(op="call_method", target="unsqueeze"):
        if not node.kwargs:
            first = known.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _write_out_norms(graph: Graph) -> None:
    """Write out norms by mean squares, which PyTorch also composes of separate operations."""
    for node in graph.find_nodes(op="call_function", target=torch.rms_norm):
        by_place = len(node.args) > 1 and node.kwargs.keys() <= {"weight", "eps"}
        norm = _norm_of(*node.args, **node.kwargs) if by_place else None
        if norm is not None:
            write = _Writer(graph, node)
            mean = write.mean(write(operator.mul, norm.x, norm.x))
            inverse = write(torch.rsqrt, write(operator.add, mean, norm.eps))
            normed = write(operator.mul, norm.x, inverse)
            if norm.weight is not None:
                normed = write(operator.mul, normed, norm.weight)
            write.instead(normed)


class _Norm(NamedTuple):
    """A norm of rows.

    Attributes:
        x: The rows.
        weight: Factor of each number of a row; None for 1.
        eps: Added to the mean square.
    """

    x: Node
    weight: Node | None
    eps: float


def _norm_of(
    x: Node, shape: Sequence[object], weight: Node | None = None, eps: float | None = None
) -> _Norm | None:
    """Return the norm if it is one over rows of floats and keeps their dtype."""
    if eps is None or len(shape) != 1 or not _has_rows(x):
        return None
    if weight is not None:
        own, scale = (part.meta["example_value"] for part in (x, weight))
        if own.dtype is not scale.dtype:
            return None
    return _Norm(x, weight, eps)


def _write_out_means(graph: Graph) -> None:
    """Write squares and means as products, sums and quotients, which start faster."""
    for node in graph.find_nodes(op="call_method", target="pow"):
        x = node.args[0]
        if node.args[1:] == (2,) and not node.kwargs and _has_floats(x):
            write = _Writer(graph, node)
            write.instead(write(operator.mul, x, x))
    for node in graph.find_nodes(op="call_method", target="mean"):
        of_rows = node.args[1:] == (-1,) and node.kwargs == {"keepdim": True}
        if of_rows and _has_rows(node.args[0]):
            write = _Writer(graph, node)
            write.instead(write.mean(node.args[0]))


class _Writer:
    """Inserts operations before a node, and replaces it by their result."""

    def __init__(self, graph: Graph, place: Node) -> None:
        self._graph = graph
        self._place = place

    def __call__(self, function: Callable[..., Tensor], *args: Argument, **named: Argument) -> Node:
        """Insert a call of ``function``."""
        with self._graph.inserting_before(self._place):
            node = self._graph.call_function(function, args, named)
        traced = map_arg(args, lambda arg: arg.meta["example_value"])
        node.meta["example_value"] = function(*traced, **named)
        return node

    def mean(self, x: Node) -> Node:
        """Insert the mean of every row of ``x`` ``[..., width]``: ``[..., 1]``."""
        width = x.meta["example_value"].shape[-1]
        return self(operator.truediv, self(torch.sum, x, -1, keepdim=True), width)

    def instead(self, node: Node) -> None:
        """Use ``node`` instead of the node for which it was inserted."""
        self._place.replace_all_uses_with(node)
        self._graph.erase_node(self._place)


def _hold_numbers(module: GraphModule) -> None:
    """Make tensors of the numbers in arithmetic once; PyTorch would make them in every call."""
    graph, held = module.graph, dict[tuple[str, torch.dtype], Node]()
    first = next(iter(graph.nodes))
    for node in graph.nodes:
        if node.target not in _ARITHMETIC or not _has_floats(node.args[0]):
            continue
        x, number = node.args
        if type(number) not in (int, float):
            continue
        dtype = x.meta["example_value"].dtype
        key = repr(number), dtype  # by repr, because 0 is not -0
        if key not in held:
            with unset_fake_temporarily():
                value = torch.tensor(number, dtype=dtype)
            name = f"number_{len(held)}"
            module.register_buffer(name, value, persistent=False)
            with graph.inserting_before(first):
                held[key] = graph.get_attr(name)
            held[key].meta["example_value"] = value
        node.args = (x, held[key])


def _has_floats(node: Argument) -> TypeGuard[Node]:
    """Return whether a node is a CPU tensor of floats in which PyTorch computes directly."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dtype in _FLOATS and value.device.type == "cpu"


def _has_rows(node: Argument) -> bool:
    """Return whether a node is such a tensor, of rows of a known width."""
    if not _has_floats(node):
        return False
    shape = node.meta["example_value"].shape
    return len(shape) > 0 and type(shape[-1]) is int
