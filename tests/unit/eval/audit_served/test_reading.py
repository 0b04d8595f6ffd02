"""Rows of servers: what is read of them may not depend on the token drawn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglegbv.eval.audit.served.laws import Rule, Settings, read, rounding
from eaglegbv.eval.audit.served.rows import Answer, Ask, Row, rows_of, sglang_rows, token_of

K = 5


def read_row(row, settings=None):
    """Return the place of a row, and notes."""
    answer = Answer(ask=asked(0, "p"), rows=[row])
    return read([answer], K, Rule(settings or Settings()))


def law_of(row):
    """Return the tokens and log-probabilities that count, and the drawn one (-1: the rest)."""
    places, _ = read_row(row)
    tokens = places.tokens[0][places.tokens[0] >= 0].tolist()
    logprobs = np.log(places.probs[0, : len(tokens)]).tolist()
    return list(zip(tokens, logprobs, strict=True)), int([*places.tokens[0], -1][places.drawn[0]])


def listed(logprobs, drawn, how):
    """List the K most likely tokens as a server does whose habit is ``how``."""
    ranked = sorted(logprobs, key=lambda token: -logprobs[token])
    if how == "drawn first among equals":
        ranked = sorted(ranked, key=lambda token: (-logprobs[token], token != drawn))
        return ranked[:K]
    likely = ranked[:K]
    if how == "drawn first, K or one more":
        return [drawn, *(token for token in likely if token != drawn)]
    if how == "drawn in the place of the last" and drawn not in likely:
        return [drawn, *likely[:-1]]
    return likely  # and the drawn one beside


HABITS = (
    "drawn first, K or one more",
    "drawn in the place of the last",
    "drawn beside",
    "drawn first among equals",
)


@pytest.mark.parametrize("how", HABITS)
@given(levels=st.lists(st.integers(0, 6), min_size=K + 1, max_size=12))
def test_the_law_is_the_same_whatever_was_drawn(how, levels):
    # Few levels: ties, as in bfloat16, are everywhere.
    weights = np.exp2(-np.array(levels, float))
    logprobs = dict(enumerate(np.log(weights / weights.sum()).tolist()))
    laws = {}
    for drawn in logprobs:
        tokens = listed(logprobs, drawn, how)
        row = Row(drawn, logprobs[drawn], [(token, logprobs[token]) for token in tokens])
        law, outcome = law_of(row)
        names = [token for token, _ in law]
        assert outcome == (drawn if drawn in names else -1)
        assert len(names) <= K - 2
        laws[drawn] = tuple(law)
    assert len(set(laws.values())) == 1
    counted = next(iter(laws.values()))
    if counted:  # what is lumped is less likely than all that is not
        others = [logprobs[token] for token in logprobs if token not in dict(counted)]
        assert max(others) < min(logprob for _, logprob in counted) + 1e-6


def test_a_naive_reading_of_such_lists_is_biased():
    """The control: what the rule forbids fails an honest server."""
    rng = np.random.default_rng(0)
    probs = np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.06, 0.04])
    logprobs = dict(enumerate(np.log(probs).tolist()))
    naive, ours = [], []
    for drawn in rng.choice(len(probs), 4000, p=probs).tolist():
        tokens = listed(logprobs, drawn, "drawn in the place of the last")
        mean = sum(math.exp(logprobs[t]) * -logprobs[t] for t in tokens)
        rest = 1 - sum(math.exp(logprobs[t]) for t in tokens)
        naive.append(-logprobs[drawn] - mean - rest * -math.log(rest))
        law, outcome = law_of(Row(drawn, logprobs[drawn], [(t, logprobs[t]) for t in tokens]))
        token, logprob = law[0]
        ours.append(float(outcome == token) - math.exp(logprob))
    z = {n: np.mean(v) / np.std(v) * len(v) ** 0.5 for n, v in (("naive", naive), ("ours", ours))}
    assert abs(z["naive"]) > 10
    assert abs(z["ours"]) < 4


@pytest.mark.parametrize(
    "listed",
    [
        None,  # no list
        [],
        [(1, None), (2, -1.0)],
        [(1, math.nan), (2, -1.0)],
        [(1, 3.5), (2, -1.0)],
        [("a", -1.6), ("a", -1.7), ("b", -1.8)],  # two tokens of one text
        [("a", -1.6), ("b", -1.8)],  # a list shorter than asked
    ],
)
def test_rows_without_a_law(listed):
    entries = [{"token": token, "logprob": logprob} for token, logprob in listed or ()]
    content = [{"token": "a", "logprob": -1.6, "top_logprobs": listed and entries}]
    places, notes = read_row(rows_of({"content": content})[0])
    assert len(places) == 0
    assert notes.unusable == 1


def test_what_stands_for_the_logarithm_of_0_is_no_probability():
    entries = [(1, math.log(0.75)), (2, math.log(0.25)), (3, -9999.0), (4, -9999.0), (5, -9999.0)]
    row = Row(1, math.log(0.75), entries)
    (law, outcome), (_, notes) = law_of(row), read_row(row)
    assert [token for token, _ in law] == [1, 2]
    assert [logprob for _, logprob in law] == pytest.approx(
        [math.log(0.75), math.log(0.25)], abs=1e-5
    )
    assert outcome == 1
    assert notes.impossible == 0
    assert read_row(Row(3, None, entries))[1].impossible == 1
    # A server that leaves them out.
    assert read_row(Row(3, None, entries[:2]))[1].impossible == 1


def test_a_drawn_token_of_a_listed_ones_text_is_another_token():
    entries = [(11, -0.7), (12, -1.4), (13, -2.0), (14, -3.0), (15, -4.0)]
    assert law_of(Row(11, -0.7, entries))[1] == 11
    assert law_of(Row(11, -6.0, entries))[1] == -1


def test_formats_of_servers():
    completions = {
        "tokens": ["token_id:7", " a"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1.5}, None],
    }
    assert rows_of(completions) == [
        Row(7, -0.5, [(7, -0.5), (9, -1.5)]),
        Row(token_of({"token": " a"}), None, None),
    ]
    one = {"token": "a", "bytes": [97], "logprob": -0.5}
    named = {"token": "token_id:7", "bytes": [97], "logprob": -0.5}
    with_id = {"id": 3, **one}
    for told, token in ((one, token_of({"token": "a"})), (named, 7), (with_id, 3)):
        content = [{**told, "top_logprobs": [told]}]
        for logprobs in ({"content": content}, content):
            assert rows_of(logprobs) == [Row(token, -0.5, [(token, -0.5)])]
    sampled = [
        {"id": 3, "prob": 0.25, "top_probs": [{"id": 3, "prob": 0.25}, {"id": 4, "prob": 0}]}
    ]
    (row,) = rows_of(sampled)
    assert row.listed == [(3, math.log(0.25)), (4, -9999.0)]
    assert rows_of([{"id": 3, "logprob": 0.0, "top_logprobs": []}]) == [Row(3, 0.0, None)]
    assert rows_of(None) == rows_of({"content": None}) == []
    meta = {
        "output_token_logprobs": [[-0.5, 3, None]],
        "output_top_logprobs": [[[-0.5, 3, None], [-1.0, 4, None]]],
    }
    assert sglang_rows(meta) == [Row(3, -0.5, [(3, -0.5), (4, -1.0)])]


@pytest.mark.parametrize(
    ("values", "errors"),
    [
        ([-0.5, -1.0234375, -16.125, -9999.0], [2**-9, 2**-8, 2**-4]),  # bfloat16
        ([-0.51, -1.03, -9999.0], [0.005, 0.005]),
        ([-0.51234567, -1.0345678], [0.0, 0.0]),
    ],
)
def test_the_grid_of_numbers(values, errors):
    assert rounding(np.array(values))[: len(errors)] == pytest.approx(errors)


@given(st.floats(-30, -1e-3))
def test_half_a_unit_of_bfloat16_is_a_bound(value):
    import torch

    rounded = np.array([float(torch.tensor(value, dtype=torch.bfloat16))])
    assert 0 < rounding(rounded)[0] < 0.01 * abs(value)
    assert abs(rounded[0] - value) <= rounding(rounded)[0]


def asked(number, prompt):
    return Ask(part="long", number=number, prompt=prompt, tokens=3)


def test_places_of_answers():
    entries = [(4, math.log(0.5)), (2, math.log(0.25)), (9, math.log(0.125)), (3, -2.5), (1, -3.0)]
    rows = [Row(4, math.log(0.5), entries), Row(8, -5.0, entries), Row(4, math.log(0.5), None)]
    answers = [
        Answer(ask=asked(0, "p"), rows=rows),
        Answer(ask=asked(1, "p"), rows=rows[:2], error="cut off"),
        Answer(ask=asked(2, "q"), rows=[], error="nothing came"),
    ]
    places, notes = read(answers, K, Rule(Settings()))
    assert len(places) == 4
    assert places.drawn.tolist() == [0, places.rest, 0, places.rest]
    assert places.probs[0] == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=1e-5)
    assert places.tokens[0].tolist() == [4, 2, 9]
    assert places.counts[1].tolist() == [1, 0, 0]
    assert places.context.tolist() == [places.context[0], places.context[1]] * 2
    assert places.answer.tolist() == [0, 0, 1, 1]
    assert places.position.tolist() == [0, 1, 0, 1]
    assert notes.unusable == 1
    assert notes.over_one == notes.impossible == 0


def test_probabilities_that_add_up_to_more_than_one_are_counted():
    entries = [(4, math.log(0.6)), (2, math.log(0.3)), (9, math.log(0.2)), (3, -2.5), (1, -3.0)]
    answer = Answer(ask=asked(0, "p"), rows=[Row(4, entries[0][1], entries)])
    assert read([answer], K, Rule(Settings()))[1].over_one == 1


def test_a_token_that_a_whole_list_lacks_is_impossible():
    entries = [(1, math.log(0.75)), (2, math.log(0.25)), (3, -9999.0), (4, -9999.0), (5, -9999.0)]
    answer = Answer(ask=asked(0, "p"), rows=[Row(8, -9999.0, entries)])
    assert read([answer], K, Rule(Settings()))[1].impossible == 1


def test_no_answers_are_no_places():
    assert len(read([], K, Rule(Settings()))[0]) == 0
