"""The client of the OpenAI endpoint, and servers in processes of their own, without SGLang."""

import json
import sys

import httpx
import pytest

from eaglegbv.backends.sglang.launch import Launch, ServerFailed, running
from eaglegbv.backends.sglang.llm import Endpoint
from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.sampling import SamplingParams

SHAPE = Plan(paths=2, depth=3)
MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = {
    "choices": [
        {
            "message": {"content": "hello"},
            "finish_reason": "length",
            "response_token_ids": [5, 6, 7, 8],
            "meta_info": {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "spec_correct_drafts_histogram": [1, 0, 1],
            },
        }
    ]
}
SERVER = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """What a server was asked, which gives one answer."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        if json.loads(request.content)["messages"] != MESSAGES:
            return httpx.Response(400, json={"message": "too long"})
        return httpx.Response(200, json=ANSWER)

    monkeypatch.setattr(httpx, "post", httpx.Client(transport=httpx.MockTransport(answer)).post)
    return requests


def test_what_is_asked_and_what_is_read(asked):
    params = SamplingParams(temperature=0.7, max_tokens=4, seed=2**64 - 5, top_k=9, min_p=0.1)
    answer = Endpoint("http://server", SHAPE)(MESSAGES, params, plan=SHAPE)
    assert (answer.text, answer.token_ids) == ("hello", [5, 6, 7, 8])
    assert answer.finish_reason == "length"
    assert (answer.metrics.target_forwards, answer.metrics.accepted_tokens) == (2, 2)
    assert answer.metrics.accepted_by_depth == [1, 1, 0]
    assert [str(request.url) for request in asked] == ["http://server/v1/chat/completions"]
    body = json.loads(asked[0].content)
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.7, 4, -5)
    assert (body["top_k"], body["min_p"]) == (9, 0.1)
    assert body["return_meta_info"]
    assert body["return_token_ids"]


@pytest.mark.usefixtures("asked")
def test_refusals_are_said_in_the_servers_words():
    with pytest.raises(InvalidArgument, match="too long"):
        Endpoint("http://server", SHAPE)(2 * MESSAGES, SamplingParams(), plan=SHAPE)


def test_a_server_that_is_not_there():
    with pytest.raises(StepFailed, match="refused"):
        Endpoint("http://127.0.0.1:9", SHAPE)(MESSAGES, SamplingParams(), plan=SHAPE)


def test_a_server_runs_as_long_as_it_is_needed(tmp_path):
    launch = Launch([sys.executable, "-c", SERVER], {})
    with running(launch, tmp_path / "log") as url:
        assert httpx.get(f"{url}/here").text == "/here"
    with pytest.raises(httpx.ConnectError, match="refused"):
        httpx.get(f"{url}/here")


@pytest.mark.parametrize(
    ("code", "within", "said"),
    [
        ("raise SystemExit('no memory')", 60.0, "ended with code 1; .*\n*no memory"),
        ("import time; time.sleep(60)", 2.0, "did not answer"),
    ],
)
def test_a_server_that_does_not_start(code, within, said, tmp_path):
    start = Launch([sys.executable, "-c", code], {})
    with (
        pytest.raises(ServerFailed, match=said),
        running(start, tmp_path / "log", starts_within=within),
    ):
        pass
