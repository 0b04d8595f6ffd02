"""The sampled audit: the output distribution of a batched verifier on random tiny problems."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from eaglegbv.config import DraftSampling, Plan
from eaglegbv.drafters.draft_probs import DraftProbs
from eaglegbv.drafters.tree_growth import TreeGrowth, level_table
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit.exact import OnInstance, Result, Subject
from eaglegbv.eval.audit.g_test import LEVEL, detectable_shift, g_test
from eaglegbv.eval.audit.problems import Sizes
from eaglegbv.tree import DraftTree, WarpedLogits
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.proof.chooser import Prefix, ProbsAt
from eaglegbv.verifiers.proof.enumeration import Problem, Shape, target_joint
from eaglegbv.verifiers.stateful import (
    Layers,
    SparseProbs,
    StatefulUniforms,
    StatefulVerdict,
    StatefulVerifier,
)


def draw_trees(
    size: int,
    shape: Shape,
    probs_after: Callable[[Tensor], Tensor],
    generator: torch.Generator,
    draft_sampling: DraftSampling = DraftSampling.IID,
) -> DraftTree:
    """Draw ``size`` trees of a shape, as an engine draws them; roots are token 0.

    ``probs_after`` maps the tokens down to every row of a level, ``[size, rows, depth]`` int64, to
    the distributions of the next, ``[size, rows, vocab]`` float64. The root is the only row at
    depth 0; of rows at one node the first decides.
    """
    fixed = draft_sampling is DraftSampling.FIXED
    plan = _plan(shape, draft_sampling)
    roots = torch.zeros(size, dtype=torch.int64)
    table = level_table(plan, draft_sampling, roots.device, width=shape.vocab)
    most = max(level.children for level in table.levels)
    numbers = torch.rand((size, most, plan.depth), generator=generator, dtype=torch.float64)
    growth = TreeGrowth(table, roots, None if fixed else numbers)
    tokens = roots.new_zeros((size, 1, 0))
    for _ in table.levels:
        probs = probs_after(tokens).flatten(0, 1)
        ids = torch.arange(probs.shape[1]).expand_as(probs)
        if fixed:
            values, ids = probs.sort(dim=1, descending=True, stable=True)
            probs = values.log()
        drawn = growth.grow(DraftProbs(ids, probs))
        if drawn.parents is None:
            above = tokens.expand(-1, drawn.token_ids.shape[1], -1)
        else:
            above = tokens.gather(1, drawn.parents.unsqueeze(2).expand(-1, -1, tokens.shape[2]))
        tokens = torch.cat((above, drawn.token_ids.unsqueeze(2)), dim=2)
    return growth.finish()


def _plan(shape: Shape, draft_sampling: DraftSampling) -> Plan:
    """Return the plan of such trees: but for K paths, all nodes have as many children."""
    widths = shape.widths_of(draft_sampling)
    if draft_sampling is DraftSampling.FIXED:
        ranks = [range(min(width, shape.vocab)) for width in widths]
        nodes = (node for depth in range(shape.length) for node in product(*ranks[: depth + 1]))
        return Plan(shape=tuple(nodes), depth=shape.length)
    if draft_sampling is DraftSampling.HUB:
        return Plan(paths=2**shape.length, depth=shape.length)
    if draft_sampling is DraftSampling.IID and not shape.widths:
        return Plan(paths=shape.paths, depth=shape.length)
    return Plan(widths=widths)


def random_uniforms(tree: DraftTree, generator: torch.Generator) -> VerifyUniforms:
    """Return fresh uniform numbers for one verification of ``tree``."""

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return VerifyUniforms(
        selection=numbers(tree.batch, tree.length, tree.drafts, 2),
        acceptance=numbers(tree.batch, max(1, tree.drafts * tree.length)),
        correction=numbers(tree.batch),
    )


Written: TypeAlias = tuple[Tensor, int]
"""Texts that a verifier wrote, ``[samples]`` int64, each as a number in base ``vocab``; and the
tokens committed by all first steps together."""


# Texts written by a batched verifier, step after step, on tiny problems.
#
# It takes given uniforms, so its distribution cannot be enumerated. But it can be sampled, with
# many requests side by side. An earlier step may modify the target of later ones, so whole runs are
# judged: each request has its own layers of the modified target, and every layer keeps the draft
# distribution of its step.


@dataclass(frozen=True, slots=True)
class RunTexts:
    """Texts in progress, one for each request."""

    codes: Tensor  # [batch] int64, the texts as numbers (see `prefix_of`)
    lengths: Tensor  # [batch] int64, number of tokens of each text
    layers: Layers  # layers of the texts' modified targets; column k is that of step k
    draft_probs_at: tuple[ProbsAt, ...]  # the draft distribution of each step

    @classmethod
    def start(cls, size: int) -> "RunTexts":
        """Return requests whose texts are empty."""
        codes = torch.ones(size, dtype=torch.int64)
        return cls(codes, torch.zeros_like(codes), Layers.none(size), ())

    def only(self, chosen: Tensor) -> "RunTexts":
        """Return the requests where ``chosen`` ``[batch]`` bool is set."""
        layers_now = self.layers
        drafts = layers_now.drafts[chosen]
        remaining = layers_now.remaining[chosen]
        layers = replace(layers_now, rho=layers_now.rho[chosen], drafts=drafts, remaining=remaining)
        return RunTexts(self.codes[chosen], self.lengths[chosen], layers, self.draft_probs_at)


def write_runs(
    verifier: Verifier | StatefulVerifier,
    problems: Sequence[Problem],
    samples: int,
    generator: torch.Generator,
) -> Written:
    """Take one step for each of ``problems``, then steps without drafts.

    Texts end after L + 1 tokens, within which every layer of a first step ends. A step without
    drafts commits a token of the (modified) target.
    """
    vocab = problems[0].shape.vocab
    total = problems[0].shape.length + 1
    texts = RunTexts.start(samples)
    cells = []
    committed = 0
    for number in range(len(problems) + total):
        drafting = number < len(problems)
        problem = problems[number if drafting else -1]
        texts = _step(verifier, texts, problem, generator, drafting=drafting)
        if number == 0:
            committed = int(texts.lengths.sum())
        done = texts.lengths >= total
        surplus = vocab ** (texts.lengths[done] - total)
        cells.append(texts.codes[done] // surplus - vocab**total)
        texts = texts.only(~done)
        if len(texts.codes) == 0:
            break
    return torch.cat(cells), committed


def prefix_of(code: int, vocab: int) -> Prefix:
    """Return the tokens of a code, whose digits are a 1 and then the tokens."""
    tokens: list[int] = []
    while code > 1:
        code, token = divmod(code, vocab)
        tokens.append(token)
    return tuple(reversed(tokens))


def _step(
    verifier: Verifier | StatefulVerifier,
    texts: RunTexts,
    problem: Problem,
    generator: torch.Generator,
    *,
    drafting: bool,
) -> RunTexts:
    vocab = problem.shape.vocab
    size = len(texts.codes)

    def probs_after(tokens: Tensor) -> Tensor:
        codes = texts.codes.unsqueeze(1).expand(tokens.shape[:2])
        for column in tokens.unbind(2):
            codes = codes * vocab + column
        return _probs_after(problem.draft_probs, codes, vocab)

    if drafting:
        tree = draw_trees(size, problem.shape, probs_after, generator, problem.draft_sampling)
        codes = _node_codes(tree, texts.codes, vocab)
    else:
        tree = DraftTree.roots([0] * size)
        codes = texts.codes.unsqueeze(1)
    p = _probs_after(problem.target_probs, codes, vocab).flatten(0, 1)
    rows = torch.arange(codes.numel()).view_as(codes)
    target = WarpedLogits(p.log(), p.new_zeros(len(p)), rows)
    verdict: Verdict | StatefulVerdict
    layers = texts.layers
    if isinstance(verifier, Verifier):
        verdict = verifier.verify(tree, target, random_uniforms(tree, generator))
    else:
        uniforms = _uniforms(tree, layers.count, generator)
        verdict = verifier.verify(tree, target, uniforms, layers, _OwnProbs(texts, vocab))
        layers = verdict.layers
    return RunTexts(
        codes=_extended(texts.codes, tree, verdict, vocab),
        lengths=texts.lengths + verdict.accepted + 1,
        layers=layers,
        draft_probs_at=(*texts.draft_probs_at, problem.draft_probs),
    )


def _node_codes(trees: DraftTree, codes: Tensor, vocab: int) -> Tensor:
    """Return the code of each node's text, ``[batch, nodes]``; padding repeats the root's."""
    node_codes = codes.unsqueeze(1).expand_as(trees.parents).clone()
    for depth in range(1, trees.length + 1):
        longer = node_codes.gather(1, trees.parents) * vocab + trees.token_ids
        node_codes = torch.where(trees.depth == depth, longer, node_codes)
    return node_codes


def _extended(codes: Tensor, tree: DraftTree, verdict: Verdict, vocab: int) -> Tensor:
    drafted = tree.token_ids.gather(1, verdict.path_nodes)
    for i in range(tree.length):
        codes = torch.where(i < verdict.accepted, codes * vocab + drafted[:, i], codes)
    return codes * vocab + verdict.token_ids


def _probs_after(probs_at: ProbsAt, codes: Tensor, vocab: int) -> Tensor:
    """Return, ``[..., vocab]`` float64, the distributions after texts with codes ``[...]``."""
    each, rows = codes.unique(return_inverse=True)
    table = [probs_at(prefix_of(code, vocab)) for code in each.tolist()]
    return torch.tensor(table, dtype=torch.float64)[rows]


@dataclass(frozen=True, slots=True)
class _OwnProbs:
    """The draft distributions of all steps so far, which the layers need."""

    texts: RunTexts
    vocab: int

    def after(self, tokens: Tensor) -> SparseProbs:
        """Return the distributions of all steps after ``tokens`` more, ``[batch, depth]``."""
        codes = self.texts.codes
        for column in tokens.T:
            codes = codes * self.vocab + column
        each = [_probs_after(probs_at, codes, self.vocab) for probs_at in self.texts.draft_probs_at]
        empty = torch.zeros((len(codes), 0, self.vocab), dtype=torch.float64)
        probs = torch.stack(each, dim=1) if each else empty
        return SparseProbs(torch.arange(self.vocab).expand(probs.shape), probs)


def _uniforms(tree: DraftTree, layers: int, generator: torch.Generator) -> StatefulUniforms:
    entering = (tree.batch, tree.length, layers)
    leaving = (tree.batch, layers + 1)
    return StatefulUniforms(
        plain=random_uniforms(tree, generator),
        entering=torch.rand(entering, generator=generator, dtype=torch.float64),
        leaving=torch.rand(leaving, generator=generator, dtype=torch.float64),
    )


class SampledResult(Result, frozen=True, kw_only=True):
    """Result of a sampled audit."""

    samples: int  # number of steps sampled for each problem
    min_p_value: float  # smallest p-value of the problems' G-tests
    # The smallest p-value of a right verifier is below this with probability at most `LEVEL`.
    rejects_below: float
    # Total variation from the target that the test of one problem notices with probability 0.9, if
    # it is spread in the way that is hardest to see; the largest of all problems.
    detectable_shift: float

    @property
    def passed(self) -> bool:
        """Whether no test rejects the verifier."""
        return self.min_p_value >= self.rejects_below


@torch.inference_mode()
def _sample(
    verifier: Verifier | StatefulVerifier,
    samples: int,
    problems: Iterator[Sequence[Problem]],
    sizes: Sizes,
    on_instance: OnInstance,
) -> Callable[..., Result]:
    """Compare each problem's texts with the target's joint distribution by a G-test."""
    generator = torch.Generator().manual_seed(sizes.seed)
    smallest = 1.0
    blindest = 0.0
    committed = 0
    level = LEVEL / sizes.instances
    for steps in problems:
        cells, tokens = write_runs(verifier, steps, samples, generator)
        joint = target_joint(steps[0].target_probs, sizes.depth + 1)
        test = g_test(cells.numpy(), np.array([float(mass) for mass in joint.values()]))
        smallest = min(smallest, test.p_value)
        if test.cells > 1:
            blindest = max(blindest, detectable_shift(samples, test.cells, level=level))
        committed += tokens
        on_instance(test.p_value)
    return partial(
        SampledResult,
        samples=samples,
        min_p_value=smallest,
        rejects_below=level,
        detectable_shift=blindest,
        block_efficiency=committed / (sizes.instances * samples),
    )


def sampled_subject(verifier: Verifier | StatefulVerifier, samples: int) -> Subject:
    """Return the audit's subject for a batched verifier, which writes so many texts a problem.

    Raises:
        InvalidArgument: ``samples`` is not positive.
    """
    if samples < 1:
        raise InvalidArgument("samples", samples, "an integer of at least 1")
    return Subject(rule=verifier, run=partial(_sample, verifier, samples))
