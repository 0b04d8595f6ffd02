"""Long distribution tests: ``python law_run.py FOLDER VERIFIER HEAD K L SAMPLES [http]``.

Each batch holds requests at temperature 1, at 0.7 with top_p 0.9, and greedy ones, all of one
prompt, through SGLang's engine, or with ``http`` through the ``/generate`` of a server that
``eaglegbv serve`` starts. FOLDER gets the models and, batch by batch, the counts of the texts in
``counts.jsonl``: a run that was stopped goes on with a new seed and what it has. At the end, or
with ``python law_run.py FOLDER`` alone, all counts found there are tested and printed as a table.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray
from support.g_test import g_test, joint_probs
from support.sglang_engine import (
    CPU_ARGUMENTS,
    PROMPT,
    cpu_environment,
    pair_arguments,
    sglang_engine,
    token_ids,
)
from support.sglang_pair import VOCAB, SGLangPair, save_sglang_pair

from eaglegbv.backends.sglang.launch import Launch, running

TOKENS = 4
TESTED = 3
SETTINGS = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
PER_BATCH = 240
GREEDY = 4
SIMULATIONS = 2000
SIZES = {"max_running_requests": 2 * PER_BATCH + GREEDY, "max_total_tokens": 40_000}
COLUMNS = (
    *("verifier", "head", "K", "L", "through", "temperature, top-p", "block efficiency"),
    *("tokens", "samples", "G", "dof", "p", "p simulated"),
)
Generate = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Answers the prompt once with each of some sampling settings."""


class Configuration(msgspec.Struct, frozen=True, array_like=True):
    """How the requests of a run speculate, and what serves them: ``engine`` or ``http``."""

    verifier: str
    head: str
    paths: int
    depth: int
    through: str = "engine"


class Batch(msgspec.Struct, frozen=True):
    """What one batch of a run yielded, a line of the file."""

    configuration: Configuration
    seed: int
    # For each of the settings: how often each text was seen, by its cell; verifications; drafted
    # tokens accepted.
    counts: list[dict[int, int]]
    forwards: list[int]
    accepted: list[int]


def read(file: Path) -> list[Batch]:
    """Return the whole lines of a file; a run may have been stopped within the last."""
    text = file.read_bytes() if file.exists() else b""
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    return [msgspec.json.decode(line, type=Batch) for line in lines]


def cell(text: list[int]) -> int:
    """Number a text of :data:`TOKENS` tokens."""
    return int(np.ravel_multi_index(text, (VOCAB,) * TOKENS))


def marginal(dist: NDArray[np.float64], first: int) -> NDArray[np.float64]:
    """Return the distribution ``[VOCAB ** TESTED]`` of the tokens from ``first`` on."""
    others = tuple(i for i in range(TOKENS) if not first <= i < first + TESTED)
    return dist.reshape((VOCAB,) * TOKENS).sum(axis=others).reshape(-1)


def observed(counts: Counter[int], first: int) -> NDArray[np.int64]:
    """Return the cells of :func:`marginal` that the texts fall in, once for each text."""
    cells = np.repeat(list(counts), list(counts.values())).astype(np.int64)
    return cells // VOCAB ** (TOKENS - TESTED - first) % VOCAB**TESTED


def simulated_p(statistic: float, dist: NDArray[np.float64], samples: int) -> float:
    """Return how often texts that do follow the distribution have a statistic at least as large.

    The chi-square distribution takes G of cells expected about five times for somewhat too large.
    """
    numbers = np.random.default_rng(0)
    cells = np.arange(len(dist))
    larger = sum(
        g_test(np.repeat(cells, numbers.multinomial(samples, dist)), dist).statistic >= statistic
        for _ in range(SIMULATIONS)
    )
    return (larger + 1) / (SIMULATIONS + 1)


def batches(generate: Generate, configuration: Configuration, seed: int) -> Iterator[Batch]:
    """Generate without end."""
    own = {"max_new_tokens": TOKENS, "ignore_eos": True}
    params = [s | own for s in SETTINGS for _ in range(PER_BATCH)]
    params += [{"temperature": 0.0} | own] * GREEDY
    greedy: set[tuple[int, ...]] = set()
    while True:
        answers = generate(params)
        greedy |= {tuple(ids) for ids in token_ids(answers[-GREEDY:])}
        if len(greedy) > 1:
            raise AssertionError(f"greedy texts differ: {greedy}")
        parts = [answers[i * PER_BATCH : (i + 1) * PER_BATCH] for i in range(len(SETTINGS))]
        histograms = [
            [a["meta_info"]["spec_correct_drafts_histogram"] for a in part] for part in parts
        ]
        yield Batch(
            configuration,
            seed,
            [dict(Counter(cell(ids) for ids in token_ids(part))) for part in parts],
            [sum(map(sum, own)) for own in histograms],
            [sum(i * n for h in own for i, n in enumerate(h)) for own in histograms],
        )


@contextmanager
def serving(pair: SGLangPair, own: Configuration, seed: int, log: Path) -> Iterator[Generate]:
    """Start what serves the requests."""
    if own.through == "engine":
        settings = {"EAGLEGBV_VERIFIER": own.verifier, "EAGLEGBV_SEED": str(seed)}
        arguments = pair_arguments(pair, own.head, own.paths, own.depth) | SIZES
        with sglang_engine(settings, **arguments) as engine:
            yield lambda params: engine.generate(
                input_ids=[PROMPT] * len(params), sampling_params=params
            )
        return
    words = ["serve", str(pair.target), f"--drafter={getattr(pair, own.head)}"]
    words += [f"--paths={own.paths}", f"--depth={own.depth}", f"--verifier={own.verifier}"]
    flags = CPU_ARGUMENTS | SIZES | {"context_length": 256}
    words += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    words += [f"--seed={seed}", "--skip-tokenizer-init"]
    start = Launch([sys.executable, "-m", "eaglegbv", *words], cpu_environment())
    with running(start, log) as url, httpx.Client(timeout=None) as client:

        def generate(params: list[dict[str, Any]]) -> list[dict[str, Any]]:
            body = {"input_ids": [PROMPT] * len(params), "sampling_params": params}
            answers: list[dict[str, Any]] = (
                client.post(f"{url}/generate", json=body).raise_for_status().json()
            )
            return answers

        yield generate


def run(pair: SGLangPair, file: Path, configuration: Configuration, samples: int) -> None:
    """Add batches to the file until it has as many samples of each of the settings."""
    before = [b for b in read(file) if b.configuration == configuration]
    missing = -(-samples // PER_BATCH) - len(before)
    if missing <= 0:
        return
    seed = 1 + max((b.seed for b in before), default=16)
    log = file.with_suffix(".log")
    with serving(pair, configuration, seed, log) as generate, file.open("ab") as out:
        for batch in islice(batches(generate, configuration, seed), missing):
            out.write(msgspec.json.encode(batch) + b"\n")
            out.flush()


def report(pair: SGLangPair, file: Path) -> None:
    """Print the table of all tests."""
    found = read(file)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for configuration in dict.fromkeys(batch.configuration for batch in found):
        own = [batch for batch in found if batch.configuration == configuration]
        title = " | ".join(map(str, msgspec.structs.astuple(configuration)))
        for i, params in enumerate(SETTINGS):
            temperature, top_p = params["temperature"], params.get("top_p", 1.0)
            dist = joint_probs(pair.next_probs(temperature, top_p), PROMPT, TOKENS)
            counts: Counter[int] = sum((Counter(batch.counts[i]) for batch in own), Counter())
            efficiency = 1 + sum(b.accepted[i] for b in own) / sum(b.forwards[i] for b in own)
            for first in range(TOKENS - TESTED + 1):
                expected = marginal(dist, first) / dist.sum()
                test = g_test(observed(counts, first), expected)
                simulated = simulated_p(test.statistic, expected, test.samples)
                print(
                    f"| {title} | {temperature}, {top_p} | {efficiency:.2f} "
                    f"| {first + 1} to {first + TESTED} | {test.samples} | {test.statistic:.1f} "
                    f"| {test.cells - 1} | {test.p_value:.3g} | {simulated:.3f} |"
                )


def main(folder: str, *configuration: str) -> None:
    """See the module."""
    home = Path(folder)
    pair, file = save_sglang_pair(home), home / "counts.jsonl"
    if configuration:
        verifier, head, paths, depth, samples, *through = configuration
        own = Configuration(verifier, head, int(paths), int(depth), *through)
        run(pair, file, own, int(samples))
    report(pair, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
