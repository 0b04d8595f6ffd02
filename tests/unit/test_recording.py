import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.exact_engine import PLANS, VOCAB, ExactEngine, Spec, exact_engine

from eaglegbv.config import Plan
from eaglegbv.metrics import StepRecord, TreeRecord
from eaglegbv.models.target import TargetOutput
from eaglegbv.request import Request
from eaglegbv.rng import Purpose
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.verification import Verification, VerifyOutput
from eaglegbv.verifiers.otbv import OtbvVerifier
from eaglegbv.verifiers.transport import exact_transport

PROMPT = (3, 1, 4, 1, 5)
ALL_PLANS = [*PLANS[2:5], *PLANS[7:], Plan(verifier="traversal", paths=3, depth=3)]
BLOCK_RULES = {"block", "gbv", "otbv", "greedy_block", "spectr_gbv"}


def observed(exact: ExactEngine, *, trees: bool = True) -> list[StepRecord]:
    """A list to which every step's record comes."""
    steps: list[StepRecord] = []
    exact.engine.observe(SimpleNamespace(on_step=steps.append), trees=trees)
    return steps


def trees_of(steps: list[StepRecord], request: Request) -> list[TreeRecord]:
    return [t for step in steps for t in step.trees if t.request == request.number]


@dataclass(frozen=True, slots=True)
class Watched:
    """A request, its records, and the engine it ran in."""

    exact: ExactEngine
    request: Request
    trees: list[TreeRecord]

    def prefix(self, tree: TreeRecord, node: int) -> tuple[int, ...]:
        """The text up to and with a node of a tree."""
        path = []
        while node:
            path.append(tree.token_ids[node])
            node = tree.parents[node]
        return (*PROMPT, *self.request.token_ids[: tree.start], *reversed(path))

    def p(self, prefix: Sequence[int]) -> torch.Tensor:
        logits = self.exact.target.logits_after(prefix)
        return (logits.double() / self.request.params.temperature).softmax(dim=0)

    def q(self, prefix: Sequence[int]) -> torch.Tensor:
        """The draft distribution: of the likeliest tokens that the plan keeps."""
        plan = self.request.plan
        logits = self.exact.draft_model.logits_after(prefix).double()
        kept = torch.full_like(logits, -math.inf)
        best = logits.topk(min(VOCAB, plan.draft_width)).indices
        kept[best] = logits[best] / (self.request.params.temperature * plan.draft_temperature)
        return kept.softmax(dim=0)


def watched(plan: Plan) -> Watched:
    exact = exact_engine(slots=256)
    steps, params = observed(exact), SamplingParams(max_tokens=30, seed=5, temperature=0.8)
    request = exact.add(Spec(PROMPT, params, plan))
    exact.run()
    return Watched(exact, request, trees_of(steps, request))


def named(plan: Plan) -> str:
    return f"{plan.verifier}-{plan.draft_sampling}-{plan.paths}x{plan.depth}"


@pytest.fixture(scope="module", params=ALL_PLANS, ids=named)
def run(request: pytest.FixtureRequest) -> Watched:
    return watched(request.param)


def test_records_tell_the_whole_text(run):
    first, *later = run.trees
    assert first.prompt_ids == PROMPT
    assert (first.token_ids, first.accepted, first.start) == ((PROMPT[-1],), (), 0)
    assert all(tree.prompt_ids == () for tree in later)
    text: list[int] = []
    for tree in run.trees:
        assert tree.start == len(text)
        assert tree.token_ids[0] == (*PROMPT, *text)[-1]
        drafted = [tree.token_ids[node] for node in tree.accepted]
        assert list(tree.committed) == [*drafted, tree.next_token][: len(tree.committed)]
        text += tree.committed
    assert text == run.request.token_ids
    spec = Spec(PROMPT, run.request.params, run.request.plan)
    assert text == run.exact.alone(spec)  # recording changes no token
    assert [tree.finish_reason for tree in run.trees[-2:]] == [None, "length"]


def test_p_and_q_are_those_of_the_tables(run):
    for tree in run.trees:
        assert tree.target_probs[0] is tree.draft_probs[0] is None
        for node in range(1, len(tree.token_ids)):
            before = run.prefix(tree, tree.parents[node])
            token = tree.token_ids[node]
            assert tree.target_probs[node] == pytest.approx(float(run.p(before)[token]), rel=1e-5)
            if tree.draft_sampling == DraftSampling.FIXED:
                assert tree.draft_probs[node] is None
            else:
                q = float(run.q(before)[token])
                assert tree.draft_probs[node] == pytest.approx(q, rel=1e-5)
        after = run.prefix(tree, tree.accepted[-1] if tree.accepted else 0)
        assert tree.next_target_prob == pytest.approx(
            float(run.p(after)[tree.next_token]), rel=1e-5
        )


def test_chances_are_those_the_verdict_was_drawn_with(run):
    """The longest prefix whose own number lies below its h was accepted, step by step."""
    if run.request.plan.verifier not in BLOCK_RULES:
        pytest.skip("a rule without chances of prefixes")
    judged = 0
    for step, tree in enumerate(run.trees):
        if len(tree.token_ids) == 1:
            assert not tree.node_stats
            continue
        chances = selected(tree, "h")
        numbers = run.request.rng.draw(step, Purpose.ACCEPTANCE, len(chances))
        passed = [d + 1 for d, h in enumerate(chances) if numbers[d] < h]
        assert len(tree.accepted) == max(passed, default=0)
        judged += 1
    assert judged > 3


def selected(tree: TreeRecord, stat: str) -> list[float]:
    """A number along the selected path: the only nodes that have it."""
    found, above = [], 0
    for node, value in enumerate(tree.node_stats[stat]):
        if value is not None:
            assert tree.parents[node] == above
            above = node
            found.append(value)
    return found


def test_b_and_w_of_otbv_are_those_of_the_reference():
    run = watched(Plan(verifier="otbv", paths=3, depth=3))
    several = 0
    for tree in run.trees[1:]:
        b, w = tree.node_stats["b"], tree.node_stats["w"]
        path = [node for node, value in enumerate(w) if value is not None]
        assert len(path) == 3
        weight = 1.0
        for node in path:
            parent = tree.parents[node]
            before = run.prefix(tree, parent)
            children = [c for c in range(1, len(b)) if tree.parents[c] == parent]
            drafts = sum(tree.multiplicity[c] for c in children)
            several += drafts > 1
            p, q = run.p(before).tolist(), run.q(before).tolist()
            dist = exact_transport(tuple(p), tuple(q), drafts).probs
            for child in children:
                assert b[child] == pytest.approx(dist[tree.token_ids[child]], rel=1e-4, abs=1e-9)
            token = tree.token_ids[node]
            weight = min(1.0, weight * p[token] / dist[token])
            assert w[node] == pytest.approx(weight, rel=1e-3)
        known = {node for node, value in enumerate(b) if value is not None}
        assert known == {n for n in range(1, len(b)) if tree.parents[n] in {0, *path[:-1]}}
    assert several > 10


def test_nothing_is_recorded_unless_somebody_asks(monkeypatch):
    refuse = Mock(side_effect=AssertionError("node stats were asked for"))
    monkeypatch.setattr(OtbvVerifier, "stats", refuse)
    monkeypatch.setattr("eaglegbv.tree_records.target_of_tokens", refuse)
    exact, evidence = exact_engine(slots=256), []
    steps = observed(exact, trees=False)
    whole = Verification.verify

    def verify(*arguments: object, **named: object) -> list[VerifyOutput]:
        outputs = whole(*arguments, **named)
        evidence.extend(output.target for output in outputs)
        return outputs

    monkeypatch.setattr(Verification, "verify", verify)
    spec = Spec(PROMPT, SamplingParams(max_tokens=9, seed=1), Plan(verifier="otbv", paths=2))
    request = exact.add(spec)
    exact.run()
    assert request.error is None
    assert len(evidence) == len(steps)
    assert set(evidence) == {None}
    assert all(step.trees == [] for step in steps)


def test_a_request_with_faulty_probabilities_has_no_record(monkeypatch):
    exact = exact_engine(slots=256)
    steps, spec = observed(exact), Spec(PROMPT, SamplingParams(max_tokens=12, seed=1), PLANS[4])
    bad, good = exact.add(spec), exact.add(spec)
    exact.engine.step()
    forward = exact.target.forward

    def spoilt(*arguments: object, **named: object) -> TargetOutput:
        output = forward(*arguments, **named)
        output.logits[0] = math.nan
        return output

    monkeypatch.setattr(exact.target, "forward", spoilt)
    exact.engine.step()
    monkeypatch.undo()
    exact.run()
    assert bad.error is not None
    assert len(trees_of(steps, bad)) == 1
    assert sum(len(tree.committed) for tree in trees_of(steps, good)) == len(good.token_ids) == 12
