"""What several files of engine tests share."""

import gc
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pretend_device import BY_KERNELS, PretendDevice

from eaglegbv.native.library import native_library
from eaglegbv.utils import CACHE_FOLDER


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, not yet there, for what is kept.

    Nothing of other tests gets there: no native library, nor costs of engines that nobody closed.
    """
    native_library()
    gc.collect()
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    """A CUDA device that is none; see :mod:`support.pretend_device`.

    Layers run there by tensor operations, as it takes long to interpret their kernels.
    """
    for module in BY_KERNELS:
        monkeypatch.setattr(f"{module}.runs_kernels", lambda _: False)
    monkeypatch.setattr("eaglegbv.devices._wait_for", lambda device: None)
    with PretendDevice() as mode:
        yield mode


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port
