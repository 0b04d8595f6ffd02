"""``eaglegbv serve``: SGLang's HTTP server, by the OpenAI endpoints and its own."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cli import documented_commands
from support.sglang_engine import NEEDS_SGLANG, serving, serving_as_documented

from eaglegbv.backends.sglang.launch import ServerFailed, running
from eaglegbv.backends.sglang.llm import Endpoint
from eaglegbv.config import Plan
from eaglegbv.sampling import SamplingParams

pytestmark = NEEDS_SGLANG


def ask(url: str, path: str, body: dict[str, object] | None = None) -> str:
    answer = httpx.request("POST" if body else "GET", url + path, json=body, timeout=600)
    return answer.raise_for_status().text


@pytest.fixture(scope="module")
def url(saved_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running server's."""
    serve = serving(*saved_pair, "--enable-metrics", paths=2, depth=3)
    with running(serve, tmp_path_factory.mktemp("served") / "log") as address:
        yield address


def test_openai_chat(url):
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
    }
    one, two = (json.loads(ask(url, "/v1/chat/completions", body)) for _ in range(2))
    assert one["usage"]["completion_tokens"] == 12
    assert one["choices"][0]["message"] == two["choices"][0]["message"]


def test_documented_request(url):
    [request] = [words for words in documented_commands("sglang.md") if words[0] == "curl"]
    address, body = request[1], json.loads(request[-1])
    answer = json.loads(ask(url, address.removeprefix("localhost:30000"), body))
    assert answer["usage"]["completion_tokens"] >= 1


def test_metrics_of_an_answer_and_of_the_server(url):
    params = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    answer = json.loads(ask(url, "/generate", {"text": "hello", "sampling_params": params}))
    about = answer["meta_info"]
    assert about["block_efficiency"] == pytest.approx(39 / about["spec_verify_ct"])
    first = counts(ask(url, "/metrics"))
    assert first["drafted_tokens"] == 6 * first["verifications"]
    long = params | {"max_new_tokens": 200}
    ask(url, "/generate", {"text": ["hello"] * 4, "sampling_params": long})
    more = {name: n - first[name] for name, n in counts(ask(url, "/metrics")).items()}
    assert more["committed_tokens"] == 4 * 199
    assert more["accepted_tokens"] <= more["committed_tokens"]
    assert 1 <= more["committed_tokens"] / more["verifications"] <= 4


def counts(text: str) -> dict[str, float]:
    """Read our counters from Prometheus' text, those of one verifier."""
    found = re.findall(r'^eaglegbv:(\w+)_total\{.*verifier="otbv".*\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_client_of_the_endpoint(url):
    shape = Plan(paths=2, depth=3)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=2**64 - 9)
    messages = [{"role": "user", "content": "hi"}]
    one, two = (Endpoint(url, shape)(messages, params, plan=shape) for _ in range(2))
    assert one == two
    assert len(one.token_ids) == 30
    assert one.metrics.committed_tokens == 29
    assert one.metrics.accepted_tokens + one.metrics.target_forwards >= 29
    assert one.finish_reason == "length"


def test_a_server_that_cannot_honour_an_option_says_so_and_ends(url, saved_pair, tmp_path):
    del url  # its server is up: one start at a time
    serve = serving(*saved_pair, "--enable-custom-logit-processor")
    said = "does not apply custom processors to draft trees; use logit_bias or a grammar"
    with pytest.raises(ServerFailed, match=said), running(serve, tmp_path / "log"):
        pass


def test_the_documented_arguments_are_enough(url, saved_pair, tmp_path):
    del url
    serve = serving_as_documented(*saved_pair, "--backend", "sglang")
    with running(serve, tmp_path / "log") as address:
        body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 8}
        answer = json.loads(ask(address, "/v1/completions", body))
        assert answer["usage"]["completion_tokens"] >= 1
