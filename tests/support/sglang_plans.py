"""Plans that change within texts: tables by which every batch has another, and requests that come
one after another, so that batches do change."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

BATCHES = range(1, 65)


def changing_plans(verifier: str, paths: int, depth: int, file: Path) -> dict[str, str]:
    """Return settings by which trees, blocks and plain rounds take turns, batch by batch."""
    tree, single = f"{paths}x{depth}", f"1x{depth}"
    names = (f"{verifier} {tree}", f"block {single}", "none")
    seconds = {
        name: [0.1 if batch % len(names) == turn else 9.0 for batch in BATCHES]
        for turn, name in enumerate(names)
    }
    file.write_text(json.dumps({"batches": [*BATCHES], "seconds": seconds}))
    return {"EAGLEGBV_PLANS": f"{tree},{single},none", "EAGLEGBV_COSTS": str(file)}


def arriving(
    engine: Any, prompt: list[int], params: Sequence[dict[str, Any]], seed: int
) -> list[dict[str, Any]]:
    """Return an engine's answers to requests of which none to two more come whenever one ends.

    So the batch grows and shrinks by one or two at a time, however fast the machine is.
    """
    rng = random.Random(seed)

    async def answer(own: dict[str, Any]) -> dict[str, Any]:
        return await engine.async_generate(input_ids=prompt, sampling_params=own)

    async def answer_all() -> list[dict[str, Any]]:
        waiting = iter(rng.sample(range(len(params)), len(params)))
        tasks: dict[int, asyncio.Task[dict[str, Any]]] = {}
        running: set[asyncio.Task[dict[str, Any]]] = set()
        while len(tasks) < len(params) or running:
            come = rng.randrange(3) if running else rng.randrange(1, 16)
            new = {i: asyncio.create_task(answer(params[i])) for i in islice(waiting, come)}
            tasks |= new
            running |= {*new.values()}
            if running:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return [tasks[i].result() for i in range(len(params))]

    return engine.loop.run_until_complete(answer_all())


def rounds_by_plan() -> Counter[str]:
    """Return Prometheus' rounds of all of an engine's processes, which has metrics."""
    from prometheus_client import CollectorRegistry, multiprocess  # SGLang sets its folder first

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    rounds: Counter[str] = Counter()
    for metric in registry.collect():
        if metric.name == "eaglegbv:rounds":
            for sample in metric.samples:
                rounds[sample.labels["plan"]] += int(sample.value)
    return rounds
