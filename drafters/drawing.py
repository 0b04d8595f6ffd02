"""Tokens drawn from a head's laws over its whole vocabulary, in operations that compile."""

from typing import NamedTuple

from torch import Tensor

from eaglegbv.drafters.draft_law import draft_laws
from eaglegbv.drafters.eagle_head import EagleHead
from eaglegbv.drafters.path_growth import pick_places
from eaglegbv.warp import WarpSettings

_COLD = 1e-30
"""The temperature that stands for 0."""


class Drawing(NamedTuple):
    """How the token after each row is drawn.

    Attributes:
        temperature: ``[rows]`` float32, of the draft laws; 0 takes the most likely token.
        uniforms: ``[rows]`` float64 in [0, 1).
    """

    temperature: Tensor
    uniforms: Tensor


class Drawn(NamedTuple):
    """Tokens drawn.

    Attributes:
        token_ids: ``[rows]`` int64, the target's ids.
        probs: ``[rows, draft_vocab]`` float64, the laws they were drawn from.
    """

    token_ids: Tensor
    probs: Tensor


class Followed(NamedTuple):
    """Result of rows that continue the head's own output, and the tokens drawn after them.

    Attributes:
        hidden: ``[rows, hidden]``.
        drawn: The tokens drawn after the rows.
    """

    hidden: Tensor
    drawn: Drawn


def draw(head: EagleHead, hidden: Tensor, drawing: Drawing) -> Drawn:
    """Draw a token after each row of results ``hidden`` ``[rows, hidden]``."""
    logits = head.logits(hidden)
    settings = WarpSettings(
        # Near 0 only the most likely token keeps any probability, so 0 needs no separate case.
        temperature=drawing.temperature.clamp(min=_COLD),
        greedy=None,
        top_k=None,
        limits=frozenset(),
        top_p=None,
        min_p=None,
    )
    ids = head.draft_to_target
    laws = draft_laws(logits, settings, width=logits.shape[1], draft_to_target=ids)
    return Drawn(ids.take(pick_places(laws.probs, drawing.uniforms)), laws.probs)
