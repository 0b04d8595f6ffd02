"""The sampled audit: a batched verifier's output law on random tiny problems, by G-tests.

A batched verifier takes given uniforms, so its law cannot be enumerated. But it can be sampled,
with many trees in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit import Result, Sizes, Subject
from eaglegbv.eval.audit_instances import instance
from eaglegbv.eval.audit_runs import RunWriter
from eaglegbv.eval.audit_steps import StepWriter
from eaglegbv.eval.audit_writing import Writer
from eaglegbv.eval.g_test import LEVEL, detectable_shift, g_test
from eaglegbv.tree import Law
from eaglegbv.verifiers.base import Rule, Verifier
from eaglegbv.verifiers.reference.enumeration import Problem, target_joint
from eaglegbv.verifiers.stateful import StatefulVerifier


class SampledResult(Result, frozen=True, kw_only=True):
    """Result of a sampled audit.

    Attributes:
        samples: Number of steps sampled for each problem.
        min_p_value: Smallest p-value of the problems' G-tests.
        level: The smallest p-value of a right verifier is below ``level / instances`` with
            probability at most ``level``.
        detectable_shift: Total variation from the target that the test of one problem notices with
            probability 0.9, if it is spread in the way that is hardest to see; the largest of all
            problems.
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
        """Return whether no test rejects the verifier."""
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
        write: Writes texts with the batched implementation.
        samples: Number of texts for each problem.
        level: Probability of rejecting a right verifier.
    """

    write: Writer
    samples: int
    level: float = LEVEL

    @classmethod
    def of(cls, verifier: Rule, write: Writer, samples: int) -> Self:
        """Return a subject with the name and claims of ``verifier``.

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
            write=write,
            samples=samples,
        )

    @torch.inference_mode()
    def audit(
        self, law: Law, sizes: Sizes, on_instance: Callable[[float], None] | None = None
    ) -> SampledResult:
        """Compare each problem's texts with the target's joint law by a G-test.

        ``on_instance`` is called with each problem's p-value.
        """
        self.check(law, sizes.shape)
        start = perf_counter()
        generator = torch.Generator().manual_seed(sizes.seed)
        smallest, blindest, committed = 1.0, 0.0, 0
        for number in range(sizes.instances):
            problems = instance(law, sizes.shape, number, steps=sizes.iterations, seed=sizes.seed)
            written = self.write(problems, self.samples, generator)
            test = g_test(written.cells.numpy(), _joint(problems[0]))
            smallest = min(smallest, test.p_value)
            level = self.level / sizes.instances
            if test.cells > 1:
                shift = detectable_shift(self.samples, test.cells, level=level)
                blindest = max(blindest, shift)
            committed += written.committed
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
            block_efficiency=committed / (sizes.instances * self.samples),
            seconds=perf_counter() - start,
        )


def sampled_subject(verifier: Verifier | StatefulVerifier, samples: int) -> SampledSubject:
    """Return the audit's subject for a batched verifier.

    Raises:
        InvalidArgument: ``samples`` is not positive.
    """
    writer: Writer = (
        RunWriter(verifier) if isinstance(verifier, StatefulVerifier) else StepWriter(verifier)
    )
    return SampledSubject.of(verifier, writer, samples)


def _joint(problem: Problem) -> NDArray[np.float64]:
    """Return the probability of each text of L + 1 tokens, by its number in base ``vocab``."""
    joint = target_joint(problem.target_law, problem.shape.length + 1)
    return np.array([float(mass) for mass in joint.values()])
