"""What forbids and favours tokens: the law of the text, node by node and end to end.

Tables give the exact distribution after every text. Each check sees a planted mistake: a rule that
looks at the last committed token alone, and one that takes its path for that of every node.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from support.exact_engine import VOCAB, ExactEngine, exact_engine, piece_tokenizer
from support.g_test import g_test
from support.ruled import LANGUAGE, MATCHES, ruled_joint, ruled_probs, spelled
from support.tabular_target import TabularTarget
from support.tiny_engine import cells_of

from eaglegbv import token_rules, verification
from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument
from eaglegbv.grammars import Grammars
from eaglegbv.request import FinishReason, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.batch import Group
from eaglegbv.token_rules import RuledRow
from eaglegbv.tree import DraftSampling, TargetProbs

PROMPT = [3, 1, 4]
TOKENS = 4
SEEDS = 12  # requests whose nodes are looked at
SAMPLES, SHIFT, POWER, LEVEL = 600, 0.15, 0.6, 1e-3

RULES = {
    "min_tokens": {"min_tokens": 3, "stop_token_ids": (0, 5)},
    "logit_bias": {"logit_bias": {1: 2.5, 4: -3.0, 6: 1.0}},
    "bad_words": {"bad_words": ((3,), (1, 4), (4, 1, 1), (5, 5))},
    "allowed_token_ids": {"allowed_token_ids": (0, 1, 4, 6)},
    "regex": {"regex": LANGUAGE},
    "together": {
        "min_tokens": 2,
        "stop_token_ids": (6,),
        "logit_bias": {1: 1.5},
        "bad_words": ((1, 1),),
        "allowed_token_ids": (1, 2, 5, 6),
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "temperature": 1.2,
    },
}
BY_PATH = ("min_tokens", "bad_words", "regex", "together")  # those that differ along a path
PLANS = {
    "otbv": Plan(paths=3, depth=3),
    "specinfer": Plan(verifier="specinfer", draft_sampling=DraftSampling.WOR, paths=3, depth=3),
    "greedy_block": Plan(verifier="greedy_block", paths=1, depth=3),
}


def params_of(name: str) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, **RULES[name])


def last_node_alone(rows: Sequence[RuledRow]) -> list[RuledRow]:
    """A mistake: nodes below the root follow no rule."""
    return [rows[0], *(RuledRow(row.rules, None) for row in rows[1:])]


def path_of_the_root(rows: Sequence[RuledRow]) -> list[RuledRow]:
    """A mistake: all nodes follow the rules that hold after the last committed token."""
    return [rows[0]] * len(rows)


MISTAKES = (last_node_alone, path_of_the_root)


def plant(monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., list[RuledRow]]) -> None:
    right = token_rules.rows_of_tree
    monkeypatch.setattr(verification, "rows_of_tree", lambda *tree: mistake(right(*tree)))


@pytest.fixture
def engine() -> ExactEngine:
    return exact_engine(slots=16_384, max_batch=512)


def engine_for(name: str) -> ExactEngine:
    """An engine that takes those settings."""
    tokenizer = piece_tokenizer() if name == "regex" else None
    return exact_engine(slots=16_384, max_batch=512, tokenizer=tokenizer)


def sample(
    engine: ExactEngine, params: SamplingParams, plan: Plan, count: int, *, sound: bool = True
) -> list[Request]:
    """Requests that were answered; where that is not ``sound``, a grammar's own may have failed."""
    seeded = [msgspec.structs.replace(params, seed=seed) for seed in range(count)]
    requests = [engine.engine.add(PROMPT, own, plan) for own in seeded]
    engine.run()
    assert not (sound and any(request.error for request in requests))
    return requests


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Group, TargetProbs, list[int]]]:
    """Every group that is verified, p at its nodes, and how long the texts were before."""
    seen = []
    right = verification.probs_of_nodes

    def noted(group: Group, *given: object) -> TargetProbs:
        target = right(group, *given)
        seen.append((group, target, [len(request.token_ids) for request in group.requests]))
        return target

    monkeypatch.setattr(verification, "probs_of_nodes", noted)
    return seen


def nodes_of(
    judged: Sequence[tuple[Group, TargetProbs, list[int]]],
) -> Iterator[tuple[Request, list[int], np.ndarray, bool]]:
    """Each node's request, the text with it, p after it, and whether it was drafted."""
    for group, target, lengths in judged:
        tree = group.tree
        for b, (request, length) in enumerate(zip(group.requests, lengths, strict=True)):
            text = request.token_ids[:length]
            for node in range(int(tree.num_nodes[b])):
                path: list[int] = []
                above = node
                while above > 0:
                    path.insert(0, int(tree.token_ids[b, above]))
                    above = int(tree.parents[b, above])
                row = target.rows[b, node]
                probs = target.logits[row].double().softmax(0).numpy()
                yield request, [*text, *path], probs, node > 0


def largest_error(engine: ExactEngine, judged: Sequence[tuple[Group, TargetProbs, list[int]]]):
    """The largest difference from the tables, over nodes that some text reaches."""
    worst, drafted = 0.0, 0
    for request, text, probs, is_draft in nodes_of(judged):
        if not reachable(engine, request, text):
            continue
        right = ruled_probs(engine.target, PROMPT, text, request.params)
        worst = max(worst, float(np.abs(probs - right).max()))
        drafted += is_draft
    assert drafted > 10
    return worst


def reachable(engine: ExactEngine, request: Request, text: list[int]) -> bool:
    for n, token in enumerate(text):
        if ruled_probs(engine.target, PROMPT, text[:n], request.params)[token] == 0:
            return False
    return True


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_every_node_has_the_targets_distribution_under_its_own_path(judged, name, plan):
    engine = engine_for(name)
    sample(engine, params_of(name), plan, SEEDS)
    assert largest_error(engine, judged) < 1e-6


@pytest.mark.parametrize("name", BY_PATH)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_rule_that_does_not_follow_the_path_is_seen_at_a_node(judged, name, mistake, monkeypatch):
    engine = engine_for(name)
    plant(monkeypatch, mistake)
    sample(engine, params_of(name), PLANS["otbv"], SEEDS, sound=False)
    assert largest_error(engine, judged) > 0.05


@pytest.mark.parametrize("name", RULES)
def test_what_is_forbidden_is_not_drafted(judged, name):
    """Otherwise it would be rejected. (Steps that are replayed draft as if there were no rules.)"""
    engine = engine_for(name)
    requests = sample(engine, params_of(name), PLANS["otbv"], SEEDS)
    assert all(reachable(engine, request, text) for request, text, _, _ in nodes_of(judged))
    assert sum(sum(request.metrics.accepted_by_depth) for request in requests) > SEEDS


def law(engine: ExactEngine, params: SamplingParams, plan: Plan) -> float:
    requests = sample(engine, params, plan, SAMPLES)
    for request in requests:  # one that ended repeats its last token
        request.token_ids += request.token_ids[-1:] * (TOKENS - len(request.token_ids))
    exact = ruled_joint(engine.target, PROMPT, TOKENS, params)
    result = g_test(cells_of(requests, VOCAB), exact, shift=SHIFT, level=LEVEL)
    assert result.power > POWER, result
    return result.p_value


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("min_tokens", "otbv"),
        ("bad_words", "specinfer"),
        ("regex", "otbv"),
        ("regex", "greedy_block"),
        ("together", "otbv"),
        ("together", "greedy_block"),
    ],
)
def test_texts_follow_the_targets_distribution_under_the_rules(name, plan):
    assert law(engine_for(name), params_of(name), PLANS[plan]) > LEVEL


@pytest.mark.parametrize("name", BY_PATH)
def test_texts_tell_a_rule_that_acts_on_the_last_node_alone(name, monkeypatch):
    engine = engine_for(name)
    plant(monkeypatch, last_node_alone)
    params = params_of(name)
    requests = sample(engine, params, PLANS["otbv"], 200, sound=False)
    assert not all(reachable(engine, request, request.token_ids) for request in requests)


def test_requests_with_rules_and_without_share_steps(engine):
    """And each text is that of a request alone."""
    kinds = [
        SamplingParams(max_tokens=12, seed=1, **settings)
        for settings in ({}, {"min_tokens": 1}, {"allowed_token_ids": (1, 2, 3), "temperature": 0})
    ]
    plan = PLANS["otbv"]
    together = [engine.engine.add(PROMPT, params, plan) for params in kinds]
    engine.run()
    for params, request in zip(kinds, together, strict=True):
        alone = exact_engine(slots=512)
        again = alone.engine.add(PROMPT, params, plan)
        alone.run()
        assert again.token_ids == request.token_ids


def test_structured_text_ends_when_it_is_complete():
    engine = engine_for("regex")
    params = SamplingParams(max_tokens=9, regex=LANGUAGE)
    for plan in PLANS.values():
        for request in sample(engine, params, plan, 20):
            *text, end = request.token_ids
            assert (end, request.finish_reason) == (0, FinishReason.STOP)
            assert spelled(text) in MATCHES


@pytest.mark.parametrize("settings", [{"regex": LANGUAGE}, {}], ids=["structured", "any text"])
def test_a_text_ends_where_only_the_tokenizer_names_its_end(settings):
    target = TabularTarget(vocab_size=VOCAB, order=2, seed=1, scale=1.5, max_slots=4096)
    assert not target.eos_token_ids
    engine = Engine(target, None, EngineConfig(kv_slots=4096), tokenizer=piece_tokenizer())
    params = [SamplingParams(max_tokens=200, seed=seed, **settings) for seed in range(9)]
    requests = [engine.add(PROMPT, each, PLAIN) for each in params]
    while engine.has_work:
        engine.step()
    for request in requests:
        assert request.finish_reason is FinishReason.STOP
        assert request.token_ids.index(0) == len(request.token_ids) - 1
        assert not settings or spelled(request.token_ids[:-1]) in MATCHES


def test_a_structure_that_outgrows_its_parser_does_not_end_as_if_complete(monkeypatch, caplog):
    """Past a limit llguidance allows an end of sequence alone, whatever is missing."""

    def narrow(grammars: Grammars, name: str, source: str) -> LLMatcher:
        spellings = grammars._read_vocabulary(name, source)
        limits = LLParserLimits(max_lexer_states=100)
        grammar = LLMatcher.grammar_from_regex(source)
        return LLMatcher(spellings, grammar, log_level=0, limits=limits)

    monkeypatch.setattr(Grammars, "_compile", narrow)
    engine = engine_for("regex").engine
    params = SamplingParams(max_tokens=40, seed=1, regex="(a|b)*a(a|b){20}")
    doomed = engine.add(PROMPT, params, PLANS["otbv"])
    other = engine.add(PROMPT, SamplingParams(max_tokens=8, seed=1, ignore_eos=True), PLANS["otbv"])
    while engine.has_work:
        engine.step()
    assert doomed.finish_reason is FinishReason.ERROR
    assert doomed.token_ids
    assert len(other.token_ids) == 8
    assert "too many states" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "(a"}, r"regex='\(a': expected one that llguidance reads \(.*regex parse error"),
        ({"json_schema": {"type": "objekt"}}, "json_schema=.*Invalid type: objekt"),
        ({"json_schema": "{"}, "json_schema='{': expected one that llguidance reads"),
        ({"grammar": "start: what"}, "grammar=.*unknown name"),
    ],
)
def test_a_structure_that_is_none_ends_its_own_request(settings, message):
    engine = engine_for("regex").engine
    with pytest.raises(InvalidArgument, match=message):
        engine.add(PROMPT, SamplingParams(**settings), PLANS["otbv"])
    assert not engine.has_work


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "a"}, "regex='a': expected None, as this engine has no fast tokenizer"),
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias=7: expected token ids in \[0, 7\)"),
        ({"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids=7: expected token ids"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words=7: expected token ids"),
        ({"bad_words": "word"}, "bad_words='word': expected token ids, as this engine has no"),
    ],
)
def test_tokens_that_the_target_does_not_have_are_refused(engine, settings, message):
    with pytest.raises(InvalidArgument, match=message):
        engine.engine.add(PROMPT, SamplingParams(**settings), PLANS["otbv"])


def test_tokens_that_no_text_can_hold_end_none(engine):
    """They take nothing from the tokens of another row, and break no step."""
    settings = {"max_tokens": 8, "min_tokens": 4, "seed": 2, "ignore_eos": True}
    texts = []
    for ends in ((), (VOCAB + 1,), (10**9,)):
        params = SamplingParams(stop_token_ids=ends, **settings)
        request = engine.engine.add(PROMPT, params, PLANS["otbv"])
        engine.run()
        assert request.finish_reason is FinishReason.LENGTH
        texts.append(request.token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_rules_that_leave_no_token_end_their_own_request(engine):
    params = SamplingParams(max_tokens=8, allowed_token_ids=(1, 2), bad_words=((1,), (2,)))
    doomed = engine.engine.add(PROMPT, params, PLANS["otbv"])
    other = engine.engine.add(PROMPT, SamplingParams(max_tokens=8, seed=1), PLANS["otbv"])
    engine.run()
    assert doomed.finish_reason is FinishReason.ERROR
    assert "do not forbid every token" in str(doomed.error)
    assert len(other.token_ids) == 8
