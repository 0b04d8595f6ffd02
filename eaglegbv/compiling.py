"""Compiling a forward that does not change any more."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.config import patch
from torch._dynamo.types import GuardFilterEntry
from torch._inductor.config import patch as inductor_patch
from torch.backends.mkldnn import set_flags as set_onednn_flags

from eaglegbv.errors import InvalidArgument


def check_backend(backend: str) -> None:
    """Raise unless ``torch.compile`` knows ``backend``.

    Raises:
        InvalidArgument: It does not.
    """
    known = torch.compiler.list_backends(exclude_tags=None)
    if backend not in known:
        raise InvalidArgument("compile", backend, f"one of {', '.join(sorted(known))}")


@contextmanager
def making_graphs() -> Iterator[None]:
    """Call compiled functions for the first time here.

    Graphs take a module's floats (and constants that are computed and kept) for what they are.
    Elsewhere a graph would be handed its floats, each made a tensor for every call, which for the
    layers of a small model took 2% of a forward. Sizes that are equal in the first call are taken
    to be so in all: those that need not be must differ there.
    """
    with patch(specialize_float=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        yield


def can_generate(backend: str | None, *, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether :func:`generating_products` is for graphs of that kind: float32 of a CPU."""
    return backend == "inductor" and device.type == "cpu" and dtype is torch.float32


@contextmanager
def generating_products() -> Iterator[None]:
    """Make graphs here that compute products with parameters by generated code, for a CPU.

    Parameters become constants of a graph, laid out in blocks for its kernels; modules keep theirs,
    so weights take their memory twice. A generated product costs no call, and four rows take hardly
    longer than one. A row does not depend on those beside it, bit for bit: each of its sums runs
    over the whole inner dimension, in one order.
    """
    settings = {
        "freezing": True,
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "CPP,ATEN",
        # What reads 8 bits rounds its input: in all graphs, not only where nothing was fused.
        "emulate_precision_casts": True,
    }
    # Imported here: it takes seconds, and compiling alone needs it.
    algorithms = import_module("torch._inductor.select_algorithm")
    selector = algorithms.get_algorithm_selector_cache()

    def generated(choices: list[Any]) -> list[Any]:
        """Leave no library's product where there is another: timed alone, either may win."""
        ours = [c for c in choices if not isinstance(c, algorithms.ExternKernelCaller)]
        return ours or choices

    selector.add_preprocessing_fn(generated)
    # With oneDNN its packed constants would come first, which keep graphs out of caches.
    enabled, *_ = set_onednn_flags(False, _fp32_precision=None)
    try:
        with inductor_patch(settings):
            yield
    finally:
        set_onednn_flags(enabled, _fp32_precision=None)
        selector.preprocessing_fns.remove(generated)


def compiled_alone(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return ``forward`` compiled for inputs of one row, and for those of any number of rows.

    A compiled graph is usually guarded by thousands of checks of the module it was made from, which
    take a tenth of a small forward. Here only the inputs are looked at, so the module must stay as
    it is, be called with the same keywords, and share its graphs with no other. A graph that ended
    early would go on in code that others share, so it must be one graph. See :func:`making_graphs`.

    Args:
        forward: A module's forward, bound.
        backend: A backend of ``torch.compile``. What it cannot make one graph of raises
            ``torch._dynamo.exc.Unsupported`` when it is first called.
    """

    def run(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    # PyTorch keeps graphs by the code they were made from, not by the function: a code of its own.
    own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    settings: dict[str, Any] = {"guard_filter_fn": _guards_of_inputs}
    if backend == "inductor":
        settings["size_asserts"] = False  # the target proves itself when it is built
    compiled: Callable[..., Any] = torch.compile(
        own, backend=backend, dynamic=True, fullgraph=True, options=settings
    )
    return compiled


def _guards_of_inputs(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Keep what tells graphs apart: one row, or several."""
    return [guard.guard_type == "SHAPE_ENV" or _of_input(guard) for guard in guards]


def _of_input(guard: GuardFilterEntry) -> bool:
    return guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter)
