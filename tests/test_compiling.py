"""Graphs found by the kind of an input: looked at once, and again where sizes do not fit."""

import platform
import subprocess
from pathlib import Path

import pytest
import torch
from support.compilers import needs_compiler
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config, list_options
from torch._inductor.cpp_builder import get_cpp_compiler

from eaglegbv.compiling import (
    compiled_by_kind,
    generating_products,
    making_graphs,
)
from eaglegbv.flat import FLAT

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations

MADE = "unique_graphs"

asserting = pytest.mark.parametrize(
    "backend", [FLAT, pytest.param("inductor", marks=needs_compiler)]
)
"""Backends whose code asserts the sizes it is given."""


def scaled_sums(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(dim=1)


def single(x: Tensor, _: Tensor) -> bool:
    return len(x) == 1


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Says how many graphs were made since."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    return lambda: counters["stats"][MADE]


def rows(count: int, width: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count * width)
    x, y = torch.rand((2, count, width), generator=generator)
    return x, y


@asserting
def test_a_kind_is_looked_at_once(graphs, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    compiled = compiled_by_kind(scaled_sums, backend, single)
    with making_graphs():
        for count in (1, 3):
            torch.testing.assert_close(compiled(*rows(count)), scaled_sums(*rows(count)))
    assert graphs() == 2

    def looked_at(*_: Tensor) -> None:
        raise AssertionError("looked at again")

    monkeypatch.setattr(compiled, "_compiled", looked_at)
    for count, width in ((1, 7), (5, 7), (2, 11), (1, 13)):
        own = rows(count, width)
        torch.testing.assert_close(compiled(*own), scaled_sums(*own))


@asserting
@pytest.mark.parametrize("kind", [single, lambda *_: "all alike"])
def test_sizes_that_do_not_fit_are_noticed_and_get_a_graph_of_their_own(
    graphs, kind, backend: str
) -> None:
    compiled = compiled_by_kind(scaled_sums, backend, kind)
    with making_graphs():
        # Sizes that are equal here are taken to be equal for good.
        torch.testing.assert_close(compiled(*rows(4, 4)), scaled_sums(*rows(4, 4)))
        for own in (rows(4, 9), rows(6, 5), rows(1, 5), rows(3, 3), rows(2, 1)):
            torch.testing.assert_close(compiled(*own), scaled_sums(*own))
        x, y = rows(6, 5)
        for turned in (x.T.contiguous().T, x[:, :1].expand(6, 5)):
            torch.testing.assert_close(compiled(turned, y), scaled_sums(turned, y))
    assert graphs() > 2


def branching(x: Tensor, y: Tensor) -> Tensor:
    return x + y if len(x) > 5 else x * y


def fixed(x: Tensor, y: Tensor) -> Tensor:
    return x.view(len(x), -1) + y[:1] + torch.ones(7)


@pytest.mark.parametrize("function", [branching, fixed])
def test_a_flat_graph_asserts_whatever_it_was_traced_for(graphs, function) -> None:
    """A branch taken by a size, and a size that turned out to be a number."""
    compiled = compiled_by_kind(function, FLAT, lambda *_: "all alike")
    with making_graphs():
        for count in (3, 9, 4, 17, 5, 6, 2, 1):
            own = rows(count)
            assert torch.equal(compiled(*own), function(*own))
    assert graphs() > 1


def test_what_does_not_fit_leaves_the_graph_of_its_kind(graphs) -> None:
    compiled = compiled_by_kind(scaled_sums, FLAT, lambda *_: "all alike")
    with making_graphs():
        for count in (3, 1):  # the second has a graph of its own
            compiled(*rows(count))
    kept = dict(compiled._graphs)
    for count in (4, 1, 5):
        torch.testing.assert_close(compiled(*rows(count)), scaled_sums(*rows(count)))
    assert compiled._graphs == kept
    assert graphs() == 2


def test_where_code_asserts_nothing_inputs_are_looked_at_in_every_call(graphs) -> None:
    compiled = compiled_by_kind(scaled_sums, "eager", lambda *_: "all alike")
    for own in (rows(4, 4), rows(4, 9), rows(1, 4), rows(4, 4)):
        torch.testing.assert_close(compiled(*own), scaled_sums(*own))
    assert graphs() > 1


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a compiler's limits on x86-64")
@pytest.mark.skipif("cpp.march" not in list_options(), reason="PyTorch 2.13 takes limits")
def test_products_are_generated_with_their_kernels_inlined() -> None:
    """Else sums of seven rows and more lie in memory, and take a quarter longer."""
    before = config.cpp.march
    with generating_products():
        native, *limits = config.cpp.march.split()
        assert native == f"{before or 'native'}"
        assert limits
        compiler = get_cpp_compiler()
        done = subprocess.run(
            [compiler, "-march=native", *limits, "-xc++", "-fsyntax-only", "-"],
            input="int main() {}",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert config.cpp.march == before
