"""What a request forbids or favours: single tokens, after the tokens generated so far.

A rule looks at a node's own path, so it makes another target distribution of the same tree, for
which every verifier is as lossless as without it. Drafters that grow trees level by level obey it
too, so that what is drafted can be accepted.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eaglegbv.devices import send, upload
from eaglegbv.errors import InvalidArgument
from eaglegbv.grammars import Grammar, Tokens
from eaglegbv.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules of one request; see :class:`SamplingParams`."""

    vocab: int  # number of tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: frozenset[int] | None = None  # None for all tokens
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()  # tokens that may not come before `min_tokens` others
    bad_words: tuple[Tokens, ...] = ()
    grammar: Grammar | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        vocab: int,
        eos_token_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        grammar: Grammar | None = None,
    ) -> Self | None:
        """Return the rules of such settings and their grammar, None if there are none.

        Raises:
            InvalidArgument: A token id is not within the vocabulary, or there is no tokenizer for
                bad words that are texts.
        """
        allowed = params.allowed_token_ids
        ends = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens else set()
        rules = cls(
            vocab=vocab,
            logit_bias=tuple(dict(params.logit_bias).items()),
            allowed=None if allowed is None else frozenset(allowed),
            min_tokens=params.min_tokens,
            # Any number may be given as one that ends a text; what no text can hold ends none.
            ends=frozenset(token for token in ends if token < vocab),
            bad_words=tuple(_words(params.bad_words, tokenizer)),
            grammar=grammar,
        )
        named = {
            "logit_bias": [token for token, _ in rules.logit_bias],
            "allowed_token_ids": allowed or (),
            "bad_words": [token for word in rules.bad_words for token in word],
        }
        for name, tokens in named.items():
            for token in tokens:
                if token >= vocab:
                    raise InvalidArgument(name, token, f"token ids in [0, {vocab})")
        return None if rules == cls(vocab) else rules

    def forbidden_after(self, sequence: Tokens) -> set[int]:
        """Return the tokens that may not follow ``sequence``, but for what is never allowed.

        What the grammar forbids is not among them.
        """
        forbidden = set(self.ends) if len(sequence) < self.min_tokens else set()
        for *before, last in self.bad_words:
            if sequence[len(sequence) - len(before) :] == tuple(before):
                forbidden.add(last)
        return forbidden

    def allows(self, sequence: Tokens, token: int) -> bool:
        """Return whether ``token`` may follow ``sequence``."""
        if self.allowed is not None and token not in self.allowed:
            return False
        if token in self.forbidden_after(sequence):
            return False
        return self.grammar is None or self.grammar.allows(sequence, token)

    def row_after(self, sequence: Tokens) -> "RuledRow":
        """Return the row after the tokens that are committed."""
        if self.grammar is not None:
            self.grammar.go_on_to(sequence)
        return RuledRow(self, sequence)


def _words(
    words: Sequence[str | Tokens], tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[Tokens]:
    """Yield bad words as tokens: a text as it begins a line, and as it follows a space.

    The latter only if its first token is another and it has as many, as in vLLM: other spellings
    would forbid a token for a space alone.
    """
    for word in words:
        if not isinstance(word, str):
            yield word
            continue
        if tokenizer is None:
            raise InvalidArgument("bad_words", word, "token ids, as this engine has no tokenizer")
        first, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
            for prefix in ("", " ")
        )
        yield first
        if len(spaced) == len(first) and spaced[0] != first[0]:
            yield spaced


class RuledRow(NamedTuple):
    """A row of logits."""

    rules: TokenRules  # those of its request
    sequence: Tokens | None  # the tokens before it; None where the rules forbid them

    def followed_by(self, token: int) -> "RuledRow":
        """Return the row after one more token."""
        if self.sequence is None or not self.rules.allows(self.sequence, token):
            return RuledRow(self.rules, None)
        return RuledRow(self.rules, (*self.sequence, token))


def rows_of_tree(
    root: RuledRow, token_ids: Sequence[int], parents: Sequence[int]
) -> list[RuledRow]:
    """Return the row of each node of a tree, by its own path.

    The sequence of ``root`` ends with its token; ``token_ids`` and ``parents`` are those of the
    nodes, root first.
    """
    rows = [root]
    for token, parent in zip(token_ids[1:], parents[1:], strict=True):
        rows.append(rows[parent].followed_by(token))
    return rows


def bias_of(rows: Sequence[RuledRow], device: torch.device) -> Tensor:
    """Return what rules add to logits ``[rows, vocab]``, float32: -inf where a token is forbidden.

    Rows that no sequence reaches are 0, so that they have some distribution.
    """
    vocab = rows[0].rules.vocab
    bias = torch.zeros((len(rows), vocab), device=device)
    first = 0
    for _, group in groupby(rows, key=lambda row: id(row.rules)):
        members = list(group)
        _add_constant(bias[first : first + len(members)], members[0].rules)
        first += len(members)
    forbidden: list[int] = []
    for number, row in enumerate(rows):
        if row.sequence is not None:
            tokens = row.rules.forbidden_after(row.sequence)
            forbidden += [number * vocab + token for token in tokens]
    if forbidden:
        places = upload(forbidden, dtype=torch.int64, device=device)
        bias.view(-1).index_fill_(0, places, -torch.inf)
    _forbid_by_grammar(bias, rows)
    unreached = [row.sequence is None for row in rows]
    if any(unreached):
        never = upload(unreached, dtype=torch.bool, device=device)
        bias.masked_fill_(never.unsqueeze(1), 0.0)
    return bias


def _add_constant(bias: Tensor, rules: TokenRules) -> None:
    """Add what is the same after every sequence; ``bias`` is ``[rows, vocab]``."""
    if rules.allowed is not None:
        allowed = upload(sorted(rules.allowed), dtype=torch.int64, device=bias.device)
        bias.fill_(-torch.inf).index_fill_(1, allowed, 0.0)
    if rules.logit_bias:
        tokens, values = zip(*rules.logit_bias, strict=True)
        places = upload(tokens, dtype=torch.int64, device=bias.device)
        added = upload(values, dtype=torch.float32, device=bias.device)
        bias.index_add_(1, places, added.expand(len(bias), -1))


def _forbid_by_grammar(bias: Tensor, rows: Sequence[RuledRow]) -> None:
    """Forbid what the rows' grammars do; ``bias`` is ``[rows, vocab]``."""
    masks = {
        number: row.rules.grammar.mask_after(row.sequence)
        for number, row in enumerate(rows)
        if row.rules.grammar is not None and row.sequence is not None
    }
    if not masks:
        return
    places = upload(list(masks), dtype=torch.int64, device=bias.device)
    words = send(torch.from_numpy(np.stack(list(masks.values()))), bias.device)
    shifts = torch.arange(32, dtype=torch.int32, device=bias.device)
    allowed = (words.unsqueeze(2) >> shifts & 1).flatten(1)[:, : bias.shape[1]] == 1
    ruled = bias.index_select(0, places).masked_fill(~allowed, -torch.inf)
    bias.index_copy_(0, places, ruled)


class GrowingRows:
    """The rows from which trees grow, level by level."""

    def __init__(self, roots: Sequence[RuledRow]) -> None:
        """Start at the roots, one of each request."""
        self._rows = list(roots)

    def extend(self, token_ids: Sequence[int], parents: Sequence[int]) -> None:
        """Go on to the next level, of these tokens after these rows."""
        pairs = zip(parents, token_ids, strict=True)
        self._rows = [self._rows[parent].followed_by(token) for parent, token in pairs]

    def obey(self, logits: Tensor, draft_to_target: Tensor) -> Tensor:
        """Return the rows' logits ``[rows, draft_vocab]`` as far as the rules leave any of them.

        A draft vocabulary may hold none of the tokens that are left. What is drafted then is
        rejected.
        """
        logits = logits.float()
        biased = logits + bias_of(self._rows, logits.device).index_select(1, draft_to_target)
        nothing = (biased == -torch.inf).all(dim=1, keepdim=True)
        return torch.where(nothing, logits, biased)
