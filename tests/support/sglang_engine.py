"""The real SGLang without a GPU: its engine with a stand-in for its compiled CPU operations."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).parents[1] / "sglang" / "stand_in"

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# intel_amx alone is refused on a CPU without AMX; named for prompts and decoding it is taken.
CPU_ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "prefill_attention_backend": "intel_amx",
    "decode_attention_backend": "intel_amx",
    "max_total_tokens": 20_000,
    "max_running_requests": 64,
    "log_level": "error",
}


def missing_sglang() -> str | None:
    """Return why tests with SGLang cannot run here, or None."""
    try:
        version("sglang")
    except PackageNotFoundError:
        return "sglang is not installed (pip install 'eaglegbv[sglang]')"
    return None


def cpu_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a server that uses the stand-in."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EAGLEGBV_")}
    path = os.pathsep.join((str(STAND_IN), clean.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    return clean | CPU_ENVIRONMENT | {"PYTHONPATH": path} | dict(settings or {})


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Let ``values`` be the whole environment in the body: child processes inherit it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def sglang_engine(settings: Mapping[str, str] | None = None, **arguments: object) -> Iterator[Any]:
    """Start an engine with the stand-in, and stop it."""
    if str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))
    with environment(cpu_environment(settings)):
        import sglang

        engine = sglang.Engine(**(CPU_ARGUMENTS | arguments))
        try:
            yield engine
        finally:
            engine.shutdown()
