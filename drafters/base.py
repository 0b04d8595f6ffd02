"""What every drafter is: it watches what the target commits, and proposes draft trees."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_law import DraftLaws
from eaglegbv.quantization import Quantization
from eaglegbv.request import DraftSnapshot, DraftState, Request
from eaglegbv.tree import DraftTree, Law

StateKind = TypeVar("StateKind", bound=DraftState)
SnapshotKind = TypeVar("SnapshotKind", bound=DraftSnapshot)


def own_state(request: Request, kind: type[StateKind], begin: Callable[[], StateKind]) -> StateKind:
    """Return a drafter's memory of a request, begun where there is none."""
    state = request.draft_states.get(kind)
    if not isinstance(state, kind):
        request.draft_states[kind] = state = begin()
    return state


def own_snapshots(
    snapshots: Sequence[DraftSnapshot], kind: type[SnapshotKind]
) -> list[SnapshotKind]:
    """Return ``snapshots`` as a drafter's own kind.

    Raises:
        TypeError: One belongs to another drafter.
    """
    own = [snapshot for snapshot in snapshots if isinstance(snapshot, kind)]
    if len(own) < len(snapshots):
        raise TypeError("a snapshot belongs to another drafter")
    return own


class Drafter(ABC):
    """Proposes a draft tree for each request.

    The life of a request, seen from here: ``observe`` after parts of its prompt and after every
    commit, ``draft`` once per decoding step, ``forget`` at its end. Between the commit and the next
    draft the accepted tokens are run again on the target's true features.

    A request may be pre-empted: it is forgotten, and observed from its text's start again, in other
    slots. And texts that begin alike may share slots: when a drafter first meets a request, the
    rows of its first ``request.shared`` positions are in its pool already, unless they are
    ``request.skipped``. So nothing but ``request.slots`` says where rows are, and it may change
    between steps.
    """

    laws: ClassVar[frozenset[Law]]
    skips: ClassVar[bool] = False
    """Whether it may begin behind positions that it has not run; see :meth:`skip`."""

    @property
    def quantization(self) -> Quantization:
        """How its weights are held; not ``auto``."""
        return Quantization.NONE

    @property
    def graph_counts(self) -> Mapping[str, int]:
        """Drafts by whether a recording was replayed, or why not; empty where none is made."""
        return {}

    @abstractmethod
    def observe(self, request: Request, features: Tensor) -> None:
        """Take the target's features ``[tokens, feature_size]`` of newly committed positions.

        They belong to the last ``tokens`` positions of ``request.slots``. Not called where the
        target has no features, for a drafter that reads tokens alone.
        """

    @abstractmethod
    def catch_up(self, requests: Sequence[Request]) -> None:
        """Run what was observed and not yet run; ``draft`` does it too."""

    @abstractmethod
    def draft(
        self, requests: Sequence[Request], plan: Plan, law: Law, tree_slots: Sequence[Tensor]
    ) -> DraftTree:
        """Propose one tree per request.

        The tokens are drawn from exactly the laws the tree carries, with the numbers of each
        request's own stream at its own step.

        Args:
            requests: Requests with at least one committed token each.
            plan: Paths, depth, width and draft temperature, shared by all of them.
            law: How children arise; one of :attr:`laws`.
            tree_slots: For each request ``[plan.tree_slots - 1]`` KV slots to write to freely.
        """

    @abstractmethod
    def forget(self, request: Request) -> None:
        """Drop what is remembered about a request that ended or is pre-empted."""

    def shareable(self, request: Request) -> int:  # noqa: ARG002
        """Return for how many leading positions the rows in the drafter's pool are final.

        Texts that begin alike, the next token included, may share their slots. 0 is always right.
        """
        return 0

    def behind(self, request: Request) -> int:
        """Return how many committed positions :meth:`catch_up` would run.

        Automatic plans weigh what that costs.
        """
        return request.context - self.shareable(request)

    def skip(self, request: Request, *, keep: int) -> None:  # noqa: B027
        """Forget what has not been run yet but the last ``keep`` positions, 1 or more.

        These it keeps by themselves, and nothing of other requests that came with them.
        Where more was missed, a drafter that :attr:`skips` begins anew there, as if the text did,
        and sets ``request.skipped``: what it drafts then may be worse, is as lawful, and is read
        sooner. Not for verifiers that recall laws.
        """


class Recaller(ABC):
    """Says what an earlier step would have drawn after other tokens.

    Rules that keep state over steps need the laws of the *very step* that a debt comes from. They
    are not the current ones: by now the drafter knows true features where that step went on from
    its own, and its draft temperature may be another.
    """

    @abstractmethod
    def snapshot(self, request: Request) -> DraftSnapshot:
        """Remember the tree last drafted for ``request``, standing at its root.

        To be called before the next ``catch_up``. It holds no KV slots, and stays valid when the
        request is forgotten and its text read again.
        """

    @abstractmethod
    def advance(
        self,
        requests: Sequence[Request],
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,
    ) -> list[DraftSnapshot]:
        """Return each snapshot moved on to the place after one more token.

        Args:
            requests: The request of each snapshot; one may stand there several times.
            snapshots: From :meth:`snapshot`, or from this method.
            tokens: ``[snapshots]`` int64, what to go on by, drafted or not.
            slots: ``[snapshots]`` int64, a KV slot for each, to stay the drafter's while the
                snapshots returned are in use.
        """

    @abstractmethod
    def laws_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftLaws:
        """Return the laws the snapshots' own steps would have drawn the next token from.

        Laws of a smaller support than others are padded with probability 0.
        """


class RecallingDrafter(Drafter, Recaller):
    """A drafter that can say what its earlier steps would have drawn."""
