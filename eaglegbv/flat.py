"""A backend of ``torch.compile`` that generates no code: it runs a forward's operations in turn.

A small forward spends much of its time between operations: in calls of modules within modules,
their keywords and checks, whose outcome never changes. The graph holds what is left of them:

    block(x):                            h = product(norm(x), ...)
      x + self.attend(self.norm(x))  =>  a = attend(h, ...)
      ...                                y = x + product(a, ...)

So every number is, bit for bit, the one that the model computes uncompiled. It needs no compiler,
and takes some twenty seconds instead of several minutes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch._dynamo.source import LocalSource
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from eaglegbv.operations import python_of
from eaglegbv.rewrites import rewrite

FLAT = "flat"
"""The name under which it is registered with torch."""

_MAY_RETURN_ITS_INPUT = frozenset({"to", "float", "contiguous"})


def flat(
    graph: GraphModule,
    inputs: Sequence[Tensor | int],  # noqa: ARG001
    *,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Return a function that runs the graph, without what need not be done.

    Operations that run Python are called directly, and not through torch's dispatcher.

    Args:
        graph: The function as it was traced.
        inputs: What it was traced with.
        options: ``size_asserts``: whether to assert that inputs have the sizes and strides it was
            traced for; parameters always do.
    """
    for node in list(graph.graph.nodes):
        python = python_of(node.target)
        if python is not None:
            node.target = python
        elif _returns_its_input(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    rewrite(graph)
    graph.recompile()
    if options is not None and options.get("size_asserts"):
        return _asserting(graph)
    return graph.forward


def _returns_its_input(node: Node) -> bool:
    """Return whether a node returns the tensor it is called on, as ``float`` does of float32."""
    if node.op != "call_method" or node.target not in _MAY_RETURN_ITS_INPUT:
        return False
    of = node.args[0]
    assert isinstance(of, Node)  # a method is called on something
    return node.meta["example_value"] is of.meta["example_value"]


def _asserting(graph: GraphModule) -> Callable[..., Any]:
    """Return a function that runs the graph, and raises AssertionError if an input does not fit."""
    values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    places = [n for n, value in enumerate(values) if not isinstance(value, nn.Parameter)]
    fits, run = _fitting([values[place] for place in places]), graph.forward

    def asserting(*args: Any) -> object:  # noqa: ANN401
        if not fits(*(args[place] for place in places)):
            raise AssertionError
        return run(*args)

    return asserting


def _fitting(inputs: Sequence[FakeTensor | torch.SymInt]) -> Callable[..., bool]:
    """Return a function that says whether tensors and sizes meet all that tracing assumed of them.

    That is more than sizes and strides: code may branch on a size, and be traced for one branch.
    """
    fakes = [value for value in inputs if isinstance(value, FakeTensor)]
    environment = fakes[0].fake_mode.shape_env
    assert environment is not None  # fakes that are traced for any size have one
    names = [f"t{n}" for n in range(len(inputs))]
    sources = [LocalSource(name) for name in names]
    found = environment.produce_guards(inputs, sources, ignore_static=False)
    # No operation depends on where in its storage a tensor begins.
    terms = [term for term in found if ".storage_offset()" not in term]
    said = " and ".join(terms) or "True"
    for name in names:
        said = said.replace(f"L['{name}']", name)
    fits: Callable[..., bool] = eval(f"lambda {', '.join(names)}: {said}", dict(SYMPY_INTERP))
    return fits


register_backend(flat, name=FLAT)
