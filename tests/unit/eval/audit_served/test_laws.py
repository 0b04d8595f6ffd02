"""Laws that follow from a report: they are those of the settings, given what is conditioned on."""

from dataclasses import fields, replace

import numpy as np
import pytest
from msgspec import structs
from support import served_laws as made

from eaglegbv.eval.audit.served.laws import Places, Reported, Rule, Settings
from eaglegbv.eval.audit.served.statistics import findings

K, LISTED = 10, 8


@pytest.fixture
def bank():
    return made.Bank.made(3, laws=64, vocab=40)


def drawn_from(probs, report, draws, seed, earlier=None):
    """Draw from rows of ``probs`` and read lists of ``report``, ``[laws, vocab]`` both."""
    rng = np.random.default_rng(seed)
    laws = rng.integers(len(probs), size=draws)
    tokens = made.inverse(probs[laws], rng.random(draws))
    places = made.places(made.Bank(report, report), tokens[:, None], laws[:, None], K)
    if earlier is not None:
        places = replace(places, counts=np.take_along_axis(earlier[laws], places.tokens, axis=1))
    return places


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


def failing(places):
    return [finding.name for finding in findings(places, 1e-3) if finding.fails]


RAW = [
    Settings(temperature=0.6),
    Settings(temperature=1.4, top_k=3),
    Settings(presence_penalty=1.0, frequency_penalty=0.5, temperature=0.8),
    Settings(logit_bias={"3": 1.5, "5": -2.0}, top_k=4),
    Settings(temperature=0.8, min_p=0.1, top_k=6),
]
TRUNCATED = [Settings(top_p=0.8), Settings(min_p=0.2), Settings(top_k=4), Settings(top_p=0.5)]


@pytest.mark.parametrize("settings", RAW + TRUNCATED, ids=str)
def test_the_law_is_that_after_settings(bank, settings):
    counts = np.random.default_rng(0).integers(0, 3, bank.p.shape)
    law = after(bank.p, settings, counts)
    places, excluded = Rule(settings).follow(drawn_from(law, bank.p, 4000, 1, counts))
    assert not excluded.any()
    assert len(places) > 1000
    assert (places.drawn < places.rest).all()
    for n in range(0, len(places), 397):  # the same odds as the whole law's, token by token
        tokens = places.tokens[n][places.probs[n, :-1] > 0]
        match = [
            law[r, tokens] / law[r, tokens].sum()
            for r in range(len(law))
            if law[r, tokens].sum() > 0
        ]
        given = places.probs[n, : len(tokens)]
        assert any(np.allclose(each, given, atol=1e-9) for each in match)
    assert not failing(places)


@pytest.mark.parametrize("settings", TRUNCATED, ids=str)
def test_limits_of_a_law_after_temperature(bank, settings):
    warped = after(bank.p, Settings(temperature=0.7), bank.p * 0)
    law = after(warped, settings, bank.p * 0)
    rule = Rule(structs.replace(settings, temperature=0.7), Reported.WARPED)
    places, excluded = rule.follow(drawn_from(law, warped, 4000, 3))
    assert not excluded.any()
    assert len(places) > 500
    assert not failing(places)


@pytest.mark.parametrize("settings", TRUNCATED, ids=str)
def test_a_law_after_limits_needs_none(bank, settings):
    """Its masses are of what is left: they say nothing of where the limit was."""
    law = after(bank.p, settings, bank.p * 0)
    law = np.maximum(law, 1e-12)
    reported = drawn_from(law, law, 4000, 6)
    places, excluded = Rule(settings, Reported.ALL).follow(reported)
    assert not excluded.any()
    assert len(places) == 4000
    assert not failing(places)


def test_another_temperature_than_the_one_said_is_found(bank):
    reported = drawn_from(after(bank.p, Settings(temperature=0.7), bank.p * 0), bank.p, 8000, 2)
    assert failing(Rule(Settings(temperature=0.8)).follow(reported)[0])


@pytest.mark.parametrize("settings", [*TRUNCATED, Settings(min_p=0.2, temperature=0.8)], ids=str)
def test_what_is_excluded_is_a_proof(bank, settings):
    """A server that ignores limits draws tokens that no rounding explains."""
    warped = after(bank.p, Settings(temperature=settings.temperature), bank.p * 0)
    _, excluded = Rule(settings).follow(drawn_from(warped, bank.p, 2000, 4))
    law = after(bank.p, settings, bank.p * 0)
    rng = np.random.default_rng(4)
    laws = rng.integers(len(law), size=2000)
    tokens = made.inverse(warped[laws], rng.random(2000))
    assert excluded.any()
    assert (law[laws, tokens][excluded] == 0).all()
    # Most of what the settings exclude is proved.
    assert excluded.sum() > 0.5 * (law[laws, tokens] == 0).sum()


def test_tokens_that_tie_at_a_limit_prove_nothing():
    """Servers break ties as they like: either may be drawn, and neither counts."""
    probs = np.array([[0.4, 0.2, 0.2, 0.1, 0.1]] * 4)
    tokens = np.array([[1, 2, 3, 4]] * 4)
    nothing = np.zeros(4, int)
    places = Places(probs, probs[:, 1:] * 0, tokens, tokens * 0, np.arange(4), *[nothing] * 3)
    for settings in (Settings(top_k=2), Settings(top_p=0.5)):
        law, excluded = Rule(settings).follow(places)
        assert excluded.tolist() == [False, False, False, True]
        assert law.drawn.tolist() == [0]
        assert law.probs[0].tolist() == [1, 0, 0, 0, 0]


def test_a_missing_last_row_is_mended_by_the_law_without_the_end(bank):
    """Rows of which the end token was taken out fail, and pass given that it was not drawn."""
    end = int(bank.p.mean(axis=0).argmax())
    reported = drawn_from(bank.p, bank.p, 8000, 5)
    place = np.arange(len(reported))
    padded = np.append(reported.tokens, np.full((len(reported), 1), -1), axis=1)
    kept = padded[place, reported.drawn] != end
    columns = {f.name: getattr(reported, f.name)[kept] for f in fields(reported)}
    reported = Places(**columns)
    assert failing(reported)
    assert not failing(Rule(Settings(), ends=[end]).follow(reported)[0])
