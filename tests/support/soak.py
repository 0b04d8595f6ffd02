"""Clients that ask, leave early and ask wrongly, all at once, of a server at a loopback address.

As a command, beside a server that `eaglegbv serve tiny --backend local` started:

    PYTHONPATH=tests python -m support.soak http://127.0.0.1:8000 2000 32
"""

import asyncio
import json
import random
import sys
from collections import Counter

import httpx

BAD = (
    {"prompt": ""},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "top_p": 2},
    {"prompt": [10**6]},
    {"n": 2},
)


async def soak(url: str, requests: int, clients: int, seed: int = 0) -> Counter[str]:
    """Return how often each outcome was seen; each request has one."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(requests))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def ask_on() -> None:
            for number in numbers:
                outcomes[await ask(client, random.Random(seed * 1_000_003 + number))] += 1

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
        answer = (await client.post("/v1/completions", json=body)).json()
        [choice] = answer["choices"]
        right = answer["usage"]["completion_tokens"] == tokens
        return "whole" if right and choice["finish_reason"] == "length" else "wrong"
    if kind == "left":
        body |= {"max_tokens": 400}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = []
    async with client.stream("POST", "/v1/completions", json=streamed) as response:
        async for line in response.aiter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if kind == "left" and len(events) >= 3:
                return "left"
    if not events or events[-1] != "[DONE]":
        return "broken off"
    usage = json.loads(events[-2])["usage"]
    return "streamed" if usage["completion_tokens"] == tokens else "wrong"


if __name__ == "__main__":
    address, count, clients = sys.argv[1:]
    outcomes = asyncio.run(soak(address, int(count), int(clients)))
    sys.stdout.write(f"{dict(outcomes)}\n")
