"""Every rule by name; and verification with the check of its inputs."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from eaglegbv.config import PLAIN, DefaultPlan, Plan, PlanChoices, Planning, named_planning
from eaglegbv.devices import runs_kernels
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers import fused
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, find_faults
from eaglegbv.verifiers.block import BlockVerifier, block
from eaglegbv.verifiers.gbv import GbvVerifier, gbv
from eaglegbv.verifiers.global_resolution import GlobalResolutionVerifier, global_resolution
from eaglegbv.verifiers.greedy_block import GreedyBlockVerifier, greedy_block
from eaglegbv.verifiers.greedy_draft import GreedyDraftVerifier, greedy_draft
from eaglegbv.verifiers.otbv import OtbvVerifier, otbv
from eaglegbv.verifiers.proof.enumeration import stateless
from eaglegbv.verifiers.proof.tree import Verify
from eaglegbv.verifiers.spechub import SpecHubVerifier, spechub
from eaglegbv.verifiers.specinfer import SpecInferVerifier, specinfer
from eaglegbv.verifiers.spectr import SpecTrVerifier, spectr
from eaglegbv.verifiers.spectr_gbv import SpecTrGbvVerifier
from eaglegbv.verifiers.stateful import StatefulVerifier, VerifyWithState
from eaglegbv.verifiers.target_only import GreedyWalkVerifier, TargetOnlyVerifier, target_only
from eaglegbv.verifiers.token import TokenVerifier, token
from eaglegbv.verifiers.traversal import TraversalVerifier, traversal

AnyVerifier = TypeVar("AnyVerifier", bound=type[Verifier] | type[StatefulVerifier])

_RULES: tuple[tuple[type[Verifier], Verify], ...] = (
    (TokenVerifier, token),
    (BlockVerifier, block),
    (GbvVerifier, gbv),
    (OtbvVerifier, otbv),
    (SpecTrVerifier, spectr),
    (SpecInferVerifier, specinfer),
    (SpecHubVerifier, spechub),
    (GreedyDraftVerifier, greedy_draft),
    (TraversalVerifier, traversal),
    (GlobalResolutionVerifier, global_resolution),
    (TargetOnlyVerifier, target_only),
)
"""The batched class and the reference of each rule whose steps are lossless by themselves."""

_STATEFUL_RULES: tuple[tuple[type[StatefulVerifier], VerifyWithState], ...] = (
    (GreedyBlockVerifier, greedy_block),
    (SpecTrGbvVerifier, greedy_block),
)

VERIFIERS: dict[str, type[Verifier]] = {cls.name: cls for cls, _ in _RULES}
"""Every verifier whose steps are lossless by themselves, keyed by its name."""

STATEFUL_VERIFIERS: dict[str, type[StatefulVerifier]] = {
    cls.name: cls for cls, _ in _STATEFUL_RULES
}
"""Every verifier that leaves a modified target to the next step, keyed by its name."""

ALL_VERIFIERS: dict[str, type[Verifier] | type[StatefulVerifier]] = {
    **VERIFIERS,
    **STATEFUL_VERIFIERS,
}

REFERENCES: Mapping[str, VerifyWithState] = MappingProxyType(
    {cls.name: stateless(verify) for cls, verify in _RULES}
    | {cls.name: verify for cls, verify in _STATEFUL_RULES}
)
"""The reference of every verifier, keyed by its name."""


def register_verifier(rule: AnyVerifier) -> AnyVerifier:
    """Let plans name a class of yours, a decorator; see docs/study/add_a_verifier.md.

    That it is lossless for the draft samplings it names is its own claim: ``eaglegbv audit
    --module`` checks it.

    Raises:
        InvalidArgument: The class has no name, or one that is taken.
    """
    name = getattr(rule, "name", None)
    if not isinstance(name, str) or name in (*ALL_VERIFIERS, GreedyWalkVerifier.name, "none"):
        raise InvalidArgument("name", name, f"a new one, not {one_of(sorted(ALL_VERIFIERS))}")
    ALL_VERIFIERS[name] = rule
    if issubclass(rule, StatefulVerifier):
        STATEFUL_VERIFIERS[name] = rule
    else:
        VERIFIERS[name] = rule
    return rule


def choose(plan: Planning | str | None, choices: PlanChoices) -> Planning:
    """Return what a user's ``plan`` comes to, or ``choices`` where it is None.

    Without a verifier and anything of a tree, that is the engine's own choice.

    Raises:
        InvalidArgument: Both are given, or what is given is no plan.
    """
    given = choices.given
    if plan is None:
        of_drafts = given.keys() <= {"draft_width", "draft_temperature"}
        return DefaultPlan(**given) if of_drafts else chosen_plan(choices)
    for name in given:
        expected = f"None where {name} is given: a plan says that too"
        raise InvalidArgument("plan", plan, expected)
    return named_planning(plan)


def chosen_plan(choices: PlanChoices) -> Plan:
    """Return the plan of ``choices``; a verifier named alone has as many paths as it takes.

    Raises:
        InvalidArgument: They exclude each other, or one is none.
    """
    given = choices.given
    if choices.verifier == PLAIN.verifier:
        expected = "none with verifier 'none', which drafts nothing"
        _refuse(given, ("paths", "depth", "draft_sampling", "widths"), expected)
    elif choices.verifier is not None and choices.widths is None:
        rule = make_any_verifier(choices.verifier)
        given.setdefault("paths", rule.fitting_paths(Plan().paths))
    if choices.widths is not None:
        _refuse(given, ("paths", "depth"), "none where widths are given")
    return Plan(**given)


def _refuse(given: Mapping[str, object], names: Sequence[str], expected: str) -> None:
    for name in names:
        if name in given:
            raise InvalidArgument(name, given[name], expected)


def make_verifier(name: str) -> Verifier:
    """Return the stateless verifier of that name, or the greedy walk.

    A plan cannot choose the walk, which is lossless at temperature 0 only.

    Raises:
        InvalidArgument: No stateless verifier has that name.
    """
    if name == GreedyWalkVerifier.name:
        return GreedyWalkVerifier()
    if name not in VERIFIERS:
        raise InvalidArgument("verifier", name, one_of(sorted(VERIFIERS), name))
    return VERIFIERS[name]()


def make_any_verifier(name: str) -> Verifier | StatefulVerifier:
    """Return the verifier of that name, with state or without.

    Raises:
        InvalidArgument: No verifier has that name.
    """
    if name not in ALL_VERIFIERS:
        raise InvalidArgument("verifier", name, one_of(sorted(ALL_VERIFIERS), name))
    return ALL_VERIFIERS[name]()


def verify_checked(
    verifier: Verifier, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
) -> tuple[Verdict, Tensor]:
    """Judge the drafts of a batch and look for faults, by a kernel where there is one.

    Returns:
        The verdict, see :meth:`Verifier.verify`; and ``[batch]`` int64, the faults of its inputs,
        where it is meaningless; else 0.
    """
    if runs_kernels(tree.token_ids.device) and fused.takes(verifier, tree):
        return fused.judge(verifier, tree, target, uniforms)
    return verifier.verify(tree, target, uniforms), find_faults(tree, target)
