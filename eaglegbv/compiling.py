"""Compilation of forwards that no longer change."""

import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.config import patch
from torch._dynamo.types import GuardFilterEntry
from torch._inductor import config, list_options
from torch._inductor.config import patch as inductor_patch
from torch.backends.mkldnn import set_flags as set_onednn_flags

from eaglegbv.errors import InvalidArgument


def check_backend(backend: str) -> None:
    """Raise InvalidArgument unless ``torch.compile`` knows ``backend``."""
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        others = sorted({*torch.compiler.list_backends()} - {"inductor"})  # none for debugging
        expected = f"'inductor', or another of torch.compile's: {', '.join(others)}"
        raise InvalidArgument("compile_backend", backend, expected)


@contextmanager
def making_graphs(
    backend: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Iterator[None]:
    """Make the first calls of compiled functions in this context.

    For ``inductor`` and weights in float32 on a CPU, products are generated code; see
    :func:`generating_products`.

    Graphs made in it have a module's floats built in (and constants that are computed once and
    kept). Graphs made elsewhere receive those floats as arguments, each turned into a tensor in
    every call, which took 2% of a forward for the layers of a small model. Sizes that are equal in
    the first call are assumed to be equal in every call, so sizes that may differ must differ in
    the first.
    """
    on_cpu = device is not None and device.type == "cpu"
    generates = backend == "inductor" and on_cpu and dtype is torch.float32
    products = generating_products() if generates else nullcontext()
    with patch(specialize_float=True), warnings.catch_warnings(), products:
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        yield


_INLINED = "max-inline-insns-single=2000", "large-function-growth=1000", "inline-unit-growth=1000"
"""Limits up to which a compiler inlines a product's kernel into the function that calls it. With
its own limits, the kernels for seven and eight rows are not inlined, and keep their sums in memory
instead of registers: a forward of seven rows took a quarter longer."""


def _inlining() -> dict[str, str]:
    """Return settings that inline kernels where the compiler's own limits are too low."""
    name = "cpp.march"
    machine = platform.machine()
    if machine != "x86_64" or name not in list_options() or config.cpp.march == "":
        return {}
    # The flag for the machine is the only setting through which further flags can be passed.
    return {name: " ".join((config.cpp.march or "native", *(f"--param={p}" for p in _INLINED)))}


@contextmanager
def generating_products() -> Iterator[None]:
    """Make graphs in this context whose products with parameters are generated code, for a CPU.

    Parameters become constants of a graph, laid out in blocks for its kernels. Modules keep theirs,
    so weights are in memory twice. Each sum of a row runs over the whole inner dimension, always in
    the same order, whatever rows are beside it; see docs/inside/speed.md.
    """
    settings = {
        "freezing": True,
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "CPP,ATEN",
        # Products with 8 bits round their input: with this, all graphs do so, fused or not.
        "emulate_precision_casts": True,
        **_inlining(),
    }
    # The import is here because it takes seconds, and only compiling needs it.
    algorithms = import_module("torch._inductor.select_algorithm")
    selector = algorithms.get_algorithm_selector_cache()

    def generated(choices: list[Any]) -> list[Any]:
        """Drop library products if there is a generated one: when timed alone, either may win."""
        kernels = [c for c in choices if not isinstance(c, algorithms.ExternKernelCaller)]
        return kernels or choices

    selector.add_preprocessing_fn(generated)
    # With oneDNN, its packed constants would be preferred, but they keep graphs out of caches.
    enabled, *_ = set_onednn_flags(False, _fp32_precision=None)
    try:
        with inductor_patch(settings):
            yield
    finally:
        set_onednn_flags(enabled, _fp32_precision=None)
        selector.preprocessing_fns.remove(generated)


def compile_graph(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return a function or a module's bound forward, compiled as a single graph for any sizes.

    A compiled graph is usually guarded by thousands of checks of the module it was made from, which
    take a tenth of a small forward. Here only the inputs are checked, so the module must not
    change, and must not share its graphs. See :func:`making_graphs`.

    Raises:
        InvalidArgument: There is no such backend. If it cannot make a single graph of ``forward``,
            the first call raises ``torch._dynamo.exc.Unsupported``.
    """
    check_backend(backend)

    def run(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    assert isinstance(run, FunctionType)  # a type checker cannot know this
    # PyTorch stores graphs by the code object they were made from, so each function gets its own.
    fn = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    compiled: Callable[..., Any] = torch.compile(
        fn,
        backend=backend,
        dynamic=True,
        fullgraph=True,
        options={"guard_filter_fn": _guards_of_inputs},
    )
    return compiled


def _guards_of_inputs(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Keep the guards on inputs, which tell graphs for one row from those for several."""
    return [
        guard.guard_type == "SHAPE_ENV"
        or (guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter))
        for guard in guards
    ]
