"""Where FlashInfer's kernels run."""

import pytest
import torch
from gpu.cuda.flashinfer_on_host import HostKernels
from gpu.cuda.runtime import HostRuntime
from support.flashinfer_place import Place

from eaglegbv.attention.flashinfer import FlashInferKernels


@pytest.fixture
def gpu() -> Place:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("flashinfer")
    return Place("cuda", FlashInferKernels())


@pytest.fixture
def host(on_host: HostRuntime) -> Place:
    return Place("cpu", HostKernels())


@pytest.fixture(
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("host", marks=pytest.mark.on_host),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found
