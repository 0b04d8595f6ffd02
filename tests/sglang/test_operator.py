"""What an operator asks of a server, one of SGLang's with our trees, by the openai client."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI
from support.sglang_engine import NEEDS_SGLANG, serving

from eaglegbv.backends.sglang.launch import running
from eaglegbv.loading import TINY, TINY_TARGET

pytestmark = NEEDS_SGLANG

PROMPT = "Once upon a time there was a little fox who lived near a river. "
CHAT = [{"role": "user", "content": "Tell me a short story about a fox and a river."}]
ON = {"ignore_eos": True}
CITY = {"type": "string", "maxLength": 12}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": CITY,
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Server:
    """A running server, and the ways to ask it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)

    def chat(self, **body: Any) -> Any:
        asked = {"model": "default", "messages": CHAT, "max_tokens": 40} | body
        return self.client.chat.completions.create(**asked)

    def complete(self, **body: Any) -> Any:
        asked = {"model": "default", "prompt": PROMPT, "max_tokens": 40} | body
        return self.client.completions.create(**asked)

    def text(self, **body: Any) -> str:
        return str(self.complete(**body).choices[0].text)

    def generate(self, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=600)
        return answer.raise_for_status().json()

    def ids(self, **params: Any) -> list[int]:
        """Return the tokens after the prompt, which go on to the end of their number."""
        sampling = {"temperature": 0, "max_new_tokens": 24} | ON | params
        return self.generate(text=PROMPT, sampling_params=sampling)["output_ids"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--enable-metrics", "--tool-call-parser", "hermes", "--paths=3", "--depth=4")
    with running(
        serving(TINY_TARGET, TINY / "eagle3", *options), tmp_path_factory.mktemp("served") / "log"
    ) as url:
        yield Server(url)


def test_its_addresses_answer(server):
    for path in ("/health", "/health_generate", "/v1/models", "/server_info", "/get_load"):
        assert httpx.get(server.url + path, timeout=120).status_code == 200, path


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1, "seed": 11}])
def test_a_stream_is_the_whole_answer(server, params):
    whole = server.chat(**params)
    pieces, usage, ended = "", None, None
    for chunk in server.chat(stream=True, stream_options={"include_usage": True}, **params):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces += choice.delta.content or ""
            ended = choice.finish_reason or ended
    assert pieces == whole.choices[0].message.content
    assert ended == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_log_probabilities_are_those_of_the_text_read_again(server, temperature):
    params = {"temperature": temperature, "max_new_tokens": 24, "sampling_seed": 5} | ON
    named = {"return_logprob": True, "logprob_start_len": 0}
    about = server.generate(text=PROMPT, sampling_params=params, **named)["meta_info"]
    said = [value for value, *_ in about["output_token_logprobs"]]
    prompt = [token for _, token, *_ in about["input_token_logprobs"]]
    text = [token for _, token, *_ in about["output_token_logprobs"]]
    last = {"temperature": temperature, "max_new_tokens": 1}
    again = server.generate(input_ids=prompt + text, sampling_params=last, **named)["meta_info"]
    read = [value for value, *_ in again["input_token_logprobs"][len(prompt) :]]
    assert said == pytest.approx(read, abs=1e-3)


@pytest.mark.parametrize("temperature", [0, 1])
def test_log_probabilities_of_a_chat(server, temperature):
    answer = server.chat(
        temperature=temperature, seed=3, logprobs=True, top_logprobs=3, max_tokens=24
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 1e-5 for token in tokens)
    if temperature == 0:
        first = [token.top_logprobs[0].logprob for token in tokens]
        assert [token.logprob for token in tokens] == pytest.approx(first, abs=1e-3)


def test_echo_and_log_probabilities_of_a_completion(server):
    answer = server.complete(temperature=0, logprobs=2, max_tokens=8, extra_body=ON)
    assert len(answer.choices[0].logprobs.tokens) == 8
    assert server.text(temperature=0, max_tokens=4, echo=True).startswith(PROMPT)


def test_copies_differ_and_a_seed_repeats_them(server):
    one, two = (server.chat(temperature=1, n=4, seed=7, max_tokens=20) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert len({*texts}) > 1
    assert texts == [choice.message.content for choice in two.choices]
    several = server.complete(prompt=[PROMPT, "The sea is"], n=2, temperature=1, max_tokens=8)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_stops(server):
    whole = server.text(temperature=0, max_tokens=60)
    word = whole.split()[6]
    stopped = server.complete(temperature=0, max_tokens=60, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert whole.startswith(stopped.text)
    assert word not in stopped.text
    stream = server.complete(temperature=0, max_tokens=60, stop=[word], stream=True)
    assert "".join(c.text for chunk in stream for c in chunk.choices) == stopped.text
    ids = server.ids(max_new_tokens=60)
    until = {"temperature": 0, "max_new_tokens": 60, "stop_token_ids": [ids[9]]}
    answer = server.generate(text=PROMPT, sampling_params=until)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["output_ids"] == ids[: ids.index(ids[9]) + 1]


def test_the_last_round_is_cut_at_the_number_of_tokens(server):
    answers = [
        server.complete(temperature=1, seed=1, max_tokens=most, extra_body=ON)
        for most in (1, 2, 3, 5, 6)
    ]
    assert [answer.usage.completion_tokens for answer in answers] == [1, 2, 3, 5, 6]
    texts = [answer.choices[0].text for answer in answers]
    assert all(texts[-1].startswith(text) for text in texts)


def test_schemas_and_expressions_hold(server):
    schema = {"name": "person", "schema": PERSON, "strict": True}
    wanted = {"type": "json_schema", "json_schema": schema}

    def describe(i: int) -> str:
        asked = [{"role": "user", "content": "Describe a person as JSON."}]
        limits = {"temperature": i % 2, "seed": i, "max_tokens": 200}
        answer = server.chat(messages=asked, response_format=wanted, **limits)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(6) as threads:
        people = [json.loads(text) for text in threads.map(describe, range(6))]
    assert all({*person} == {*PERSON["required"]} for person in people)
    assert all(0 <= person["age"] <= 99 for person in people)
    asked = {"temperature": 1, "seed": 2, "max_tokens": 24}
    regex = server.chat(**asked, extra_body={"regex": "(yes|no)( please)?"})
    assert re.fullmatch("(yes|no)( please)?", regex.choices[0].message.content)
    grammar = server.chat(**asked, extra_body={"ebnf": 'root ::= "red" | "green"'})
    assert grammar.choices[0].message.content in {"red", "green"}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_calls_of_tools(server, choice):
    asked = {"tools": [WEATHER], "tool_choice": choice, "seed": 4, "max_tokens": 80}
    for temperature in (0, 1):
        answer = server.chat(temperature=temperature, **asked)
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert {*json.loads(call.function.arguments)} == {"city"}
    name, arguments = None, ""
    for chunk in server.chat(temperature=1, stream=True, **asked):
        for piece in chunk.choices:
            for call in piece.delta.tool_calls or ():
                name = call.function.name or name
                arguments += call.function.arguments or ""
    assert name == "weather"
    assert {*json.loads(arguments)} == {"city"}


def test_penalties_bias_and_limits(server):
    penalised = server.ids(temperature=1, sampling_seed=1, max_new_tokens=60, frequency_penalty=2)
    plain = server.ids(temperature=1, sampling_seed=1, max_new_tokens=60)
    assert len({*penalised}) > len({*plain})
    greedy = server.ids()
    forced = server.ids(temperature=1, logit_bias={str(greedy[3]): 100}, max_new_tokens=8)
    assert forced == [greedy[3]] * 8
    for limit in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert server.ids(**({"temperature": 1} | limit)) == greedy, limit


def test_seeds_alone_and_in_company(server):
    asked = [
        {"temperature": 1, "seed": seed, "max_tokens": 32, "extra_body": ON} for seed in range(4)
    ]
    alone = [server.text(**body) for body in asked]
    with ThreadPoolExecutor(24) as threads:
        for i in range(20):
            threads.submit(server.text, temperature=i % 2, max_tokens=32 + i)
        together = [*threads.map(lambda body: server.text(**body), asked)]
    assert together == alone
    assert len({*alone}) == 4


def test_greedy_requests_among_others(server):
    greedy = server.text(temperature=0)
    with ThreadPoolExecutor(24) as threads:
        texts = [*threads.map(lambda i: server.text(temperature=i % 2), range(24))]
    assert {*texts[::2]} == {greedy}


def test_a_client_that_leaves_costs_nothing_more(server):
    for number, _ in enumerate(server.chat(max_tokens=1500, stream=True, extra_body=ON)):
        if number == 5:
            break
    deadline = time.monotonic() + 60
    while _running(server):
        assert time.monotonic() < deadline
        time.sleep(1)
    with ThreadPoolExecutor(6) as threads:
        answers = [
            threads.submit(server.complete, max_tokens=1500, extra_body=ON) for _ in range(6)
        ]
        while _running(server) < 6:
            time.sleep(1)
        httpx.post(f"{server.url}/abort_request", json={"rid": "", "abort_all": True}, timeout=60)
        for answer in answers:
            answer.exception(timeout=60)  # it has ended, in whatever way SGLang ends it
    assert server.text(temperature=0, max_tokens=4)


def _running(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    values = re.findall(r"^sglang:num_running_reqs\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": -1},
        {"max_tokens": -3},
        {"top_p": 2.0},
        {"prompt": "word " * 20_000},
        {"extra_body": {"min_p": 2}},
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_and_others_go_on(server, body):
    with pytest.raises(APIStatusError) as refused:
        server.complete(**body)
    assert 400 <= refused.value.status_code < 500
    assert server.text(temperature=0, max_tokens=4)


def test_figures_of_an_answer(server):
    asked = {"return_meta_info": True, "return_token_ids": True} | ON
    answer = server.chat(temperature=1, seed=3, extra_body=asked)
    about = answer.choices[0].model_extra["meta_info"]
    assert about["block_efficiency"] > 1
    assert httpx.post(f"{server.url}/flush_cache", timeout=120).status_code == 200
    assert server.text(temperature=1, max_tokens=4)
