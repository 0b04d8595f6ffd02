"""Which server ``eaglegbv serve`` starts, why, and what each refuses."""

import re
import shlex
from types import SimpleNamespace

import pytest

from eaglegbv.cli import serve

READY = "eaglegbv.backends.sglang.ready"


@pytest.fixture
def started(monkeypatch):
    """What would have been started, by its name: the arguments."""
    calls: dict[str, object] = {}
    monkeypatch.setattr(serve, "serve_local", lambda *given: calls.update(local=given))

    def sglang(*given: object, **how: object) -> SimpleNamespace:
        calls.update(sglang=given)
        return SimpleNamespace(command=("sglang",), environment={"A": "1"})

    monkeypatch.setattr(serve, "_sglang", sglang)
    monkeypatch.setattr("os.execve", lambda *_: calls.update(run=True))
    return calls


@pytest.fixture
def machine(monkeypatch):
    def has(*, installed: bool, accelerator: bool) -> None:
        monkeypatch.setattr(serve, "find_spec", lambda _: object() if installed else None)
        monkeypatch.setattr(f"{READY}.accelerator_exists", lambda: accelerator)

    return has


@pytest.mark.parametrize(
    ("installed", "accelerator", "words", "name", "line"),
    [
        (False, True, "", "local", "local: SGLang is not installed"),
        (True, False, "", "local", "local: there is no accelerator for SGLang"),
        (True, True, "", "sglang", "sglang: it is installed, and there is an accelerator"),
        (True, True, "--backend local", "local", "local: as asked"),
        (False, False, "--backend sglang", "sglang", "sglang: as asked"),
        (True, False, "--dry-run", "sglang", "a dry run needs no accelerator"),
    ],
)
def test_one_line_says_what_serves_and_why(
    cli, machine, started, installed, accelerator, words, name, line
):
    machine(installed=installed, accelerator=accelerator)
    result = cli("serve", "tiny", *words.split())
    assert line in result.err
    assert result.err.count("\n") == 1
    assert name in started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plans 3x4,none", "--plans='3x4,none': expected none with --backend local (SGLang is"),
        ("--dry-run", "--backend sglang has it"),
        ("--tp 2", "'--tp 2': expected no such option with --backend local"),
        ("--backend sglang --max-waiting 3", "--backend local has it"),
        (
            "--backend sglang --widths 3x1x1",
            "--widths='3x1x1': expected none with --backend sglang",
        ),
        ("--backend vllm", "expected one of auto, sglang, local"),
    ],
)
def test_what_only_the_other_has_is_refused_by_name(cli, machine, started, words, message):
    machine(installed=False, accelerator=False)
    result = cli("serve", "tiny", *shlex.split(words), status=2)
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not started


def test_what_sglang_calls_alike_is_passed_on(cli, machine, started, monkeypatch):
    machine(installed=True, accelerator=True)
    monkeypatch.setenv("EAGLEGBV_API_KEY", "secret")
    cli("serve", "tiny", *shlex.split("--port 9 --trust-remote-code --tp 2 --log-level warning"))
    others = " ".join(started["sglang"][6])
    assert others == "--tp 2 --port 9 --log-level warning --trust-remote-code --api-key secret"
    assert started["run"]


def test_one_help_has_what_both_have_and_two_groups(cli):
    said = cli("serve", "--help").out
    groups = re.findall(r"^\S.*:$", said, re.MULTILINE)
    engine, sglang = "This package's engine (--backend local):", "SGLang (--backend sglang):"
    assert groups == ["Arguments:", "Options:", engine, sglang]
    common, own, others = (said.index(f"\n{group}") for group in groups[1:])
    assert common < said.index("--host") < own < said.index("--max-waiting") < others
    assert others < said.index("--plans")
