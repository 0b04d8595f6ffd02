"""A backend of ``torch.compile`` that generates no code: it runs a forward's operations in turn.

A small forward spends much of its time between operations: in calls of modules within modules,
their keywords and checks, whose outcome never changes. The graph contains only the operations:

    block(x):                            h = product(norm(x), ...)
      x + self.attend(self.norm(x))  =>  a = attend(h, ...)
      ...                                y = x + product(a, ...)

So every number is bit for bit the one that the model computes uncompiled. The backend needs no
compiler, and takes about twenty seconds instead of several minutes.
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
"""Name under which the backend is registered with torch."""

_MAY_RETURN_ITS_INPUT = frozenset({"to", "float", "contiguous"})


def flat(
    graph: GraphModule,
    inputs: Sequence[Tensor | int],  # noqa: ARG001
    *,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Return a function that runs the graph without unnecessary work.

    Operations that run Python are called directly, not through torch's dispatcher.

    Args:
        graph: The traced function.
        inputs: The inputs with which it was traced.
        options: ``size_asserts``: whether to assert that inputs have the sizes and strides for
            which it was traced; parameters always have them.
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
    """Return whether a node returns the tensor it is called on, as ``float`` does for float32."""
    if node.op != "call_method" or node.target not in _MAY_RETURN_ITS_INPUT:
        return False
    of = node.args[0]
    assert isinstance(of, Node)  # a method is always called on a node
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
    """Return a function that checks whether tensors and sizes meet all assumptions of the tracing.

    These are more than sizes and strides: code may branch on a size and be traced for one branch.
    """
    fakes = [value for value in inputs if isinstance(value, FakeTensor)]
    environment = fakes[0].fake_mode.shape_env
    assert environment is not None  # fakes traced for any size have one
    names = [f"t{n}" for n in range(len(inputs))]
    sources = [LocalSource(name) for name in names]
    found = environment.produce_guards(inputs, sources, ignore_static=False)
    # No operation depends on a tensor's offset in its storage.
    terms = [term for term in found if ".storage_offset()" not in term]
    said = " and ".join(terms) or "True"
    for name in names:
        said = said.replace(f"L['{name}']", name)
    fits: Callable[..., bool] = eval(f"lambda {', '.join(names)}: {said}", dict(SYMPY_INTERP))
    return fits


register_backend(flat, name=FLAT)
