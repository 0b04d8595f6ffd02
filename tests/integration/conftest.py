"""What several files of engine tests share."""

from collections.abc import Iterator

import pytest
from support.pretend_device import PretendDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    """A CUDA device that is none; see :mod:`support.pretend_device`."""
    monkeypatch.setattr("eaglegbv.devices._wait_for", lambda device: None)
    with PretendDevice() as mode:
        yield mode
