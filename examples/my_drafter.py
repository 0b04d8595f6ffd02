"""Draft with a drafter of your own: the text's own bigrams (docs/study/add_a_drafter.md)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from eaglegbv import LLM, SamplingParams
from eaglegbv.drafters import SequenceDrafter, register_drafter


@register_drafter("bigrams")
class Bigrams(SequenceDrafter):
    """Smoothed counts. Any logits will do: the text follows the target's distribution exactly."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device

    def logits(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """Return ``[sequences, vocab]``, the logits of the token after each sequence."""
        counts = torch.full((len(sequences), self.vocab_size), 0.001)
        for row, sequence in zip(counts, sequences, strict=True):
            for token, after in pairwise(sequence):
                row[after] += token == sequence[-1]
        return counts.log().to(self.device)


llm = LLM("tiny", drafter="bigrams", verifier="otbv", paths=3, depth=4)
completion = llm.generate("to be or not to be", SamplingParams(max_tokens=64, seed=1))
print(completion.text)
print(f"-- {completion.metrics.block_efficiency:.2f} tokens a target forward")
