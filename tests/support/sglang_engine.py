"""The real SGLang without a GPU: its engine with a stand-in for its compiled CPU operations."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from eaglegbv.backends.sglang.launch import Launch
from support.g_test import GTest, g_test, joint_probs
from support.sglang_pair import VOCAB, SGLangPair

STAND_IN = Path(__file__).parents[1] / "sglang" / "stand_in"

PROMPT = [3, 7, 5, 11, 4]
PROMPTS = [PROMPT, [9, 2], [4] * 30, [*PROMPT, 6, 12, 0, 13], [15, 14, 13, 12, 11, 10]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# intel_amx alone is refused on a CPU without AMX; named for prompts and decoding it is taken. Here
# KV caches would take most of the memory that there is.
STAND_IN_ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "prefill_attention_backend": "intel_amx",
    "decode_attention_backend": "intel_amx",
    "max_total_tokens": 20_000,
}
"""What the stand-in asks for; all else is as it would be elsewhere."""

CPU_ARGUMENTS = STAND_IN_ARGUMENTS | {"max_running_requests": 64, "log_level": "error"}


def missing_sglang() -> str | None:
    """Return why tests with SGLang cannot run here, or None."""
    try:
        version("sglang")
    except PackageNotFoundError:
        return "sglang is not installed (pip install -e '.[sglang]')"
    return None


NEEDS_SGLANG = [
    pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang())),
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # what SGLang says of this machine
]
"""Marks of tests that run SGLang's engine."""


def cpu_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a server that uses the stand-in."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EAGLEGBV_")}
    path = os.pathsep.join((str(STAND_IN), clean.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    return clean | CPU_ENVIRONMENT | {"PYTHONPATH": path} | dict(settings or {})


def serving(target: Path, head: Path, *arguments: str, **flags: object) -> Launch:
    """Return our command ``serve``, on the stand-in."""
    return serving_as_documented(target, head, *arguments, **(CPU_ARGUMENTS | flags))


def serving_as_documented(target: Path, head: Path, *arguments: str, **flags: object) -> Launch:
    """Return the same command with no options but those that the stand-in needs, and these."""
    named = (STAND_IN_ARGUMENTS | flags).items()
    words = [f"--{name.replace('_', '-')}={value}" for name, value in named]
    start = [sys.executable, "-m", "eaglegbv", "serve", str(target), "--backend=sglang"]
    start.append(f"--drafter={head}")
    return Launch([*start, *arguments, *words], cpu_environment())


@contextmanager
def sglang_engine(settings: Mapping[str, str] | None = None, **arguments: object) -> Iterator[Any]:
    """Start an engine with the stand-in, and stop it."""
    if str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))
    # Child processes inherit what is the whole environment here.
    with patch.dict(os.environ, cpu_environment(settings), clear=True):
        import sglang

        engine = sglang.Engine(**(CPU_ARGUMENTS | arguments))
        try:
            yield engine
        finally:
            engine.shutdown()


def token_ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of answers."""
    return [answer["output_ids"] for answer in answers]


def three_tokens(
    pair: SGLangPair, texts: list[list[int]], *, temperature: float = 1.0, top_p: float = 1.0
) -> GTest:
    """Test the first three tokens of answers to :data:`PROMPT` by their exact distribution."""
    dist = joint_probs(pair.next_probs(temperature, top_p), PROMPT, 3)
    return g_test([(a * VOCAB + b) * VOCAB + c for a, b, c, *_ in texts], dist)


def pair_arguments(pair: SGLangPair, head: str, K: int, L: int) -> dict[str, object]:
    """Return the arguments that serve the pair with one of its heads."""
    return {
        "model_path": str(pair.target),
        "skip_tokenizer_init": True,
        "context_length": 256,
        "speculative_algorithm": "EAGLEGBV3" if head == "eagle3" else "EAGLEGBV",
        "speculative_draft_model_path": str(getattr(pair, head)),
        "speculative_num_steps": L,
        "speculative_eagle_topk": K,
    }
