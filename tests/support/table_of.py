"""Tables of whole distributions, for tabular drafters."""

import torch

from eaglegbv.drafters.tabular import LookupTable


def table_of(logits: torch.Tensor, *, order: int = 1) -> LookupTable:
    """The table of ``[(V + 1) ** order, V]`` logits."""
    states, vocab = logits.shape
    return LookupTable(vocab, order, torch.arange(vocab).expand(states, -1), logits.float())
