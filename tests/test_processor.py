"""The processor's name, as Linux tells it and where nothing does."""

import platform
from pathlib import Path

import pytest

from eaglegbv import processor


def test_the_first_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A 64: fast\n\nmodel name\t: B\n")
    monkeypatch.setattr(processor, "CPU_INFO", info)
    assert processor.processor_name() == "A 64: fast"


@pytest.mark.parametrize("named", ["arm", ""])
def test_without_a_name_the_architecture_stands_for_it(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "CPU_INFO", info)
    monkeypatch.setattr(platform, "processor", lambda: named)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for _ in range(2):
        assert processor.processor_name() == (named or "aarch64")
        info.write_text("processor\t: 0\n")
