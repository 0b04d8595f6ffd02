"""Count a bigram table, the yardstick of heads, on texts like those that heads are trained on.

    python examples/train_bigram.py TARGET DATA OUT [SAMPLES]

TARGET is a folder or a hub name, DATA a file or folder of chats and texts as JSON lines. SAMPLES
are answers of the target that the training of a head has kept; they take the place of the data's.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from eaglegbv.drafters.tabular import LookupTable
from eaglegbv.drafters.training.data import Corpus, Texts, TextSettings, gather_texts
from eaglegbv.errors import InvalidArgument
from eaglegbv.loading import find_target
from eaglegbv.models.hf import load_config, load_tokenizer
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


def smoothed(pairs: csr_array, prior: float, width: int) -> LookupTable:
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
    return LookupTable(
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


def train_bigram(texts: Texts, out: Path, *, vocab: int, width: int = 256) -> str:
    """Count texts, choose the prior by the held-out ones, and save the table in ``out``.

    The target has ``vocab`` tokens; ``width`` followers are kept of each. Return a summary for a
    reader.

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
    smoothed(pairs, prior, width).save(out, **facts, tokens=tokens)
    return (
        f"{pairs.nnz:,} pairs of {sum(tokens.values()):,} tokens, prior {prior:g}, "
        f"held-out cross-entropy {losses[prior]:.3f}; wrote {out}"
    )


def main(target: str, data: str, out: str, samples: str = "") -> str:
    """Read the texts of a target, and count them."""
    folder = find_target(target)
    kept = Path(samples or Path(out) / "samples.pt")
    settings = TextSettings(data=(Path(data),), samples=kept, regenerate=int(bool(samples)))
    if samples and not kept.is_file():
        raise InvalidArgument("samples", samples, "a file that the training of a head has kept")
    texts = gather_texts(settings, load_tokenizer(folder), list)
    vocab = int(load_config(folder).get_text_config(decoder=True).vocab_size)
    return train_bigram(texts, Path(out), vocab=vocab)


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
