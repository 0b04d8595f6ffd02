import platform
from pathlib import Path

import pytest
import torch
from support.cli import process
from support.compilers import needs_compiler
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config, list_options
from torch._inductor.cpp_builder import get_cpp_compiler

from eaglegbv.compiling import compile_graph, generating_products, making_graphs

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Says how many graphs were made since."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


def rows(count: int, width: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count * width)
    x, y = torch.rand((2, count, width), generator=generator)
    return x, y


def scaled_sums(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(dim=1)


def branching(x: Tensor, y: Tensor) -> Tensor:
    return x + y if len(x) > 5 else x * y


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.thorough])]
)
def test_two_graphs_serve_any_sizes_that_differ(graphs, backend):
    compiled = compile_graph(scaled_sums, backend)
    with making_graphs():
        for count in (1, 3):
            torch.testing.assert_close(compiled(*rows(count)), scaled_sums(*rows(count)))
    for count, width in ((1, 7), (5, 7), (2, 11), (1, 13)):
        own = rows(count, width)
        torch.testing.assert_close(compiled(*own), scaled_sums(*own))
    assert graphs() == 2


@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (scaled_sums, "eager"),
        (branching, "eager"),
        pytest.param(scaled_sums, "inductor", marks=[needs_compiler, pytest.mark.thorough]),
    ],
)
def test_inputs_that_do_not_fit_get_a_graph_of_their_own(graphs, function, backend: str) -> None:
    """Sizes that were equal, a size that was branched on, other strides."""
    compiled = compile_graph(function, backend)
    with making_graphs():
        torch.testing.assert_close(compiled(*rows(4, 4)), function(*rows(4, 4)))
        for own in (rows(4, 9), rows(6, 5), rows(1, 5), rows(3, 3), rows(2, 1)):
            torch.testing.assert_close(compiled(*own), function(*own))
        x, y = rows(6, 5)
        for turned in (x.T.contiguous().T, x[:, :1].expand(6, 5)):
            torch.testing.assert_close(compiled(turned, y), function(turned, y))
    assert graphs() > 2


def test_graphs_of_two_functions_keep_apart(graphs):
    """PyTorch stores graphs by code, which functions made in one place share."""
    compiled = [compile_graph(lambda x, by=by: x * by, "eager") for by in (2, 3)]
    x, _ = rows(3)
    assert all(torch.equal(own(x), x * by) for own, by in zip(compiled, (2, 3), strict=True))
    assert graphs() == 2


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a compiler's limits on x86-64")
@pytest.mark.skipif("cpp.march" not in list_options(), reason="PyTorch 2.13 takes limits")
def test_products_are_generated_with_their_kernels_inlined():
    """Else sums of seven rows and more lie in memory, and take a quarter longer."""
    before = config.cpp.march
    with generating_products():
        native, *limits = config.cpp.march.split()
        assert native == f"{before or 'native'}"
        assert limits
        compiler = get_cpp_compiler()
        how = ("-march=native", *limits, "-xc++", "-fsyntax-only", "-")
        process(compiler, *how, input="int main() {}")
    assert config.cpp.march == before
