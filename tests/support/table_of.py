"""Tables of whole distributions, for tabular drafters."""

import torch

from eaglegbv.drafters.tabular import Table


def table_of(logits: torch.Tensor, *, order: int = 1) -> Table:
    """The table of ``[(V + 1) ** order, V]`` logits."""
    states, vocab = logits.shape
    return Table(vocab, order, torch.arange(vocab).expand(states, -1), logits.float())
