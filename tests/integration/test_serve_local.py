"""The server of the package's own engine, asked by OpenAI's client and by plain requests."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from unittest.mock import Mock

import httpx
import openai
import pytest
from starlette.testclient import TestClient
from support.cli import documented, documented_commands, process, run
from support.http_server import serving, wait_for
from support.requests import idle
from support.soak import soak

from eaglegbv import LLM, EngineConfig, SamplingParams
from eaglegbv.cli.main import main
from eaglegbv.grammars import Grammars
from eaglegbv.server import WARNING, Server
from eaglegbv.serving import Serving
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
    with serving(server.app()) as server.url:
        yield server


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
    llm.generate("a", SamplingParams(max_tokens=1))
    metrics = httpx.get(f"{served.url}/metrics")
    assert 'eaglegbv_steps_total{model_name="pair"} ' in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain; version=")


@pytest.mark.parametrize(
    ("asked", "parameter", "message"),
    [
        ({"prompt": ""}, "prompt", "expected a text that is not empty"),
        ({"prompt": []}, "prompt", "expected at least one prompt"),
        ({"n": 41}, "n", "n=41: expected at most 40 answers to all prompts of a request"),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"temperature": "hot"}, "temperature", "temperature='hot': expected a number in [0, 100]"),
        ({"suffix": "b"}, "suffix", "this server does not offer it"),
        ({"best_of": 3}, "best_of", "expected 1, as n"),
        ({"functions": [{}]}, "functions", "this server does not offer it"),
        ({"logprobs": -5}, "logprobs", "logprobs=-5: expected an integer of at least -1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0: expected an integer of at least 1"),
        ({"stop": 3}, "stop", "stop=3: expected non-empty strings"),
        ({"response_format": {"type": "xml"}}, "response_format", "a type of text, json_object"),
        ({"prompt": 5}, "prompt", "prompt=5: expected `str | array`, got `int` at prompt"),
        ({"prompt": [["a"]]}, "prompt", "got `str` at prompt[0][0]"),
        ({"model": "gpt"}, "model", "model='gpt': expected 'pair'"),
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


@pytest.mark.parametrize(
    ("asked", "warning"),
    [
        ({"max_new_tokens": 5}, "SamplingParams(max_tokens=...)"),
        ({"temprature": 1}, "temperature, perhaps"),
        ({"sampling": {}}, "sampling is not known and was ignored"),
        ({"größe\r\nX-Other: 1": 1}, r"gr\xf6\xdfe\r\nX-Other: 1 is not known and was ignored"),
        ({f"{number} {'x' * 90}": 1 for number in range(99)}, "0 xxx"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_unknown_fields_are_ignored_and_named(served, asked, warning, stream, caplog):
    body = {"prompt": "abc", "max_tokens": 3, "stream": stream} | asked
    headers = {"Authorization": "bearer  secret"}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert warning in answer.headers[WARNING]
    assert len(answer.headers[WARNING]) < 8190
    assert warning in caplog.text


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


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 2}, {"prompt_logprobs": 1, "echo": False}, {"max_tokens": 0}]
)
def test_a_stream_tells_of_prompts_what_a_whole_answer_tells(served, llm, more):
    asked = {"prompt": ["abc", "fig and"], "n": 2, "echo": True, "max_tokens": 5, "seed": 3, **more}
    asked["allowed_token_ids"] = llm.encode("abcdefgh ")  # no part of a character stands last
    headers = {"Authorization": "Bearer secret"}
    if not asked["max_tokens"]:
        asked["logprobs"] = 1
    whole = httpx.post(f"{served.url}/v1/completions", json=asked, headers=headers).json()
    streamed = httpx.post(
        f"{served.url}/v1/completions", json={**asked, "stream": True}, headers=headers
    )
    lines = streamed.text.split("\n\n")
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for choice in whole["choices"]:
        parts = [c for piece in pieces for c in piece["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        told = [p["prompt_logprobs"] for p in parts if p.get("prompt_logprobs") is not None]
        expected = choice["prompt_logprobs"]
        assert len(told) == (expected is not None)
        for mine, theirs in zip(told[0] if told else [], expected or [], strict=True):
            for token, entry in (theirs or {}).items():
                assert mine[token]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)
        for name in ("tokens", "text_offset"):
            column = [value for p in parts if p["logprobs"] for value in p["logprobs"][name]]
            assert column == (choice["logprobs"] or {name: []})[name]
    assert {len(choice["logprobs"] or ()) for choice in whole["choices"]} == {
        4 if "logprobs" in asked else 0
    }


def test_prompts_are_echoed_with_their_logprobs(client, llm):
    """As evaluation harnesses ask for them."""
    texts = ["abc", "fig and pear"]
    ids = [llm.encode(text) for text in texts]
    asked = {"model": "pair", "max_tokens": 2, "temperature": 0, "extra_body": {"ignore_eos": True}}
    alone = client.completions.create(prompt=texts, logprobs=2, **asked).choices
    for prompt in (texts, ids):
        echoed = client.completions.create(prompt=prompt, logprobs=2, echo=True, **asked).choices
        for choice, answer, text, tokens in zip(echoed, alone, texts, ids, strict=True):
            assert choice.text == text + answer.text
            score = llm.score(tokens)
            first, *read = choice.logprobs.token_logprobs[: len(tokens)]
            assert first is None
            assert sum(read) == pytest.approx(score.total, abs=1e-4)
            assert "".join(choice.logprobs.tokens[: len(tokens)]) == text
            assert (
                choice.logprobs.text_offset
                == [0, *accumulate(map(len, choice.logprobs.tokens))][:-1]
            )
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                rest = getattr(choice.logprobs, name)[len(tokens) :]
                assert rest == getattr(answer.logprobs, name)
    [plain] = client.completions.create(prompt="abc", echo=True, **asked).choices
    assert (plain.text, plain.logprobs) == (echoed[0].text, None)


def test_prompt_logprobs_are_written_as_by_vllm(client, llm):
    ids = llm.encode("abc")
    asked = {"model": "pair", "max_tokens": 1, "extra_body": {"prompt_logprobs": 1}}
    answer = client.completions.create(prompt=ids, **asked).choices[0].prompt_logprobs
    assert answer[0] is None
    expected = llm.score(ids, logprobs=1).logprobs
    for token, place, known in zip(ids[1:], answer[1:], expected[1:], strict=True):
        assert set(place) == {str(entry) for entry in known}
        assert place[str(token)]["logprob"] == pytest.approx(known[token].logprob, abs=1e-5)
        assert set(place[str(token)]) == {"logprob", "rank", "decoded_token"}
    chat = client.chat.completions.create(messages=CHAT, **asked).prompt_logprobs
    assert chat[0] is None
    assert len(chat) == len(llm.encode(CHAT))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", [[5] * 300, ["abc", "abc " * 300], [[5], [5] * 300]])
def test_a_prompt_that_can_never_fit_is_the_client_s_mistake(served, prompt, stream):
    refused = httpx.post(
        f"{served.url}/v1/completions",
        json={"prompt": prompt, "stream": stream},
        headers={"Authorization": "Bearer secret"},
    )
    assert refused.status_code == 400
    assert "expected at most" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_large_grammar_is_compiled_on_another_thread_than_the_engine_s(served, llm, stream):
    compiled_on: list[str] = []
    compile_ = Grammars._compile

    def watched(grammars: Grammars, name: str, source: str) -> object:
        compiled_on.append(threading.current_thread().name)
        return compile_(grammars, name, source)

    grammars = llm._engine._grammars
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "_compiled", lru_cache(partial(watched, grammars)))
        answer = httpx.post(
            f"{served.url}/v1/completions",
            json={"prompt": "abc", "regex": "a{3}", "stream": stream, "temperature": 0},
            headers={"Authorization": "Bearer secret"},
        )
    assert answer.status_code == 200
    assert len(compiled_on) == 1
    assert compiled_on[0] != "eaglegbv"


def test_a_server_whose_engine_has_stopped_says_so(saved_pair, monkeypatch):
    with LLM(*saved_pair, paths=2, depth=3) as llm:
        client = TestClient(Server(llm, "pair", None, limit=4).app())
        assert client.get("/health").status_code == 200
        monkeypatch.setattr(Serving, "_follow_all", Mock(side_effect=RuntimeError("planted")))
        for _ in range(2):
            answer = client.post("/v1/completions", json={"prompt": "abc"})
            assert answer.status_code == 500
            assert "the engine has stopped: RuntimeError: planted" in answer.text
        assert client.get("/health").status_code == 503


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


def test_its_speed_is_measured_by_clients(served, capsys):
    words = ["bench", "endpoint", served.url, "--clients", "1,3", "--each", "2"]
    words += ["--max-tokens", "4"]
    keyless = run(capsys, *words)
    assert keyless.status == 2
    assert "the API key is missing or wrong" in keyless.err
    report = json.loads(run(capsys, *words, "--api-key", "secret", "--json").out)
    headings, *rows = report["tables"][0]["rows"]
    found = [dict(zip(headings, map(float, row), strict=True)) for row in rows]
    assert [(row["clients"], row["answers"]) for row in found] == [(1, 2), (3, 6)]
    for row in found:
        assert 0 < row["first token, s"] <= row["95 of 100"]
        assert row["between tokens, s"] >= 0
        assert row["tokens/s"] > 0
        assert 1 <= row["acceptance length"] <= 4
    assert served.unfinished == 0
    table = run(capsys, *words, "--api-key", "secret").out
    assert headings[:2] == ["clients", "answers"]
    assert "clients  answers  first token, s" in table
    nobody = run(capsys, "bench", "endpoint", "http://127.0.0.1:1")
    assert nobody.status == 2
    assert "url='http://127.0.0.1:1': expected the address of a server" in nobody.err


def test_the_page_s_commands_run(capsys, free_port):
    """docs/use/serving.md: the server, curl, OpenAI's client, and the measurement."""
    commands = documented_commands("serving.md", smollm2="tiny")
    server, *asking = [words for words in commands if words[0] != "pip"]
    words = [word.replace("8000", str(free_port)) for word in server]
    address = f"127.0.0.1:{free_port}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in a shell's background ignores Ctrl-C, and so would the server.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process_:
        try:
            wait_for(f"http://{address}/health", process_)
            for words in asking:
                placed = [word.replace("127.0.0.1:8000", address) for word in words]
                if placed[0] == "curl":
                    assert "error" not in process(*placed).stdout
                else:
                    done = run(capsys, *placed[1:], "--clients", "1,2", "--each", "1")
                    assert done.status == 0, done.err
            [code] = documented("serving.md", "python")
            exec(code.replace("127.0.0.1:8000", address).replace("smollm2", "tiny"), {})
            assert "target_forwards" in capsys.readouterr().out
        finally:
            process_.send_signal(signal.SIGINT)
    assert process_.returncode == 130  # as a shell says of Ctrl-C
