"""Multi-path greedy block verification with the promises of SpecTr-GBV (Lin et al., 2604.25925).

The path is selected as by otbv, for the modified target M in place of p, and verified by the greedy
block rule with the selections' distributions b: the reference is the function ``greedy_block``. The
acceptance rule of the authors' implementation does not preserve the target with two or more paths.
This one does, over any number of steps, and keeps what the paper claims: one path is greedy block
verification, and with one level a step accepts at least
sum p(x) [1 - (1 - min(1, q(x)/p(x)))^K].
"""

from eaglegbv.verifiers.greedy_block import GreedyBlockVerifier


class SpecTrGbvVerifier(GreedyBlockVerifier):
    """:class:`GreedyBlockVerifier` of any number of paths."""

    name = "spectr_gbv"
    max_paths = None
