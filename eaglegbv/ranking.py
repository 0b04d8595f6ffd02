"""The order of a law's tokens that drafters and verifiers share."""

from torch import Tensor


def most_likely_first(ids: Tensor, probs: Tensor) -> Tensor:
    """Return the order that sorts laws by probability, most likely first, ties by token id.

    Drafters and verifiers must agree on the order, because some draft laws fix a node's most likely
    children.

    Args:
        ids: ``[..., width]`` int64, token ids.
        probs: ``[..., width]``, their probabilities.

    Returns:
        ``[..., width]`` int64, indices along the last dimension.
    """
    by_id = ids.argsort(dim=-1)
    by_probability = probs.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices
    return by_id.gather(-1, by_probability)
