"""The first user of our hooks for SGLang (``docs/inside/sglang_hooks.md``): a plug-in, with a test.

Run as a script, ``first_user.py FOLDER COUNT``, it prints texts that a patched SGLang writes with
it as a JSON array; FOLDER gets the models.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.sglang_engine import PROMPT, pair_arguments, sglang_engine, token_ids
from support.sglang_pair import save_sglang_pair

from eaglegbv.backends.sglang.book import RequestBook
from eaglegbv.backends.sglang.plugin import SampledTrees
from eaglegbv.backends.sglang.rounds import RoundBuffers
from eaglegbv.backends.sglang.verify import GraphJudge
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import Recorder

NAME = "FIRST_USER"
ROWS = 256  # most requests at once
PAGE = Path(__file__).parents[3] / "docs/inside/sglang_hooks.md"

page: dict[str, Any] = {}  # the classes that it shows
exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)), page)


class FirstUser(SampledTrees):
    """An algorithm that says by the hooks alone how trees grow and are judged."""

    def handle_server_args(self, server_args: Any) -> None:
        """Complete the arguments."""
        drafted = server_args.speculative_eagle_topk * server_args.speculative_num_steps
        server_args.speculative_num_draft_tokens = 1 + drafted
        server_args.disable_overlap_schedule = True  # SGLang has none on a CPU

    def create_tree_verifier(self, worker: Any) -> Any:
        """Return the verifier, which gets its buffers with the pools."""
        self.judge = page["Judge"](None)
        return self.judge

    def create_tree_grower(self, draft_worker: Any) -> Any:
        """Allocate what both read at fixed addresses."""
        plan = Plan(paths=draft_worker.topk, depth=draft_worker.speculative_num_steps)
        book = RequestBook(plan, 0)
        slots = draft_worker.req_to_token_pool.req_to_token.shape[0]
        vocab = draft_worker.draft_runner.model_config.vocab_size
        buffers = RoundBuffers(plan, ROWS, torch.zeros(slots, vocab), torch.arange(vocab))
        probs = torch.zeros(ROWS * (1 + plan.paths * plan.depth), vocab)
        self.judge.graphs = GraphJudge(buffers, probs, ROWS)
        self.judge.graphs.record(Recorder())
        return page["SampledPaths"](buffers, book)


def register() -> None:
    """Register it with SGLang's own worker."""
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=FirstUser)(
        lambda _: EAGLEWorkerV2
    )


def main(folder: str, count: str) -> None:
    """See the module."""
    arguments = pair_arguments(save_sglang_pair(Path(folder)), "eagle1", 3, 3)
    arguments |= {"speculative_algorithm": NAME, "max_running_requests": ROWS}
    params = {"temperature": 1.0, "max_new_tokens": 5, "ignore_eos": True}
    texts: list[list[int]] = []
    with sglang_engine(**arguments) as engine:
        while len(texts) < int(count):
            prompts = [PROMPT] * min(ROWS, int(count) - len(texts))
            texts += token_ids(engine.generate(input_ids=prompts, sampling_params=params))
    sys.stdout.write(f"{json.dumps(texts)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
