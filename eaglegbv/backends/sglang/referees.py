"""Referees that decide about a round's trees: a stateless verifier, or one with debts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.backends.sglang.recall import HeadRecall, RoundStart
from eaglegbv.backends.sglang.requests import RequestBook
from eaglegbv.errors import ModelNotSupported
from eaglegbv.request import Request
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verification import replay_slots, verify_stateful
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.stateful import StatefulVerifier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from eaglegbv.backends.sglang.draft_worker import SampledDraftWorker


class Referee(ABC):
    """Judges the trees of a batch."""

    @abstractmethod
    def judge(
        self,
        requests: Sequence["Req"],
        pool_indices: Tensor,
        tree: DraftTree,
        target: TargetProbs,
        start: RoundStart | None,
        greedy: Sequence[bool],
    ) -> Verdict:
        """Judge the trees, and remember what later rounds need.

        Args:
            requests: SGLang's requests.
            pool_indices: ``[batch]``, indices of their slots in SGLang's pool.
            tree: Their trees.
            target: The target's distributions.
            start: Start of the round's drafting; None for trees with only a root.
            greedy: Whether each request is greedy; the greedy walk then decides, without debts.
        """

    @abstractmethod
    def owing(self, requests: Sequence["Req"]) -> list[int]:
        """Return the rows of the requests that have debts."""


class PlainReferee(Referee):
    """A verifier whose rounds are each lossless."""

    def __init__(self, verifier: Verifier, book: RequestBook) -> None:
        self._verifier = verifier
        self._book = book

    def judge(
        self,
        requests: Sequence["Req"],
        pool_indices: Tensor,
        tree: DraftTree,
        target: TargetProbs,
        start: RoundStart | None,
        greedy: Sequence[bool],
    ) -> Verdict:
        """See :meth:`Referee.judge`."""
        del pool_indices, start, greedy
        own = self._book.of(requests)
        uniforms = VerifyUniforms.draw(
            [request.stream for request in own],
            [request.step for request in own],
            paths=tree.paths,
            length=tree.length,
            device=tree.token_ids.device,
        )
        return self._verifier.verify(tree, target, uniforms)

    def owing(self, requests: Sequence["Req"]) -> list[int]:
        """Return an empty list, as no request has debts."""
        del requests
        return []


class DebtReferee(Referee):
    """A verifier whose rounds leave a modified target for the next."""

    def __init__(
        self, verifier: StatefulVerifier, book: RequestBook, worker: "SampledDraftWorker"
    ) -> None:
        if worker.draft_runner.use_mla_backend:
            raise ModelNotSupported(
                "speculative_draft_model_path",
                worker.server_args.speculative_draft_model_path,
                f"a head without latent attention, for verifier {verifier.name!r}",
            )
        self._verifier = verifier
        self._book = book
        self._worker = worker

    def judge(
        self,
        requests: Sequence["Req"],
        pool_indices: Tensor,
        tree: DraftTree,
        target: TargetProbs,
        start: RoundStart | None,
        greedy: Sequence[bool],
    ) -> Verdict:
        """See :meth:`Referee.judge`."""
        own = self._records(requests)
        recall = HeadRecall(self._worker, own, pool_indices, start)
        # Recalled entries are outside SGLang's pool, so these slots are only counted, never used.
        slots = SlotAllocator(1 + len(own) * replay_slots(own[0].plan))
        result, layers, _ = verify_stateful(self._verifier, own, tree, target, recall, slots)
        for request, left, exempt in zip(own, layers, greedy, strict=True):
            request.target_layers = () if exempt else left
        return result

    def owing(self, requests: Sequence["Req"]) -> list[int]:
        """See :meth:`Referee.owing`."""
        return [row for row, own in enumerate(self._book.of(requests)) if own.target_layers]

    def _records(self, requests: Sequence["Req"]) -> list[Request]:
        own = self._book.of(requests)
        for record, request in zip(own, requests, strict=True):
            record.token_ids = list(request.output_ids)
        return own
