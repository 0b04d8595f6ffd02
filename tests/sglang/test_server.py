"""``eaglegbv serve``: SGLang's HTTP server, by the OpenAI endpoints and its own."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.saved_pair import save_pair
from support.sglang_engine import CPU_ARGUMENTS, cpu_environment, missing_sglang

pytestmark = [
    pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang())),
    pytest.mark.timeout(1800),
]

STARTS_WITHIN = 1500
COMMAND = "import sys; from eaglegbv.cli.main import main; main(sys.argv[1:])"


def ask(port: int, path: str, body: dict[str, object] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read().decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A running server's."""
    folder = tmp_path_factory.mktemp("served")
    target, head = save_pair(folder)
    number = free_port()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in CPU_ARGUMENTS.items()]
    serve = ["serve", str(target), "--drafter", str(head), "--paths", "2", "--depth", "3"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *serve, *flags, f"--port={number}", "--enable-metrics"],
            env=cpu_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(server, number, folder / "log")
        yield number
        assert server.poll() is None, (folder / "log").read_text()[-3000:]
    finally:
        server.terminate()
        server.wait(60)


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            ask(port, "/health_generate")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
        else:
            return
    pytest.fail(f"no answer within {STARTS_WITHIN} s: {log.read_text()[-3000:]}")


def test_openai_chat(port: int) -> None:
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
    }
    one, two = (json.loads(ask(port, "/v1/chat/completions", body)) for _ in range(2))
    assert one["usage"]["completion_tokens"] == 12
    assert one["choices"][0]["message"] == two["choices"][0]["message"]


def test_metrics_of_an_answer_and_of_the_server(port: int) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    answer = json.loads(ask(port, "/generate", {"text": "hello", "sampling_params": params}))
    about = answer["meta_info"]
    assert about["block_efficiency"] == pytest.approx(about["acceptance_length"] + 1)
    assert "sglang:spec_accept_length" in ask(port, "/metrics")
