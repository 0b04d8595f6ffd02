"""Settings of every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from eaglegbv.cost_cache import FOLDER

# How long an example takes depends on what else the machine does; that is no property to test.
settings.register_profile("any-machine", deadline=None, print_blob=True)
settings.load_profile("any-machine")

# The tensors of tests are tiny: threads that wait for each other cost ten times what they bring.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let kernels warn as they are compiled on a GPU: nothing of that is ours to mend."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what is measured out of the user's cache, and share it among the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        yield folder
