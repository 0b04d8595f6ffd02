"""``eaglegbv serve`` says to SGLang what was asked for."""

import os
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.cli import documented, documented_commands, run

from eaglegbv.backends.sglang.launch import check_ready, launch, server_arguments
from eaglegbv.backends.sglang.settings import JSON_VARIABLE, Settings
from eaglegbv.errors import InvalidArgument
from eaglegbv.models.hf import load_config


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        (Settings(verifier="gbv", seed=5), {"--speculative-algorithm": "EAGLEGBV3"}),
        # SGLang's own EAGLE has as many nodes.
        (None, {"--speculative-algorithm": "EAGLE3", "--speculative-num-draft-tokens": "11"}),
    ],
)
def test_flags_and_environment(pair, settings, own):
    others = ["--port", "31000"]
    start = launch(pair.target, pair.eagle3, paths=2, depth=5, settings=settings, others=others)
    assert start.command[1:3] == ["-m", "sglang.launch_server"]
    flags = dict(zip(start.command[3::2], start.command[4::2], strict=True))
    assert flags == own | {
        "--model-path": str(pair.target),
        "--speculative-draft-model-path": str(pair.eagle3),
        "--speculative-eagle-topk": "2",
        "--speculative-num-steps": "5",
        "--port": "31000",
    }
    assert bool(start.environment) == (settings is not None)
    assert Settings.from_environment(start.environment) == (settings or Settings())


def test_heads_of_other_formats_are_written_anew(saved_pair):
    target, head = saved_pair
    named = server_arguments(target, head, paths=3, depth=4)
    folder = Path(named["speculative_draft_model_path"])
    assert named["speculative_algorithm"] == "EAGLEGBV"
    assert folder != head
    assert "LlamaForCausalLMEagle" in (folder / "config.json").read_text()
    assert server_arguments(target, head, paths=3, depth=4) == named


def test_the_targets_configuration_is_read_as_sglang_is_told_to(pair, monkeypatch):
    load = Mock(return_value=load_config(pair.target))
    monkeypatch.setattr("eaglegbv.backends.sglang.launch.load_config", load)
    for others in ([], ["--tp", "2", "--revision", "abc", "--trust-remote-code"]):
        launch(pair.target, pair.eagle1, paths=3, depth=4, settings=Settings(), others=others)
    assert [call.kwargs for call in load.call_args_list] == [
        {"revision": None, "trust_remote_code": False},
        {"revision": "abc", "trust_remote_code": True},
    ]


def test_without_a_drafter_nothing_is_drafted():
    assert server_arguments("some/model", None, paths=3, depth=4) == {"model_path": "some/model"}


def test_documented_commands_and_calls_start_what_they_say(pair, capsys, monkeypatch):
    install, serve, _, by_hand, _ = documented_commands(
        "sglang.md",
        **{
            "meta-llama/Llama-3.1-8B-Instruct": pair.target,
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": pair.eagle3,
            "MODEL": pair.target,
            "HEAD": pair.eagle3,
        },
    )
    assert install == ["pip", "install", "-e", ".[sglang]"]
    started = shlex.split(run(capsys, *serve[1:], "--dry-run").out)
    assert started[0].startswith(f"{JSON_VARIABLE}=")
    assert started[-2:] == ["--port", "30000"]
    # SGLang's own command starts the same; its trees and verifier are the defaults of `serve`.
    assert Settings.from_environment(dict([by_hand[0].split("=")])) == Settings()
    assert by_hand[2:4] == started[2:4]
    pairs = zip(*[iter(started[4:-2])] * 2, strict=True)
    assert set(pairs) == set(zip(*[iter(by_hand[4:])] * 2, strict=True))

    sglang, asked = ModuleType("sglang"), dict[str, Any]()
    engine = SimpleNamespace(generate=lambda *prompts: prompts)
    vars(sglang)["Engine"] = lambda **named: asked.update(named, **os.environ) or engine
    monkeypatch.setitem(sys.modules, "sglang", sglang)
    monkeypatch.setattr("eaglegbv.backends.sglang.launch.check_ready", lambda **_: None)
    code = documented("sglang.md", "python")[0]
    exec(code.replace("MODEL", str(pair.target)).replace("HEAD", str(pair.eagle1)), {})
    assert (asked["speculative_eagle_topk"], asked["tp_size"]) == (3, 2)
    assert Settings.from_environment(asked) == Settings(verifier="gbv")
    assert JSON_VARIABLE not in os.environ


def test_without_an_accelerator_a_device_must_be_named(monkeypatch):
    for check in ("check_version", "check_plugin"):
        monkeypatch.setattr(f"eaglegbv.backends.sglang.launch.{check}", lambda: None)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    check_ready(["--tp", "2", "--device=cpu"])
    check_ready(device="cpu")
    with pytest.raises(InvalidArgument, match=r"^device=None: expected 'cpu', as there is no"):
        check_ready(["--tp", "2"])
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    check_ready()


# Settings come from the environment and are checked before a server starts.

LARGEST = Settings(verifier="block", draft_width=5, draft_temperature=0.5, seed=2**64 - 1)
SINGLE = {"EAGLEGBV_VERIFIER": "gbv", "EAGLEGBV_DRAFT_WIDTH": "8", "EAGLEGBV_SEED": "7"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PATH": "/bin"}, Settings()),
        (
            SINGLE | {"EAGLEGBV_DRAFT_TEMPERATURE": "1.5"},
            Settings(verifier="gbv", draft_width=8, draft_temperature=1.5, seed=7),
        ),
        # JSON wins over single variables.
        (
            SINGLE | {JSON_VARIABLE: '{"verifier": "block", "seed": 3}'},
            Settings(verifier="block", draft_width=8, seed=3),
        ),
        (LARGEST.to_environment(), LARGEST),
    ],
    ids=["defaults", "variables", "json", "its own"],
)
def test_what_is_said_is_read(environment, expected):
    assert Settings.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"EAGLEGBV_DRAFT_WIDTH": "0"}, "draft_width=0"),
        ({"EAGLEGBV_DRAFT_WIDTH": "many"}, "EAGLEGBV_DRAFT_WIDTH='many'"),
        ({"EAGLEGBV_DRAFT_TEMPERATURE": "0"}, "draft_temperature=0"),
        ({"EAGLEGBV_DRAFT_TEMPERATURE": "nan"}, "draft_temperature=nan"),
        ({"EAGLEGBV_SEED": "-1"}, "seed=-1"),
        ({JSON_VARIABLE: "{"}, JSON_VARIABLE),
        ({JSON_VARIABLE: "[]"}, JSON_VARIABLE),
        ({JSON_VARIABLE: '{"paths": 3}'}, "'paths'"),
        ({JSON_VARIABLE: '{"draft_width": true}'}, "draft_width=True"),
        ({JSON_VARIABLE: '{"verifier": 3}'}, "verifier=3"),
    ],
)
def test_what_is_wrong_is_named(environment, named):
    with pytest.raises(InvalidArgument, match=named.replace("[", r"\[")):
        Settings.from_environment(environment)
