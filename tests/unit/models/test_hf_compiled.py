"""A compiled target computes what the plain one does, for any number of rows.

The compiler's front end is what can go wrong here (graphs around the attention, shapes that vary);
so the graphs it finds are mostly run as they are, without the minutes its code generator takes.
"""

import pytest
import torch
from support.compilers import needs_compiler
from support.packed_trees import Text, assert_same, random_tokens, random_tree
from support.tiny_models import VOCAB, tiny_model
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.select_algorithm import get_algorithm_selector_cache
from transformers import LlamaConfig, LlamaForCausalLM

from eaglegbv.attention.base import Segment
from eaglegbv.compiling import generating_products
from eaglegbv.errors import InvalidArgument
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.target import FINAL, TargetOutput

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations

COMPILED = ("llama", "gemma3_text", "phi3", "gpt_oss")
"""Kinds of layers: plain, of two windows, joint products, experts and sinks."""


def outputs(target: HFTarget) -> list[TargetOutput]:
    """Two prompts, then trees of several sizes behind them, in one forward each."""
    generator = torch.Generator().manual_seed(3)
    texts = [Text(random_tokens(length, generator)) for length in (7, 3)]
    found = [target.forward([text.prefill(target.allocator, generator) for text in texts])]
    found.append(target.forward([Text([1]).prefill(target.allocator, generator)]))  # of one row
    for nodes in (1, 5, 9, 2):
        segments = [random_tree(text, nodes, target.allocator, generator) for text in texts]
        found.append(target.forward(segments, logit_rows=torch.arange(2 * nodes)))
        for text in texts:
            text.commit(nodes - 1, target.allocator)
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "llama" else pytest.mark.thorough)
        for name in COMPILED
    ],
)
def test_compiled_forwards_equal_plain_ones(name):
    features = (1, 3)
    plain = HFTarget(tiny_model(name), features=features, max_slots=256)
    compiled = HFTarget(tiny_model(name), features=features, max_slots=256, compile_backend="eager")
    check_same(compiled, plain)


@pytest.mark.thorough
def test_compiled_targets_of_one_class_keep_apart():
    # Their graphs are not guarded by what they were made from, which differs here: the number of
    # layers, what is captured, the weights.
    both = [
        [
            HFTarget(make(), features=features, max_slots=256, compile_backend=backend)
            for make, features in (
                (lambda: tiny_model("llama"), (1, 3)),
                (shallow_llama, ()),
                (lambda: tiny_model("llama"), (FINAL,)),
            )
        ]
        for backend in ("eager", None)
    ]
    for compiled, plain in zip(*both, strict=True):
        check_same(compiled, plain)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.timeout(600)
def test_generated_products_are_the_targets_and_no_row_depends_on_another(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    features = (FINAL,)
    compiled, plain = (
        HFTarget(shallow_llama(), features=features, max_slots=256, compile_backend=backend)
        for backend in ("inductor", None)
    )
    # Two graphs, for one row and several; joined, a layer has four products.
    assert counters["inductor"]["cpp_templated_kernel_counter"] == 2 * 4 * compiled.num_layers
    check_same(compiled, plain)
    tokens = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    every = alone(compiled, tokens)
    for rows in (1, 2, 3, 7, 8, 17):
        assert torch.equal(alone(compiled, tokens[:rows]), every[:rows])


def test_how_products_are_generated_does_not_stay_for_what_others_compile():
    selector = get_algorithm_selector_cache()
    choosing, enabled = selector.preprocessing_fns[:], torch.backends.mkldnn.enabled
    with pytest.raises(KeyError), generating_products():  # noqa: PT012
        assert inductor.freezing
        assert not torch.backends.mkldnn.enabled
        assert len(selector.preprocessing_fns) == len(choosing) + 1
        raise KeyError
    assert not inductor.freezing
    assert torch.backends.mkldnn.enabled == enabled
    assert selector.preprocessing_fns == choosing


def alone(target: HFTarget, tokens: torch.Tensor) -> torch.Tensor:
    """Return what texts of one token each come to, which see nothing else, in one forward."""
    first = torch.zeros(1, dtype=torch.int64)
    segments = [
        Segment(token.view(1), first, first[:0], torch.tensor([slot]), first)
        for slot, token in enumerate(tokens)
    ]
    features = target.forward(segments).features
    assert features is not None
    return features


def shallow_llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(**{**tiny_model("llama").config.to_dict(), "num_hidden_layers": 2})
    return LlamaForCausalLM(config)


def check_same(compiled: HFTarget, plain: HFTarget) -> None:
    for ours, expected in zip(outputs(compiled), outputs(plain), strict=True):
        assert_same(ours, expected)


def test_a_model_that_is_not_one_graph_is_refused_by_name(monkeypatch):
    model = tiny_model("llama")
    plain = model.model.norm.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        result: torch.Tensor = plain(x)
        return result

    monkeypatch.setattr(model.model.norm, "forward", broken)
    with pytest.raises(
        InvalidArgument, match=r"compile_backend='eager'.*LlamaForCausalLM.*not one graph"
    ):
        HFTarget(model, max_slots=64, compile_backend="eager")


def test_a_model_that_calls_another_part_of_itself_is_refused_by_name():
    expected = r"compile_backend='eager': expected none for OPTForCausalLM.*not call OPTModel"
    with pytest.raises(InvalidArgument, match=expected):
        HFTarget(tiny_model("opt"), max_slots=256, compile_backend="eager")


def test_an_unknown_compiler_is_named():
    with pytest.raises(InvalidArgument, match=r"compile_backend='fast'.*inductor"):
        HFTarget(tiny_model("llama"), max_slots=256, compile_backend="fast")
