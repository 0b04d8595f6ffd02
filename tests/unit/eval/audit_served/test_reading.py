"""Rows of servers: what is read of them may not depend on the token drawn."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglegbv.eval.audit.served.laws import Grid, Law, Rule, Settings, law_of
from eaglegbv.eval.audit.served.places import read
from eaglegbv.eval.audit.served.rows import Answer, Ask, Row, rows_of, sglang_rows

K = 5


def read_row(row):
    return law_of(row, K, Grid(), Counter())


def pairs(law):
    return [(entry.token, entry.logprob) for entry in law.entries]


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
        law = read_row(row)
        assert isinstance(law, Law)
        names = [entry.token for entry in law.entries]
        assert law.drawn == (drawn if drawn in names else None)
        assert len(names) <= K - 2
        laws[drawn] = tuple(pairs(law))
    assert len(set(laws.values())) == 1
    counted = next(iter(laws.values()))
    if counted:  # what is lumped is less likely than all that is not
        others = [logprobs[token] for token in logprobs if token not in dict(counted)]
        assert max(others) < min(logprob for _, logprob in counted)


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
        law = read_row(Row(drawn, logprobs[drawn], [(t, logprobs[t]) for t in tokens]))
        first = law.entries[0]
        ours.append(float(law.drawn == first.token) - first.prob)
    z = {n: np.mean(v) / np.std(v) * len(v) ** 0.5 for n, v in (("naive", naive), ("ours", ours))}
    assert abs(z["naive"]) > 10
    assert abs(z["ours"]) < 4


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row(1, -0.5, None), "no list"),
        (Row(1, -0.5, [(1, None), (2, -1.0)]), "no log-probabilities"),
        (Row(1, -0.5, [(1, math.nan), (2, -1.0)]), "no log-probabilities"),
        (Row(1, -0.5, [(1, 3.5), (2, -1.0)]), "no log-probabilities"),
        (Row("a", -1.6, [("a", -1.6), ("a", -1.7), ("b", -1.8)]), "two tokens of one text"),
        (Row("a", -1.6, [("a", -1.6), ("b", -1.8)]), "a list shorter than asked"),
    ],
)
def test_rows_without_a_law(row, why):
    assert read_row(row) == why


def test_what_stands_for_the_logarithm_of_0_is_no_probability():
    entries = [(1, math.log(0.75)), (2, math.log(0.25)), (3, -9999.0), (4, -9999.0), (5, -9999.0)]
    law = read_row(Row(1, math.log(0.75), entries))
    assert pairs(law) == entries[:2]
    assert law.closed
    assert not law.impossible
    assert read_row(Row(3, None, entries)).impossible
    assert read_row(Row(1, math.log(0.75), entries[:2])).closed  # a server that leaves them out


def test_a_drawn_token_of_a_listed_ones_text_is_another_token():
    entries = [("a", -0.7), ("b", -1.4), ("c", -2.0), ("d", -3.0), ("e", -4.0)]
    assert read_row(Row("a", -0.7, entries)).drawn == "a"
    assert read_row(Row("a", -6.0, entries)).drawn is None


def test_formats_of_servers():
    completions = {
        "tokens": ["token_id:7", " a"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1.5}, None],
    }
    assert rows_of(completions) == [
        Row(7, -0.5, [(7, -0.5), (9, -1.5)]),
        Row(" a", None, None),
    ]
    one = {"token": "a", "bytes": [97], "logprob": -0.5}
    named = {"token": "token_id:7", "bytes": [97], "logprob": -0.5}
    with_id = {"id": 3, **one}
    for told, token in ((one, "61"), (named, 7), (with_id, 3)):
        content = [{**told, "top_logprobs": [told]}]
        for logprobs in ({"content": content}, content):
            assert rows_of(logprobs) == [Row(token, -0.5, [(token, -0.5)])]
    sampled = [
        {"id": 3, "prob": 0.25, "top_probs": [{"id": 3, "prob": 0.25}, {"id": 4, "prob": 0}]}
    ]
    (row,) = rows_of(sampled)
    assert row.listed == [(3, math.log(0.25)), (4, -math.inf)]
    assert rows_of([{"id": 3, "logprob": 0.0, "top_logprobs": []}]) == [Row(3, 0.0, None)]
    assert rows_of(None) == rows_of({"content": None}) == []
    meta = {
        "output_token_logprobs": [[-0.5, 3, None]],
        "output_top_logprobs": [[[-0.5, 3, None], [-1.0, 4, None]]],
    }
    assert sglang_rows(meta) == [Row(3, -0.5, [(3, -0.5), (4, -1.0)])]


@pytest.mark.parametrize(
    ("values", "expected", "error"),
    [
        (np.array([-0.5, -1.0234375, -16.125]), Grid(bits=8), [2**-9, 2**-8, 2**-4]),
        (np.array([-0.51, -1.03]), Grid(decimals=2), [0.005, 0.005]),
        (np.array([-0.51234567, -1.0345678]), Grid(), [0.0, 0.0]),
    ],
)
def test_the_grid_of_numbers(values, expected, error):
    assert Grid.of(values) == expected
    assert [Grid.of(values).error(value) for value in values] == pytest.approx(error)


@given(st.floats(-30, -1e-3))
def test_half_a_unit_of_bfloat16_is_a_bound(value):
    import torch

    rounded = np.array([float(torch.tensor(value, dtype=torch.bfloat16))])
    assert Grid.of(rounded).bits == 8
    assert abs(rounded[0] - value) <= Grid(bits=8).error(rounded[0])


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
    assert notes.answers == 3
    assert notes.places == 5
    assert dict(notes.unusable) == {"no list": 1}
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
