"""Throughput under load: ``python load_run.py MODEL LOADS PAIRS [TOKENS]``, on a quiet machine.

MODEL is ``tiny`` or ``smollm2``, LOADS such as ``1,4,12,24``. All servers run at once and sleep
while idle; runs alternate between them, in another order each time. Prints tokens a second, and the
ratio of plans by load to every other way: its geometric mean over pairs of neighbouring runs, with
a 95% interval (Student's t).
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
from scipy.stats import t as student
from support.sglang_engine import CPU_ARGUMENTS, cpu_environment

from eaglegbv.backends.sglang.launch import Launch, launch, running
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.loading import named_models

ADAPTIVE = "plans by load"
PROMPTS = ("Once upon a time", "The capital of France is", "Name three kinds of fruit:")


def ways(model: str, folder: Path) -> dict[str, Launch]:
    """Return what starts each server."""
    costs = folder / "plain.json"
    seconds = {"block 1x1": [9.0], "none": [0.001]}
    costs.write_text(json.dumps({"batches": [64], "seconds": seconds}))
    plain = Settings(plans="1x1,none", costs=str(costs))
    pair = named_models(model, None)
    flags = CPU_ARGUMENTS | {"max_running_requests": 32}
    others = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    others += ["--sleep-on-idle", "--disable-radix-cache"]
    plans = {
        ADAPTIVE: (Settings(plans="auto"), pair.drafter),
        "plain rounds": (plain, pair.drafter),
        "fixed 3x4": (Settings(), pair.drafter),
        "SGLang alone": (Settings(), None),
    }
    started = {}
    for name, (settings, drafter) in plans.items():
        start = launch(pair.target, drafter, paths=3, depth=4, settings=settings, others=others)
        started[name] = Launch(start.command, cpu_environment(start.environment))
    return started


def speed(url: str, load: int, tokens: int) -> float:
    """Return tokens a second of so many requests at once."""
    params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    text = [PROMPTS[i % len(PROMPTS)] for i in range(load)]
    start = time.perf_counter()
    body = {"text": text, "sampling_params": params}
    httpx.post(f"{url}/generate", json=body, timeout=None).raise_for_status()
    return load * tokens / (time.perf_counter() - start)


@contextmanager
def serving_all(starts: dict[str, Launch], folder: Path) -> Iterator[dict[str, str]]:
    """Start all servers; yield their addresses."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running(start, folder / f"{name}.log"))
            for name, start in starts.items()
        }


def main(model: str, loads: str, pairs: str, tokens: str = "32") -> None:
    """See the module."""
    with TemporaryDirectory() as name, serving_all(ways(model, Path(name)), Path(name)) as urls:
        for load in map(int, loads.split(",")):
            speeds: dict[str, list[float]] = {way: [] for way in urls}
            for url in urls.values():
                speed(url, load, 8)  # a warm-up
            for number in range(int(pairs)):
                order = [*urls][number % len(urls) :] + [*urls][: number % len(urls)]
                for way in order:
                    speeds[way].append(speed(urls[way], load, int(tokens)))
            for way, found in speeds.items():
                ratios = np.log(speeds[ADAPTIVE]) - np.log(found)
                mean, count = ratios.mean(), len(ratios)
                spread = student.ppf(0.975, count - 1) * ratios.std(ddof=1) / math.sqrt(count)
                low, high = np.exp((mean - spread, mean + spread))
                sys.stdout.write(
                    f"{model} {load:3} at once  {way:14} {np.median(found):8.1f} tokens/s"
                    f"  ratio {math.exp(mean):.2f} [{low:.2f}, {high:.2f}]\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
