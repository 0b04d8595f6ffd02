"""An exact toy target: the next token's distribution is a table over the last few tokens.

Its distributions are known in closed form, so tests can compare what an engine emits with the exact
joint distribution. A table of tokens by slot takes the place of a KV pool: a slot freed too early,
or a tree node that sees its sibling, changes the distribution.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eaglegbv.attention.base import Segment, pack
from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.models.target import Target, TargetOutput

HIDDEN = 8


class TabularTarget(Target):
    """Random logits for every state, where a state is the last ``order`` tokens.

    A state's features are a random vector f, and its logits are W f with one random output matrix
    W. So heads that share the output layer have a true relation to learn.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        order: int = 2,
        seed: int = 0,
        scale: float = 1.5,
        max_slots: int = 1024,
        features: tuple[int, ...] = (),
    ) -> None:
        """Draw the tables, by ``seed``; larger values of ``scale`` give more peaked distributions.

        Positions before the text's start count as one more token.
        """
        self.vocab_size = vocab_size
        self.max_context = 1024
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.eos_token_ids = frozenset()
        self.features = features
        self.allocator = SlotAllocator(max_slots)
        generator = torch.Generator().manual_seed(seed)
        states = int((vocab_size + 1) ** order)
        self._order = order
        torch.randn((vocab_size, HIDDEN), generator=generator)  # numbers that tests began with
        output = torch.randn((vocab_size, HIDDEN), generator=generator)
        self._features = torch.randn((states, HIDDEN), generator=generator)
        self._logits: Tensor = self._features @ output.T * (scale / HIDDEN**0.5)
        self._token_of_slot = torch.full((max_slots,), vocab_size)

    def logits_after(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits ``[vocab]`` float32 that follow the text ``token_ids``."""
        start = [self.vocab_size] * self._order
        state = 0
        for token in [*start, *token_ids][-self._order :]:
            state = state * (self.vocab_size + 1) + token
        return self._logits[state]

    def forward(
        self, segments: Sequence[Segment], *, logit_rows: Tensor | None = None
    ) -> TargetOutput:
        """See :meth:`Target.forward`."""
        batch = pack(segments)
        self._token_of_slot[batch.slots] = batch.token_ids
        states = torch.cat([self._states(segment) for segment in batch.segments])
        wanted = states if logit_rows is None else states[logit_rows]
        return TargetOutput(self._logits[wanted], self._features[states] if self.features else None)

    def _states(self, segment: Segment) -> Tensor:
        """Return each new token's state, ``[q]``, read from the slots it may see."""
        tokens = self._token_of_slot[segment.key_slots()]
        key_positions = torch.cat((torch.arange(segment.num_context), segment.tree_positions))
        seen = segment.key_mask(None)
        state = torch.zeros_like(segment.positions)
        for back in range(self._order - 1, -1, -1):
            here = key_positions == (segment.positions - back).unsqueeze(1)
            if seen is not None:
                here &= seen
            # At most one visible token is at each position, and none before the text's start.
            found = torch.where(here.any(1), tokens[here.int().argmax(1)], self.vocab_size)
            state = state * (self.vocab_size + 1) + found
        return state
