"""Settings of every test."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

if not torch.cuda.is_available():  # before Triton is first imported: it interprets its kernels
    os.environ["TRITON_INTERPRET"] = "1"
from gpu.cuda.flashinfer_on_host import compile_for_host, missing
from gpu.cuda.runtime import HostRuntime, Launched
from hypothesis import settings

from eaglegbv import devices, loading
from eaglegbv.utils import CACHE_FOLDER
from eaglegbv.verifiers import registry

# How long an example takes depends on what else the machine does; that is no property to test.
settings.register_profile("any-machine", deadline=None, print_blob=True)
settings.load_profile("any-machine")

# The tensors of tests are tiny: threads that wait for each other cost ten times what they bring.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let FlashInfer warn as it is loaded and compiles: nothing of that is ours to mend."""
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("on_host"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Keep what is measured out of the user's cache, and share it among the tests.

    The native library is built once for all runs of the tests.
    """
    folder = tmp_path_factory.mktemp("cache")
    (folder / "native").symlink_to(request.config.cache.mkdir("native"))
    with pytest.MonkeyPatch.context() as context:
        context.setenv(CACHE_FOLDER, str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def usual_choices() -> Iterator[None]:
    """Compute in float32, where texts are compared, and take the tiny pair, which is quick.

    What is chosen by the machine has tests of its own.
    """
    with pytest.MonkeyPatch.context() as context:
        context.setattr(devices, "_auto_dtype", lambda _: torch.float32)
        context.setattr(loading, "smollm2_at_hand", lambda: False)
        yield


@pytest.fixture(autouse=True)
def known_verifiers() -> Iterator[None]:
    """Forget the verifiers that a test registers, such as those whose acceptance length is told."""
    with (
        patch.dict(registry.VERIFIERS),
        patch.dict(registry.STATEFUL_VERIFIERS),
        patch.dict(registry.ALL_VERIFIERS),
    ):
        yield


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny random target and of a head for it, which tests only read."""
    from support.saved_pair import save_pair

    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def host_runtime(request: pytest.FixtureRequest) -> HostRuntime:
    """CUDA's runtime with the host as its device; what is compiled for it is kept."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return HostRuntime(request.config.cache.mkdir("cuda_on_host"))


@pytest.fixture
def on_host(host_runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostRuntime]:
    """FlashInfer's kernels, run on the host; they may touch no memory but that of tensors."""
    compile_for_host(host_runtime, monkeypatch)
    host_runtime.launched.clear()
    host_runtime.faults.clear()
    monkeypatch.setattr(host_runtime, "on_launch", Launched.run_within_tensors)
    yield host_runtime
    if host_runtime.faults:
        raise host_runtime.faults[0]
