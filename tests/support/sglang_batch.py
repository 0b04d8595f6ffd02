"""What is read of SGLang's batches, without SGLang."""

from types import SimpleNamespace

import torch
from torch import Tensor


class Req:
    """A request."""

    def __init__(self, seed: int | None = None) -> None:
        self.sampling_params = SimpleNamespace(sampling_seed=seed)
        self.origin_input_ids = [1, 2, 3]


def sampling(temperatures: Tensor, greedy: Tensor | None) -> SimpleNamespace:
    """Return settings: ``temperatures`` ``[batch, 1]``; ``greedy`` ``[batch]`` bool or None."""
    rows = torch.zeros(len(temperatures), dtype=torch.bool) if greedy is None else greedy
    return SimpleNamespace(
        temperatures=temperatures,
        top_ks=torch.where(rows, 1, 2**30).int(),
        is_any_greedy=greedy is not None,
        need_min_p_sampling=False,
    )


def kernel_arguments(tokens: Tensor, length: int) -> dict[str, Tensor]:
    """Return what SGLang's kernel is given with distributions, for trees ``[batch, nodes]``."""
    (batch, nodes), names = tokens.shape, ("index", "next_token", "next_sibling")
    return {
        "predicts": torch.zeros(batch * nodes, dtype=torch.int32),
        "accept_index": torch.full((batch, length + 1), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(batch, dtype=torch.int32),
        **dict.fromkeys(("candidates", *(f"retrive_{name}" for name in names)), tokens),
    }
