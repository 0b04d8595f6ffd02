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
        is_all_greedy=greedy is not None and bool(greedy.all()),
        **{f"need_{name}_sampling": False for name in ("top_k", "top_p", "min_p")},
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
    )
