"""Requests that run for several steps by a verifier with state, batched and by the reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.proof.chooser import Prefix, Probs, ProbsAt, UniformChooser
from eaglegbv.verifiers.proof.enumeration import After, draft
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.stateful import (
    Layer,
    Layers,
    ModifiedTarget,
    SparseProbs,
    StatefulUniforms,
    StatefulVerifier,
    VerifyWithState,
)
from support.batched_trees import Batch, build_batch, outcomes
from support.tables import KINDS, GeneratorChooser, Model, Shape


@dataclass
class Running:
    """One request: its target, its state by the reference, and the layers of the batched rule."""

    model: Model
    state: ModifiedTarget = field(default_factory=ModifiedTarget)
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


def start(
    rng: np.random.Generator, size: int, vocab: int, kinds: Sequence[str] = KINDS
) -> list[Running]:
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
        return build_batch(trees, shape.vocab, rng, paths=shape.paths, length=shape.length)
    size = len(trees)
    probs = torch.tensor([[tree.target_probs(())] for tree in trees], dtype=torch.float64)
    last = torch.from_numpy(rng.random(size))
    uniforms = VerifyUniforms(last.new_zeros((size, 0, 0, 2)), last.new_zeros((size, 1)), last)
    return Batch(DraftTree.roots([0] * size), TargetProbs.of_probs(probs), uniforms)


def step(
    verifier: StatefulVerifier,
    verify: VerifyWithState,
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
        paths = draft(DraftSampling.IID, q, shape, GeneratorChooser(rng), below)
        # Probabilities are read off logits: exactly the numbers that the batched verifier sees.
        p = After(request.p, context)
        drafted.append(Layer(0.0, 1, 0, dist, stop))
        trees.append(ReferenceTree(DraftSampling.IID, paths, p, q, reach=shape.length, stop=below))
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
