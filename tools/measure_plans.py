"""Automatic plans beside fixed ones in every cell, by the state of the kept costs, in one table.

    python tools/measure_plans.py OUT [WORD ...]   # cells whose names have all words: tiny busy 8

Each cell is a process with kept costs of its own: none, those of a machine that two other processes
kept busy, or those of a quiet one times two. A cell whose file is in OUT is not measured again.
OUT/table.md has all: "yes" is an interval above the limit, "reaches" one with it; "quick" a trial.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

from eaglegbv.utils import CACHE_FOLDER, cache_folder

# Model and batch: tokens of an answer, repeats of eight prompts, and seconds of a cell, roughly, on
# one core at 2.5 GHz.
LOADS = {"tiny 1": (64, 1, 75), "tiny 4": (64, 2, 75), "tiny 8": (64, 4, 85)}
LOADS |= {"tiny 16": (64, 3, 90), "smollm2 1": (16, 1, 130), "smollm2 8": (32, 2, 150)}
CELLS = list(map(" ".join, product(LOADS, ("empty", "busy", "doubled"), ("1.0", "0.0"))))
HEADINGS = "model|batch|cache|T|best fixed|auto/best|0.95|auto/plain|0.97|plans|reasons"


def bench(cache: Path, model: str, options: str) -> str:
    """Run ``bench batch`` with a cache folder, and return what it prints."""
    command = f"-m eaglegbv bench batch --explain --questions-set builtin --model {model} {options}"
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "models").exists():  # converted weights are no costs
        (cache / "models").symlink_to(cache_folder().absolute() / "models")
    print(f"+ {CACHE_FOLDER}='{cache}' python {command}", flush=True)
    env, run = os.environ | {CACHE_FOLDER: str(cache)}, [sys.executable, *command.split()]
    return subprocess.run(run, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def costs(folder: Path, model: str, state: str) -> list[Path]:
    """Return the files of kept costs in a state, measured now if they are not there."""
    if state != "empty" and not list(folder.glob("costs-*.json")):
        loop = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(loop) for _ in range(2 if state == "busy" else 0)]
        try:
            # Each run of a temperature goes on with what the one before it has kept.
            for temperature in ("1.0", "0.0"):
                load = f"--batches 1,4 --tokens 32 --repeats 1 --temperature {temperature}"
                bench(folder, model, f"--ways auto {load}")
        finally:
            for process in others:
                process.kill()
        for file in folder.glob("costs-*.json") if state == "doubled" else ():
            kept = json.loads(file.read_text())
            file.write_text(json.dumps({t: [[s, 2 * x] for s, x in kept[t]] for t in kept}))
    return list(folder.glob("costs-*.json"))


def row(name: str, told: str) -> str:
    """Return a cell's row of the table, from what ``bench batch`` printed."""
    found = re.findall(r"auto / (\S+), batch \d+: (\S+) \[(\S+), (\S+)\]", told)
    columns = [*name.split(), found[0][0]]
    for (_, ratio, low, high), limit in ((found[0], 0.95), (found[-1], 0.97)):
        reached = "yes" if float(low) >= limit else "reaches" if float(high) >= limit else "no"
        columns += [f"{ratio} [{low}, {high}]", reached]
    return "|".join((*columns, *re.findall(r"auto, batch \d+: (.*); (.*)", told)[0]))


if __name__ == "__main__":
    out, words = Path(sys.argv[1]), {*sys.argv[2:]} - {"quick"}
    left = [n for n in CELLS if words <= {*n.split()} and not (out / f"{n}.txt").exists()]
    seconds = sum(LOADS[" ".join(n.split()[:2])][2] for n in left)
    print(f"{len(left)} of {len(CELLS)} cells, about {seconds // 60} minutes", flush=True)
    for name in left:
        model, batch, state, temperature = name.split()
        tokens, repeats, _ = (8, 2, 0) if "quick" in sys.argv else LOADS[f"{model} {batch}"]
        shutil.rmtree(cache := out / "cache", ignore_errors=True)
        for file in costs(out / f"costs-{model}-{state}", model, state):
            cache.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, cache)
        load = f"--batches {batch} --tokens {tokens} --repeats {repeats}"
        load += f" --temperature {temperature} --ways auto,none,1x3,2x3,3x4"
        (out / f"{name}.txt").write_text(bench(cache, model, load))
        rows = [row(n, f.read_text()) for n in CELLS if (f := out / f"{n}.txt").exists()]
        lines = [HEADINGS, re.sub(r"[^|]+", "---", HEADINGS), *rows, ""]
        (out / "table.md").write_text("\n".join(lines))
