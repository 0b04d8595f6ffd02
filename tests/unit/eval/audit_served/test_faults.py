"""The engine on the tiny pair with planted faults: each is found, and the honest engine passes."""

import asyncio

import httpx
import pytest

from eaglegbv.config import Plan as TreePlan
from eaglegbv.eval.audit.served.client import Client, Server
from eaglegbv.eval.audit.served.faults import FAULTS, planted
from eaglegbv.eval.audit.served.places import Settings
from eaglegbv.eval.audit.served.report import Verdict
from eaglegbv.eval.audit.served.run import Audit, Plan, Store
from eaglegbv.llm import LLM

PENALISED = Settings(presence_penalty=1.0)
COLD = Settings(temperature=0.7)
LIMITED = Settings(top_p=0.8)
SETTINGS = {
    "temperature-ignored": COLD,
    "raw-bonus": COLD,
    "penalty-ignored": PENALISED,
    "late-top-p": LIMITED,
}


def audit_engine(fault, plan, dtype="float32", seed=0):
    from eaglegbv.server import Server as LocalServer

    with planted(fault) as verifier:
        llm = LLM("tiny", plan=TreePlan(verifier=verifier, paths=1, depth=4), dtype=dtype)
        app = LocalServer(llm, "tiny", None, limit=512).app()
        server = Server(url="http://local", settings=SETTINGS.get(fault, Settings()))
        client = Client(server=server, transport=httpx.ASGITransport(app), timeout=600)
        try:
            return asyncio.run(Audit(client, plan, Store(), lambda text: None).run())
        finally:
            llm.close()


def test_a_planted_fault_is_found():
    plan = Plan(long=800, copies=1600, seeds=0, greedy=0)
    report = audit_engine("pruned-drafts", plan)
    assert report.verdict is Verdict.FAILS, report.lines()


@pytest.mark.hours
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_every_planted_fault_is_found(fault):
    plan = Plan(long=20_000, copies=20_000, seeds=0, greedy=0)
    assert audit_engine(fault, plan).verdict is Verdict.FAILS


@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_the_honest_engine_in_bfloat16_passes():
    """20 audits at level 0.01 raise at most one alarm."""
    plan = Plan(long=3000, copies=2000, seeds=0, greedy=0, level=0.01)
    reports = [audit_engine("none", plan, "bfloat16", seed) for seed in range(20)]
    assert sum(report.verdict is Verdict.FAILS for report in reports) <= 1
