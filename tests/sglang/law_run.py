"""Long runs of the distribution tests: ``python law_run.py FOLDER VERIFIER HEAD K L SAMPLES``.

Each batch of SGLang's engine holds requests at temperature 1, at 0.7 with top_p 0.9, and greedy
ones, all of one prompt. FOLDER gets the models and, batch by batch, the counts of the texts in
``counts.jsonl``: a run that was stopped goes on with a new seed and what it has. At the end, or
with ``python law_run.py FOLDER`` alone, all counts found there are tested and printed as a table.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.g_test import g_test, joint_probs
from support.sglang_engine import PROMPT, pair_arguments, sglang_engine, token_ids
from support.sglang_pair import VOCAB, SGLangPair, save_sglang_pair

TOKENS = 4
LAW = 3
SETTINGS = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
PER_BATCH = 240
GREEDY = 4
SIMULATIONS = 2000
FILE = "counts.jsonl"
COLUMNS = (
    *("verifier", "head", "K", "L", "temperature, top-p", "block efficiency"),
    *("tokens", "samples", "G", "dof", "p", "p simulated"),
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """How the requests of a run speculate.

    Attributes:
        verifier: Its name.
        head: ``eagle1`` or ``eagle3``.
        paths: K.
        depth: L.
    """

    verifier: str
    head: str
    paths: int
    depth: int

    def __str__(self) -> str:
        return f"{self.verifier} | {self.head} | {self.paths} | {self.depth}"


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch of a run yielded, a line of the file.

    Attributes:
        configuration: Of the run.
        seed: Of the engine.
        counts: For each of :data:`SETTINGS` how often each text was seen, by its cell.
        forwards: For each of :data:`SETTINGS`, verifications.
        accepted: For each of :data:`SETTINGS`, drafted tokens accepted.
    """

    configuration: Configuration
    seed: int
    counts: list[dict[int, int]]
    forwards: list[int]
    accepted: list[int]

    def line(self) -> str:
        """Return it as JSON."""
        own = self.configuration
        return json.dumps(
            {
                "configuration": [own.verifier, own.head, own.paths, own.depth],
                "seed": self.seed,
                "counts": self.counts,
                "forwards": self.forwards,
                "accepted": self.accepted,
            }
        )

    @classmethod
    def of_line(cls, line: str) -> "Batch":
        """Undo :meth:`line`."""
        read = json.loads(line)
        counts = [{int(cell): n for cell, n in table.items()} for table in read["counts"]]
        own = Configuration(*read["configuration"])
        return cls(own, read["seed"], counts, read["forwards"], read["accepted"])


def read(file: Path) -> list[Batch]:
    """Return the whole lines of a file; a run may have been stopped within the last."""
    if not file.exists():
        return []
    text = file.read_text()
    return [Batch.of_line(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def cell(text: list[int]) -> int:
    """Number a text of :data:`TOKENS` tokens."""
    return int(np.ravel_multi_index(text, (VOCAB,) * TOKENS))


def marginal(dist: NDArray[np.float64], first: int) -> NDArray[np.float64]:
    """Return the distribution ``[VOCAB ** LAW]`` of the tokens from ``first`` on."""
    others = tuple(i for i in range(TOKENS) if not first <= i < first + LAW)
    return dist.reshape((VOCAB,) * TOKENS).sum(axis=others).reshape(-1)


def observed(counts: Counter[int], first: int) -> NDArray[np.int64]:
    """Return the cells of :func:`marginal` that the texts fall in, once for each text."""
    cells = np.repeat(list(counts), list(counts.values())).astype(np.int64)
    return cells // VOCAB ** (TOKENS - LAW - first) % VOCAB**LAW


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


def batches(engine: Any, configuration: Configuration, seed: int) -> Iterator[Batch]:
    """Generate without end."""
    own = {"max_new_tokens": TOKENS, "ignore_eos": True}
    params = [s | own for s in SETTINGS for _ in range(PER_BATCH)]
    params += [{"temperature": 0.0} | own] * GREEDY
    greedy: set[tuple[int, ...]] = set()
    while True:
        answers = engine.generate(input_ids=[PROMPT] * len(params), sampling_params=params)
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


def run(pair: SGLangPair, file: Path, configuration: Configuration, samples: int) -> None:
    """Add batches to the file until it has as many samples of each of the settings."""
    before = [b for b in read(file) if b.configuration == configuration]
    done = PER_BATCH * len(before)
    if done >= samples:
        return
    seed = 1 + max((b.seed for b in before), default=16)
    settings = {"EAGLEGBV_VERIFIER": configuration.verifier, "EAGLEGBV_SEED": str(seed)}
    arguments = pair_arguments(
        pair, configuration.head, configuration.paths, configuration.depth
    ) | {"max_running_requests": 2 * PER_BATCH + GREEDY, "max_total_tokens": 40_000}
    with sglang_engine(settings, **arguments) as engine, file.open("a") as out:
        for batch in batches(engine, configuration, seed):
            print(batch.line(), file=out, flush=True)
            done += PER_BATCH
            if done >= samples:
                return


def report(pair: SGLangPair, file: Path) -> None:
    """Print the table of all tests."""
    found = read(file)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for configuration in dict.fromkeys(batch.configuration for batch in found):
        own = [batch for batch in found if batch.configuration == configuration]
        for i, params in enumerate(SETTINGS):
            temperature, top_p = params["temperature"], params.get("top_p", 1.0)
            dist = joint_probs(pair.next_probs(temperature, top_p), PROMPT, TOKENS)
            counts: Counter[int] = sum((Counter(batch.counts[i]) for batch in own), Counter())
            efficiency = 1 + sum(b.accepted[i] for b in own) / sum(b.forwards[i] for b in own)
            for first in range(TOKENS - LAW + 1):
                expected = marginal(dist, first) / dist.sum()
                test = g_test(observed(counts, first), expected)
                simulated = simulated_p(test.statistic, expected, test.samples)
                print(
                    f"| {configuration} | {temperature}, {top_p} | {efficiency:.2f} "
                    f"| {first + 1} to {first + LAW} | {test.samples} | {test.statistic:.1f} "
                    f"| {test.cells - 1} | {test.p_value:.3g} | {simulated:.3f} |"
                )


def main(folder: str, *configuration: str) -> None:
    """See the module."""
    home = Path(folder)
    pair = save_sglang_pair(home)
    if configuration:
        verifier, head, paths, depth, samples = configuration
        run(pair, home / FILE, Configuration(verifier, head, int(paths), int(depth)), int(samples))
    report(pair, home / FILE)


if __name__ == "__main__":
    main(*sys.argv[1:])
