"""Servers of this package with planted faults: what an audit must find.

Each is token verification of one path with one thing wrong, as engines have had it. Some faults
show under a setting alone, which the audit must then ask for.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor

from eaglegbv import verification
from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.rng import RequestRng
from eaglegbv.scheduler.batch import Group
from eaglegbv.tree import DraftTree, TargetProbs, WarpedLogits
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.paths import DraftedPath, correction_token
from eaglegbv.verifiers.registry import ALL_VERIFIERS, VERIFIERS

PRUNED_BELOW = 0.2
LIKELY = 0.5


@dataclass(frozen=True, slots=True)
class TwoTargets(WarpedLogits):
    """What tokens are drawn from, and another law that a fault takes in its place."""

    other: WarpedLogits


class Planted(Verifier):
    """Token verification of one path, right but for its fault."""

    name = "planted"
    draft_samplings = frozenset({DraftSampling.IID})
    max_paths = 1
    fault = "none"

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """See :meth:`Verifier.judge`."""
        other = target.other if isinstance(target, TwoTargets) else target
        path = DraftedPath.drawn(tree, target if self.fault == "raw-bonus" else other)
        if self.fault == "other-temperature":
            sharper = path.draft**2
            path = replace(path, draft=sharper / sharper.sum(dim=2, keepdim=True).clamp(min=1e-300))
        if self.fault == "pruned-drafts":
            likely = entry_at(path.draft, path.chosen) >= PRUNED_BELOW
            path = replace(path, lengths=torch.minimum(_leading(likely), path.lengths))
        ratios = path.ratios()
        if self.fault == "half-threshold":
            ratios = 2 * ratios
        if self.fault == "likely-accepted":
            ratios[entry_at(path.target, path.chosen) >= LIKELY] = 1.0
        passed = uniforms.acceptance[:, : tree.length] < ratios
        accepted = torch.minimum(_leading(passed), path.lengths)
        bonus, number = accepted == path.lengths, uniforms.correction
        if self.fault == "number-reused":
            at = accepted.clamp(max=tree.length - 1)
            number = torch.where(bonus, number, entry_at(uniforms.acceptance, at))
        if self.fault == "no-residual":
            path = replace(path, draft=torch.zeros_like(path.draft))
        residual = path.residual(accepted, torch.ones_like(number))
        last = correction_token(residual, target, number)
        if self.fault == "raw-bonus":
            last = torch.where(bonus, correction_token(residual, other, number), last)
        return Verdict(path.nodes[:, 1:], accepted, last)


def _leading(passed: Tensor) -> Tensor:
    """Return how many entries of each row come before the first false one, ``[batch]`` int64."""
    return passed.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _alike(rngs: Sequence[RequestRng], steps: Sequence[int], **how: Any) -> VerifyUniforms:  # noqa: ANN401
    """Draw for every second step the numbers of the step before."""
    return _DRAW(rngs, [step - step % 2 for step in steps], **how)


def _wrong_row(group: Group, logits: Tensor, target: WarpedLogits, verdict: Verdict) -> Any:  # noqa: ANN401
    """Report for a round's last token the law of the token before."""
    nodes = torch.nn.functional.pad(verdict.path_nodes, (1, 0))
    last = entry_at(nodes, verdict.accepted)
    earlier = entry_at(nodes, (verdict.accepted - 1).clamp(min=0))
    reported = entry_at(target.rows, earlier)
    rows = target.rows.scatter(1, last[:, None], reported[:, None])
    return _RANK(group, logits, replace(target, rows=rows), verdict)


_DRAW = VerifyUniforms.draw
_RANK = verification._rank_committed
_PROBS = verification.probs_of_nodes


def _two_targets(**ignored: float) -> dict[str, Any]:
    """Have a law without some settings."""

    def probs(group: Group, logits: Tensor) -> WarpedLogits:
        others = [copy.copy(request) for request in group.requests]
        for request in others:
            request.params = msgspec.structs.replace(request.params, **ignored)
        other = _PROBS(replace(group, requests=others), logits)
        both = _PROBS(group, logits)
        return TwoTargets(both.logits, both.log_normaliser, both.rows, other)

    return {"eaglegbv.verification.probs_of_nodes": probs}


def _greedy(growing: Any) -> Iterator[tuple[int, float]]:  # noqa: ANN401
    """Take the most likely drafts, which are then judged as if they were drawn."""
    rows, drafts = growing._levels[-1]
    at = [rows[request, node] for request, node, *_ in growing._going]
    probs, places = drafts.probs[at].max(dim=1)
    return zip(drafts.ids[at, places].tolist(), probs.tolist(), strict=True)


GREEDY = {"eaglegbv.drafters.host_drafting._IndependentPaths._drawn": _greedy}
TWO_STEPS = {"eaglegbv.verification.VerifyUniforms.draw": _alike}
WRONG_ROW = {"eaglegbv.verification._rank_committed": _wrong_row}
FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature-ignored": _two_targets(temperature=1.0),  # on drafts
    "greedy-drafts": GREEDY,
    "other-temperature": {},
    "half-threshold": {},
    "likely-accepted": {},
    "no-residual": {},
    "number-reused": {},
    "steps-alike": TWO_STEPS,
    "raw-bonus": _two_targets(temperature=1.0),
    "pruned-drafts": {},
    "penalty-ignored": _two_targets(presence_penalty=0.0),
    "late-top-p": _two_targets(top_p=1.0),
    "wrong-row": WRONG_ROW,
}
"""The faults by name, and what they take the place of in verification beside its rule."""


@contextmanager
def planted(name: str) -> Iterator[str]:
    """Plant a fault within this context; yields the name of the verifier that has it.

    Raises:
        InvalidArgument: No fault has that name.
    """
    if name not in FAULTS:
        raise InvalidArgument("fault", name, one_of(FAULTS, name))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Planted, "fault", name))
        for table in (VERIFIERS, ALL_VERIFIERS):
            stack.enter_context(mock.patch.dict(table, {Planted.name: Planted}))
        for place, value in FAULTS[name].items():
            stack.enter_context(mock.patch(place, value))
        yield Planted.name
