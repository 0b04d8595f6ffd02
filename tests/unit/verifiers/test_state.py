"""Verifiers with state decide as their references, step after step, and leave the same layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from support.batched_trees import Batch, build_batch, outcomes, random_batch, target_of
from support.g_test import g_test, joint_probs
from support.references import UniformChooser
from support.table_of import table_of
from support.tables import KINDS, GeneratorChooser, Model, Shape
from support.tabular_target import TabularTarget
from support.tape import Tape
from support.tiny_engine import cells_of, served

from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.engine import Engine
from eaglegbv.errors import SamplingMismatch
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree, WarpedLogits
from eaglegbv.verifiers import stateful
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.proof.chooser import Prefix, Probs, ProbsAt
from eaglegbv.verifiers.proof.enumeration import After, draft
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.registry import REFERENCES, STATEFUL_VERIFIERS
from eaglegbv.verifiers.stateful import MOST_RHO, Layer, Layers, SparseProbs, StatefulUniforms


@dataclass
class Running:
    """One request: its target, its state by the reference, and the layers of the batched rule."""

    model: Model
    state: stateful.ModifiedTarget = field(default_factory=stateful.ModifiedTarget)
    layers: list[Layer] = field(default_factory=list)

    def p(self, prefix: Prefix) -> Probs:
        """p as logits give it back."""
        return tuple(torch.tensor(self.model.p(prefix), dtype=torch.float64).log().exp().tolist())


@dataclass(frozen=True)
class TableProbs:
    """Draft distributions of layers by table; ``current`` plants those of the current step."""

    requests: list[Running]
    width: int
    current: list[ProbsAt] | None = None

    def after(self, tokens: torch.Tensor) -> SparseProbs:
        most = max(len(r.layers) for r in self.requests)
        probs = torch.zeros((len(self.requests), most, self.width), dtype=torch.float64)
        for b, request in enumerate(self.requests):
            context = (*request.state.context, *tokens[b].tolist())
            for k, layer in enumerate(request.layers):
                if not layer.stop(context):
                    dist = self.current[b] if self.current else layer.draft_probs
                    probs[b, k] = torch.tensor(dist(context), dtype=torch.float64)
        return SparseProbs(torch.arange(self.width).expand_as(probs), probs)


def chooser_of(uniforms: StatefulUniforms, request: int, layers: int) -> UniformChooser:
    """Decide by the uniforms of one request, those of its layers included."""
    plain, b = uniforms.plain, request
    entering, leaving = uniforms.entering[b, :, :layers].flatten(), uniforms.leaving[b]
    own = VerifyUniforms(
        selection=torch.cat((plain.selection[b].flatten(), entering)).unsqueeze(0),
        acceptance=plain.acceptance[b].unsqueeze(0),
        correction=torch.cat((plain.correction[b : b + 1], leaving)).unsqueeze(0),
    )
    return UniformChooser(own)


def stateful_uniforms(plain_of: Batch, layers: int, rng: np.random.Generator) -> StatefulUniforms:
    size, length = plain_of.tree.batch, plain_of.tree.length
    return StatefulUniforms(
        plain_of.uniforms,
        torch.from_numpy(rng.random((size, length, layers))),
        torch.from_numpy(rng.random((size, layers + 1))),
    )


UNTIED = ("random", "zeros", "one_hot")
"""Kinds of independent p and q whose ratios never tie, apart from ratio 0.

Ratios M/q that tie in exact arithmetic differ by rounding as soon as layers change M, so the order
of such tokens, and with it the path selected among several, is not defined by the mathematics.
"""


def start(rng, size: int, vocab: int, kinds: Sequence[str] = KINDS) -> list[Running]:
    """Requests with targets of the given kinds."""
    return [
        Running(Model(vocab, kinds[k], int(rng.integers(2**31)), 0.5))
        for k in rng.integers(len(kinds), size=size)
    ]


def layers_of(requests: list[Running], most_drafts: int) -> Layers:
    most = max(len(r.layers) for r in requests)
    rho = torch.zeros((len(requests), most), dtype=torch.float64)
    drafts, remaining = torch.ones_like(rho).long(), torch.zeros_like(rho).long()
    for b, request in enumerate(requests):
        for k, own in enumerate(request.layers):
            rho[b, k], drafts[b, k], remaining[b, k] = own.rho, own.drafts, own.remaining
    return Layers(rho, drafts, remaining, most_drafts)


def _batch(trees: list[ReferenceTree], shape: Shape, rng: np.random.Generator) -> Batch:
    if shape.length > 0:
        return build_batch(trees, shape.vocab, rng, drafts=shape.paths, length=shape.length)
    size = len(trees)
    probs = torch.tensor([[tree.target_probs(())] for tree in trees], dtype=torch.float64)
    last = torch.from_numpy(rng.random(size))
    uniforms = VerifyUniforms(last.new_zeros((size, 0, 0, 2)), last.new_zeros((size, 1)), last)
    return Batch(DraftTree.roots([0] * size), target_of(probs), uniforms)


def step(
    verifier: stateful.StatefulVerifier,
    verify: stateful.VerifyWithState,
    requests: list[Running],
    shape: Shape,
    rng: np.random.Generator,
    *,
    kinds: Sequence[str] = KINDS,
    planted: bool = False,
) -> tuple[list[Outcome], list[Outcome]]:
    """Take one step by both; every request goes on with its own state of each.

    Shapes of length 0 take a step without drafts. ``kinds`` are those of the draft distributions;
    with all of them half of the steps draft by ones related to the target's. ``planted``: the
    batched verifier is given the current draft distributions in place of the layers' own.
    """
    drafted, trees = [], []
    for request in requests:
        context = request.state.context
        other = Model(shape.vocab, kinds[rng.integers(len(kinds))], int(rng.integers(2**31)))
        related = kinds is KINDS and rng.random() < 0.5
        dist = request.model.q if related else other.q
        end = int(rng.integers(shape.vocab)) if rng.random() < 1 / 3 else -1

        def stop(prefix: Prefix, end: int = end, root: int = len(context)) -> bool:
            return len(prefix) > root and prefix[-1] == end

        q, below = After(dist, context), After(stop, context)
        draws = draft(DraftSampling.IID, q, shape, GeneratorChooser(rng), below)
        # Probabilities are read off logits: exactly the numbers that the batched verifier sees.
        p = After(request.p, context)
        drafted.append(Layer(0.0, 1, 0, dist, stop))
        trees.append(ReferenceTree(DraftSampling.IID, draws, p, q, reach=shape.length, stop=below))
    batch = _batch(trees, shape, rng)
    layers = layers_of(requests, 4)
    uniforms = stateful_uniforms(batch, layers.count, rng)
    current = [layer.draft_probs for layer in drafted] if planted else None
    probs = TableProbs(requests, shape.vocab, current)
    result = verifier.verify(batch.tree, batch.target, uniforms, layers, probs)
    expected = []
    for b, (request, tree) in enumerate(zip(requests, trees, strict=True)):
        chooser = chooser_of(uniforms, b, len(request.state.layers))
        after = verify(tree, request.state, chooser)
        expected.append(after.outcome)
        request.state = after.target
        left = result.layers
        columns = [*enumerate(request.layers), (layers.count, drafted[b])]
        request.layers = [
            replace(
                layer,
                rho=float(left.rho[b, k]),
                drafts=int(left.drafts[b, k]),
                remaining=int(left.remaining[b, k]),
            )
            for k, layer in columns
            if int(left.remaining[b, k]) > 0 and not layer.stop(request.state.context)
        ]
    return outcomes(batch.tree, result), expected


NAMES = sorted(STATEFUL_VERIFIERS)


def agree(request: Running) -> bool:
    """Whether both keep the same layers."""
    mine, its = request.layers, request.state.layers
    return len(mine) == len(its) and all(
        (a.drafts, a.remaining) == (b.drafts, b.remaining) and abs(a.rho - b.rho) <= 1e-9 * b.rho
        for a, b in zip(mine, its, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_decides_and_leaves_as_the_reference(name: str) -> None:
    """Steps of all lengths, 0 among them, on trees of changing draft distributions."""
    rng = np.random.default_rng(len(name))
    verifier = STATEFUL_VERIFIERS[name]()
    kinds = KINDS if verifier.max_paths == 1 else UNTIED
    left = 0
    for _ in range(12):
        vocab = int(rng.integers(2, 6))
        requests = start(rng, 12, vocab, kinds)
        for _ in range(4):
            paths = verifier.max_paths or int(rng.integers(1, 5))
            shape = Shape(vocab, int(rng.integers(6)), paths)
            got, expected = step(verifier, REFERENCES[name], requests, shape, rng, kinds=kinds)
            assert got == expected
            assert all(agree(request) for request in requests)
            left += sum(len(request.layers) for request in requests)
    assert left > 100


@pytest.mark.parametrize("name", NAMES)
def test_current_draft_distribution_in_place_of_a_layers_own_is_noticed(name: str) -> None:
    rng = np.random.default_rng(3)
    verifier = STATEFUL_VERIFIERS[name]()
    wrong = 0
    for _ in range(12):
        requests = start(rng, 8, 4)
        shape = Shape(4, 4, verifier.max_paths or 2)
        step(verifier, REFERENCES[name], requests, shape, rng)
        got, expected = step(verifier, REFERENCES[name], requests, shape, rng, planted=True)
        pairs = zip(requests, got, expected, strict=True)
        wrong += sum(mine != its or not agree(request) for request, mine, its in pairs)
    assert wrong > 4


@pytest.mark.parametrize("name", NAMES)
def test_reads_nothing_on_the_host_and_refuses_other_samplings(name: str) -> None:
    rng = np.random.default_rng(4)
    verifier = STATEFUL_VERIFIERS[name]()
    batch = random_batch(DraftSampling.IID, rng, 4, Shape(5, 3, verifier.max_paths or 3))
    layers = Layers(
        rho=torch.tensor([[0.5], [2.0], [1.0], [0.0]], dtype=torch.float64),
        drafts=torch.tensor([[3], [1], [2], [1]]),
        remaining=torch.tensor([[2], [1], [1], [0]]),
        most_drafts=3,
    )
    uniforms = stateful_uniforms(batch, 1, rng)
    with Tape():  # raises at a host read
        verifier.verify(batch.tree, batch.target, uniforms, layers, Always())
    other = replace(batch.tree, draft_sampling=DraftSampling.WOR)
    with pytest.raises(SamplingMismatch, match=name):
        verifier.verify(other, batch.target, uniforms, layers, Always())


class Always:
    """The same draft distribution after all tokens."""

    def after(self, tokens: torch.Tensor) -> SparseProbs:
        probs = torch.full((len(tokens), 1, 5), 0.2, dtype=torch.float64)
        return SparseProbs(torch.arange(5).expand_as(probs), probs)


# --- layers along texts that the drafter thinks next to impossible: rho has an upper limit
VOCAB, TOKENS, SAMPLES = 4, 6, 800
PROMPT = [1, 2]


def test_rho_grows_to_its_limit_and_no_further() -> None:
    rho = torch.tensor([1.0, 1e90, MOST_RHO, 0.0], dtype=torch.float64)
    b = torch.tensor([0.5, 1e-130, 5e-324, 5e-324], dtype=torch.float64)
    grown = stateful.rho_after(rho, torch.full((4,), 0.25, dtype=torch.float64), b)
    assert grown.tolist() == [0.5, MOST_RHO, MOST_RHO, 0.0]


def test_a_layer_at_the_limit_leaves_the_target_as_it_is() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -40.0]])
    target = WarpedLogits.of(logits, torch.zeros((1, 1), dtype=torch.int64))
    ids = torch.arange(VOCAB).unsqueeze(0)
    one = torch.ones((1, 1), dtype=torch.int64)
    layers = Layers(torch.full((1, 1), MOST_RHO, dtype=torch.float64), one, 2 * one, 1)
    draft = torch.tensor([[[0.3, 0.7]]], dtype=torch.float64)
    dists = SparseProbs(torch.tensor([[[3, 0]]]), draft)
    modified = stateful.ModifiedNode.at(target, torch.tensor([0]), layers, dists, ids)
    dist = target.probs_of(torch.tensor([0]))
    assert torch.allclose(modified.probs, dist, rtol=1e-12, atol=0)
    assert torch.allclose(modified.whole(target, torch.tensor([0])), dist, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("verifier", "paths"), [("greedy_block", 1), ("spectr_gbv", 2)])
def test_texts_that_the_drafter_never_drafts_follow_the_target(verifier: str, paths: int) -> None:
    """At a draft temperature of 0.05, b is 1e-78 at each token: rho was infinite after four."""
    target = TabularTarget(vocab_size=VOCAB, order=1, seed=3, scale=0.3, max_slots=4096)
    target._logits[:, 2] += 3  # mostly says 2
    logits = torch.tensor([-1000.0, 0.0, -9.0, -1000.0]).expand(VOCAB + 1, -1)  # sure of 1
    drafter = TabularDrafter(table_of(logits.clone(), order=1))
    engine = Engine(target, drafter, EngineConfig(max_batch=64))
    plan = Plan(verifier=verifier, paths=paths, depth=8, draft_temperature=0.05, draft_width=2)
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=n) for n in range(SAMPLES)]
    requests = served(engine, [(PROMPT, own, plan) for own in params])

    def next_probs(prefixes: list[list[int]]) -> np.ndarray:
        rows = torch.stack([target.logits_after(prefix) for prefix in prefixes])
        return rows.double().softmax(dim=1).numpy()

    outcome = g_test(cells_of(requests, VOCAB), joint_probs(next_probs, PROMPT, TOKENS))
    assert outcome.p_value > 1e-4, outcome
