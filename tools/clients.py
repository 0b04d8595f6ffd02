"""Real clients, unchanged, against a server that runs: each does what it is used for, or fails.

    eaglegbv serve smollm2 --backend local --per-request-spec-decode-metrics summary --port 8000
    python tools/clients.py http://127.0.0.1:8000             # all that are installed
    python tools/clients.py http://127.0.0.1:8000 openai aiperf

Run it by the Python of an environment with clients; those that exclude each other have one each.
The model must be in a folder: clients read its tokenizer there, and nothing is fetched.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

QUESTION = "What is the weather in Oslo?"
CITIES = ["Oslo", "Rome"]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
REQUESTS = 8
SECONDS = 600  # that a command may take


class Server(NamedTuple):
    """A server, and what it serves."""

    url: str
    model: str
    folder: str  # of the model

    @classmethod
    def at(cls, url: str) -> "Server":
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            [model] = json.load(answer)["data"]
        return cls(url, model["id"], model["root"])

    @property
    def api(self) -> dict[str, str]:
        return {"base_url": f"{self.url}/v1", "api_key": "none"}


def check_city(arguments: Mapping[str, object]) -> None:
    assert arguments["city"] in CITIES, arguments


# Clients in Python.
def openai(server: Server) -> str:
    """A tool is called twice, whole and streamed, and what it returns is read."""
    from openai import OpenAI

    client = OpenAI(**server.api)
    messages: list = [{"role": "user", "content": QUESTION}]
    # Small models would call on and on.
    one = {"parallel_tool_calls": False, "max_tokens": 60}
    how = {"model": server.model, "tools": TOOLS, "seed": 1, **one}
    whole = client.chat.completions.create(messages=messages, tool_choice="required", **how)
    messages.append(whole.choices[0].message)
    _reply(messages, whole.choices[0].message.tool_calls)
    with client.chat.completions.stream(
        messages=messages, tool_choice={"type": "function", "function": {"name": "weather"}}, **how
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    messages.append(message)
    _reply(messages, message.tool_calls)
    last = client.chat.completions.create(messages=messages, tool_choice="none", **how)
    assert last.choices[0].message.content
    assert last.usage.completion_tokens
    return f"{len(messages)} messages, then {last.choices[0].message.content[:40]!r}"


def _reply(messages: list, calls: list) -> None:
    assert calls
    for call in calls:
        check_city(json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain, 8 degrees."})


def langchain_openai(server: Server) -> str:
    """Structured output by function calling, and by a JSON schema."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=server.model, temperature=0, max_tokens=60, **server.api)
    schema = {"title": "weather", "description": "A city.", **CITY}
    for method in ("function_calling", "json_schema"):
        check_city(model.with_structured_output(schema, method=method).invoke(QUESTION))
    pieces = [piece.content for piece in model.stream(QUESTION)]
    assert "".join(pieces)
    return f"two structures, and a stream of {len(pieces)} pieces"


def litellm(server: Server) -> str:
    """A chat, whole, streamed and with a tool; and a completion."""
    import litellm as client

    how = {"model": f"openai/{server.model}", "max_tokens": 40, **server.api}
    how["messages"] = [{"role": "user", "content": QUESTION}]
    assert client.completion(**how).choices[0].message.content
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = client.completion(**how, **usage)
    assert last.usage.completion_tokens > 0
    called = client.completion(
        **how, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    check_city(json.loads(called.choices[0].message.tool_calls[0].function.arguments))
    text = client.text_completion(
        model=f"text-completion-openai/{server.model}", prompt="Once", max_tokens=8, **server.api
    )
    assert text.choices[0].text
    return f"a stream of {len(pieces)} pieces, a call and two texts"


def instructor(server: Server) -> str:
    """Answers of a class, by tools and by a JSON schema."""
    from typing import Literal

    import instructor as client
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel, extra="forbid"):  # small models would name more and more fields
        city: Literal["Oslo", "Rome"]

    for mode in (client.Mode.TOOLS, client.Mode.JSON_SCHEMA):
        asking = client.from_openai(OpenAI(**server.api), mode=mode)
        messages = [{"role": "user", "content": QUESTION}]
        answer = asking.chat.completions.create(
            model=server.model, response_model=City, messages=messages, max_tokens=60
        )
        check_city(answer.model_dump())
    return "two answers of the class"


# Commands.
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{{target}}}}}"
{more}
"""
ROWS = [
    {"question": "The capital of France is", "choices": ["Paris", "a cheese"], "right": 0},
    {"question": "Two and two are", "choices": ["four", "a river"], "right": 0},
]


def lm_eval(server: Server) -> str:
    """Likelihoods of choices, of whole texts, and generated answers, by local-completions."""
    with folder() as place:
        rows = place / "rows.jsonl"
        rows.write_text("\n".join(json.dumps(row) for row in ROWS))
        choices = 'doc_to_choice: "{{choices}}"'
        metric = "metric_list: [{{metric: {}}}]"
        perplexity = metric.format("word_perplexity")
        generated = "generation_kwargs: {until: ['.'], max_gen_toks: 8}\n"
        generated += metric.format("exact_match")
        tasks = {
            "choices": ("multiple_choice", "right", choices),
            "texts": ("loglikelihood_rolling", "question", perplexity),
            "answers": ("generate_until", "question", generated),
        }
        for name, (kind, target, more) in tasks.items():
            text = TASK.format(name=name, rows=rows, kind=kind, target=target, more=more)
            (place / f"{name}.yaml").write_text(text)
        model = {
            "model": server.model,
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": server.folder,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_length": 512,
        }
        named = ",".join(f"{name}={value}" for name, value in model.items())
        command = ["-m", "lm_eval", "--model", "local-completions", "--model_args", named]
        command += ["--tasks", ",".join(tasks), "--include_path", str(place)]
        run(sys.executable, *command, "--output_path", str(place / "out"))
        [out] = (place / "out").rglob("results*.json")
        results = json.loads(out.read_text())["results"]
    assert results["choices"]["acc,none"] >= 0.5, results
    return f"accuracy {results['choices']['acc,none']}, perplexity of {sorted(results)}"


def aiperf(server: Server) -> str:
    """A profile of streamed chats; it must find the record of speculation."""
    with folder() as place:
        command = ["profile", "--model", server.model, "--url", server.url, "--streaming"]
        command += ["--endpoint-type", "chat", "--tokenizer", server.folder, "--ui", "none"]
        command += ["--concurrency", "4", "--request-count", str(REQUESTS)]
        command += ["--isl", "40", "--osl", "16", "--no-gpu-telemetry"]
        run(beside("aiperf"), *command, "--artifact-dir", str(place))
        [out] = place.rglob("profile_export_aiperf.json")
        told = json.loads(out.read_text())
    assert told["request_count"]["avg"] == REQUESTS, told
    length = told["spec_decode_acceptance_length"]["avg"]
    return f"{REQUESTS} streams, acceptance length {length:.2f}"


def guidellm(server: Server) -> str:
    """A benchmark of concurrent chats; none may fail."""
    with folder() as place:
        out = place / "out.json"
        command = ["run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={server.url},model={server.model}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={server.folder}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"]
        command += ["--profile", "kind=concurrent,streams=4", "--output", f"kind=json,path={out}"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        run(beside("guidellm"), *command)
        [benchmark] = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS, totals
    assert not totals["errored"], totals
    return f"{REQUESTS} streams"


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def beside(command: str) -> str:
    """Return a command of the environment that runs this."""
    return str(Path(sys.executable).with_name(command))


def run(*command: str) -> None:
    """Run a command without the hub; what it printed is in the error if it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command,
        env=os.environ | offline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:])


CLIENTS: Mapping[str, Callable[[Server], str]] = {
    "openai": openai,
    "langchain-openai": langchain_openai,
    "litellm": litellm,
    "instructor": instructor,
    "lm-eval": lm_eval,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


def version(client: str) -> str | None:
    try:
        return metadata.version(client)
    except metadata.PackageNotFoundError:
        return None


def main() -> int:
    """Print a line for each client; return 1 if one failed, or was asked for and is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("clients", nargs="*", choices=[[], *CLIENTS], metavar="CLIENT")
    given = parser.parse_args()
    server, failed = Server.at(given.url.rstrip("/")), False
    for name in given.clients or CLIENTS:
        known = version(name)
        if known is None:
            failed |= name in given.clients
            print(f"{name}: not installed", flush=True)
            continue
        try:
            print(f"{name} {known}: right; {CLIENTS[name](server)}", flush=True)
        except Exception as error:
            failed = True
            print(f"{name} {known}: WRONG; {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
