"""The drafters of an engine: its own, if it has one, and lookups in the sequence itself."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from eaglegbv.attention import offsets_of
from eaglegbv.config import AutoPlan, DraftSampling, Plan, Planning, Source, plan_name
from eaglegbv.devices import upload
from eaglegbv.drafters import DraftCall, Drafter, NgramDrafter
from eaglegbv.errors import InvalidArgument
from eaglegbv.request import Request, RequestOutput
from eaglegbv.scheduler import Group
from eaglegbv.tree import DraftTree

_KEPT = 64
_MOST_KEPT = 128
"""A drafter more than ``_MOST_KEPT`` positions behind keeps the last ``_KEPT`` and skips the rest.

Otherwise the features of all that large batches decode plainly would fill memory, and a request
that drafts again would first have to read them. The tiny pair's head drafts no worse if it begins
64 positions back.
"""


class Drafters:
    """The drafters of an engine, which passes on here all that they must see."""

    def __init__(self, drafter: Drafter | None) -> None:
        """``drafter`` may be None; lookups have a drafter of their own."""
        self.drafter = drafter
        # Whether it may begin after positions that it has not run.
        self.skips = drafter is not None and drafter.skips
        self.at_once = drafter is not None and drafter.at_once
        # Number of drafts that replayed a recording, or by why not.
        self.graph_counts: Mapping[str, int] = {} if drafter is None else drafter.graph_counts
        self._lookup = drafter if isinstance(drafter, NgramDrafter) else NgramDrafter()

    def by(self, plan: Plan) -> Drafter:
        """Return the drafter of a plan that was checked; RuntimeError where there is none."""
        drafter = self._lookup if plan.source is Source.LOOKUP else self.drafter
        if drafter is None:
            raise RuntimeError(f"no drafter for {plan_name(plan)}")
        return drafter

    def max_context(self, plan: Plan, target: int) -> int:
        """Return the most positions of a sequence for which ``plan`` drafts; ``target`` at most."""
        longest = self.by(plan).max_context
        return target if longest is None else min(target, longest)

    def check_depth(self, plan: Plan) -> None:
        """Raise InvalidArgument where the plan's drafter cannot draft so deep a tree."""
        most = self.by(plan).max_depth
        if most is not None and plan.depth > most:
            raise InvalidArgument("depth", plan.depth, f"at most {most}, the drafter's levels")

    def within(self, planning: Planning) -> Planning:
        """Return ``planning``, the engine's own choices no deeper than its drafter drafts."""
        most = None if self.drafter is None else self.drafter.max_depth
        if most is None or not isinstance(planning, AutoPlan) or planning.max_depth <= most:
            return planning
        return msgspec.structs.replace(planning, max_depth=most)

    def draft(
        self, requests: Sequence[Request], draft_sampling: DraftSampling, slots: Sequence[Tensor]
    ) -> DraftTree:
        """Propose trees for requests of one plan; each has ``[plan.tree_slots]`` slots."""
        plan = requests[0].plan
        return self.by(plan).draft(DraftCall(requests, plan, draft_sampling, slots))

    def observe_prefill(self, requests: Sequence[Request], features: Sequence[Tensor]) -> None:
        """Pass on the features ``[tokens, feature_size]`` of parts of prompts."""
        if self.drafter is None:
            return
        for request, features_of_request in zip(requests, features, strict=True):
            if request.drafted:
                self.drafter.observe(request, features_of_request)

    def observe_commit(
        self, outputs: Sequence[RequestOutput], group: Group, features: Tensor | None
    ) -> None:
        """Pass on the features of what was committed of a group, all gathered at once.

        ``features`` ``[rows, feature_size]`` are those of the whole forward, or None.
        """
        if self.drafter is None or features is None:
            return
        shown = [
            b for b, output in enumerate(outputs) if output.request.drafted and not output.fault
        ]
        if not shown:
            return
        if len(features) == len(shown):  # one row for each request, as when none drafted
            parts = features.clone().split(1)
        else:
            firsts = offsets_of(segment.num_new for segment in group.segments)
            rows: list[int] = []
            counts: list[int] = []
            for b in shown:
                committed = group.committed(b, outputs[b].nodes)
                rows += [group.first_token + firsts[b] + row for row in committed]
                counts.append(len(committed))
            places = upload(rows, dtype=torch.int64, device=features.device)
            parts = features.index_select(0, places).split(counts)
        for b, part in zip(shown, parts, strict=True):
            self.drafter.observe(outputs[b].request, part)

    def end_prefill(
        self, requests: Sequence[Request], *, can_wait: Callable[[Request], bool]
    ) -> tuple[int, float]:
        """Run the drafters over what was prefilled of requests, but for those who ``can_wait``.

        Returns how many positions the drafter had missed, and the seconds that it took to read
        them. Features that it has not run are copied, so that those of the forward can be freed.
        """
        self._lookup.catch_up([request for request in requests if request.looks_up])
        start = time.perf_counter()
        missed = self._catch_up(
            [request for request in requests if request.drafted and not can_wait(request)]
        )
        seconds = time.perf_counter() - start
        self.skip(requests)
        for request in requests:
            if self.drafter is not None and request.skips:
                self.drafter.skip(request, keep=_MOST_KEPT)
        return missed, seconds

    def matched(self, request: Request) -> int:
        """Return how many of the last tokens occurred before; see :class:`NgramDrafter`."""
        return self._lookup.matched(request)

    def _catch_up(self, requests: Sequence[Request]) -> int:
        """Run the drafter over the positions it has not run yet, and return their number."""
        if self.drafter is None:
            return 0
        most = self.drafter.max_context
        readable = [r for r in requests if most is None or r.length <= most]
        missed = sum(map(self.behind, readable))
        self.drafter.catch_up(readable)
        return missed

    def behind(self, request: Request) -> int:
        """Return the number of committed positions that the drafter has not run yet."""
        return 0 if self.drafter is None else self.drafter.behind(request)

    def skip(self, requests: Iterable[Request]) -> None:
        """Let the drafter forget most of what it missed of requests that may never draft again."""
        for request in requests:
            if self.drafter is not None and request.skips and self.behind(request) > _MOST_KEPT:
                self.drafter.skip(request, keep=_KEPT)

    def shareable(self, request: Request) -> int | None:
        """Return how many leading positions are final in the drafter; None if it has none."""
        if self.drafter is None or not request.drafted:
            return None
        return self.drafter.shareable(request)

    def forget(self, request: Request) -> None:
        """Drop what is remembered about a request that ended or was pre-empted."""
        self._lookup.forget(request)
        if self.drafter is not None:
            self.drafter.forget(request)
