"""Compiling a forward that does not change any more."""

import platform
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.config import patch
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.types import GuardFilterEntry
from torch._inductor import config, list_options
from torch._inductor.config import patch as inductor_patch
from torch.backends.mkldnn import set_flags as set_onednn_flags

from eaglegbv.errors import InvalidArgument
from eaglegbv.flat import FLAT
from eaglegbv.frames import with_code

_ASSERTING = frozenset({FLAT, "inductor"})
"""Backends whose code can assert the sizes and strides it is given."""

_LEAST_TORCH = "2.13"
"""Before, ``torch.compile`` loses the fields of named tuples that are made while it traces."""


def check_backend(backend: str) -> None:
    """Raise unless ``torch.compile`` knows ``backend``, and can be trusted.

    Raises:
        InvalidArgument: It does not, or this PyTorch is too old.
    """
    if torch.__version__ < _LEAST_TORCH:
        expected = f"none: compiling takes PyTorch {_LEAST_TORCH}, and this is {torch.__version__}"
        raise InvalidArgument("compile_backend", backend, expected)
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        usual = torch.compiler.list_backends()  # not those for debugging
        expected = f"one of {', '.join(sorted(usual))}"
        raise InvalidArgument("compile_backend", backend, expected)


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


_INLINED = "max-inline-insns-single=2000", "large-function-growth=1000", "inline-unit-growth=1000"
"""Limits within which a compiler puts a product's kernel into the function that calls it. By its
own, those of seven rows and eight stay outside, where their sums lie in memory and not in
registers: a forward of seven took a quarter longer."""


def _inlining() -> dict[str, str]:
    """Return settings that have kernels inlined, where the compiler's limits are too low for it."""
    name, machine = "cpp.march", platform.machine()
    if machine != "x86_64" or name not in list_options() or config.cpp.march == "":
        return {}
    # The flag for the machine is the one place where further flags can be said.
    return {name: " ".join((config.cpp.march or "native", *(f"--param={p}" for p in _INLINED)))}


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
        **_inlining(),
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


def compiled_by_kind(
    forward: Callable[..., Any], backend: str, kind: Callable[..., Hashable] | None
) -> Callable[..., Any]:
    """Return ``forward`` compiled for any sizes, with the graph of an input found by its kind.

    A compiled graph is usually guarded by thousands of checks of the module it was made from, which
    take a tenth of a small forward. Here only the inputs are looked at, so the module must stay as
    it is, and share its graphs with no other. A graph that ended early would go on in code that
    others share, so it must be one graph. See :func:`making_graphs`.

    Even to look at the inputs before every call may take as long as what is computed. That is done
    once for a kind; its graph then runs as it is. It still asserts that what it is given has the
    sizes and strides it was made for, before it computes anything: what does not fit is looked at
    as usual. Of ``"inductor"`` it does not assert in which bounds they are, so nothing in
    ``forward`` may branch by a size.

    Args:
        forward: A function, or a module's forward, bound. Inputs of a kind differ in tensors alone,
            which may be in tuples and dataclasses, and those in their sizes.
        backend: A backend of ``torch.compile``; those of others than ``"flat"`` and ``"inductor"``
            assert nothing, so inputs are looked at in every call. What it cannot make one graph of
            raises ``torch._dynamo.exc.Unsupported`` when it is first called.
        kind: Tells inputs apart that take graphs of their own, from the same arguments; what it
            returns None for is looked at, and without it every input.
    """
    own = _code_of_its_own(forward)
    if kind is None or backend not in _ASSERTING:
        return _compiled(own, backend, sizes_checked=False)
    return _ByKind(own, _compiled(own, backend, sizes_checked=True), kind)


class _ByKind:
    """See :func:`compiled_by_kind`."""

    def __init__(
        self, own: FunctionType, compiled: Callable[..., Any], kind: Callable[..., Hashable]
    ) -> None:
        self._own = own
        self._compiled = compiled
        self._kind = kind
        self._graphs: dict[Hashable, FunctionType] = {}

    def __call__(self, *args: object, **named: object) -> object:
        kind = self._kind(*args, **named)
        if kind is None:
            return self._compiled(*args, **named)
        graph = self._graphs.get(kind)
        if graph is not None:
            try:
                return graph(*args, **named)
            except AssertionError:  # other sizes than it was made for
                pass
        with _codes_made(self._own) as codes:
            found = self._compiled(*args, **named)
        if codes:  # else it is a graph made before, which inputs are looked at for
            self._graphs[kind] = with_code(self._own, codes[-1])
        return found


@contextmanager
def _codes_made(function: FunctionType) -> Iterator[list[CodeType]]:
    """Gather what ``torch.compile`` makes of a function's code here: code that calls graphs."""
    made: list[CodeType] = []

    def note(code: CodeType, new_code: CodeType) -> None:
        if code is function.__code__:
            made.append(new_code)

    handle = register_bytecode_hook(note)
    try:
        yield made
    finally:
        handle.remove()


def _code_of_its_own(forward: Callable[..., Any]) -> FunctionType:
    """Return a function that calls ``forward``, of a code that no other function has.

    PyTorch keeps graphs by the code they were made from, not by the function.
    """

    def run(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    assert isinstance(run, FunctionType)  # as a type checker does not know
    return with_code(run, run.__code__.replace())


def _compiled(own: FunctionType, backend: str, *, sizes_checked: bool) -> Callable[..., Any]:
    settings: dict[str, Any] = {"guard_filter_fn": _guards_of_inputs}
    if backend in _ASSERTING:
        settings["size_asserts"] = sizes_checked
    compiled: Callable[..., Any] = torch.compile(
        own, backend=backend, dynamic=True, fullgraph=True, options=settings
    )
    return compiled


def _guards_of_inputs(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Keep what tells graphs apart: one row, or several."""
    return [guard.guard_type == "SHAPE_ENV" or _of_input(guard) for guard in guards]


def _of_input(guard: GuardFilterEntry) -> bool:
    return guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter)
