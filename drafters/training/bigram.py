"""A bigram table counted on the texts that heads are trained on: the yardstick for them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eaglegbv.drafters.tabular import Table
from eaglegbv.drafters.training.data import Corpus, Texts
from eaglegbv.errors import InvalidArgument

_PRIORS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
_CELLS = 1 << 24  # most entries of a dense block of distributions


@dataclass(frozen=True, slots=True)
class Pairs:
    """Counts of two tokens in a row, the second written by the assistant."""

    vocab: int  # number of tokens, V
    keys: Tensor  # [pairs] int64, ascending: first token * V + second
    counts: Tensor  # [pairs] float64

    @property
    def firsts(self) -> Tensor:
        """Total count of each first token, ``[V]`` float64."""
        return torch.bincount(self.keys // self.vocab, self.counts, self.vocab)

    @property
    def unigram(self) -> Tensor:
        """Probabilities of second tokens, ``[V]`` float64, each counted once more than it was."""
        counts = 1 + torch.bincount(self.keys % self.vocab, self.counts, self.vocab)
        return counts / counts.sum()

    def count_of(self, keys: Tensor) -> Tensor:
        """Return the counts of ``keys``, 0 where there is none."""
        place = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return self.counts[place].where(self.keys[place] == keys, 0.0)


def count_pairs(corpus: Corpus, vocab: int) -> Pairs:
    """Count the pairs within the documents of a corpus."""
    tokens = corpus.token_ids.long()
    document = torch.repeat_interleave(corpus.lengths)
    pair = (document[1:] == document[:-1]) & corpus.is_response[1:]
    keys = (tokens[:-1] * vocab + tokens[1:])[pair]
    if not len(keys):
        raise InvalidArgument("data", list(corpus.sources), "responses of two tokens or more")
    unique, counts = keys.unique(return_counts=True)
    return Pairs(vocab, unique, counts.double())


def smoothed(pairs: Pairs, prior: float, width: int) -> Table:
    """Return the ``width`` likeliest followers of every token.

    p(y | x) = (count(x, y) + prior u(y)) / (count(x) + prior), u the unigram distribution: MacKay
    and Peto's Dirichlet prior (1995). The last row, for a missing token, is u.
    """
    unigram, firsts = pairs.unigram, pairs.firsts
    width = min(width, pairs.vocab)
    rows = max(1, _CELLS // pairs.vocab)
    ids, probs = [], []
    for begin in range(0, pairs.vocab, rows):
        end = min(begin + rows, pairs.vocab)
        own = slice(
            *torch.searchsorted(pairs.keys, pairs.keys.new_tensor([begin, end]) * pairs.vocab)
        )
        dense = (prior * unigram).repeat(end - begin, 1)
        dense.view(-1).index_add_(0, pairs.keys[own] - begin * pairs.vocab, pairs.counts[own])
        best = (dense / (firsts[begin:end, None] + prior)).topk(width, dim=1)
        ids.append(best.indices)
        probs.append(best.values)
    overall = unigram.topk(width)
    return Table(
        vocab_size=pairs.vocab,
        order=1,
        ids=torch.cat((*ids, overall.indices[None])),
        log_probs=torch.cat((*probs, overall.values[None])).log().float(),
    )


def cross_entropy(pairs: Pairs, prior: float, measured: Pairs) -> float:
    """Return the mean of -log p(y | x), in nats, over the pairs of ``measured``."""
    first, second = measured.keys // pairs.vocab, measured.keys % pairs.vocab
    counts = pairs.count_of(measured.keys) + prior * pairs.unigram[second]
    probs = counts / (pairs.firsts[first] + prior)
    return float(-(measured.counts * probs.log()).sum() / measured.counts.sum())


def train_bigram(texts: Texts, out: Path, *, vocab: int, width: int, command: str = "") -> str:
    """Count texts, choose the prior by the held-out ones, and save the table in ``out``.

    Args:
        texts: What to count.
        out: Folder to write.
        vocab: Tokens of the target.
        width: Followers kept of every token.
        command: Command line, for the report.

    Returns:
        A summary for a reader.

    Raises:
        InvalidArgument: There is nothing to count, or a token is none of the target's.
    """
    if width < 1:
        raise InvalidArgument("width", width, "an integer of at least 1")
    texts.training.check_vocabulary(vocab)
    pairs, held_out = count_pairs(texts.training, vocab), count_pairs(texts.held_out, vocab)
    losses = {prior: cross_entropy(pairs, prior, held_out) for prior in _PRIORS}
    prior = min(losses, key=losses.__getitem__)
    tokens = texts.training.token_counts()
    facts = {"prior": prior, "held_out_cross_entropy": losses[prior], "pairs": len(pairs.keys)}
    smoothed(pairs, prior, width).save(out, **facts, tokens=tokens, command=command)
    return (
        f"{len(pairs.keys):,} pairs of {sum(tokens.values()):,} tokens, prior {prior:g}, "
        f"held-out cross-entropy {losses[prior]:.3f}; wrote {out}"
    )
