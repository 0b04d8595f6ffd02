"""Long distribution tests: ``python law_run.py FOLDER VERIFIER HEAD K L SAMPLES [http|plans]``.

FOLDER gets the models and, after every batch, the counts of the texts, in a file for each
configuration: a run that was stopped goes on with a new seed and what it has. At the end, or with
FOLDER alone, all counts found there are tested and printed as README.md's table.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray
from support.g_test import g_test, joint_probs
from support.sglang_engine import PROMPT, pair_arguments, serving, sglang_engine, token_ids
from support.sglang_pair import VOCAB, SGLangPair, save_sglang_pair
from support.sglang_plans import arriving, changing_plans

from eaglegbv.backends.sglang.launch import running
from eaglegbv.utils import replacing

TOKENS = 4
TESTED = 3
SHAPE = (VOCAB,) * TOKENS
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


class Configuration(NamedTuple):
    """How the requests of a run speculate, and what serves them.

    That is the ``engine``, or one whose ``plans`` change with the batch, or a server by ``http``.
    """

    verifier: str
    head: str
    paths: int
    depth: int
    through: str = "engine"


class Counts(NamedTuple):
    """What a configuration's batches have yielded, for each of the settings."""

    texts: NDArray[np.int64]  # [settings, VOCAB ** TOKENS], how often each text was seen
    drafted: NDArray[np.int64]  # [settings, 2], verifications, and drafted tokens accepted
    seed: NDArray[np.int64]  # [], the last run's

    @classmethod
    def of(cls, file: Path) -> "Counts":
        """Read a file; if there is none yet, nothing was counted."""
        if file.exists():
            return cls(**np.load(file))
        sizes = ((len(SETTINGS), VOCAB**TOKENS), (len(SETTINGS), 2))
        return cls(*(np.zeros(size, dtype=np.int64) for size in sizes), np.array(16))


def samples_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each cell as often as it was counted."""
    return np.repeat(np.arange(len(counts)), counts)


def marginal(cells: NDArray[Any], first: int) -> NDArray[Any]:
    """Sum the cells of texts to ``[VOCAB ** TESTED]``, those of the tokens from ``first`` on."""
    others = tuple(i for i in range(TOKENS) if not first <= i < first + TESTED)
    return cells.reshape(SHAPE).sum(axis=others).reshape(-1)


def simulated_p(statistic: float, dist: NDArray[np.float64], samples: int) -> float:
    """Return how often texts that do follow the distribution have a statistic at least as large.

    The chi-square distribution takes G of cells expected about five times for somewhat too large.
    """
    numbers = np.random.default_rng(0)
    draws = (samples_of(numbers.multinomial(samples, dist)) for _ in range(SIMULATIONS))
    larger = sum(g_test(cells, dist).statistic >= statistic for cells in draws)
    return (larger + 1) / (SIMULATIONS + 1)


@contextmanager
def answering(pair: SGLangPair, own: Configuration, seed: int, log: Path) -> Iterator[Generate]:
    """Start what serves the requests."""
    if own.through != "http":
        settings = {"EAGLEGBV_VERIFIER": own.verifier, "EAGLEGBV_SEED": str(seed)}
        arguments = pair_arguments(pair, own.head, own.paths, own.depth) | SIZES
        if own.through == "plans":
            table = log.with_suffix(".json")
            settings |= changing_plans(own.verifier, own.paths, own.depth, table)
            arguments |= {"disable_cuda_graph": True, "max_running_requests": 64}
        with sglang_engine(settings, **arguments) as engine:
            if own.through == "plans":
                yield lambda params: arriving(engine, PROMPT, params, seed)
            else:
                yield lambda params: engine.generate(
                    input_ids=[PROMPT] * len(params), sampling_params=params
                )
        return
    named = {"verifier": own.verifier, "paths": own.paths, "depth": own.depth, "seed": seed}
    flags = named | SIZES | {"context_length": 256}
    start = serving(pair.target, getattr(pair, own.head), "--skip-tokenizer-init", **flags)
    with running(start, log) as url, httpx.Client(timeout=None) as client:

        def generate(params: list[dict[str, Any]]) -> list[dict[str, Any]]:
            body = {"input_ids": [PROMPT] * len(params), "sampling_params": params}
            return client.post(f"{url}/generate", json=body).raise_for_status().json()

        yield generate


def run(pair: SGLangPair, file: Path, own: Configuration, samples: int) -> None:
    """Add batches to the file until it has as many samples of each of the settings."""
    texts, drafted, seed = Counts.of(file)
    if texts.sum(axis=1).min() >= samples:
        return
    each = {"max_new_tokens": TOKENS, "ignore_eos": True}
    params = [s | each for s in SETTINGS for _ in range(PER_BATCH)]
    params += [{"temperature": 0.0} | each] * GREEDY
    greedy: set[tuple[int, ...]] = set()
    with answering(pair, own, int(seed) + 1, file.with_suffix(".log")) as generate:
        while texts.sum(axis=1).min() < samples:
            answers = generate(params)
            greedy |= {tuple(ids) for ids in token_ids(answers[-GREEDY:])}
            if len(greedy) > 1:
                raise AssertionError(f"greedy texts differ: {greedy}")
            for i in range(len(SETTINGS)):
                part = answers[i * PER_BATCH : (i + 1) * PER_BATCH]
                cells = np.ravel_multi_index(np.array(token_ids(part)).T, SHAPE)
                texts[i] += np.bincount(cells, minlength=VOCAB**TOKENS)
                for answer in part:
                    histogram = answer["meta_info"]["spec_correct_drafts_histogram"]
                    drafted[i] += sum(histogram), np.dot(range(len(histogram)), histogram)
            with replacing(file) as partial, partial.open("wb") as out:
                np.savez(out, **Counts(texts, drafted, seed + 1)._asdict())


def report(pair: SGLangPair, home: Path) -> None:
    """Print the table of all tests."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for file in sorted(home.glob("*.npz")):
        found = Counts.of(file)
        title = " | ".join(file.stem.split(" "))
        for params, texts, (forwards, accepted) in zip(SETTINGS, *found[:2], strict=True):
            temperature, top_p = params["temperature"], params.get("top_p", 1.0)
            dist = joint_probs(pair.next_probs(temperature, top_p), PROMPT, TOKENS)
            for first in range(TOKENS - TESTED + 1):
                expected = marginal(dist, first) / dist.sum()
                test = g_test(samples_of(marginal(texts, first)), expected)
                simulated = simulated_p(test.statistic, expected, test.samples)
                print(
                    f"| {title} | {temperature}, {top_p} | {1 + accepted / forwards:.2f} "
                    f"| {first + 1} to {first + TESTED} | {test.samples} | {test.statistic:.1f} "
                    f"| {test.cells - 1} | {test.p_value:.3g} | {simulated:.3f} |"
                )


def main(folder: str, *configuration: str) -> None:
    """See the module."""
    home = Path(folder)
    pair = save_sglang_pair(home)
    if configuration:
        verifier, head, paths, depth, samples, *through = configuration
        own = Configuration(verifier, head, int(paths), int(depth), *through)
        run(pair, home / f"{' '.join(map(str, own))}.npz", own, int(samples))
    report(pair, home)


if __name__ == "__main__":
    main(*sys.argv[1:])
