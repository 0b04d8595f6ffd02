"""A backend of ``torch.compile`` that generates nothing: the operations of a forward in a row.

A small forward spends much of its time between operations: in calls of modules within modules,
their keywords and checks, which always come to the same. The graph has what is left of them:

    block(x):                            h = product(norm(x), ...)
      x + self.attend(self.norm(x))  =>  a = attend(h, ...)
      ...                                y = x + product(a, ...)

So every number is the one that the model computes as it is, bit for bit; it takes no compiler, and
seconds instead of minutes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sympy import lambdify
from torch import Tensor, nn
from torch._C._dynamo.guards import assert_size_stride
from torch._dynamo import register_backend
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node

from eaglegbv.operations import python_of

FLAT = "flat"
"""Its name among torch's."""

_MAY_RETURN_ITS_INPUT = frozenset({"to", "float", "contiguous"})


def flat(
    graph: GraphModule,
    inputs: Sequence[Tensor | int],  # noqa: ARG001
    *,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Return what runs the graph, without what it need not do.

    Operations that run Python are called at once, and not by way of torch's dispatcher.

    Args:
        graph: What a function came to.
        inputs: What it was traced with.
        options: ``size_asserts``: whether to assert that inputs have the sizes and strides it was
            traced for, where they are no symbols; a parameter always has.
    """
    for node in list(graph.graph.nodes):
        python = python_of(node.target)
        if python is not None:
            node.target = python
        elif _returns_its_input(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    if options is not None and options.get("size_asserts"):
        return _asserting(graph)
    return graph.forward


def _returns_its_input(node: Node) -> bool:
    """Return whether a node hands on the tensor it is called of, such as floats made floats."""
    if node.op != "call_method" or node.target not in _MAY_RETURN_ITS_INPUT:
        return False
    of = node.args[0]
    assert isinstance(of, Node)  # a method is called of something
    return node.meta["example_value"] is of.meta["example_value"]


def _asserting(graph: GraphModule) -> Callable[..., Any]:
    """Return what runs the graph, and raises AssertionError where an input does not fit."""
    run, places = graph.forward, graph.graph.find_nodes(op="placeholder")
    symbols: dict[Any, int] = {}
    tensors: list[tuple[int, FakeTensor]] = []
    for place, node in enumerate(places):
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt):
            symbols[value.node.expr] = place
        elif not isinstance(value, nn.Parameter):
            tensors.append((place, value))
    layouts = [(_expressions(like.size()), _expressions(like.stride())) for _, like in tensors]
    expected = lambdify(list(symbols), layouts)

    def asserting(*args: Any) -> object:  # noqa: ANN401
        found = expected(*(args[place] for place in symbols.values()))
        for (place, _), (size, stride) in zip(tensors, found, strict=True):
            assert_size_stride(args[place], size, stride)
        return run(*args)

    return asserting


def _expressions(sizes: Sequence[int | torch.SymInt]) -> tuple[Any, ...]:
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes)


register_backend(flat, name=FLAT)
