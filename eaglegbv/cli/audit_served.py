"""``eaglegbv audit served URL``: is a running server's sampling what it says it is?"""

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import opt
from eaglegbv.cli.structs import Fields
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit.served.client import Client, Server, Store
from eaglegbv.eval.audit.served.laws import Settings
from eaglegbv.eval.audit.served.report import Verdict
from eaglegbv.eval.audit.served.run import PROMPTS, Audit, Plan

STATUS = {Verdict.PASSES: 0, Verdict.FAILS: 1, Verdict.UNKNOWN: 3}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}

app = opts.make_app()


@app.command()
def served(
    url: Annotated[str, typer.Argument(help="Address of the server.")],
    kind: Annotated[
        str, opt("How it is asked: completions, chat, sglang or llama.cpp (their own endpoints).")
    ] = "completions",
    model: Annotated[str | None, opt("Model to ask for, if the server has several.")] = None,
    api_key: Annotated[
        str, typer.Option(help="Key to give.", envvar="EAGLEGBV_API_KEY", show_default=False)
    ] = "none",
    prompts: Annotated[Path | None, opt("File with a prompt a line.", shown="six")] = None,
    *,
    settings: Annotated[Settings, Fields(without=("logit_bias",))],
    logit_bias: Annotated[str | None, opt("Added to logits, by token id: a JSON object.")] = None,
    extra: Annotated[str, opt("More fields of every request: a JSON object.")] = "{}",
    plan: Plan,
    end: Annotated[
        tuple[int, ...], opt("Ids of tokens that end answers without a row of their own.")
    ] = (),
    top: Annotated[int, opt("Likely tokens to ask for at each place.")] = 20,
    against: Annotated[str | None, opt("Server of the same model to compare laws with.")] = None,
    against_model: Annotated[
        str | None, opt("Model to compare laws with, a folder or on the hub, by transformers.")
    ] = None,
    concurrency: Annotated[int, opt("Requests at once.")] = 8,
    max_requests: Annotated[int, opt("Most requests to send.")] = 100_000,
    budget: Annotated[str | None, opt("Time after which no request begins, such as 10m.")] = None,
    timeout: Annotated[float, opt("Seconds without a token after which an answer ends.")] = 120.0,
    out: Annotated[Path | None, opt("Folder of the answers; a stopped audit goes on.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File for the report as JSON.")
    ] = None,
    junit: Annotated[Path | None, opt("File for the report as JUnit's XML.")] = None,
) -> None:
    """Test whether a running server draws its tokens from the laws that it reports.

    Asks for log-probabilities, and tests the tokens against them; no model is needed. It says
    beforehand how much it will ask for. docs/study/served_audit.md tells how to start servers.

    Exit status: 0 the server passes; 1 it fails; 2 bad input; 3 the audit cannot tell.

    \b
    Examples:
      eaglegbv audit served http://127.0.0.1:8000/v1
      eaglegbv audit served http://127.0.0.1:30000 --kind sglang --temperature 0.7 --budget 10m
    """
    for path, option in ((json_path, "json"), (junit, "junit")):
        opts.check_out(path, option)
    biases = None if logit_bias is None else _object("logit_bias", logit_bias)
    server = Server(
        url=url,
        kind=kind,
        model=model,
        key=api_key,
        settings=msgspec.structs.replace(settings, logit_bias=biases),
        top=top,
        extra=_object("extra", extra),
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + _seconds(budget)
    client = Client(
        server=server,
        concurrency=concurrency,
        timeout=timeout,
        most_requests=max_requests,
        until=until,
    )
    audit = Audit(
        client,
        plan,
        Store(None if out is None else out / "answers.jsonl", _say),
        _say,
        PROMPTS if prompts is None else prompts.read_text(encoding="utf-8").splitlines(),
        end,
        against=None if against is None else replace(client, server=replace(server, url=against)),
        model=against_model,
    )
    report = asyncio.run(audit.run())
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report.told()), indent=2))
    if junit is not None:
        junit.write_text(report.junit(), encoding="utf-8")
    for line in report.lines():
        typer.echo(line)
    raise typer.Exit(STATUS[report.verdict])


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _object(name: str, text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(name, text, f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise InvalidArgument(name, text, "a JSON object")
    return value


def _seconds(text: str | None) -> float:
    if text is None:
        return float("inf")
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if parts is None:
        raise InvalidArgument("budget", text, "a time such as 90s, 10m or 1h")
    return float(parts[1]) * SECONDS[parts[2]]
