"""Settings that a user makes once: how to speculate, and how large the engine is."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Literal, TypeAlias

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import (
    DRAFT_WIDTH,
    make_member,
    make_numbers_plain,
    require_integer,
    require_integers,
    require_number,
    require_truth,
)


class DraftSampling(StrEnum):
    """How the children of a node arise. Losslessness belongs to a verifier and one of these."""

    IID = "iid"  # K paths drawn independently from the draft probabilities, with replacement
    WOR = "wor"  # the children of a node are drawn from the draft probabilities without replacement
    GREEDY = "greedy"  # the n - 1 most likely tokens, and one drawn from the rest
    HUB = "hub"  # SpecHub's pair of drafts
    FIXED = "fixed"  # any function of what the drafter knows before sampling

    @property
    def min_paths(self) -> int:
        """Fewest paths for which a drafter needs room."""
        return 2 if self is DraftSampling.HUB else 1


class GraphMode(StrEnum):
    """Whether forwards of draft trees, and the drafting itself, are recorded and replayed."""

    AUTO = "auto"  # on a CUDA device whose attention can be recorded (FlashInfer's), only there
    ON = "on"  # like `auto`, but an error where it is impossible
    OFF = "off"
    EAGER = "eager"  # the same padded work without recording, on any device, for debugging


MAX_PATHS = 16
MAX_LEAVES = 64  # of a sampled tree of given widths
MAX_DEPTH = 32
MAX_WIDTH = 1 << 18
MAX_BEAM = 64
MAX_NODES = 512
Shape: TypeAlias = tuple[tuple[int, ...], ...]
"""A static tree: each entry is a node, as the ranks of the children on its path from the root."""

# fmt: off
EAGLE1_SHAPE: Shape = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)
# fmt: on
"""EAGLE-1's tree of 25 nodes and depth 5 (arXiv 2401.15077, its public code's ``mc_sim_7b_63``)."""


class Source(StrEnum):
    """The source of a plan's drafts."""

    DRAFTER = "drafter"  # the engine's drafter
    LOOKUP = "lookup"
    """The text itself: what followed earlier occurrences of its last few tokens (prompt lookup).
    Such drafts are not drawn; their distribution is ``fixed``."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How one request speculates. Every plan gives the text the same distribution; speed differs.

    Attributes:
        verifier: Name of a verifier (see ``eaglegbv.verifiers.registry``), or ``"none"`` for plain
            autoregressive decoding.
        paths: Number of drafted paths, K.
        depth: Number of drafted tokens of a path, L.
        draft_sampling: How the tree's children arise; ``None`` takes the verifier's own (``iid`` if
            it accepts sampled paths, otherwise the one it is made for). A tree has at most
            ``paths * depth`` drafted nodes:
            ``iid``: K paths drawn independently, starting at the root.
            ``wor``: K paths whose first tokens are drawn without replacement, with one path below
            each.
            ``greedy``: K paths whose first tokens are the K - 1 most likely ones and one drawn from
            the rest; below each, one path of drawn tokens.
            ``hub``: pairs of drafts below the ``K // 2`` most likely nodes of each level; K is at
            least 2.
            ``fixed``: the ``nodes`` most likely nodes that a beam finds, or a tree of given shape.
        widths: Drafts of the nodes of each depth, from the root on, instead of ``paths`` and
            ``depth``: a node of depth d has (the number of drafts equal to it) x ``widths[d]``. So
            (K, 1, ..., 1) are K paths, and there are at most as many leaves as the product says.
            Equal drafts of a node can only occur with ``iid``. ``paths`` and ``depth`` are then the
            number of leaves and of levels.
        draft_width: Number of most likely candidates whose draft probabilities are kept, and
            renormalised.
        whole_vocab: Draft vocabularies of at most this many tokens are kept whole instead: nothing
            is ranked, and more is accepted.
        draft_temperature: Draft temperature as a multiple of the request's own. Any value is
            lossless.
        min_confidence: A path ends where the product of the draft probabilities of its own tokens
            falls below this; 0 never ends one early. This is lossless, because it depends only on
            what the path has emitted. Not for verifiers that keep state over steps.
        beam: For a ``fixed`` tree, nodes of a level that get children, and children of each
            (EAGLE-2's top-k); ``None`` takes ``paths``.
        nodes: For a ``fixed`` tree, number of nodes without the root (EAGLE-2's total tokens minus
            1); ``None`` takes ``paths * depth``, or all nodes of a shape.
        shape: A static ``fixed`` tree instead, such as :data:`EAGLE1_SHAPE`: child (r1, r2) is the
            r2-th most likely child, counted from 0, of the root's r1-th. Empty for a dynamic tree.
        source: Source of the drafts: the drafter, or ``lookup``.

    At temperature 0 all sampled paths coincide. So a ``fixed`` tree (of ``paths * depth`` nodes, or
    as many as the ``widths`` make, unless ``nodes`` or ``shape`` says otherwise) is drafted and
    judged by the greedy walk, whatever the named verifier.

    Raises:
        InvalidArgument: A value is out of range; the message says which and what is accepted.
    """

    verifier: str = "otbv"
    paths: int = 3
    depth: int = 4
    draft_sampling: DraftSampling | None = None
    widths: tuple[int, ...] = ()
    draft_width: int = DRAFT_WIDTH
    whole_vocab: int = 0
    draft_temperature: float = 1.0
    min_confidence: float = 0.0
    beam: int | None = None
    nodes: int | None = None
    shape: Shape = ()
    source: Source = Source.DRAFTER

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        self._take_widths()
        require_integers(
            self,
            optional=("beam", "nodes"),
            paths=(1, MAX_LEAVES if self.widths else MAX_PATHS),
            depth=(1, MAX_DEPTH),
            draft_width=(1, MAX_WIDTH),
            whole_vocab=(0, MAX_WIDTH),
            beam=(1, MAX_BEAM),
            nodes=(1, MAX_NODES),
        )
        if not isinstance(self.verifier, str):
            raise InvalidArgument("verifier", self.verifier, "the name of a verifier, or 'none'")
        if self.draft_sampling is not None:
            make_member(self, "draft_sampling", DraftSampling)
        require_number("draft_temperature", self.draft_temperature, 0.05, 20)
        require_number("min_confidence", self.min_confidence, 0, 1)
        msgspec.structs.force_setattr(self, "shape", _shape(self.shape, self.depth, self.nodes))
        make_member(self, "source", Source)
        if self.widths:
            self._check_widths()

    def _take_widths(self) -> None:
        """Set paths and depth by the widths; those of K paths are written as such."""
        widths = self.widths
        if not isinstance(widths, Sequence) or isinstance(widths, str):
            raise InvalidArgument("widths", widths, "a sequence of numbers, such as (3, 2, 2, 1)")
        for width in widths:
            require_integer("widths", width, 1, MAX_LEAVES)
        if not widths:
            return
        leaves = prod(widths)
        if leaves > MAX_LEAVES:
            expected = f"at most {MAX_LEAVES} leaves, the product; here {leaves}"
            raise InvalidArgument("widths", widths, expected)
        for name, value in (("paths", leaves), ("depth", len(widths))):
            if getattr(self, name) not in (value, _USUAL[name]):
                raise InvalidArgument(name, getattr(self, name), f"none: widths say {value}")
            msgspec.structs.force_setattr(self, name, value)
        forks_below = any(width > 1 for width in widths[1:])
        msgspec.structs.force_setattr(self, "widths", tuple(widths) if forks_below else ())

    def _check_widths(self) -> None:
        sampling = self.draft_sampling
        if sampling in (DraftSampling.FIXED, DraftSampling.HUB) or self.shape:
            drawn = "a shape" if self.shape else f"draft sampling {str(sampling)!r}"
            raise InvalidArgument("widths", self.widths, f"none: {drawn} says what is drawn")
        if not self.speculative:
            expected = f"none with verifier {PLAIN.verifier!r}, which drafts nothing"
            raise InvalidArgument("widths", self.widths, expected)
        if self.source is Source.LOOKUP:
            raise InvalidArgument("widths", self.widths, "none where drafts are looked up")
        if sum(self.level_draws) > MAX_NODES:
            expected = f"at most {MAX_NODES} nodes; here {sum(self.level_draws)}"
            raise InvalidArgument("widths", self.widths, expected)

    @classmethod
    def parse(cls, name: str) -> "Plan":
        """Return the plan with a name as :func:`plan_name` gives, such as ``otbv 3x2x2x1 iid``.

        What names do not tell, such as the draft width, is as usual.
        """
        if name == PLAIN.verifier:
            return PLAIN
        match = _PLAN_NAME.fullmatch(name)
        if match is None:
            expected = "a name such as 'otbv 3x4', 'otbv 3x2x2x1 iid' or 'none'"
            raise InvalidArgument("plan", name, expected)
        sampling = match["sampling"]
        numbers = tuple(map(int, match["sizes"].split("x")))
        sizes: dict[str, Any] = {"widths": numbers}
        if len(numbers) == 2 and match["widths"] is None:
            sizes = {"paths": numbers[0], "depth": numbers[1]}
        return cls(
            verifier=match["verifier"],
            source=Source(match["source"] or Source.DRAFTER),
            draft_sampling=None if sampling is None else DraftSampling(sampling),
            draft_temperature=float(match["temperature"] or 1),
            **sizes,
        )

    @property
    def level_draws(self) -> tuple[int, ...]:
        """Most draws of each level of a sampled tree."""
        if not self.widths:
            return (self.paths,) * self.depth
        return tuple(accumulate(self.widths, mul))

    @property
    def speculative(self) -> bool:
        """Whether anything is drafted."""
        return self.verifier != "none"

    @property
    def asks_drafter(self) -> bool:
        """Whether the engine's drafter drafts."""
        return self.speculative and self.source is Source.DRAFTER

    def up_to(self, depth: int) -> "Plan":
        """Return the plan with paths of at most ``depth`` tokens, at least 1."""
        if depth >= self.depth:
            return self
        shape = tuple(ranks for ranks in self.shape if len(ranks) <= depth)
        widths = self.widths[:depth]
        paths = prod(widths) if widths else self.paths
        return msgspec.structs.replace(self, paths=paths, depth=depth, widths=widths, shape=shape)

    def list_width(self, vocab: int) -> int:
        """Return how many candidates are kept where ``vocab`` tokens can be drafted."""
        return vocab if vocab <= self.whole_vocab else min(self.draft_width, vocab)

    @property
    def fixed_beam(self) -> int:
        """Nodes of a level of a ``fixed`` tree that get children, and children of each."""
        return self.paths if self.beam is None else self.beam

    @property
    def fixed_nodes(self) -> int:
        """Most nodes of a ``fixed`` tree, without the root."""
        if self.shape:
            return len(self.shape)
        return sum(self.level_draws) if self.nodes is None else self.nodes

    @property
    def tree_nodes(self) -> int:
        """Most nodes of a tree of this plan, with the root."""
        if not self.speculative:
            return 1
        # At temperature 0, a sampled plan drafts a fixed tree too.
        drawn = 0 if self.draft_sampling is DraftSampling.FIXED else sum(self.level_draws)
        return 1 + max(drawn, self.fixed_nodes)

    @property
    def tree_slots(self) -> int:
        """KV slots of a step: for the nodes, and for what a drafter reads to find them."""
        if not self.speculative:
            return 1
        # A beam also expands nodes that it does not keep. The root may be read as well.
        return max(self.tree_nodes, 2 + self.fixed_beam * (self.depth - 1))


MIN_SLOTS = 32  # fewest slots of a KV pool: it takes them to prove how a target attends


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and the seed of an engine.

    Attributes:
        max_batch: Most requests that run together; others wait.
        kv_slots: Tokens the KV pools hold, all requests together; None if memory decides.
        kv_bytes: Bytes of the KV pools of target and drafter together, instead of ``kv_slots``. If
            neither is given, the pools take a share of free memory: 0.8 of an accelerator's, a
            quarter of the CPU's, but no more than ``max_batch`` texts of full length can use.
        prefill_tokens: Most prompt tokens that one step reads, all requests together. A longer
            prompt is read in parts, so that requests that decode do not wait for it.
        prefix_cache: Whether texts with a common beginning share its KV slots.
        check_slots: Whether to check after every step that each KV slot has one owner.
        cuda_graphs: Whether forwards of draft trees, and drafting, are recorded and replayed:
            ``auto`` on CUDA devices with FlashInfer, ``on`` (refused elsewhere), ``off``, or
            ``eager``: the same padded work without recording, on any device, for debugging.
        seed: Seed from which the seeds of requests without one are derived.
        self_check: Whether a model is refused whose outputs, when it is loaded, are not those that
            transformers alone computes; otherwise a warning says so.
        native: Whether forwards on a CPU run in the native library, which is built at the first
            start; otherwise, and for models that it does not know, they run through transformers.
    """

    max_batch: int = 16
    kv_slots: int | None = None
    kv_bytes: int | None = None
    prefill_tokens: int = 1024
    prefix_cache: bool = True
    check_slots: bool = False
    cuda_graphs: GraphMode = GraphMode.AUTO
    seed: int = 0
    self_check: bool = True
    native: bool = True

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        require_integers(
            self,
            optional=("kv_slots", "kv_bytes"),
            max_batch=(1, 4096),
            kv_slots=(MIN_SLOTS, 2**31 - 1),
            kv_bytes=(1, 2**63 - 1),
            prefill_tokens=(1, 2**31 - 1),
            seed=(0, 2**64 - 1),
        )
        if self.kv_bytes is not None and self.kv_slots is not None:
            raise InvalidArgument("kv_bytes", self.kv_bytes, "None where kv_slots is given")
        require_truth(self, "prefix_cache", "check_slots", "self_check", "native")
        make_member(self, "cuda_graphs", GraphMode)


def _shape(given: object, depth: int, nodes: int | None) -> Shape:
    """Return a plan's shape, given as any nested sequences, as tuples; or raise."""
    expected = "a sequence of nodes, each a sequence of child ranks"
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidArgument("shape", given, expected)
    shape: Shape = ()
    for ranks in given:
        if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
            raise InvalidArgument("shape", ranks, expected)
        for rank in ranks:
            require_integer("shape", rank, 0, MAX_BEAM - 1)
        node = tuple(ranks)
        if node[:-1] not in ((), *shape) or node in shape:
            raise InvalidArgument("shape", node, "different nodes after their parents")
        shape = (*shape, node)
    if shape and nodes is not None:
        raise InvalidArgument("nodes", nodes, "None: the shape says how many")
    deepest = max(map(len, shape), default=depth)
    if depth != deepest:
        raise InvalidArgument("depth", depth, f"{deepest}, the depth of the shape")
    return shape


_USUAL = {"paths": 3, "depth": 4}  # of a plan that says neither

_PLAN_NAME = re.compile(
    r"(?P<verifier>\S+)(?: (?P<source>lookup))?(?: (?P<widths>widths))? (?P<sizes>\d+(?:x\d+)+)"
    rf"(?: (?P<sampling>{'|'.join(DraftSampling)}))?"
    r"(?: at (?P<temperature>\d+(?:\.\d+)?(?:e[+-]\d+)?))?"
)
"""The names of :func:`plan_name`. Two numbers are paths and depth unless called widths."""

PLAIN = Plan(verifier="none", paths=1, depth=1)  # plain autoregressive decoding

_PATHS = (1, 2, 3, 4, 6, 8, 12, 16)
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_LOOKUP_DEPTHS = (2, 4, 8, 16)
_WHOLE_VOCAB = 8192
"""Size up to which single paths keep draft vocabularies whole: width hardly slows verification.

The tiny pair's draft probabilities of all 4,096 tokens cover 0.61 of the target's on MT-Bench,
those of the 256 most likely cover 0.59. For several paths, verifying all tokens takes longer than
that is worth.
"""


class AutoPlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Let the engine choose a plan for each request and step, from its measurements so far.

    Every choice gives the text the same distribution; speed differs. As the choice depends on
    measured times, the same seed need not give the same text twice (at temperature 0 it does).
    Where nobody names a plan, :class:`DefaultPlan` takes care of that.

    Attributes:
        verifier: Verifier of all plans; a stateless one that takes sampled paths.
        max_paths: Most drafted paths.
        max_depth: Most drafted tokens of a path.
        draft_width: See :class:`eaglegbv.config.Plan`. Single paths keep draft vocabularies of up
            to 8,192 tokens whole.
        draft_temperature: See :class:`eaglegbv.config.Plan`.
        lookup_depth: Most tokens that are looked up in the text itself instead of drafted, at
            temperature 0 and where lookups promise more; 0 for no lookups.

    Raises:
        InvalidArgument: A value is out of range.
    """

    verifier: str = "otbv"
    max_paths: int = 4
    max_depth: int = 8
    draft_width: int = DRAFT_WIDTH
    draft_temperature: float = 1.0
    lookup_depth: int = 16

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        require_integers(
            self,
            max_paths=(1, MAX_PATHS),
            max_depth=(1, MAX_DEPTH),
            draft_width=(1, MAX_WIDTH),
            lookup_depth=(0, MAX_DEPTH),
        )
        if self.verifier == "none":
            raise InvalidArgument("verifier", "none", "a verifier; a fixed plan decodes plainly")
        # The plans themselves check the rest.
        _ = self.candidates

    @cached_property
    def candidates(self) -> tuple[Plan, ...]:
        """The plans by which the drafter drafts, the smallest first; see also :attr:`lookups`.

        Plain decoding is always possible too.
        """
        return tuple(
            Plan(
                verifier=self.verifier,
                paths=paths,
                depth=depth,
                draft_width=self.draft_width,
                whole_vocab=_WHOLE_VOCAB if paths == 1 else 0,
                draft_temperature=self.draft_temperature,
            )
            for paths in _up_to(_PATHS, self.max_paths)
            for depth in _up_to(_DEPTHS, self.max_depth)
        )

    @cached_property
    def lookups(self) -> tuple[Plan, ...]:
        """The plans by which requests at temperature 0 may look drafts up, the smallest first."""
        depths = _up_to(_LOOKUP_DEPTHS, self.lookup_depth) if self.lookup_depth else ()
        look = partial(Plan, verifier=self.verifier, paths=1, source=Source.LOOKUP)
        return tuple(look(depth=depth) for depth in depths)


class DefaultPlan(AutoPlan, frozen=True, kw_only=True, dict=True):
    """The engine's own choice where nobody names a plan: a seed reproduces its text.

    Requests with a seed follow one plan, which neither load nor measured times change.
    """

    @cached_property
    def seeded(self) -> Plan:
        """The plan of sampled requests with a seed: a path of at most 4 tokens, judged as a block.

        That is what the default verifier makes of one path; it judges drafts of any kind.
        """
        return Plan(
            verifier=self.verifier,
            paths=1,
            depth=min(4, self.max_depth),
            draft_width=self.draft_width,
            draft_temperature=self.draft_temperature,
        )


def _up_to(grid: tuple[int, ...], largest: int) -> list[int]:
    return [value for value in grid if value < largest] + [largest]


Planning: TypeAlias = Plan | AutoPlan  # one plan for all steps, or the engine's own choice
PlanName: TypeAlias = Literal["auto"]  # `"auto"` stands for `AUTO`
AUTO = AutoPlan()  # the engine's own choice, with its usual limits


def named_planning(plan: Planning | str) -> Planning:
    """Return what a user's ``plan`` stands for: InvalidArgument if it is no planning."""
    if plan == "auto":
        return AUTO
    if not isinstance(plan, Plan | AutoPlan):
        raise InvalidArgument("plan", plan, "'auto', an AutoPlan or a Plan")
    return plan


@dataclass(frozen=True, slots=True)
class PlanChoices:
    """A user's choices for a plan, see :class:`Plan`; None and default values choose nothing.

    Without a verifier and anything of a tree, the engine chooses plans itself, step by step.

    Attributes:
        verifier: Verifier: otbv, gbv, spectr_gbv, traversal, block, greedy_block, token, specinfer,
            spectr, spechub, greedy_draft, global_resolution or target_only; or 'none' for plain
            decoding. By default otbv, or the engine's choice.
        paths: Drafted paths, K; by default 3, or as many as the verifier takes.
        depth: Drafted tokens of a path, L; by default 4.
        draft_sampling: How a tree's children arise: iid, wor, greedy, hub or fixed; by default as
            the verifier takes them.
        draft_width: Number of candidates a draft distribution keeps.
        draft_temperature: Temperature of the drafts, as a multiple of the request's; lossless at
            any value.
        widths: Drafts of the nodes of each depth, such as 3x2x2x1, instead of paths and depth.
    """

    verifier: str | None = None
    paths: int | None = None
    depth: int | None = None
    draft_sampling: DraftSampling | str | None = None
    draft_width: int = DRAFT_WIDTH
    draft_temperature: float = 1.0
    widths: Sequence[int] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """All that is not a default, by its name."""
        given: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and (each.default is None or value != each.default):
                given[each.name] = value
        return given


def plans_of(planning: Planning, *, greedy: bool) -> tuple[Plan, ...]:
    """Return all plans that a request may follow at some step, besides plain decoding."""
    if isinstance(planning, AutoPlan):
        return planning.candidates + (planning.lookups if greedy else ())
    return (planning,)


@lru_cache(maxsize=1024)
def plan_name(plan: Plan) -> str:
    """Return a short name, such as ``otbv 3x4``: verifier, paths and depth, and other choices.

    Widths stand instead of paths and depth, as in ``otbv 3x2x2x1``, or ``otbv widths 3x2``.
    """
    if not plan.speculative:
        return "none"
    judge = plan.verifier if plan.source is Source.DRAFTER else f"{plan.verifier} {plan.source}"
    draft_sampling = "" if plan.draft_sampling is None else f" {plan.draft_sampling}"
    hot = "" if plan.draft_temperature == 1 else f" at {plan.draft_temperature:g}"
    sizes = "x".join(map(str, plan.widths or (plan.paths, plan.depth)))
    called = "widths " if len(plan.widths) == 2 else ""
    return f"{judge} {called}{sizes}{draft_sampling}{hot}"
