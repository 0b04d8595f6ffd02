"""A bigram table counted on the texts that heads are trained on: the yardstick for them."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from eaglegbv.drafters.tabular import Table
from eaglegbv.drafters.training.data import Corpus, Texts
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import require_integer

_PRIORS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
_CELLS = 1 << 24  # most entries of a dense block of distributions


def count_pairs(corpus: Corpus, vocab: int) -> csr_array:
    """Return ``[vocab, vocab]`` float64: how often each token of a document follows each.

    Counted are those that the assistant wrote.
    """
    tokens = corpus.token_ids.long().cpu().numpy()
    document = torch.repeat_interleave(corpus.lengths)
    pair = ((document[1:] == document[:-1]) & corpus.is_response[1:]).cpu().numpy()
    first, second = tokens[:-1][pair], tokens[1:][pair]
    if not len(first):
        raise InvalidArgument("data", list(corpus.sources), "responses of two tokens or more")
    return coo_array((np.ones(len(first)), (first, second)), shape=(vocab, vocab)).tocsr()


def unigram(pairs: csr_array) -> NDArray[np.float64]:
    """Return the probabilities ``[vocab]`` of second tokens, each counted once more than it was."""
    counts = 1 + pairs.sum(axis=0)
    return np.asarray(counts / counts.sum(), dtype=np.float64)


def smoothed(pairs: csr_array, prior: float, width: int) -> Table:
    """Return the ``width`` likeliest followers of every token.

    p(y | x) = (count(x, y) + prior u(y)) / (count(x) + prior), u the unigram distribution: MacKay
    and Peto's Dirichlet prior (1995). The last row, for a missing token, is u.
    """
    vocab, u, firsts = pairs.shape[0], unigram(pairs), pairs.sum(axis=1)
    rows = max(1, _CELLS // vocab)
    best = []
    for begin in range(0, vocab, rows):
        block = slice(begin, begin + rows)
        dense = (pairs[block].toarray() + prior * u) / (firsts[block, None] + prior)
        best.append(torch.from_numpy(dense).topk(min(width, vocab), dim=1))
    best.append(torch.from_numpy(u[None]).topk(min(width, vocab), dim=1))
    return Table(
        vocab_size=vocab,
        order=1,
        ids=torch.cat([each.indices for each in best]),
        log_probs=torch.cat([each.values for each in best]).log().float(),
    )


def cross_entropy(pairs: csr_array, prior: float, measured: csr_array) -> float:
    """Return the mean of -log p(y | x), in nats, over the pairs of ``measured``."""
    first, second = measured.nonzero()
    counts = pairs[first, second] + prior * unigram(pairs)[second]
    probs = counts / (pairs.sum(axis=1)[first] + prior)
    return float(-(measured[first, second] * np.log(probs)).sum() / measured.sum())


def train_bigram(texts: Texts, out: Path, *, vocab: int, width: int, command: str = "") -> str:
    """Count texts, choose the prior by the held-out ones, and save the table in ``out``.

    The target has ``vocab`` tokens; ``width`` followers are kept of each. ``command``, the command
    line, is saved with the table. Return a summary for a reader.

    Raises:
        InvalidArgument: There is nothing to count, or a token is none of the target's.
    """
    require_integer("width", width, 1)
    texts.training.check_vocabulary(vocab)
    pairs, held_out = count_pairs(texts.training, vocab), count_pairs(texts.held_out, vocab)
    losses = {prior: cross_entropy(pairs, prior, held_out) for prior in _PRIORS}
    prior = min(losses, key=losses.__getitem__)
    tokens = texts.training.token_counts()
    facts = {"prior": prior, "held_out_cross_entropy": losses[prior], "pairs": pairs.nnz}
    smoothed(pairs, prior, width).save(out, **facts, tokens=tokens, command=command)
    return (
        f"{pairs.nnz:,} pairs of {sum(tokens.values()):,} tokens, prior {prior:g}, "
        f"held-out cross-entropy {losses[prior]:.3f}; wrote {out}"
    )
