"""The engine on the tiny pair with planted faults: each is found, and the honest engine passes."""

import asyncio
import statistics
import sys
from contextlib import contextmanager

import httpx
import pytest

from eaglegbv.config import Plan as TreePlan
from eaglegbv.eval.audit.served.client import Client, Server, Store
from eaglegbv.eval.audit.served.faults import FAULTS, planted
from eaglegbv.eval.audit.served.laws import Settings
from eaglegbv.eval.audit.served.report import Verdict
from eaglegbv.eval.audit.served.run import Audit, Plan
from eaglegbv.llm import LLM

COLD = Settings(temperature=0.7)
SETTINGS = {
    "temperature-ignored": COLD,
    "raw-bonus": COLD,
    "penalty-ignored": Settings(presence_penalty=1.0),
    "late-top-p": Settings(top_p=0.8),
}
TOKENS = {
    "temperature-ignored": 1600,
    "greedy-drafts": 1600,
    "other-temperature": 4000,
    "half-threshold": 100_000,
    "likely-accepted": 40_000,
    "no-residual": 16_000,
    "number-reused": 16_000,
    "steps-alike": 40_000,
    "raw-bonus": 40_000,
    "pruned-drafts": 4000,
    "penalty-ignored": 16_000,
    "late-top-p": 1600,
    "wrong-row": 4000,
}
"""Tokens with which each fault is found; those of the table in docs/study/served_audit.md."""


OWN = {
    "otbv": TreePlan(verifier="otbv", paths=3, depth=4),
    "block": TreePlan(verifier="block", paths=1, depth=4),
    "spectr_gbv": TreePlan(verifier="spectr_gbv", paths=3, depth=4),
    "auto": None,
}


@contextmanager
def served(plan, dtype="float32"):
    """The local server of the tiny pair, without a network."""
    from eaglegbv.server import Server as LocalServer

    llm = LLM("tiny", plan=plan, dtype=dtype)
    try:
        yield LocalServer(llm, "tiny", None, limit=512).app()
    finally:
        llm.close()


@contextmanager
def engine(fault, dtype="float32"):
    with (
        planted(fault) as verifier,
        served(TreePlan(verifier=verifier, paths=1, depth=4), dtype) as app,
    ):
        yield app


def audited(app, plan, settings=None, model=None):
    server = Server(url="http://local", settings=settings or Settings())
    client = Client(server=server, transport=httpx.ASGITransport(app), timeout=600)
    audit = Audit(client, plan, Store(), lambda text: None, model=model)
    return asyncio.run(audit.run())


def plan_of(tokens, level=1e-3):
    return Plan(long=tokens // 2, copies=tokens // 2, seeds=0, greedy=0, level=level)


def test_a_planted_fault_is_found():
    with engine("greedy-drafts") as app:
        report = audited(app, plan_of(1600))
    assert report.verdict is Verdict.FAILS, report.lines()


def test_the_honest_engine_passes_and_tells_as_many_tokens_as_it_counts():
    with engine("none") as app:
        report = audited(app, Plan(long=1200, copies=600, seeds=20, greedy=32, compared=100))
    verdicts = {feature.name: feature.verdict for feature in report.features}
    assert set(verdicts.values()) == {Verdict.PASSES}, report.lines()
    assert set(verdicts) > {"sampling", "n", "seeds", "temperature 0", "counts", "laws"}


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "verdict"), [("none", "passes"), ("wrong-row", "fails")])
def test_laws_are_compared_with_those_of_a_model_by_transformers(fault, verdict):
    with engine(fault) as app:
        plan = Plan(long=200, copies=0, seeds=0, greedy=0, compared=200)
        report = audited(app, plan, model="tiny")
    verdicts = {feature.name: feature.verdict for feature in report.features}
    assert verdicts["laws"] == verdict, report.lines()


@pytest.mark.hours
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_every_planted_fault_is_found(fault, capsys):
    """Prints a row of the table in docs/study/served_audit.md."""
    with engine(fault) as app:
        plan, settings = plan_of(TOKENS[fault]), SETTINGS.get(fault)
        reports = [audited(app, plan, settings) for _ in range(10)]
    failing = [report.tokens for report in reports if report.verdict is Verdict.FAILS]
    needed = f"{statistics.median(failing):,.0f}" if failing else "-"
    with capsys.disabled():
        sys.stdout.write(f"| `{fault}` | {TOKENS[fault]:,} | {len(failing)} of 10 | {needed} |\n")
    assert len(failing) >= 9, [report.lines() for report in reports]


@pytest.mark.hours
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", OWN)
def test_the_local_server_passes(name):
    with served(OWN[name]) as app:
        report = audited(app, plan_of(8000))
    assert report.verdict is Verdict.PASSES, report.lines()


@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_the_honest_engine_in_bfloat16_passes():
    """20 audits at level 0.01 raise at most one alarm."""
    with engine("none", "bfloat16") as app:
        reports = [audited(app, plan_of(5000, 0.01)) for _ in range(20)]
    failing = [report.lines() for report in reports if report.verdict is Verdict.FAILS]
    assert len(failing) <= 1, failing
