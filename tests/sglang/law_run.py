"""Long runs of the law tests: ``python law_run.py FOLDER VERIFIER HEAD K L SAMPLES``.

Prints the G-test of the joint laws of the first three tokens and of the second to fourth, at
temperature 1, and at temperature 0.7 with top_p 0.9 among greedy requests.
"""

import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.g_test import g_test, joint_law
from support.sglang_engine import sglang_engine
from support.sglang_pair import VOCAB, save_sglang_pair

PROMPT = [3, 7, 5, 11, 4]
TOKENS = 5
SETTINGS = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
BATCH = 240


def marginal(law: NDArray[np.float64], first: int, count: int) -> NDArray[np.float64]:
    """Return the law of ``count`` tokens from ``first`` on."""
    tokens = round(np.log(len(law)) / np.log(VOCAB))
    table = law.reshape((VOCAB,) * tokens)
    others = tuple(i for i in range(tokens) if not first <= i < first + count)
    return table.sum(axis=others).reshape(-1)


def cells(texts: list[list[int]], first: int, count: int) -> list[int]:
    """Return the cell of each text."""
    cell = [0] * len(texts)
    for i in range(first, first + count):
        cell = [VOCAB * c + text[i] for c, text in zip(cell, texts, strict=True)]
    return cell


def main(folder: str, verifier: str, head: str, K: str, L: str, samples: str) -> None:
    pair = save_sglang_pair(Path(folder))
    settings = {"EAGLEGBV_VERIFIER": verifier, "EAGLEGBV_SEED": "17"}
    algorithm = "EAGLEGBV3" if head == "eagle3" else "EAGLEGBV"
    with sglang_engine(
        settings,
        model_path=str(pair.target),
        skip_tokenizer_init=True,
        context_length=256,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(getattr(pair, head)),
        speculative_num_steps=int(L),
        speculative_eagle_topk=int(K),
        max_running_requests=120,
    ) as engine:
        for params in SETTINGS:
            start, texts, greedy, histogram = time.time(), [], set(), np.zeros(40)
            own = {"max_new_tokens": TOKENS + 1, "ignore_eos": True}
            many = [params | own] * BATCH + [{"temperature": 0.0} | own] * 4
            while len(texts) < int(samples):
                answers = engine.generate(input_ids=[PROMPT] * len(many), sampling_params=many)
                texts += [answer["output_ids"] for answer in answers[:BATCH]]
                greedy |= {tuple(answer["output_ids"]) for answer in answers[BATCH:]}
                for answer in answers[:BATCH]:
                    own_histogram = answer["meta_info"].get("spec_correct_drafts_histogram", [])
                    histogram[: len(own_histogram)] += own_histogram
            laws = pair.next_laws(params["temperature"], params.get("top_p", 1.0))
            law = joint_law(laws, PROMPT, 4)
            efficiency = 1 + (histogram * np.arange(40)).sum() / histogram.sum()
            print(
                verifier, head, f"K={K} L={L}", params, f"samples={len(texts)}",
                f"seconds={time.time() - start:.0f}", f"block efficiency={efficiency:.3f}",
                f"greedy texts={greedy}", flush=True,
            )  # fmt: skip
            for first, count in ((0, 3), (1, 3), (0, 4)):
                print(
                    "   tokens",
                    first,
                    count,
                    g_test(cells(texts, first, count), marginal(law, first, count)),
                    flush=True,
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
