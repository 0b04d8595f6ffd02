"""Compilation of forwards that no longer change."""

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

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.flat import FLAT
from eaglegbv.frames import with_code

EXAMPLE_WIDTH = 251
"""Approximate number of tokens in a draft law, for which code over draft laws is tuned."""

_ASSERTING = frozenset({FLAT, "inductor"})
"""Backends whose code can assert the sizes and strides of its inputs."""


def check_backend(backend: str) -> None:
    """Raise unless ``torch.compile`` knows ``backend``.

    Raises:
        InvalidArgument: ``torch.compile`` does not know it.
    """
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        first = FLAT, "inductor"
        others = sorted({*torch.compiler.list_backends()} - {*first})  # not those for debugging
        expected = f"{one_of(first)}, or another of torch.compile's: {', '.join(others)}"
        raise InvalidArgument("compile_backend", backend, expected)


@contextmanager
def making_graphs() -> Iterator[None]:
    """Make the first calls of compiled functions in this context.

    Graphs made in it have a module's floats built in (and constants that are computed once and
    kept). Graphs made elsewhere receive those floats as arguments, each turned into a tensor in
    every call, which took 2% of a forward for the layers of a small model. Sizes that are equal in
    the first call are assumed to be equal in every call, so sizes that may differ must differ in
    the first.
    """
    with patch(specialize_float=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        yield


def can_generate(backend: str | None, *, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether :func:`generating_products` supports such graphs: float32 on a CPU."""
    return backend == "inductor" and device.type == "cpu" and dtype is torch.float32


_INLINED = "max-inline-insns-single=2000", "large-function-growth=1000", "inline-unit-growth=1000"
"""Limits up to which a compiler inlines a product's kernel into the function that calls it. With
its own limits, the kernels for seven and eight rows are not inlined, and keep their sums in memory
instead of registers: a forward of seven rows took a quarter longer."""


def _inlining() -> dict[str, str]:
    """Return settings that inline kernels where the compiler's own limits are too low."""
    name, machine = "cpp.march", platform.machine()
    if machine != "x86_64" or name not in list_options() or config.cpp.march == "":
        return {}
    # The flag for the machine is the only setting through which further flags can be passed.
    return {name: " ".join((config.cpp.march or "native", *(f"--param={p}" for p in _INLINED)))}


@contextmanager
def generating_products() -> Iterator[None]:
    """Make graphs in this context whose products with parameters are generated code, for a CPU.

    Parameters become constants of a graph, laid out in blocks for its kernels. Modules keep theirs,
    so weights are in memory twice. A generated product needs no call, and four rows take hardly
    longer than one. A row does not depend on the rows beside it, bit for bit: each of its sums runs
    over the whole inner dimension, always in the same order.
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
        ours = [c for c in choices if not isinstance(c, algorithms.ExternKernelCaller)]
        return ours or choices

    selector.add_preprocessing_fn(generated)
    # With oneDNN, its packed constants would be preferred, but they keep graphs out of caches.
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
    """Return ``forward`` compiled for any sizes; calls find their graph by their kind.

    A compiled graph is usually guarded by thousands of checks of the module it was made from, which
    take a tenth of a small forward. Here only the inputs are checked, so the module must not
    change, and must not share its graphs. After a break in a graph, execution would continue in
    code that other functions share, so there must be no break. See :func:`making_graphs`.

    Even checking only the inputs before every call may take as long as the computation itself. So
    they are checked once for each kind, whose graph then runs directly. Before it computes
    anything, the graph still asserts that its inputs have the sizes and strides it was made for;
    inputs that do not fit are checked as usual. Graphs of ``"inductor"`` do not assert the bounds
    of sizes, so nothing in ``forward`` may branch on a size.

    Args:
        forward: A function, or a module's bound forward. Inputs of one kind differ only in tensors,
            which may be in tuples and dataclasses, and the tensors only in sizes and contents.
        backend: A backend of ``torch.compile``. Graphs of backends other than ``"flat"`` and
            ``"inductor"`` assert nothing, so inputs are checked in every call. If the backend
            cannot make a single graph of ``forward``, the first call raises
            ``torch._dynamo.exc.Unsupported``.
        kind: Returns, for the arguments of a call, a key of the inputs that share a graph. Calls
            for which it returns None go through torch.compile's guards; with ``kind=None``, all do.
    """
    own = code_of_its_own(forward)
    if kind is None or backend not in _ASSERTING:
        return _compiled(own, backend, sizes_checked=False)
    return _ByKind(own, _compiled(own, backend, sizes_checked=True), kind)


class _ByKind:
    """A compiled function; see :func:`compiled_by_kind`."""

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
            except AssertionError:  # the graph was made for other sizes
                pass
        with _codes_made(self._own) as codes:
            found = self._compiled(*args, **named)
        if codes:  # otherwise the guards found an existing graph
            self._graphs[kind] = with_code(self._own, codes[-1])
        return found


@contextmanager
def _codes_made(function: FunctionType) -> Iterator[list[CodeType]]:
    """Collect the code objects, which call graphs, that ``torch.compile`` makes of a function."""
    made: list[CodeType] = []

    def note(code: CodeType, new_code: CodeType) -> None:
        if code is function.__code__:
            made.append(new_code)

    handle = register_bytecode_hook(note)
    try:
        yield made
    finally:
        handle.remove()


def code_of_its_own(forward: Callable[..., Any]) -> FunctionType:
    """Return a function that calls ``forward``, with a code object shared with no other function.

    PyTorch stores graphs by the code object they were made from, not by the function.
    """

    def run(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    assert isinstance(run, FunctionType)  # a type checker cannot know this
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
    """Keep the guards on inputs, which tell graphs for one row from those for several."""
    return [guard.guard_type == "SHAPE_ENV" or _of_input(guard) for guard in guards]


def _of_input(guard: GuardFilterEntry) -> bool:
    return guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter)
