"""Who judges an engine's drafts: the verifier of each plan, found by name, checked, and asked."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from eaglegbv.auto_plan import AutoPlan, Planning
from eaglegbv.config import Plan
from eaglegbv.debts import recall_slots, settle
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafting import Drafting
from eaglegbv.errors import InvalidArgument
from eaglegbv.node_laws import law_of_nodes
from eaglegbv.outcomes import Judgement
from eaglegbv.params import SamplingParams
from eaglegbv.recording import Evidence
from eaglegbv.scheduler.batch import Group, Layout
from eaglegbv.target_law import TargetLaw
from eaglegbv.targets.base import Target
from eaglegbv.tree import Law
from eaglegbv.verifiers.base import Rule, Verifier, VerifyUniforms
from eaglegbv.verifiers.checked import CheckedVerifier, checked_verifier
from eaglegbv.verifiers.figures import NodeFigures
from eaglegbv.verifiers.greedy_walk import GreedyWalkVerifier
from eaglegbv.verifiers.inputs import find_faults
from eaglegbv.verifiers.registry import make_any_verifier, make_verifier
from eaglegbv.verifiers.stateful import StatefulVerifier
from eaglegbv.verifiers.target_only import TargetOnlyVerifier


class Verification:
    """The verifiers of an engine.

    Attributes:
        keeps_evidence: Whether judgements say what they rest on, for trees to be recorded.
    """

    def __init__(
        self, target: Target, drafting: Drafting, *, compile_backend: str | None = None
    ) -> None:
        """Put the parts together.

        Args:
            target: Whose law is kept.
            drafting: Who drafts; verifiers with state ask it for the laws of earlier steps.
            compile_backend: Compile the verifiers of plans, when first checked, by this backend of
                ``torch.compile``; None runs them as they are.
        """
        self._target, self._drafting = target, drafting
        self._compile_backend = compile_backend
        self._verifiers: dict[str, Verifier | StatefulVerifier] = {}
        self._sound_plans: set[Planning] = set()
        self.keeps_evidence = False

    def check(self, plan: Planning) -> None:
        """Raise unless the engine can run ``plan``, once for each.

        Raises:
            InvalidArgument: There is no such verifier, nobody drafts, or not as the plan asks.
            LawMismatch: The verifier is not lossless for the plan's law.
        """
        if plan in self._sound_plans:
            return
        if isinstance(plan, AutoPlan):
            self._check_candidates(plan)
        elif plan.speculative:
            self._check_speculation(plan)
        self._sound_plans.add(plan)

    def draft_law(self, plan: Plan, *, greedy: bool) -> Law:
        """Return how children arise in the trees of a plan that speculates."""
        verifier, drafter = self._verifier(plan.verifier), self._drafting.by(plan)
        return draft_law(plan, verifier, drafter, greedy=greedy)

    def slots_to_recall(self, plan: Plan, params: SamplingParams) -> int:
        """Return the most KV slots a request borrows to recall the draft laws of earlier steps."""
        if params.greedy or not plan.speculative:
            return 0
        stateful = isinstance(self._verifier(plan.verifier), StatefulVerifier)
        return recall_slots(plan) if stateful else 0

    def judge(self, group: Group, layout: Layout, logits: Tensor) -> Judgement:
        """Judge a group's trees by the verifier of its plan.

        Args:
            group: The trees, on the device of the logits.
            layout: Where their nodes stand among the logits.
            logits: ``[rows, vocab]``, those of the whole forward.
        """
        plan, greedy = group.requests[0].plan, group.requests[0].params.greedy
        name = judge_name(plan, greedy=greedy)
        verifier = make_verifier(name) if greedy else self._verifier(name)
        law = law_of_nodes(group, layout, logits)
        if isinstance(verifier, StatefulVerifier):
            return self._settle(verifier, group, law)
        uniforms = VerifyUniforms.draw(
            [request.stream for request in group.requests],
            [request.step for request in group.requests],
            paths=group.tree.paths,
            length=group.tree.length,
            device=logits.device,
        )
        verdict, faults = self._checked(verifier, group.tree.law).verify(group.tree, law, uniforms)
        figures = partial(verifier.figures, group.tree, law, uniforms)
        evidence = self._evidence(group, verifier, law, figures)
        return Judgement(verdict, faults, [() for _ in group.requests], evidence)

    def _settle(self, verifier: StatefulVerifier, group: Group, law: TargetLaw) -> Judgement:
        """Judge a group's trees under the debts of its requests."""
        faults = find_faults(group.tree, law)
        drafter = self._drafting.recalling(group.requests[0].plan)
        allocator = self._target.allocator
        settled = settle(verifier, group.requests, group.tree, law, drafter, allocator)
        evidence = self._evidence(group, verifier, law, settled.figures)
        return Judgement(settled.verdict, faults | settled.faults, settled.debts, evidence)

    def _evidence(
        self, group: Group, rule: Rule, law: TargetLaw, figures: Callable[[], NodeFigures]
    ) -> Evidence | None:
        """Return what is to be kept of a verification until its trees are recorded, if they are."""
        if not self.keeps_evidence:
            return None
        return Evidence(rule.name, law, figures, group.prefilling)

    def _check_candidates(self, auto: AutoPlan) -> None:
        # Lookups are for temperature 0, where no verifier is asked.
        for candidate in auto.candidates:
            self.check(candidate)
        if isinstance(self._verifier(auto.verifier), StatefulVerifier):
            expected = "one without state over steps, where the engine chooses plans"
            raise InvalidArgument("verifier", auto.verifier, expected)

    def _check_speculation(self, plan: Plan) -> None:
        drafter, verifier = self._drafting.by(plan), self._verifier(plan.verifier)
        law = self.draft_law(plan, greedy=False)
        verifier.check_law(law, plan.paths)
        if plan.paths < law.min_paths:
            expected = f"at least {law.min_paths} for draft law {str(law)!r}"
            raise InvalidArgument("paths", plan.paths, expected)
        if isinstance(verifier, StatefulVerifier):
            self._drafting.recalling(plan)
            if plan.min_confidence > 0:
                expected = f"0 for verifier {plan.verifier!r}, whose debts run to the full depth"
                raise InvalidArgument("min_confidence", plan.min_confidence, expected)
        for needed in (law, Law.FIXED):
            if needed not in drafter.laws:
                known = ", ".join(sorted(drafter.laws))
                raise InvalidArgument("law", str(needed), f"one the drafter draws: {known}")
        if isinstance(verifier, Verifier):
            self._checked(verifier, law)  # compiled now

    def _verifier(self, name: str) -> Verifier | StatefulVerifier:
        if name not in self._verifiers:
            self._verifiers[name] = make_any_verifier(name)
        return self._verifiers[name]

    def _checked(self, verifier: Verifier, law: Law) -> CheckedVerifier:
        """Return a verifier with the check of what it is given; graphs take independent paths."""
        backend = self._compile_backend if law is Law.IID else None
        if backend is None:
            return checked_verifier(verifier.name)
        target = self._target
        return checked_verifier(verifier.name, backend, target.vocab_size, target.device)


def check_verifier(plan: Plan) -> None:
    """Raise unless the plan's verifier exists and takes the law it names, whatever drafts.

    Raises:
        InvalidArgument: There is no such verifier.
        LawMismatch: It is not lossless for the plan's law, or for so many paths.
    """
    if plan.speculative:
        verifier = make_any_verifier(plan.verifier)
        if plan.law is not None:
            verifier.check_law(plan.law, plan.paths)


def judge_name(plan: Plan, *, greedy: bool) -> str:
    """Return the name of the verifier of a step: the plan's, unless nothing is left to decide.

    At temperature 0 the target's law is one token, which the greedy walk follows through any tree;
    without drafts the next token is drawn from the target.
    """
    if greedy:
        return GreedyWalkVerifier.name
    return plan.verifier if plan.speculative else TargetOnlyVerifier.name


def draft_law(plan: Plan, verifier: Rule, drafter: Drafter, *, greedy: bool) -> Law:
    """Return the draft law of a plan: its own, else the verifier's, else the drafter's only one.

    At temperature 0 sampled paths all coincide, and a fixed tree covers more.
    """
    if greedy:
        return Law.FIXED
    if plan.law is not None:
        return plan.law
    if verifier.default_law not in drafter.laws and drafter.laws <= {Law.FIXED}:
        return Law.FIXED
    return verifier.default_law
