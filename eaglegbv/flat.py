"""A backend of ``torch.compile`` that generates nothing: the operations of a forward in a row.

A small forward spends much of its time between operations: in calls of modules within modules,
their keywords and checks, which always come to the same. The graph has what is left of them:

    block(x):                            h = product(norm(x), ...)
      x + self.attend(self.norm(x))  =>  a = attend(h, ...)
      ...                                y = x + product(a, ...)

So every number is the one that the model computes as it is, bit for bit; it takes no compiler, and
seconds instead of minutes.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._dynamo import register_backend
from torch.fx import GraphModule, Node

from eaglegbv.operations import python_of

FLAT = "flat"
"""Its name among torch's."""

_MAY_RETURN_ITS_INPUT = frozenset({"to", "float", "contiguous"})


def flat(graph: GraphModule, inputs: list[Tensor], **_: object) -> Callable[..., Any]:  # noqa: ARG001
    """Return what runs the graph, without what it need not do.

    Operations that run Python are called at once, and not by way of torch's dispatcher.
    """
    for node in list(graph.graph.nodes):
        python = python_of(node.target)
        if python is not None:
            node.target = python
        elif _returns_its_input(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def _returns_its_input(node: Node) -> bool:
    """Return whether a node hands on the tensor it is called of, such as floats made floats."""
    if node.op != "call_method" or node.target not in _MAY_RETURN_ITS_INPUT:
        return False
    of = node.args[0]
    assert isinstance(of, Node)  # a method is called of something
    return node.meta["example_value"] is of.meta["example_value"]


register_backend(flat, name=FLAT)
