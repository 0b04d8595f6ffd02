"""What real clients send to the local server, by OpenAI's client, and what operators look at."""

import json
from collections.abc import Iterator
from itertools import accumulate

import openai
import pytest
from starlette.testclient import TestClient

from eaglegbv import LLM, SamplingParams
from eaglegbv.cli.serve_local import Endpoint
from eaglegbv.config import AUTO, DefaultPlan
from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import REASONS
from eaglegbv.openai_api import IGNORED, REFUSED, ChatRequest
from eaglegbv.request import PlanReason
from eaglegbv.server import WARNING, Server

CHAT = [{"role": "user", "content": "Weather in Oslo?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": None}}
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% for t in m.tool_calls or [] %}"
    "{{ t.function.arguments | tojson }}{% endfor %};{% endfor %}"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def http(llm: LLM) -> TestClient:
    return TestClient(Server(llm, "tiny", None, limit=40, spec_metrics="detailed").app())


@pytest.fixture(scope="module")
def client(http: TestClient) -> openai.OpenAI:
    return openai.OpenAI(
        base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0
    )


def ask(http: TestClient, path: str = "/v1/chat/completions", **asked: object):
    body = {"max_tokens": 4, "temperature": 1, "seed": 3, **asked}
    if path.endswith("chat/completions"):
        body = {"messages": CHAT, **body}
    return http.post(path, json=body)


VALUES = {
    "logit_bias": {"300": 100, "301": -100},
    "stop": ["\n\n\n"],
    "stop_token_ids": [7],
    "seed": -5,
    "max_tokens": 3.0,
    "n": 2.0,
    "bad_words": ["bad"],
    "allowed_token_ids": list(range(300, 400)),
    "json_schema": CITY,
    "regex": "a+",
    "grammar": 'start: "a"',
    "logprobs_mode": "processed_logprobs",
    "logprobs": True,
    "add_generation_prompt": True,
    "max_completion_tokens": 3,
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_object"},
    "tools": [WEATHER],
}
OF_CHATS = ChatRequest(messages=CHAT)
SETTINGS = SamplingParams()
FIELDS = {*SETTINGS.__struct_fields__, *OF_CHATS.__struct_fields__, "max_completion_tokens"}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_documented_field_is_taken(client, name):
    home = OF_CHATS if name in OF_CHATS.__struct_fields__ else SETTINGS
    value = VALUES[name] if name in VALUES else getattr(home, name)
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 4, "temperature": 1, "seed": 3}
    more = {name: 1 if value is None else value}
    answer = client.chat.completions.with_raw_response.create(**asked, extra_body=more)
    assert answer.status_code == 200
    assert WARNING not in answer.headers


@pytest.mark.parametrize("name", [*IGNORED, *REFUSED])
def test_fields_that_change_nothing_are_taken(http, name):
    neutral = REFUSED.get(name, ("x",))
    for value in (None, *neutral):
        assert ask(http, **{name: value}).status_code == 200
    if name in REFUSED:
        refused = ask(http, **{name: {"other": 1}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_bias_rules_the_text(client, llm):
    answer = client.completions.create(
        model="tiny", prompt="Once", max_tokens=4, temperature=0, logit_bias={"300": 100}
    )
    assert answer.choices[0].text == llm.decode([300]) * 4


@pytest.mark.parametrize(
    ("form", "accepted"),
    [
        ({"type": "json_object", "schema": CITY}, True),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}, True),
        ({"type": "json_schema", "json_schema": {"name": "a", **CITY}}, False),
        ({"type": "json_schema"}, False),
        ({"type": "text", "schema": CITY}, False),
        ({"schema": CITY}, False),
    ],
)
def test_no_schema_is_dropped(http, form, accepted):
    answer = ask(http, response_format=form, max_tokens=60)
    assert answer.status_code == (200 if accepted else 400)
    if accepted:
        assert json.loads(answer.json()["choices"][0]["message"]["content"])["city"] in (
            "Oslo",
            "Rome",
        )
    else:
        assert answer.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["any", "named"],
)
def test_a_tool_is_called_and_its_answer_is_read(client, llm, choice, stream, monkeypatch):
    asked = {"model": "tiny", "tools": [WEATHER], "seed": 1, "max_tokens": 90}
    messages = list(CHAT)
    monkeypatch.setattr(llm.tokenizer, "chat_template", TEMPLATE)
    for _ in range(2):
        answer = client.chat.completions.create(
            messages=messages, tool_choice=choice, parallel_tool_calls=False, stream=stream, **asked
        )
        if stream:
            pieces = [piece.choices[0] for piece in answer]
            [call] = [c for piece in pieces for c in piece.delta.tool_calls or []]
            assert pieces[-1].finish_reason == "tool_calls"
            assert not pieces[-1].delta.content
            called = {"id": call.id, "type": "function", "function": call.function.model_dump()}
        else:
            [told] = answer.choices
            assert (told.message.content, told.finish_reason) == (None, "tool_calls")
            called = told.message.tool_calls[0].model_dump()
        assert called["function"]["name"] == "weather"
        assert json.loads(called["function"]["arguments"])["city"] in ("Oslo", "Rome")
        messages += [{"role": "assistant", "content": None, "tool_calls": [called]}]
        messages += [{"role": "tool", "tool_call_id": called["id"], "content": "rain"}]


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"function": {"name": "clock"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"messages": None}, "messages"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_errors_name_the_field_that_was_sent(http, asked, parameter):
    refused = ask(http, **asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == parameter
    assert f"{parameter}=" in refused.json()["error"]["message"]


def test_long_values_are_cut(http):
    refused = ask(http, stop=[{"text": "x" * 9999}]).json()["error"]["message"]
    assert refused.startswith("stop=({'text': 'xxx")
    assert "xxx... (10014 characters): expected " in refused
    assert len(refused) < 400


def test_words_beside_tools_stay_words_and_ids_are_as_expected(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, tools=[WEATHER, CLOCK], max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("eaglegbv-")
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).id.startswith("cmpl-")


def test_the_last_text_comes_before_the_reason(client):
    for create, more in (
        (client.chat.completions.create, {"messages": CHAT}),
        (client.completions.create, {"prompt": "Once"}),
    ):
        pieces = list(create(model="tiny", max_tokens=6, stream=True, **more))
        *others, last = [piece.choices[0] for piece in pieces]
        assert last.finish_reason
        assert not any(piece.finish_reason for piece in others)
        assert not (last.text if hasattr(last, "text") else last.delta.content)


def test_what_stands_beside_an_answer(http, llm):
    told = ask(
        http, "/v1/completions", prompt="Once upon", logprobs=2, return_token_ids=True
    ).json()
    [choice] = told["choices"]
    assert choice["prompt_token_ids"] == llm.encode("Once upon")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    *offsets, _ = [0, *accumulate(map(len, choice["logprobs"]["tokens"]))]
    assert choice["logprobs"]["text_offset"] == offsets
    record = told["metrics"]["speculative_decoding"]
    assert len(record["acceptance_histogram"]) == record["num_spec_tokens"] + 1
    ids = ask(http, "/v1/completions", prompt="Once", logprobs=1, return_tokens_as_token_ids=True)
    assert ids.json()["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    chat = ask(
        http, logprobs=True, top_logprobs=3, max_tokens=12, return_spec_tokens_details=True
    ).json()
    places = chat["choices"][0]["logprobs"]["content"]
    spelled = b"".join(bytes(place["bytes"]) for place in places)
    assert spelled.decode(errors="replace") == chat["choices"][0]["message"]["content"]
    assert chat["sglext"]["spec_tokens_details"]["spec_verify_ct"] > 0


def test_a_stream_tells_what_a_whole_answer_tells(http):
    asked = {"prompt": "Once upon", "logprobs": 2, "max_tokens": 9, "return_token_ids": True}
    [whole] = ask(http, "/v1/completions", **asked).json()["choices"]
    with http.stream(
        "POST", "/v1/completions", json={**asked, "stream": True, "temperature": 1, "seed": 3}
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [t for c in choices for t in c.get("token_ids", [])] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        told = [value for c in choices if c["logprobs"] for value in c["logprobs"][name]]
        assert told == whole["logprobs"][name]


def test_texts_as_long_as_the_context_are_scored(http, llm):
    ids = [300 + place % 50 for place in range(llm.max_model_len)]
    answer = ask(
        http, "/v1/completions", prompt=ids, echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids)
    assert choice["text"] == llm.decode(ids)
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert llm.score(ids).total == pytest.approx(
        sum(choice["logprobs"]["token_logprobs"][1:]), abs=0.05
    )
    too_long = ask(http, "/v1/completions", prompt=[*ids, 300], echo=True, logprobs=1, max_tokens=0)
    assert too_long.status_code == 400


def test_other_endpoints(http, llm):
    model = http.get("/v1/models/tiny").json()
    assert model == http.get("/v1/models").json()["data"][0]
    assert model["max_model_len"] == llm.max_model_len
    assert model["created"] > 1_700_000_000
    tokens = http.post("/tokenize", json={"prompt": "Once upon"}).json()
    assert tokens["tokens"] == llm.encode("Once upon")
    assert tokens["count"] == len(tokens["tokens"])
    assert http.post("/tokenize", json={"messages": CHAT}).json()["tokens"] == llm.encode(CHAT)
    bare = {"prompt": "Once upon", "add_special_tokens": False}
    ids = http.post("/tokenize", json=bare).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "Once upon"
    assert http.get("/version").json()["version"]
    for path, status in (("/v1/models/other", 404), ("/nowhere", 404), ("/v1/completions", 405)):
        refused = http.get(path)
        assert refused.status_code == status
        assert refused.json()["error"]["message"]
    assert http.get("/nowhere").json()["error"]["message"] == "GET /nowhere: Not Found"
    not_allowed = http.get("/v1/completions").json()["error"]["message"]
    assert not_allowed == "GET /v1/completions: Method Not Allowed"
    preflight = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    allowed = http.options("/v1/completions", headers=preflight)
    assert allowed.headers["access-control-allow-origin"] == "*"


def test_metrics_have_vllm_s_names(http):
    ask(http, max_tokens=9, ignore_eos=True)
    text = http.get("/metrics").text
    for name in (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "prompt_tokens_total",
        "generation_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "num_requests_running",
        "kv_cache_usage_perc",
    ):
        assert f'vllm:{name}{{model_name="tiny"}} ' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in text
    assert (
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"}' in text
    )


def test_a_seed_reproduces_its_text_alone_and_in_company(llm):
    params = SamplingParams(temperature=1, max_tokens=12, seed=7, ignore_eos=True)
    alone = llm.generate("Once upon a time", params)
    crowd = [SamplingParams(temperature=1, max_tokens=12, seed=seed) for seed in range(6)]
    among = llm.generate(["Once upon a time"] * 7, [*crowd, params])[-1]
    assert among.token_ids == alone.token_ids
    assert isinstance(llm.plan, DefaultPlan)
    assert set(alone.metrics.plans) == {"otbv 1x4"}
    unseeded = llm.generate("Once upon a time", SamplingParams(temperature=1, max_tokens=12))
    assert set(unseeded.metrics.plans) != {"otbv 1x4"} or len(unseeded.metrics.plans) == 1


def test_automatic_plans_by_name_stay_automatic_with_a_seed(llm):
    fixed = llm.metrics.value(REASONS, PlanReason.FIXED)
    steps = sum(llm.metrics.values[REASONS].values())
    how = {"temperature": 1, "max_tokens": 20, "ignore_eos": True}
    params = [SamplingParams(**how, seed=seed) for seed in range(4)]
    llm.generate(["Once upon a time"] * 4, params, plan=AUTO)
    assert llm.metrics.value(REASONS, PlanReason.FIXED) == fixed
    assert sum(llm.metrics.values[REASONS].values()) > steps


def test_an_address_is_checked_before_anything_is_loaded():
    with Endpoint(port=0).bind() as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(InvalidArgument, match=f"port={port}: expected one that is free"):
            Endpoint(port=port).bind()
    for wrong in (Endpoint(host="no.such.host.invalid"), Endpoint(port=70_000)):
        with pytest.raises(InvalidArgument, match="port="):
            wrong.bind()
