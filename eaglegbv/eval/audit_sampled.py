"""The sampled audit: a batched verifier's output law on random tiny problems, by G-tests.

A batched verifier answers for given uniforms, so its law cannot be enumerated; it can be sampled,
many trees in one call. One step is judged: a verifier of this kind keeps nothing between steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from time import perf_counter
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit import Result, Sizes, Subject
from eaglegbv.eval.audit_instances import instance
from eaglegbv.eval.g_test import GTest, detectable_shift, g_test
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verifier, VerifyUniforms
from eaglegbv.verifiers.reference.enumeration import Problem, drafted_paths
from eaglegbv.verifiers.reference.probs import LawAt, Prefix

CHUNK = 4096
"""Trees of one call."""

POWER = 0.9


class SampledResult(Result, frozen=True, kw_only=True):
    """What a sampled audit found.

    Attributes:
        samples: Steps sampled of each.
        min_p_value: Smallest p-value of the problems' G-tests.
        level: A right verifier's smallest p-value is below ``level / instances`` with probability
            ``level`` at most.
        detectable_shift: Total variation from the target that one problem's test notices with
            probability 0.9, spread as it is hardest to see; of the problem that sees least.
        block_efficiency: Mean number of tokens committed by a step.
        seconds: Wall time.
    """

    samples: int
    min_p_value: float
    level: float
    detectable_shift: float
    block_efficiency: float
    seconds: float

    def passed(self, tolerance: float) -> bool:
        """Return whether no test rejects."""
        del tolerance
        return self.min_p_value >= self.level / self.instances

    def figures(self) -> dict[str, str]:
        """See :meth:`Result.figures`."""
        return {
            "least p-value": f"{self.min_p_value:.1e}",
            "rejects below": f"{self.level / self.instances:.1e}",
            "detects": f"{self.detectable_shift:.3f}",
            "block efficiency": f"{self.block_efficiency:.3f}",
            "seconds": f"{self.seconds:.1f}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSubject(Subject):
    """A verifier whose batched implementation is sampled.

    Attributes:
        verifier: The implementation.
        samples: Steps to sample of each problem.
        level: Probability to reject a right verifier.
    """

    verifier: Verifier
    samples: int
    level: float = 1e-4

    @classmethod
    def of(cls, verifier: Verifier, samples: int) -> Self:
        """Return ``verifier`` with what it claims.

        Raises:
            InvalidArgument: ``samples`` is not positive.
        """
        if samples < 1:
            raise InvalidArgument("samples", samples, "an integer of at least 1")
        return cls(
            name=verifier.name,
            laws=verifier.laws,
            default_law=verifier.default_law,
            max_paths=verifier.max_paths,
            verifier=verifier,
            samples=samples,
        )

    def audit(
        self, law: Law, sizes: Sizes, on_instance: Callable[[float], None] | None = None
    ) -> SampledResult:
        """Sample one step's output on random problems and test it.

        Trees are drawn from their exact law, the texts completed by the target to ``depth + 1``
        tokens, and each problem's texts compared with the target's joint law by a G-test.
        ``on_instance`` is told each problem's p-value.
        """
        self.check(law, sizes.shape)
        start = perf_counter()
        generator = torch.Generator().manual_seed(sizes.seed)
        smallest, blindest, committed = 1.0, 0.0, 0.0
        for number in range(sizes.instances):
            [problem] = instance(law, sizes.shape, number, steps=1, seed=sizes.seed)
            test, efficiency = _check(self.verifier, problem, self.samples, generator)
            smallest = min(smallest, test.p_value)
            level = self.level / sizes.instances
            if test.cells > 1:
                shift = detectable_shift(self.samples, test.cells, level=level, power_wanted=POWER)
                blindest = max(blindest, shift)
            committed += efficiency
            if on_instance is not None:
                on_instance(test.p_value)
        return SampledResult(
            verifier=self.name,
            law=str(law),
            instances=sizes.instances,
            samples=self.samples,
            min_p_value=smallest,
            level=self.level,
            detectable_shift=blindest,
            block_efficiency=committed / sizes.instances,
            seconds=perf_counter() - start,
        )


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in the making: a row's first ``lengths`` tokens, the rest undecided."""

    tokens: Tensor
    lengths: Tensor


@torch.inference_mode()
def _check(
    verifier: Verifier, problem: Problem, samples: int, generator: torch.Generator
) -> tuple[GTest, float]:
    """Return one problem's test, and the mean number of committed tokens."""
    trees, target, masses = batch_of(problem)
    total = problem.shape.length + 1
    laws = _laws_by_code(problem.target_law, problem.shape.vocab, total)
    counts, committed = np.zeros(problem.shape.vocab**total), 0
    for size in _chunks(samples):
        index = torch.multinomial(masses, size, replacement=True, generator=generator)
        tree = DraftTree(
            law=trees.law,
            **{f.name: getattr(trees, f.name)[index] for f in fields(trees) if f.name != "law"},
        )
        law = replace(target, rows=target.rows[index])
        verdict = verifier.verify(tree, law, _uniforms(tree, generator))
        drafted = tree.token_ids.gather(1, verdict.path_nodes)
        tokens = torch.cat((drafted, verdict.token_ids.unsqueeze(1)), dim=1)
        tokens.scatter_(1, verdict.accepted.unsqueeze(1), verdict.token_ids.unsqueeze(1))
        texts = Texts(tokens, verdict.accepted + 1)
        committed += int(texts.lengths.sum())
        cells = _complete(texts, laws, generator)
        counts += np.bincount(cells.numpy(), minlength=len(counts))
    joint = laws[-1].reshape(-1).numpy()
    observed = np.repeat(np.arange(len(counts)), counts.astype(np.int64))
    return g_test(observed, joint), committed / samples


def _chunks(samples: int) -> list[int]:
    full, rest = divmod(samples, CHUNK)
    return [CHUNK] * full + ([rest] if rest else [])


def _laws_by_code(p: LawAt, vocab: int, total: int) -> list[Tensor]:
    """Return the laws after all prefixes of lengths 0 ... total - 1, then the joint law of all.

    Entry d is ``[vocab ** d, vocab]``, rows by the prefix read as a number in base ``vocab``.
    """
    laws = [
        torch.tensor([p(prefix) for prefix in product(range(vocab), repeat=d)], dtype=torch.float64)
        for d in range(total)
    ]
    joint = torch.ones((1, 1), dtype=torch.float64)
    for law in laws:
        joint = (joint.view(-1, 1) * law).view(-1, 1)
    return [*laws, joint]


def _complete(texts: Texts, laws: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """Continue texts by the target; return each whole text as a number in base ``vocab``."""
    vocab = laws[0].shape[1]
    code = torch.zeros_like(texts.lengths)
    for d, law in enumerate(laws[:-1]):
        own = torch.multinomial(law[code], 1, generator=generator).squeeze(1)
        code = code * vocab + torch.where(texts.lengths > d, texts.tokens[:, d], own)
    return code


def _uniforms(tree: DraftTree, generator: torch.Generator) -> VerifyUniforms:
    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return VerifyUniforms(
        selection=numbers(tree.batch, tree.length, tree.paths, 2),
        acceptance=numbers(tree.batch, max(1, tree.paths * tree.length)),
        correction=numbers(tree.batch),
    )


def batch_of(problem: Problem) -> tuple[DraftTree, TargetLaw, Tensor]:
    """Return every draft tree of a problem as one batch, its target laws, and its law ``[batch]``.

    Rows of the target belong to prefixes and are shared by all trees.
    """
    drafted = drafted_paths(problem)
    trees = [_Nodes.of(paths) for paths in drafted]
    vocab, length = problem.shape.vocab, problem.shape.length
    prefixes = [c for d in range(length + 1) for c in product(range(vocab), repeat=d)]
    row_of = {prefix: row for row, prefix in enumerate(prefixes)}
    size, nodes = len(trees), max(len(tree.prefixes) for tree in trees)
    most = max(len(tree.paths) for tree in trees)
    token_ids = np.zeros((size, nodes), dtype=np.int64)
    parents, depth, rows = token_ids.copy(), token_ids.copy(), token_ids.copy()
    path_nodes = np.zeros((size, most, length), dtype=np.int64)
    path_lengths = np.zeros((size, most), dtype=np.int64)
    for b, tree in enumerate(trees):
        for node, prefix in enumerate(tree.prefixes):
            rows[b, node] = row_of[prefix]
            if prefix:
                token_ids[b, node] = prefix[-1]
                parents[b, node] = tree.numbers[prefix[:-1]]
                depth[b, node] = len(prefix)
        for k, path in enumerate(tree.paths):
            path_nodes[b, k] = [tree.numbers[path[:d]] for d in range(1, length + 1)]
            path_lengths[b, k] = length
    draft = torch.tensor([problem.draft_law(c) for c in prefixes], dtype=torch.float64)
    shared = torch.from_numpy(rows)
    batch = DraftTree(
        law=problem.law,
        token_ids=torch.from_numpy(token_ids),
        parents=torch.from_numpy(parents),
        depth=torch.from_numpy(depth),
        num_nodes=torch.tensor([len(tree.prefixes) for tree in trees]),
        path_nodes=torch.from_numpy(path_nodes),
        path_lengths=torch.from_numpy(path_lengths),
        draft_ids=torch.arange(vocab).expand(size, nodes, vocab),
        draft_probs=draft[shared],
    )
    probs = torch.tensor([problem.target_law(c) for c in prefixes], dtype=torch.float64)
    target = TargetLaw(probs.log(), probs.new_zeros(len(prefixes)), shared)
    masses = torch.tensor([float(mass) for mass in drafted.values()], dtype=torch.float64)
    return batch, target, masses


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of one tree, numbered by depth, then by first path."""

    paths: tuple[Prefix, ...]
    prefixes: list[Prefix]
    numbers: dict[Prefix, int]

    @classmethod
    def of(cls, paths: tuple[Prefix, ...]) -> "_Nodes":
        longest = max(map(len, paths))
        below = [path[:d] for d in range(1, longest + 1) for path in paths]
        prefixes: list[Prefix] = list(dict.fromkeys([(), *below]))
        return cls(paths, prefixes, {prefix: n for n, prefix in enumerate(prefixes)})
