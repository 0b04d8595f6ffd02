"""``eaglegbv serve`` says to SGLang what was asked for."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from support.cli import run
from support.saved_pair import save_pair
from support.sglang_pair import save_sglang_pair

from eaglegbv.backends.sglang.launch import (
    check_ready,
    launch,
    server_arguments,
)
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.errors import DrafterMismatch, InvalidArgument
from eaglegbv.models.hf import load_config


def test_flags_and_environment(tmp_path: Path) -> None:
    pair = save_sglang_pair(tmp_path)
    settings = Settings(verifier="gbv", seed=5)
    start = launch(
        pair.target, pair.eagle3, paths=2, depth=5, settings=settings, others=["--port", "31000"]
    )
    assert start.command[1:3] == ["-m", "sglang.launch_server"]
    flags = dict(zip(start.command[3::2], start.command[4::2], strict=True))
    assert flags == {
        "--model-path": str(pair.target),
        "--speculative-algorithm": "EAGLEGBV3",
        "--speculative-draft-model-path": str(pair.eagle3),
        "--speculative-eagle-topk": "2",
        "--speculative-num-steps": "5",
        "--port": "31000",
    }
    assert Settings.from_environment(start.environment) == settings


def test_heads_of_other_formats_are_written_anew(tmp_path: Path) -> None:
    target, head = save_pair(tmp_path)
    named = server_arguments(target, head, paths=3, depth=4)
    folder = Path(named["speculative_draft_model_path"])
    assert named["speculative_algorithm"] == "EAGLEGBV"
    assert folder != head
    assert "LlamaForCausalLMEagle" in (folder / "config.json").read_text()
    assert server_arguments(target, head, paths=3, depth=4) == named


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path / "one")
    other = save_sglang_pair(tmp_path / "two")
    with pytest.raises(DrafterMismatch):
        server_arguments(target, other.eagle1, paths=3, depth=4)


def test_the_targets_configuration_is_read_as_sglang_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = save_sglang_pair(tmp_path)
    asked: list[dict[str, Any]] = []

    def load(model: Path, **options: Any) -> Any:
        asked.append(options)
        return load_config(model)

    monkeypatch.setattr("eaglegbv.backends.sglang.launch.load_config", load)
    for others in ([], ["--tp", "2", "--revision", "abc", "--trust-remote-code"]):
        launch(pair.target, pair.eagle1, paths=3, depth=4, settings=Settings(), others=others)
    assert asked == [
        {"revision": None, "trust_remote_code": False},
        {"revision": "abc", "trust_remote_code": True},
    ]


def test_without_a_drafter_nothing_is_drafted(tmp_path: Path) -> None:
    assert server_arguments("some/model", None, paths=3, depth=4) == {"model_path": "some/model"}


def test_dry_run_prints_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = save_sglang_pair(tmp_path)
    options = ("--drafter", str(pair.eagle1), "--dry-run", "--tp", "2")
    words = shlex.split(run(capsys, "serve", str(pair.target), *options).out)
    assert words[0].startswith("EAGLEGBV_SETTINGS=")
    assert words[-2:] == ["--tp", "2"]
    assert "EAGLEGBV" in words


def test_sglangs_own_eagle_has_as_many_nodes(tmp_path: Path) -> None:
    pair = save_sglang_pair(tmp_path)
    shape = {"paths": 2, "depth": 5}
    start = launch(pair.target, pair.eagle3, **shape, settings=None, others=["--tp", "2"])
    flags = dict(zip(start.command[3::2], start.command[4::2], strict=True))
    assert flags == {
        "--model-path": str(pair.target),
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(pair.eagle3),
        "--speculative-eagle-topk": "2",
        "--speculative-num-steps": "5",
        "--speculative-num-draft-tokens": "11",
        "--tp": "2",
    }
    assert start.environment == {}


def test_without_an_accelerator_a_device_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("check_version", "check_plugin"):
        monkeypatch.setattr(f"eaglegbv.backends.sglang.launch.{check}", lambda: None)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    check_ready(["--tp", "2", "--device=cpu"])
    check_ready(device="cpu")
    with pytest.raises(InvalidArgument, match=r"^device=None: expected 'cpu', as there is no"):
        check_ready(["--tp", "2"])
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    check_ready()
