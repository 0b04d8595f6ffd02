"""Whole audits of servers that are honest, biased, or in trouble."""

import asyncio
import json
import subprocess
import sys
from xml.etree import ElementTree

import msgspec
import pytest
from support.served_fake import FakeServer, K

from eaglegbv.eval.audit.served.client import Client, Server, Store
from eaglegbv.eval.audit.served.laws import Rule, Settings, read
from eaglegbv.eval.audit.served.report import Verdict
from eaglegbv.eval.audit.served.rows import Ask
from eaglegbv.eval.audit.served.run import Audit, Plan

SMALL = Plan(long=900, copies=700, length=50, seeds=20, greedy=10)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("eaglegbv.eval.audit.served.client.FIRST_PAUSE", 0.0)


def audit(fake, plan=SMALL, path=None, settings=None, kind="completions", extra=None):
    server = Server(
        url="http://fake", kind=kind, top=K, settings=settings or Settings(), extra=extra or {}
    )
    client = Client(server=server, transport=fake.transport(), retries=2, most_failures=3)
    return Audit(client, plan, Store(path), lambda text: None)


def against(fake, other, **plan):
    audited = audit(fake, msgspec.structs.replace(SMALL, compared=100, **plan))
    server = Server(url="http://other", top=K)
    audited.against = Client(server=server, transport=other.transport())
    return asyncio.run(audited.run())


def report_of(fake, **how):
    return asyncio.run(audit(fake, **how).run())


def verdicts(report):
    return {feature.name: feature.verdict for feature in report.features}


@pytest.mark.parametrize(
    ("kind", "habit"), [("completions", "beside"), ("chat", "in place"), ("chat", "beside")]
)
def test_an_honest_server_passes(kind, habit):
    report = report_of(FakeServer(habit=habit), kind=kind)
    assert report.verdict is Verdict.PASSES, report.lines()
    assert verdicts(report) == dict.fromkeys(
        ("sampling", "temperature", "n", "equal seeds", "seeds", "temperature 0", "counts"),
        Verdict.PASSES,
    )
    assert report.places > 1200


def test_a_biased_server_fails_and_the_audit_stops_asking():
    fake = FakeServer(leak=0.3)
    report = report_of(fake)
    assert report.verdict is Verdict.FAILS
    assert report.tokens < 1600
    assert any(
        "most likely token" in line and "more than reported" in line for line in report.lines()
    )


@pytest.mark.parametrize("processed", [False, True])
def test_the_law_that_is_reported_is_found_out(processed):
    """Settings are covered without a flag, whether the server reports the law before or after."""
    settings = Settings(temperature=0.7)
    report = report_of(FakeServer(processed=processed), settings=settings)
    assert report.law == (
        "after temperature and penalties, and before limits" if processed else "before all settings"
    )
    assert report.verdict is Verdict.PASSES


def test_what_the_law_does_not_show_is_not_told():
    report = report_of(FakeServer(), settings=Settings(temperature=0.7, top_p=0.9))
    assert verdicts(report)["top_p"] is Verdict.UNKNOWN
    assert report.verdict is Verdict.UNKNOWN
    # This server ignores top-p, which a law before nothing else shows.
    report = report_of(FakeServer(), settings=Settings(top_p=0.5))
    assert report.verdict is Verdict.FAILS
    assert "cannot be drawn" in report.features[0].why


@pytest.mark.parametrize("trouble", [429, 500, "die", "cut", "garbage", "error", "no logprobs"])
def test_troubles_lose_nothing_that_came(trouble):
    fake = FakeServer(troubles=[None] * 3 + [trouble] * 2)
    asks = [Ask(number=i, part="long", prompt="a", tokens=10) for i in range(12)]
    store = Store()
    server = Server(url="http://fake", top=K)
    client = Client(server=server, transport=fake.transport(), concurrency=2)
    asyncio.run(client.collect(asks, store))
    answers = store.of("long")
    assert sorted(answer.ask.number for answer in answers) == list(range(12))
    sizes = [len(answer.rows) for answer in answers]
    if trouble in ("cut", "garbage", "error"):  # what came counts, and is not asked for again
        assert sorted(sizes) == [3] * 2 + [10] * 10
        assert sum(answer.error is not None for answer in answers) == 2
        assert len(fake.bodies) == 12
    elif trouble == "no logprobs":
        assert sorted(sizes) == [4] * 2 + [10] * 10
    else:
        assert sizes == [10] * 12
        assert len(fake.bodies) == 14
    assert len(read(answers, K, Rule(Settings()))[0]) == sum(sizes)


def test_a_server_that_stalls_loses_nothing_that_came():
    body = {"prompt": "a", "max_tokens": 10, "logprobs": K}
    events = b"".join(FakeServer().events(body, "cut", chat=False))  # of three tokens
    store = Store()

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        writer.write(head + events)
        await reader.read()  # until the client leaves
        writer.close()

    async def run():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            server = Server(url=f"http://127.0.0.1:{port}", top=K)
            ask = Ask(number=0, part="long", prompt="a", tokens=10)
            await Client(server=server, timeout=2.0).collect([ask], store)

    asyncio.run(run())
    (kept,) = store.answers
    assert len(kept.rows) == 3
    assert "ReadTimeout" in kept.error


def test_tokens_are_rounds_and_accepted_drafts():
    report = report_of(FakeServer(accepted=9))
    assert verdicts(report)["counts"] is Verdict.FAILS
    assert report.verdict is Verdict.FAILS


@pytest.mark.parametrize("leak", [0.0, 0.3])
def test_laws_are_asked_for_anew_where_drafted_tokens_have_none(leak):
    """As with llama.cpp: nothing is listed of drafted tokens, and a request for one drafts none."""
    told = report_of(FakeServer(drafts=True))
    assert told.verdict is Verdict.UNKNOWN
    plan = msgspec.structs.replace(SMALL, reasked=True)
    report = report_of(FakeServer(drafts=True, leak=leak), plan=plan)
    assert report.verdict is (Verdict.FAILS if leak else Verdict.PASSES), report.lines()
    assert leak or report.places > 1200


def test_texts_are_asked_for_anew_once():
    fake = FakeServer()
    report_of(fake, plan=msgspec.structs.replace(SMALL, reasked=True, seeds=0, greedy=0))
    texts = [tuple(body["prompt"]) for body in fake.bodies if isinstance(body["prompt"], list)]
    assert len(set(texts)) == len(texts) > 500


def test_laws_are_compared_with_another_servers():
    same = against(FakeServer(), FakeServer(seed=0))
    assert verdicts(same)["laws"] is Verdict.PASSES
    other = against(FakeServer(), FakeServer(seed=1))
    assert verdicts(other)["laws"] is Verdict.FAILS
    assert verdicts(other)["sampling"] is Verdict.PASSES
    # The same server, asked again: a report that is not of what comes next would differ.
    rescored = report_of(FakeServer(), plan=msgspec.structs.replace(SMALL, compared=100))
    assert verdicts(rescored)["laws"] is Verdict.PASSES


def test_a_cap_of_requests_is_kept():
    fake = FakeServer()
    audited = audit(fake)
    audited.client.most_requests = 40
    report = asyncio.run(audited.run())
    assert len(fake.bodies) == report.requests == 40
    assert report.verdict is Verdict.UNKNOWN
    assert any("budget" in note for note in report.notes)


def test_settings_that_change_nothing_are_asked_for():
    """Otherwise a server takes the defaults of its model, of which its law may show nothing."""
    fake = FakeServer()
    report_of(fake, settings=Settings(top_k=3, temperature=0.9))
    assert all(body["top_p"] == 1.0 for body in fake.bodies)
    assert all(body["min_p"] == 0.0 for body in fake.bodies)
    assert fake.bodies[-1]["top_k"] == 3
    fake = FakeServer()
    fake.refused = {"top_p": 1.0}
    assert any("its own defaults" in note for note in report_of(fake).notes)


def test_a_server_that_dies_leaves_a_report():
    fake = FakeServer(troubles=[None] * 40 + ["die"] * 1000)
    report = report_of(fake)
    assert report.verdict is Verdict.UNKNOWN
    assert any("in a row gave nothing: ConnectError" in note for note in report.notes)
    assert report.tokens > 0


def test_a_server_without_logprobs_gets_no_verdict():
    fake = FakeServer()
    fake.logprobs = lambda *_, **__: None
    report = report_of(fake)
    assert report.verdict is Verdict.UNKNOWN


def test_fields_that_a_server_refuses_are_left_out():
    fake = FakeServer()
    fake.refused = {"return_tokens_as_token_ids": True, "logprobs": K}
    report = report_of(fake)
    assert report.verdict is Verdict.PASSES
    assert fake.bodies[-1]["logprobs"] == 5
    assert "return_tokens_as_token_ids" not in fake.bodies[-1]


def test_a_stopped_audit_goes_on(tmp_path):
    path = tmp_path / "answers.jsonl"
    first = FakeServer(troubles=[None] * 36 + ["die"] * 1000)
    asyncio.run(audit(first, path=path).run())
    kept = path.read_bytes().splitlines()
    with path.open("ab") as file:
        file.write(b'{"request": 3, "pa')  # a line that was being written
    second = FakeServer()
    report = asyncio.run(audit(second, path=path).run())
    assert report.verdict is Verdict.PASSES
    assert path.read_bytes().splitlines()[: len(kept)] == kept
    whole = FakeServer()
    asyncio.run(audit(whole).run())
    assert len(second.bodies) < len(whole.bodies) - 20


def test_the_report_for_machines():
    report = report_of(FakeServer())
    told = json.loads(msgspec.json.encode(report.told()))
    assert told["verdict"] == "passes"
    assert {finding["name"] for finding in told["findings"]} >= {"top", "surprise", "copies"}
    assert all(finding["smallest_shift"] > 0 for finding in told["findings"])
    suite = ElementTree.fromstring(report.junit())
    assert suite.get("failures") == suite.get("skipped") == "0"
    assert int(suite.get("tests")) == len(report.findings) + len(report.features)
    failing = report_of(FakeServer(leak=0.3))
    suite = ElementTree.fromstring(failing.junit())
    assert int(suite.get("failures")) == len(list(suite.iter("failure"))) > 0


@pytest.mark.parametrize("arguments", [["--help"], ["http://127.0.0.1:9", "--long", "x"]])
def test_the_command_needs_no_torch(arguments):
    code = (
        "import sys\n"
        "from eaglegbv.cli.main import main\n"
        "try:\n    main(['audit', 'served', *sys.argv[1:]])\n"
        "except SystemExit:\n    pass\n"
        "loaded = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert 'eaglegbv.eval.audit.served.run' in sys.modules\n"
        "sys.exit(bool(loaded))"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
