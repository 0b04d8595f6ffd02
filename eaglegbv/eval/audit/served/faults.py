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
    """What last tokens are drawn from, and another law by which drafts are judged."""

    of_drafts: WarpedLogits


class Planted(Verifier):
    """Token verification, right as it stands; each fault changes one of its parts."""

    name = "planted"
    draft_samplings = frozenset({DraftSampling.IID})
    max_paths = 1

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """See :meth:`Verifier.judge`."""
        judged = target.of_drafts if isinstance(target, TwoTargets) else target
        path = self.path(DraftedPath.drawn(tree, judged))
        passed = uniforms.acceptance[:, : tree.length] < self.ratios(path)
        accepted = passed.to(torch.int64).cumprod(dim=1).sum(dim=1)
        accepted = torch.minimum(accepted, path.lengths)
        token_ids = self.last(path, accepted, target, uniforms)
        return Verdict(path.nodes[:, 1:], accepted, token_ids)

    def path(self, path: DraftedPath) -> DraftedPath:
        """Return the path as it is judged."""
        return path

    def ratios(self, path: DraftedPath) -> Tensor:
        """Return the chances of acceptance, ``[batch, length]``."""
        return path.ratios()

    def last(
        self, path: DraftedPath, accepted: Tensor, target: TargetProbs, uniforms: VerifyUniforms
    ) -> Tensor:
        """Draw the correction or bonus token, ``[batch]``."""
        residual = path.residual(accepted, torch.ones_like(uniforms.correction))
        return correction_token(residual, target, uniforms.correction)


class RawBonus(Planted):
    """The bonus token is drawn at temperature 1."""

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """See :meth:`Verifier.judge`."""
        assert isinstance(target, TwoTargets)
        raw = target.of_drafts
        verdict = super().judge(tree, replace(target, of_drafts=target), uniforms)
        path = DraftedPath.drawn(tree, raw)
        other = self.last(path, path.lengths, raw, uniforms)
        bonus = verdict.accepted == path.lengths
        return replace(verdict, token_ids=torch.where(bonus, other, verdict.token_ids))


class OtherTemperature(Planted):
    """Drafts are judged by q at half the temperature that they were drawn at."""

    def path(self, path: DraftedPath) -> DraftedPath:
        """See :meth:`Planted.path`."""
        sharper = path.draft**2
        return replace(path, draft=sharper / sharper.sum(dim=2, keepdim=True).clamp(min=1e-300))


class HalfThreshold(Planted):
    """A draft is accepted with the chance p / (0.5 q)."""

    def ratios(self, path: DraftedPath) -> Tensor:
        """See :meth:`Planted.ratios`."""
        return 2 * path.ratios()


class LikelyAccepted(Planted):
    """A draft of probability 0.5 or more is always accepted."""

    def ratios(self, path: DraftedPath) -> Tensor:
        """See :meth:`Planted.ratios`."""
        likely = entry_at(path.target, path.chosen) >= LIKELY
        return torch.where(likely, 1.0, path.ratios())


class NoResidual(Planted):
    """The correction is drawn from p."""

    def last(self, path: DraftedPath, *rest: Any) -> Tensor:  # noqa: ANN401
        """See :meth:`Planted.last`."""
        return super().last(replace(path, draft=torch.zeros_like(path.draft)), *rest)


class NumberReused(Planted):
    """The number that rejected a draft draws its correction too."""

    def last(
        self, path: DraftedPath, accepted: Tensor, target: TargetProbs, uniforms: VerifyUniforms
    ) -> Tensor:
        """See :meth:`Planted.last`."""
        at = accepted.clamp(max=uniforms.acceptance.shape[1] - 1)
        rejected = accepted < path.lengths
        reused = torch.where(rejected, entry_at(uniforms.acceptance, at), uniforms.correction)
        return Planted.last(self, path, accepted, target, replace(uniforms, correction=reused))


class PrunedDrafts(Planted):
    """A draft of small q, and the path behind it, is dropped after it was drawn."""

    def path(self, path: DraftedPath) -> DraftedPath:
        """See :meth:`Planted.path`."""
        likely = (entry_at(path.draft, path.chosen) >= PRUNED_BELOW).to(torch.int64)
        kept = likely.cumprod(dim=1).sum(dim=1)
        return replace(path, lengths=torch.minimum(kept, path.lengths))


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
    """Judge drafts without some settings."""

    def probs(group: Group, logits: Tensor) -> WarpedLogits:
        others = [copy.copy(request) for request in group.requests]
        for request in others:
            request.params = msgspec.structs.replace(request.params, **ignored)
        of_drafts = _PROBS(replace(group, requests=others), logits)
        both = _PROBS(group, logits)
        return TwoTargets(both.logits, both.log_normaliser, both.rows, of_drafts)

    return {"eaglegbv.verification.probs_of_nodes": probs}


def _greedy(growing: Any) -> Iterator[tuple[int, float]]:  # noqa: ANN401
    """Take the most likely drafts, which are then judged as if they were drawn."""
    rows, drafts = growing._levels[-1]
    at = [rows[request, node] for request, node, *_ in growing._going]
    probs, places = drafts.probs[at].max(dim=1)
    return zip(drafts.ids[at, places].tolist(), probs.tolist(), strict=True)


GREEDY = {"eaglegbv.drafters.host_drafting._IndependentPaths._drawn": _greedy}
FAULTS: dict[str, tuple[type[Planted], dict[str, Any]]] = {
    "none": (Planted, {}),
    "temperature-ignored": (Planted, _two_targets(temperature=1.0)),
    "greedy-drafts": (Planted, GREEDY),
    "other-temperature": (OtherTemperature, {}),
    "half-threshold": (HalfThreshold, {}),
    "likely-accepted": (LikelyAccepted, {}),
    "no-residual": (NoResidual, {}),
    "number-reused": (NumberReused, {}),
    "steps-alike": (Planted, {"eaglegbv.verification.VerifyUniforms.draw": _alike}),
    "raw-bonus": (RawBonus, _two_targets(temperature=1.0)),
    "pruned-drafts": (PrunedDrafts, {}),
    "penalty-ignored": (Planted, _two_targets(presence_penalty=0.0)),
    "late-top-p": (Planted, _two_targets(top_p=1.0)),
    "wrong-row": (Planted, {"eaglegbv.verification._rank_committed": _wrong_row}),
}
"""The faults by name: the rule, and what it takes the place of in verification."""


@contextmanager
def planted(name: str) -> Iterator[str]:
    """Plant a fault within this context; yields the name of the verifier that has it.

    Raises:
        InvalidArgument: No fault has that name.
    """
    if name not in FAULTS:
        raise InvalidArgument("fault", name, one_of(FAULTS, name))
    rule, changes = FAULTS[name]
    with ExitStack() as stack:
        for table in (VERIFIERS, ALL_VERIFIERS):
            stack.enter_context(mock.patch.dict(table, {Planted.name: rule}))
        for place, value in changes.items():
            stack.enter_context(mock.patch(place, value))
        yield Planted.name
