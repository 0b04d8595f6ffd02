"""Verifiers that commit as many tokens as they are told, to see what other drafts would bring.

A step costs what it costs: its drafts are drawn, scored and judged as ever, and then as many of a
path are accepted as the acceptance length says. The text means nothing, which the verifier's name
tells, such as ``otbv~3.3``.
"""

from math import floor

import torch

from eaglegbv.errors import InvalidArgument
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.registry import VERIFIERS, make_verifier, register_verifier, verify_checked


def simulated(verifier: str, acceptance_length: float) -> str:
    """Return the name of a verifier that commits so many tokens a step on average.

    It accepts the integers around that at random, along the deepest path of a tree, and what the
    tree has where it is shorter.

    Raises:
        InvalidArgument: There is no such stateless verifier, or the length is below 1.
    """
    if not acceptance_length >= 1:
        raise InvalidArgument("acceptance_length", acceptance_length, "a number of at least 1")
    name = f"{verifier}~{acceptance_length:g}"
    if name not in VERIFIERS:
        rule = make_verifier(verifier)
        facts = {"name": name, "rule": rule, "wanted": acceptance_length - 1}
        claims = ("draft_samplings", "default_sampling", "any_widths", "max_paths")
        facts |= {claim: getattr(rule, claim) for claim in claims}
        register_verifier(type("Told", (_Simulated,), facts))
    return name


class _Simulated(Verifier):
    rule: Verifier
    wanted: float  # accepted drafts, on average

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        verdict, _ = verify_checked(self.rule, tree, target, uniforms)
        node = tree.depth.argmax(dim=1)
        deepest = tree.depth.gather(1, node.unsqueeze(1)).squeeze(1)
        path = node.unsqueeze(1).expand(-1, tree.length).clone()
        for depth in range(tree.length, 0, -1):
            path[:, depth - 1] = node
            parent = tree.parents.gather(1, node.unsqueeze(1)).squeeze(1)
            node = torch.where(deepest >= depth, parent, node)
        more = uniforms.acceptance[:, 0] < self.wanted % 1
        accepted = (floor(self.wanted) + more.long()).minimum(deepest)
        return Verdict(path, accepted, verdict.token_ids)
