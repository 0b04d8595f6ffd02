from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from httpx import ConnectError
from support.cli import Result, run


@pytest.fixture(scope="session")
def pair(saved_pair: tuple[Path, Path]) -> list[str]:
    """Options that name a tiny random pair."""
    target, head = saved_pair
    return ["--model", str(target), "--drafter", str(head), "--device", "cpu"]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the command line in this process; it must end with a status, 0 unless one is said."""

    def ended(*arguments: str, status: int = 0) -> Result:
        result = run(capsys, *arguments)
        assert result.status == status, result.err
        return result

    return ended


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep questions of this machine and of the hub out."""
    offline = Mock(side_effect=ConnectError("no network"))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", offline)
    monkeypatch.delenv("EAGLEGBV_DATA", raising=False)
