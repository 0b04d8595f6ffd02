"""Graphs that are run as they are: the same numbers, without detours."""

import operator

import pytest
import torch
from support.kept_graphs import KeptGraphs
from support.packed_trees import Text, scattered
from support.tiny_models import LAYERS, VOCAB, tiny_model
from torch import Tensor, nn
from torch.fx import GraphModule

import eaglegbv.flat as flat_module
from eaglegbv.attention.opaque import attend_opaque
from eaglegbv.compiling import check_backend
from eaglegbv.flat import FLAT, flat
from eaglegbv.operations import python_of
from eaglegbv.rewrites import rewrite
from eaglegbv.targets.base import FeatureSpec
from eaglegbv.targets.hf import HFTarget

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations


@pytest.fixture
def kept() -> KeptGraphs:
    return KeptGraphs(flat)


def same_and_other_types(x: Tensor) -> tuple[Tensor, ...]:
    y = x.to(torch.float32).float().contiguous() + 1
    return y, x.T.contiguous() * 2, y.to(torch.float64) * 3, y.half().float() - 1


def test_what_returns_its_input_is_left_out_and_nothing_else(kept: KeptGraphs) -> None:
    x = torch.rand(3, 4)
    for ours, expected in zip(
        torch.compile(same_and_other_types, backend=kept)(x), same_and_other_types(x), strict=True
    ):
        assert torch.equal(ours, expected)
        assert ours.dtype is expected.dtype
    methods = [target for target in kept.targets() if isinstance(target, str)]
    assert methods == ["contiguous", "to", "half", "float"]


def test_an_input_may_be_what_is_returned(kept: KeptGraphs) -> None:
    x = torch.rand(3, 4)
    same, twice = torch.compile(lambda x: (x.float(), 2 * x), backend=kept)(x)
    assert same is x
    assert torch.equal(twice, 2 * x)


def test_changes_in_place_stay(kept: KeptGraphs) -> None:
    def changed(x: Tensor) -> Tensor:
        y = x.clone().float()
        y.mul_(2)
        return y.float().add_(1)

    x = torch.rand(3, 4)
    assert torch.equal(torch.compile(changed, backend=kept)(x), 2 * x + 1)
    assert kept.targets() == ["clone", "mul_", "add_"]


def test_python_behind_an_operation_is_called_at_once(kept: KeptGraphs) -> None:
    q = torch.rand(1, 2, 4)
    compiled = torch.compile(lambda q: attend_opaque(0, q, q, q, scale=0.5) + 1, backend=kept)
    with pytest.raises(LookupError):  # no forward is served
        compiled(q)
    assert kept.targets() == [python_of(torch.ops.eaglegbv.attend), operator.add]
    assert python_of(operator.add) is None


def test_modules_leave_no_calls_behind(kept: KeptGraphs) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    module = nn.Sequential(inner, nn.LayerNorm(4))
    x = torch.rand(3, 4)
    with torch.no_grad():
        assert torch.equal(torch.compile(module, backend=kept)(x), module(x))
    [graph] = kept.graphs
    assert all(node.op != "call_module" for node in graph.graph.nodes)


def test_it_is_a_backend_of_torch() -> None:
    check_backend(FLAT)
    assert torch.equal(torch.compile(torch.sin, backend=FLAT)(torch.ones(2)), torch.ones(2).sin())


def test_a_targets_queries_and_keys_rotate_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What models write must stay what is looked for, or steps would only take longer."""
    graphs: list[GraphModule] = []

    def watched(graph: GraphModule) -> None:
        rewrite(graph)
        graphs.append(graph)

    monkeypatch.setattr(flat_module, "rewrite", watched)
    HFTarget(tiny_model("llama"), max_slots=64, compile_backend=FLAT)
    assert len(graphs) == 2  # of one row, and of any number
    for graph in graphs:
        targets = [node.target for node in graph.graph.nodes]
        assert targets.count("narrow") == 2 * LAYERS
        assert targets.count(torch.rsqrt) == 2 * LAYERS + 1
        assert "mean" not in targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2"]
)
def test_a_targets_numbers_are_the_same_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    features = FeatureSpec.layer_inputs([1, 3])
    ours, plain = (
        HFTarget(
            tiny_model(name, dtype=dtype),
            features=features,
            max_slots=256,
            compile_backend=backend,
        )
        for backend in (FLAT, None)
    )
    for tokens in ([5], [1, 2, 3], list(range(3, 20))):
        found = []
        for target in (ours, plain):
            generator = torch.Generator().manual_seed(0)
            text = Text([token % VOCAB for token in tokens])
            slots = scattered(target.allocator, len(tokens), generator)
            found.append(target.forward([text.prefill(slots)]))
        assert torch.equal(found[0].logits, found[1].logits)
        assert torch.equal(found[0].features, found[1].features)
