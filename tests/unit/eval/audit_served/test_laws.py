"""Laws that follow from a report: they are those of the settings, given what is conditioned on."""

from dataclasses import fields, replace

import numpy as np
import pytest
from support import served_laws as made

from eaglegbv.eval.audit.served.laws import (
    Entry,
    Law,
    Settings,
    among_listed,
    outside,
    truncated,
)
from eaglegbv.eval.audit.served.places import Places
from eaglegbv.eval.audit.served.statistics import findings

K, LISTED = 10, 8


@pytest.fixture
def bank():
    return made.Bank.made(3, laws=64, vocab=40)


def places_of(probs, report, draws, seed, earlier=None):
    """Draw from rows of ``probs`` and read lists of ``report``, ``[laws, vocab]`` both."""
    rng = np.random.default_rng(seed)
    laws = rng.integers(len(probs), size=draws)
    tokens = made.inverse(probs[laws], rng.random(draws))
    places = made.places(made.Bank(report, report), tokens[:, None], laws[:, None], K)
    if earlier is not None:
        places = replace(places, counts=np.take_along_axis(earlier[laws], places.tokens, axis=1))
    return places


def laws_of(places):
    """The laws of places, as they are read."""
    laws = []
    for n in range(len(places)):
        columns = (places.tokens[n].tolist(), np.log(places.probs[n, :-1]), places.counts[n])
        entries = [
            Entry(t, float(value), 0.0, int(c)) for t, value, c in zip(*columns, strict=True)
        ]
        drawn = None if places.drawn[n] == places.rest else entries[places.drawn[n]].token
        laws.append(Law(entries, drawn, float(places.probs[n, -1])))
    return laws


def followed(places, rule):
    """The places whose law follows from the reported one."""
    laws = [rule(law) for law in laws_of(places)]
    kept = [n for n, law in enumerate(laws) if law is not None]
    where = [(int(places.answer[n]), int(places.position[n]), 0) for n in kept]
    return Places.of([laws[n] for n in kept], where)


def after(probs, settings, counts):
    """Return what a server samples from: penalties, bias, temperature, top-k, top-p and min-p."""
    logits = np.log(probs)
    logits -= (settings.presence_penalty or 0) * (counts > 0)
    logits -= (settings.frequency_penalty or 0) * counts
    for token, bias in (settings.logit_bias or {}).items():
        logits[:, int(token)] += bias
    law = made.softmax(logits / settings.temperature)
    order = np.argsort(-law, axis=1)
    ranked = np.take_along_axis(law, order, axis=1)
    kept = np.ones(law.shape, bool)
    if settings.top_k is not None:
        kept[:, settings.top_k :] = False
    if settings.top_p is not None:
        kept &= ranked.cumsum(axis=1) - ranked < settings.top_p
    if settings.min_p is not None:
        kept &= ranked >= settings.min_p * ranked[:, :1]
    out = np.zeros_like(law)
    np.put_along_axis(out, order, np.where(kept, ranked, 0.0), axis=1)
    return out / out.sum(axis=1, keepdims=True)


RAW = [
    Settings(temperature=0.6),
    Settings(temperature=1.4, top_k=3),
    Settings(presence_penalty=1.0, frequency_penalty=0.5, temperature=0.8),
    Settings(logit_bias={"3": 1.5, "5": -2.0}, top_k=4),
]


@pytest.mark.parametrize("settings", RAW, ids=str)
def test_among_listed_is_the_law_after_settings(bank, settings):
    counts = np.random.default_rng(0).integers(0, 3, bank.p.shape)
    law = after(bank.p, settings, counts)
    reported = places_of(law, bank.p, 4000, 1, counts)
    places = followed(reported, lambda law: among_listed(law, settings))
    assert len(places) > 1000
    for n in range(0, len(places), 397):  # the same odds as the whole law's, token by token
        tokens = places.tokens[n][places.probs[n, :-1] > 0]
        match = [
            law[r, tokens] / law[r, tokens].sum()
            for r in range(len(law))
            if law[r, tokens].sum() > 0
        ]
        given = places.probs[n, : len(tokens)]
        assert any(np.allclose(each, given, atol=1e-9) for each in match)
    assert not [f.name for f in findings(places, 1e-3) if f.fails]


def test_another_temperature_than_the_one_said_is_found(bank):
    reported = places_of(after(bank.p, Settings(temperature=0.7), bank.p * 0), bank.p, 8000, 2)
    wrong = followed(reported, lambda law: among_listed(law, Settings(temperature=0.8)))
    assert [f.name for f in findings(wrong, 1e-3) if f.fails]


TRUNCATED = [Settings(top_p=0.8), Settings(min_p=0.2), Settings(top_k=4), Settings(top_p=0.5)]


@pytest.mark.parametrize("settings", TRUNCATED, ids=str)
def test_truncated_is_the_law_after_top_p_top_k_and_min_p(bank, settings):
    law = after(bank.p, settings, bank.p * 0)
    reported = places_of(law, bank.p, 4000, 3)
    places = followed(reported, lambda law: truncated(law, settings))
    assert len(places) > 500
    assert (places.drawn < places.rest).all()
    assert not [f.name for f in findings(places, 1e-3) if f.fails]
    assert not any(outside(law, settings) for law in laws_of(reported))


@pytest.mark.parametrize("settings", TRUNCATED, ids=str)
def test_what_is_outside_is_a_proof(bank, settings):
    """A server that ignores the settings draws tokens that no rounding explains."""
    reported = places_of(bank.p, bank.p, 2000, 4)
    excluded = np.array([outside(law, settings) for law in laws_of(reported)])
    law = after(bank.p, settings, bank.p * 0)
    assert excluded.any()
    rng = np.random.default_rng(4)
    laws = rng.integers(len(law), size=2000)
    tokens = made.inverse(bank.p[laws], rng.random(2000))
    assert (law[laws, tokens][excluded] == 0).all()


def test_a_missing_last_row_is_mended_by_the_law_without_the_end(bank):
    """Rows of which the end token was taken out fail, and pass given that it was not drawn."""
    end = int(bank.p.mean(axis=0).argmax())
    reported = places_of(bank.p, bank.p, 8000, 5)
    place = np.arange(len(reported))
    padded = np.append(reported.tokens, np.full((len(reported), 1), -1), axis=1)
    kept = padded[place, reported.drawn] != end
    columns = {f.name: getattr(reported, f.name)[kept] for f in fields(reported)}
    reported = Places(**columns)
    assert [f.name for f in findings(reported, 1e-3) if f.fails]
    mended = followed(reported, lambda law: among_listed(law, Settings(), ends=[end]))
    assert not [f.name for f in findings(mended, 1e-3) if f.fails]
