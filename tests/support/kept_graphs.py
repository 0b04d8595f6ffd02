"""A backend of ``torch.compile`` that keeps the graphs it is given, to be looked at."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from eaglegbv.compiling import code_of_its_own, making_graphs

Backend = Callable[[GraphModule, list[Tensor]], Callable[..., object]]


class KeptGraphs:
    """The backend, with what it made."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.graphs: list[GraphModule] = []

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs.append(graph)
        return self._backend(graph, inputs)

    def run(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run a function's graph, of rows as wide as a model's and any number of them."""
        own = code_of_its_own(function)  # else the graphs of all modules count as one function's
        for tensor in inputs:
            if tensor.is_floating_point() and tensor.ndim:
                torch._dynamo.mark_static(tensor, tensor.ndim - 1)
        with making_graphs(), torch.no_grad():
            return torch.compile(own, backend=self, dynamic=True, fullgraph=True)(*inputs)

    def targets(self) -> list[object]:
        """Return what the graph calls, in order."""
        [graph] = self.graphs
        return [node.target for node in graph.graph.nodes if node.op.startswith("call_")]


def changing(change: Callable[[GraphModule], None]) -> Backend:
    """Return the backend that runs graphs as ``change`` leaves them."""

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        change(graph)
        graph.graph.lint()
        graph.recompile()
        return graph.forward

    return backend
