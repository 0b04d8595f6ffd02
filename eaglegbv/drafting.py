"""The drafters of an engine: its own, if it has one, and lookups in the text itself."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from eaglegbv.config import Plan, Source
from eaglegbv.devices import upload
from eaglegbv.drafters.base import Drafter, ReplayingDrafter
from eaglegbv.drafters.ngram import NgramDrafter
from eaglegbv.errors import InvalidArgument
from eaglegbv.fused_linears import Quantization
from eaglegbv.outcomes import Outcome
from eaglegbv.request import Request
from eaglegbv.scheduler.batch import Layout
from eaglegbv.tree import DraftSampling, DraftTree

_KEPT, _MOST_KEPT = 64, 128
"""A drafter more than ``_MOST_KEPT`` positions behind keeps the last ``_KEPT`` and skips the rest.

Otherwise the features of all that large batches decode plainly would fill memory, and a request
that drafts again would first have to read them. The tiny pair's head drafts no worse if it begins
64 positions back.
"""


class Drafting:
    """The drafters of an engine, which receives here all that they must see.

    Attributes:
        drafter: The engine's own drafter; None if it has none, so that drafts are only looked up.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        """Take the engine's drafter; another one does all lookups."""
        self.drafter = drafter
        self._lookup = drafter if isinstance(drafter, NgramDrafter) else NgramDrafter()

    @property
    def skips(self) -> bool:
        """Whether the engine's drafter may begin after positions that it has not run."""
        return self.drafter is not None and self.drafter.skips

    @property
    def graph_counts(self) -> Mapping[str, int]:
        """Number of drafts that replayed a recording, or by why not."""
        return {} if self.drafter is None else self.drafter.graph_counts

    def by(self, plan: Plan) -> Drafter:
        """Return the drafter of a plan.

        Raises:
            InvalidArgument: The plan has no drafter.
        """
        if plan.source is Source.LOOKUP:
            return self._lookup
        if self.drafter is None:
            raise InvalidArgument("drafter", None, f"a drafter, for verifier {plan.verifier!r}")
        return self.drafter

    def recalling(self, plan: Plan) -> ReplayingDrafter:
        """Return the drafter of a plan that needs the distributions of earlier steps.

        Raises:
            InvalidArgument: The plan has no drafter, or it cannot recall its distributions to the last bit.
        """
        drafter = self.by(plan)
        if not isinstance(drafter, ReplayingDrafter):
            raise InvalidArgument(
                "drafter",
                type(drafter).__name__,
                f"one that recalls the draft distributions of earlier steps, for verifier {plan.verifier!r}",
            )
        if drafter.quantization is not Quantization.NONE:
            # A distribution recomputed in another batch would differ from the one that was sampled from.
            expected = (
                f"none, verifier {plan.verifier!r} going by draft distributions of earlier steps"
            )
            raise InvalidArgument("draft_quantization", str(drafter.quantization), expected)
        return drafter

    def draft(
        self, requests: Sequence[Request], draft_sampling: DraftSampling, slots: Sequence[Tensor]
    ) -> DraftTree:
        """Propose a tree for each request.

        Args:
            requests: Requests with the same plan, which speculates.
            draft_sampling: How children arise.
            slots: For each request ``[plan.tree_slots]``, its KV slots of this step.
        """
        plan = requests[0].plan
        return self.by(plan).draft(requests, plan, draft_sampling, [own[:-1] for own in slots])

    def show_read(self, requests: Sequence[Request], features: Sequence[Tensor]) -> None:
        """Pass on the features ``[tokens, feature_size]`` of parts of texts that were read."""
        if self.drafter is None:
            return
        for request, own in zip(requests, features, strict=True):
            if request.drafted:
                self.drafter.observe(request, own)

    def show_committed(
        self,
        requests: Sequence[Request],
        layout: Layout,
        outcomes: Sequence[Outcome],
        features: Tensor | None,
    ) -> None:
        """Pass on the features of what was committed, all gathered at once.

        Args:
            requests: Requests of a group.
            layout: Layout of the group in the forward.
            outcomes: What was decided for each request.
            features: ``[rows, feature_size]`` of the whole forward; None if there are none.
        """
        if self.drafter is None or features is None:
            return
        shown = [
            b for b, outcome in enumerate(outcomes) if requests[b].drafted and not outcome.fault
        ]
        if not shown:
            return
        if len(features) == len(shown):  # one row for each request, as when none drafted
            parts = features.clone().split(1)
        else:
            rows = [layout.committed_rows(b, outcomes[b].nodes) for b in shown]
            places = upload(list(chain(*rows)), dtype=torch.int64, device=features.device)
            parts = features.index_select(0, places).split([len(own) for own in rows])
        for b, part in zip(shown, parts, strict=True):
            self.drafter.observe(requests[b], part)

    def index(self, requests: Iterable[Request]) -> None:
        """Index what was read of texts in which drafts may be looked up."""
        self._lookup.catch_up([request for request in requests if request.looks_up])

    def matched(self, request: Request) -> int:
        """Return how many tokens at a text's end occurred before; see :class:`NgramDrafter`."""
        return self._lookup.matched(request)

    def catch_up(self, requests: Sequence[Request]) -> int:
        """Run the drafter over the positions it has not run yet, and return their number."""
        if self.drafter is None:
            return 0
        missed = sum(map(self.behind, requests))
        self.drafter.catch_up(requests)
        return missed

    def behind(self, request: Request) -> int:
        """Return the number of committed positions that the drafter has not run yet."""
        return 0 if self.drafter is None else self.drafter.behind(request)

    def skip(self, requests: Iterable[Request]) -> None:
        """Let the drafter forget most of what it missed of texts that it may never draft again."""
        for request in requests:
            if request.skips and self.behind(request) > _MOST_KEPT:
                self._skip(request, keep=_KEPT)

    def set_aside(self, requests: Iterable[Request]) -> None:
        """Copy features that are not yet run, so that those of the forward can be freed."""
        for request in requests:
            if request.skips:
                self._skip(request, keep=_MOST_KEPT)

    def final(self, request: Request) -> int | None:
        """Return the number of leading positions whose rows in the drafter are final.

        The result is None if the drafter does not follow the text and so has no such rows.
        """
        if self.drafter is None or not request.drafted:
            return None
        return self.drafter.shareable(request)

    def forget(self, request: Request) -> None:
        """Drop what is remembered about a request that ended or was pre-empted."""
        self._lookup.forget(request)
        if self.drafter is not None:
            self.drafter.forget(request)

    def _skip(self, request: Request, *, keep: int) -> None:
        if self.drafter is not None:
            self.drafter.skip(request, keep=keep)
