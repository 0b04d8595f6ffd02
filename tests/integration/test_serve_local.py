"""The server of the package's own engine, asked by OpenAI's client and by plain requests."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from support.requests import idle
from support.soak import soak

from eaglegbv import LLM, EngineConfig, SamplingParams
from eaglegbv.cli.main import main
from eaglegbv.cli.serve_local import Server
from eaglegbv.engine import Engine
from eaglegbv.errors import OutOfSlots
from eaglegbv.request import FinishReason, Request
from eaglegbv.text import Delta

CHAT = [{"role": "user", "content": "Name a fruit."}]


class AddressedServer(Server):
    url = ""  # where it is served


@pytest.fixture(scope="module")
def llm(saved_pair: tuple[Path, Path]) -> LLM:
    engine = EngineConfig(check_slots=True, max_batch=16)
    return LLM(*saved_pair, paths=2, depth=3, engine=engine)


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[AddressedServer]:
    server = AddressedServer(llm, "pair", "secret", limit=40)
    config = uvicorn.Config(server.app(), host="127.0.0.1", port=0, log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    [socket] = running.servers[0].sockets
    server.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    yield server
    running.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_completions(client, llm):
    asked = {"model": "pair", "prompt": "abc", "max_tokens": 9, "seed": 3, "n": 2}
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    params = SamplingParams(max_tokens=9, seed=3, n=2, ignore_eos=True)
    expected = llm.generate("abc", params)
    assert [c.text for c in answer.choices] == [c.text for c in expected.choices]
    assert [c.finish_reason for c in answer.choices] == ["length", "length"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 18)
    details = answer.usage.completion_tokens_details
    accepted = sum(c.metrics.accepted_tokens for c in expected.choices)
    drafted = sum(c.metrics.drafted_nodes for c in expected.choices)
    assert details.accepted_prediction_tokens == accepted
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == drafted
    pieces = list(client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    for index, choice in enumerate(expected.choices):
        mine = [c for piece in pieces for c in piece.choices if c.index == index]
        assert "".join(c.text for c in mine) == choice.text
        assert mine[-1].finish_reason == "length"


def test_chats(client, llm):
    asked = {"model": "pair", "messages": CHAT, "max_completion_tokens": 9, "seed": 3}
    answer = client.chat.completions.create(**asked)
    expected = llm.chat(CHAT, SamplingParams(max_tokens=9, seed=3))
    [choice] = answer.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    streamed = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    first, *pieces, usage = streamed
    assert first.choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text
    assert usage.usage.completion_tokens == len(expected.token_ids)


def test_logprobs_are_those_of_the_completion(client, llm):
    params = SamplingParams(max_tokens=5, seed=3, logprobs=2, ignore_eos=True)
    expected = llm.generate("abc", params)
    chosen = [place[t] for t, place in zip(expected.token_ids, expected.logprobs, strict=True)]
    asked = {"model": "pair", "seed": 3, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    told = client.completions.create(prompt="abc", logprobs=2, **asked).choices[0].logprobs
    assert told.token_logprobs == pytest.approx([entry.logprob for entry in chosen])
    assert [len(top) >= 2 for top in told.top_logprobs] == 5 * [True]
    streamed = client.completions.create(prompt="abc", logprobs=2, stream=True, **asked)
    pieces = [piece.choices[0].logprobs for piece in streamed]
    numbers = [n for piece in pieces if piece is not None for n in piece.token_logprobs]
    assert numbers == pytest.approx(told.token_logprobs)
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **asked)
    for place in chat.choices[0].logprobs.content:
        assert len(place.top_logprobs) == 2
        numbers = [top.logprob for top in place.top_logprobs]
        assert numbers == sorted(numbers, reverse=True)
        assert place.logprob <= numbers[0]


def test_several_prompts_and_stop(client, llm):
    full = llm.generate("stop", SamplingParams(max_tokens=30, seed=5, ignore_eos=True)).text
    asked = {"model": "pair", "max_tokens": 30, "seed": 5, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=["stop", "other"], stop=full[8:10], **asked)
    first, second = answer.choices
    assert (first.text, first.finish_reason) == (full[: full.index(full[8:10])], "stop")
    assert second.index == 1
    ids = client.completions.create(prompt=llm.tokenizer.encode("stop"), **asked)
    assert ids.choices[0].text == full


def test_what_else_is_served(client, served, llm):
    assert [model.id for model in client.models.list()] == ["pair"]
    assert httpx.get(f"{served.url}/health").json()["status"] == "ok"
    metrics = httpx.get(f"{served.url}/metrics")
    assert "eaglegbv_steps_total " in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    ("asked", "parameter", "message"),
    [
        ({"prompt": ""}, "prompt", "expected a text that is not empty"),
        ({"prompt": []}, "prompt", "expected at least one prompt"),
        ({"n": 41}, None, "41 answers: expected at most 40 in one request"),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"temperature": "hot"}, "body", r"Expected `float`, got `str`"),
        ({"max_new_tokens": 5}, "max_new_tokens", "SamplingParams(max_tokens=...)"),
        ({"temprature": 1}, "temprature", "temperature, perhaps"),
        ({"sampling": {}}, "sampling", "no such argument"),
        ({"echo": True}, "echo", "there is no echo here"),
        ({"prompt_logprobs": 3}, "prompt_logprobs", "this server does not offer it"),
        ({"response_format": {"type": "xml"}}, "response_format", "a type of text, json_object"),
        ({"prompt": 5}, "body", "got `int` - at `$.prompt`"),
        ({"model": "gpt"}, "model", "no model 'gpt', only 'pair'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_bad_requests_are_named(served, asked, parameter, message, stream):
    body = {"prompt": "abc", "max_tokens": 3, "stream": stream} | asked
    headers = {"Authorization": "Bearer secret"}
    refused = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers)
    assert refused.status_code == (404 if parameter == "model" else 400)
    error = refused.json()["error"]
    assert error["param"] == parameter
    assert message in error["message"]


def test_a_key_is_needed_and_the_queue_is_bounded(client, served, llm):
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        stranger.models.list()
    served.unfinished = 39
    try:
        with pytest.raises(openai.RateLimitError, match="2 more are too many"):
            client.completions.create(model="pair", prompt="abc", n=2)
        assert served.unfinished == 39
    finally:
        served.unfinished = 0
    broken = httpx.post(
        f"{served.url}/v1/completions", content=b"{", headers={"Authorization": "Bearer secret"}
    )
    assert broken.status_code == 400


def test_a_client_that_goes_away_ends_its_request(client, served, llm):
    long = {"model": "pair", "prompt": "abc", "max_tokens": 240, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**long, stream=True) as stream:
        next(stream)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).completions.create(**long, n=8)
    deadline = time.monotonic() + 60
    while served.unfinished or not idle(llm):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_that_goes_away_before_the_first_piece_ends_its_request(served, llm, monkeypatch):
    async def silent(*_: object) -> AsyncGenerator[Delta, None]:
        await asyncio.Event().wait()
        yield Delta(text="", token_ids=[])

    monkeypatch.setattr(llm, "stream_async", silent)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/completions",
            json={"prompt": "abc", "stream": True},
            headers={"Authorization": "Bearer secret"},
            timeout=0.5,
        )
    deadline = time.monotonic() + 10
    while served.unfinished:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_prompt_larger_than_the_pool_is_the_clients_mistake(served, llm, monkeypatch, stream):
    add = Engine.add

    def crowded(*arguments: object, **named: object) -> Request:
        request = add(*arguments, **named)
        request.error = OutOfSlots(1 + 10**9, 0, 10**9)
        arguments[0].finish(request, FinishReason.ERROR)
        return request

    monkeypatch.setattr(Engine, "add", crowded)
    refused = httpx.post(
        f"{served.url}/v1/completions",
        json={"prompt": "abc", "stream": stream},
        headers={"Authorization": "Bearer secret"},
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_a_few_clients_that_leave_and_err_lose_nothing(served, llm):
    served.key = None
    try:
        outcomes = asyncio.run(soak(served.url, requests=40, clients=8))
    finally:
        served.key = "secret"
    assert sum(outcomes.values()) == 40
    assert set(outcomes) == {"whole", "streamed", "left", "refused 400"}
    deadline = time.monotonic() + 60
    while served.unfinished or not idle(llm):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_command_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["serve", "tiny", "--backend", "local", "--verifier", "nope"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("eaglegbv: --verifier='nope': expected ")
