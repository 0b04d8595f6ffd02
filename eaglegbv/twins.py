"""Joint computation of heads that are computed alike: queries and keys, rotated in the same way.

    split(product, [q, k, v])              split(product, [q + k, v])
       |      |     |                            |        |
      view   view   ...                         view      ...
       |      |               =>                 |
     rotate  rotate                            rotate
       |      |                                /    \\
       q      k                               q      k

Only operations that treat each head separately are joined, so no number changes.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

_IN_PLACE = frozenset(
    {
        operator.setitem,
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.ipow,
    }
)
"""Functions that change their operand in place, besides those whose names say so."""

_BY_NUMBER = frozenset({operator.add, operator.mul, operator.neg, operator.sub, torch.addcmul})
"""Elementwise operations: each number depends only on numbers in the same place."""


def join_twins(graph: Graph) -> None:
    """Join what is computed alike from two parts of a product, wherever that saves operations."""
    for node in graph.find_nodes(op="call_method", target="split_with_sizes"):
        split = _Split.of(node)
        for pair in pairwise(split.parts):
            twins = _Twins.of(*pair)
            if twins.worth_joining:
                _join(graph, split, twins)
                break


@dataclass(frozen=True, slots=True)
class _Split:
    """A product split into parts.

    Attributes:
        node: The operation.
        sizes: Sizes of the parts.
        parts: The nodes that take the parts, in order; empty unless each part is taken once and the
            split is along rows.
    """

    node: Node
    sizes: list[int]
    parts: list[Node]

    @classmethod
    def of(cls, node: Node) -> "_Split":
        """Read a split from its node."""
        sizes: Any = node.args[1] if len(node.args) > 1 else ()
        if node.kwargs != {"dim": -1} or any(type(size) is not int for size in sizes):
            return cls(node, [], [])
        parts = sorted(node.users, key=_place_of)
        whole = [_place_of(part) for part in parts] == list(range(len(sizes)))
        return cls(node, list(sizes), parts if whole else [])


def _place_of(part: Node) -> int:
    """Return the index of the part of a split that a node takes."""
    place: Any = part.args[1]
    return int(place)


@dataclass(frozen=True, slots=True)
class _Twins:
    """What is computed alike from two adjacent parts of a product.

    Attributes:
        parts: The parts.
        second: For each node computed from the first part, in order, its twin, computed from the
            second.
        dims: For the same nodes, the dimension that counts heads, which is never the last.
    """

    parts: tuple[Node, Node]
    second: dict[Node, Node]
    dims: dict[Node, int]

    @classmethod
    def of(cls, first: Node, second: Node) -> "_Twins":
        """Follow two parts as long as the same is done to both and nothing is changed in place."""
        twins = cls((first, second), {}, {})
        end = first.next
        while end.op != "output" and not _changes_in_place(end):
            end = end.next
        node = first.next
        while node is not end:
            dim = twins._dim_of(node)
            other = None if dim is None else twins._twin_of(node)
            if dim is not None and other is not None and other < end:
                twins.second[node], twins.dims[node] = other, dim
            node = node.next
        return twins

    def _dim_of(self, node: Node) -> int | None:
        """Return the dimension of a result that counts heads, if it comes from the first part."""
        sources = node.all_input_nodes
        if any(source in self.dims for source in sources):
            return _dim_of_heads(node, self.dims)
        return _dim_of_rows(node) if self.parts[0] in sources else None

    def _twin_of(self, node: Node) -> Node | None:
        """Return the node that does to the second part what ``node`` does to the first, if any."""
        twin = dict([self.parts]) | self.second
        source = next(source for source in node.all_input_nodes if source in twin)
        expected = map_arg((node.args, node.kwargs), lambda arg: twin.get(arg, arg))
        for user in twin[source].users:
            if (user.target, (user.args, user.kwargs)) == (node.target, expected):
                return user
        return None

    @property
    def readers(self) -> dict[Node, set[Node]]:
        """Nodes outside the twins that read a node of the first part or its twin, by node."""
        found = {n: self._others((*n.users, *twin.users)) for n, twin in self.second.items()}
        return {node: others for node, others in found.items() if others}

    def _others(self, nodes: Iterable[Node]) -> set[Node]:
        return set(nodes) - self.second.keys() - set(self.second.values())

    @property
    def worth_joining(self) -> bool:
        """Whether this saves operations (splitting two results takes two), and moves none."""
        readers = self.readers
        alone = not any(self._others(part.users) for part in self.parts)
        behind = all(min(users) > max(n, self.second[n]) for n, users in readers.items())
        return alone and behind and len(self.second) > 2 * len(readers)


def _changes_in_place(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    by_name = node.op.startswith("call_") and name.endswith("_") and not name.endswith("__")
    return by_name or node.target in _IN_PLACE


def _dim_of_rows(node: Node) -> int | None:
    """Return the dimension that counts heads if an operation splits rows into heads, or None."""
    match node.target, node.args[1:]:
        case ("view", ((*_, -1, int()),)) | ("unflatten", (-1, (-1, int()))):
            part, heads = _value(node.all_input_nodes[0]), _value(node)
            dim = heads.ndim - 2
            if heads.shape[:dim] == part.shape[:-1] and type(heads.shape[dim]) is int:
                return dim
    return None


def _dim_of_heads(node: Node, dims: Mapping[Node, int]) -> int | None:
    """Return the dimension of a result that counts heads; None unless heads are kept separate.

    Args:
        node: The operation.
        dims: Dimensions that count heads in earlier results, some of which the operation reads.
    """
    sources = [source for source in node.all_input_nodes if source in dims]
    others = set(node.all_input_nodes) - dims.keys()
    [dim, *different] = {dims[source] for source in sources}
    if different:
        return None
    arguments: Any = node.args[1:]
    match node.target, arguments:
        case "transpose", (int(one), int(other)) if min(one, other) >= 0:
            moved = one + other - dim if dim in (one, other) else dim
            return moved if moved < _value(node).ndim - 1 else None
        case "squeeze", (0,):
            return dim - 1 if dim > 0 and _value(node).ndim < _value(sources[0]).ndim else None
        case "chunk", (int(),):
            stays = node.kwargs == {"dim": -1}
        case operator.getitem, (int(),):
            stays = sources[0].target == "chunk"
        case operator.getitem, ((place, slice()),):
            stays = place is ...
        case torch.cat, ():
            stays = node.kwargs == {"dim": -1} and not others
        case _:
            stays = node.target in _BY_NUMBER and _keeps_heads(node, dim, sources, others)
    return dim if stays else None


def _keeps_heads(node: Node, dim: int, sources: Iterable[Node], others: Iterable[Node]) -> bool:
    """Return whether an elementwise operation leaves heads where they are.

    Args:
        node: The operation.
        dim: The dimension of the ``sources`` that counts heads.
        sources: Operands with heads.
        others: The other operands, which must be the same for all heads.
    """
    ndim = _value(node).ndim
    return all(_value(source).ndim == ndim for source in sources) and all(
        _same_for_all(other, ndim - dim) for other in others
    )


def _same_for_all(node: Node, place: int) -> bool:
    """Return whether a node is the same for all heads, counted by its ``place``-th last size."""
    if "example_value" not in node.meta:
        return False
    value = node.meta["example_value"]
    return not isinstance(value, Tensor) or value.ndim < place or value.shape[-place] == 1


def _value(node: Node) -> Tensor:
    """Return the value with which a node was traced, which must be a tensor."""
    value = node.meta["example_value"]
    assert isinstance(value, Tensor)
    return value


def _join(graph: Graph, split: _Split, twins: _Twins) -> None:
    """Compute twins jointly."""
    joint = {twins.parts[0]: _join_parts(graph, split, _place_of(twins.parts[0]))}
    for first, second in twins.second.items():
        with graph.inserting_after(max(first, second)):
            joint[first] = graph.node_copy(first, lambda arg: joint.get(arg, arg))
        del joint[first].meta["example_value"]  # the joint node has more heads
    for first, readers in twins.readers.items():
        dim, start = twins.dims[first], 0
        for own in (first, twins.second[first]):
            heads = _value(own).shape[dim]
            with graph.inserting_before(min(readers)):
                told = graph.call_method("narrow", (joint[first], dim, start, heads))
            told.meta["example_value"] = own.meta["example_value"]
            own.replace_all_uses_with(told, delete_user_cb=readers.__contains__)
            start += heads
    gone = {split.node, *twins.parts, *twins.second, *twins.second.values()}
    for node in reversed(graph.nodes):
        if node in gone:
            graph.erase_node(node)


def _join_parts(graph: Graph, split: _Split, place: int) -> Node:
    """Split a product into one part fewer, and return the node that replaces two of the parts."""
    behind = place + 2
    sizes = [*split.sizes[:place], sum(split.sizes[place:behind]), *split.sizes[behind:]]
    with graph.inserting_after(split.node):
        arguments = (split.node.args[0], sizes)
        parts = graph.call_method("split_with_sizes", arguments, split.node.kwargs)
    with graph.inserting_after(parts):
        joint = graph.call_function(operator.getitem, (parts, place))
    for part in split.parts[:place]:
        part.args = (parts, _place_of(part))
    for part in split.parts[behind:]:
        part.args = (parts, _place_of(part) - 1)
    return joint
