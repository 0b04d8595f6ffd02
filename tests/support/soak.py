"""Clients that ask, leave early and ask wrongly, all at once, of a server at a loopback address.

As a command, beside a server that `eaglegbv serve tiny --backend local` started as process PID:

    PYTHONPATH=tests python -m support.soak http://127.0.0.1:8000 2000 32 --process PID
    PYTHONPATH=tests python -m support.soak http://127.0.0.1:8000 50000 32 --short --process PID
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import httpx

Ask: TypeAlias = Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]

BAD = (
    {"prompt": ""},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "top_p": 2},
    {"prompt": [10**6]},
    {"n": 2},
)


class Held(NamedTuple):
    """What a process holds."""

    threads: int
    files: int
    megabytes: float  # resident

    @classmethod
    def by(cls, process: int) -> "Held":
        """Return what a process of this machine holds, as Linux tells it."""
        folder = Path("/proc") / str(process)
        lines = (folder / "status").read_text().splitlines()
        said = dict(line.split(":", 1) for line in lines)
        files = sum(1 for _ in (folder / "fd").iterdir())
        return cls(int(said["Threads"]), files, int(said["VmRSS"].split()[0]) / 1024)


async def soak(url: str, requests: int, clients: int, seed: int = 0, *, short: bool = False):
    """Return how often each outcome was seen; each request has one."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(requests))
    limits = httpx.Limits(max_connections=None)
    one: Ask = ask_short if short else ask
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def ask_on() -> None:
            for number in numbers:
                outcomes[await one(client, random.Random(seed * 1_000_003 + number))] += 1

        await asyncio.gather(*(ask_on() for _ in range(clients)))
    return outcomes


async def ask(client: httpx.AsyncClient, rng: random.Random) -> str:
    kind = rng.choice(("whole", "streamed", "left", "left", "bad", "streamed"))
    if kind == "bad":
        refused = await client.post("/v1/completions", json=rng.choice(BAD))
        return f"refused {refused.status_code}" if refused.json()["error"] else "no error"
    tokens = rng.randint(1, 24)
    body = {"prompt": "x" * rng.randint(1, 60), "max_tokens": tokens, "ignore_eos": True}
    if kind == "whole":
        return await _whole(client, body)
    return await _streamed(client, body, leaves=kind == "left")


async def ask_short(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Ask for one to four tokens."""
    prompt = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 40)))
    body = {"prompt": prompt, "max_tokens": rng.randint(1, 4), "ignore_eos": True}
    how = rng.choice((_whole, _streamed))
    return await how(client, body)


async def _whole(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    answer = (await client.post("/v1/completions", json=body)).json()
    [choice] = answer["choices"]
    right = answer["usage"]["completion_tokens"] == body["max_tokens"]
    return "whole" if right and choice["finish_reason"] == "length" else "wrong"


async def _streamed(
    client: httpx.AsyncClient, body: dict[str, object], *, leaves: bool = False
) -> str:
    more = {"max_tokens": 400} if leaves else {}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, **more}
    events = []
    async with client.stream("POST", "/v1/completions", json=streamed) as response:
        async for line in response.aiter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if leaves and len(events) >= 3:
                return "left"
    if not events or events[-1] != "[DONE]":
        return "broken off"
    usage = json.loads(events[-2])["usage"]
    return "streamed" if usage["completion_tokens"] == body["max_tokens"] else "wrong"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("requests", type=int)
    parser.add_argument("clients", type=int)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--process", type=int)
    given = parser.parse_args()
    how = {"short": given.short, "seed": given.seed}
    outcomes = asyncio.run(soak(given.url, given.requests, given.clients, **how))
    time.sleep(2)  # until the server has closed their connections too
    held = "" if given.process is None else Held.by(given.process)
    sys.stdout.write(f"{dict(outcomes)} {held}\n")
