"""A backend of ``torch.compile`` that changes graphs, and keeps them to be looked at."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from eaglegbv.compiling import making_graphs


class KeptGraphs:
    """Runs functions through graphs that ``change`` was applied to."""

    def __init__(self, change: Callable[[GraphModule], None]) -> None:
        self._change = change
        self.graphs: list[GraphModule] = []

    def run(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        torch.compiler.reset()  # graphs of all modules are counted as those of one function
        for tensor in inputs:
            if tensor.is_floating_point() and tensor.ndim:  # rows are as wide as a model's
                torch._dynamo.mark_static(tensor, tensor.ndim - 1)
        with making_graphs(), torch.no_grad():
            compiled = torch.compile(function, backend=self._backend, dynamic=True, fullgraph=True)
            return compiled(*inputs)

    def _backend(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self._change(graph)
        graph.graph.lint()
        graph.recompile()
        self.graphs.append(graph)
        return graph.forward

    @property
    def targets(self) -> list[object]:
        """What the graph calls, in order."""
        [graph] = self.graphs
        return [node.target for node in graph.graph.nodes if node.op.startswith("call_")]
