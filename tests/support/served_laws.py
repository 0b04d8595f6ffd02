"""Made-up language models with drafts, and servers that judge their drafts rightly or wrongly.

A law is a row of a bank, and the row of the next token follows from the row and the token: all that
an audit reads comes from tables, so that millions of tokens are drawn in seconds.
"""

from dataclasses import dataclass

import numpy as np

from eaglegbv.eval.audit.served.laws import Places


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@dataclass(frozen=True)
class Bank:
    """Laws p of a target and q of a drafter, ``[laws, vocab]``, and which follows which token."""

    p: np.ndarray
    q: np.ndarray

    @classmethod
    def made(cls, seed, laws=2048, vocab=120):
        rng = np.random.default_rng(seed)
        scale = rng.gamma(3.0, 1.0, (laws, 1)) + 0.3
        logits = rng.normal(size=(laws, vocab)) * scale
        return cls(
            softmax(logits), softmax(logits + rng.normal(size=logits.shape) * 0.6 * scale**0.5)
        )

    def following(self, law, token):
        return (law * 1103 + token * 7919 + 12345) % len(self.p)


def inverse(weights, numbers):
    """Draw from rows of weights by the inverse CDF."""
    cdf = weights.cumsum(axis=1)
    return np.minimum((cdf <= numbers[:, None] * cdf[:, -1:]).sum(axis=1), weights.shape[1] - 1)


def plain(bank, laws, rng, *, leak=0.0):
    """One token of each answer; a ``leak`` of them is replaced by the most likely token."""
    tokens = inverse(bank.p[laws], rng.random(len(laws)))
    return np.where(rng.random(len(laws)) < leak, bank.p[laws].argmax(axis=1), tokens)


def drafted(bank, laws, rng, *, threshold=1.0, residual=True, depth=4):
    """A round of token verification of each answer: tokens ``[answers, depth + 1]``, -1 past it.

    ``threshold`` t accepts drafts with p / (t q); without ``residual`` corrections come from p.
    """
    rows = np.arange(len(laws))
    tokens = np.full((len(laws), depth + 1), -1)
    going, law = np.ones(len(laws), bool), laws
    for level in range(depth):
        p, q = bank.p[law], bank.q[law]
        draft = inverse(q, rng.random(len(laws)))
        accepted = rng.random(len(laws)) * threshold * q[rows, draft] < p[rows, draft]
        left = np.maximum(p - q, 0) if residual else p
        correction = inverse(
            np.where(left.sum(1, keepdims=True) > 1e-12, left, p), rng.random(len(laws))
        )
        tokens[going, level] = np.where(accepted, draft, correction)[going]
        going = going & accepted
        law = bank.following(law, draft)
    tokens[going, depth] = inverse(bank.p[law], rng.random(len(laws)))[going]
    return tokens


def answers(bank, count, length, seed, *, starts=None, leak=0.0, speculative=True, **fault):
    """Return tokens and rows of the bank, ``[answers, length]`` both."""
    rng = np.random.default_rng(seed)
    law = rng.integers(len(bank.p), size=count) if starts is None else np.resize(starts, count)
    tokens = np.zeros((count, length + 8), int)
    laws, done = np.zeros_like(tokens), np.zeros(count, int)
    while done.min() < length:
        if speculative:
            drawn = drafted(bank, law, rng, **fault)
        else:
            drawn = plain(bank, law, rng, leak=leak)[:, None]
        for column in drawn.T:
            live = (column >= 0) & (done < length)
            tokens[live, done[live]], laws[live, done[live]] = column[live], law[live]
            law = np.where(live, bank.following(law, column), law)
            done = done + live
    return tokens[:, :length], laws[:, :length]


def places(bank, tokens, laws, k=20):
    """Read answers as a server's lists of ``k`` tokens give them, the rest lumped."""
    count, length = tokens.shape
    order = np.argsort(-bank.p, axis=1, kind="stable")[:, : k - 2]
    flat, row = tokens.ravel(), laws.ravel()
    listed = order[row]
    probs = np.take_along_axis(bank.p[row], listed, axis=1)
    probs = np.append(probs, np.maximum(1 - probs.sum(axis=1, keepdims=True), 0), axis=1)
    same = listed == flat[:, None]
    drawn = np.where(same.any(axis=1), same.argmax(axis=1), k - 2)
    answer, position = np.divmod(np.arange(count * length), length)
    counts = np.zeros_like(listed)
    for lag in range(1, length):
        earlier = np.roll(flat, lag)[:, None]
        counts += (listed == earlier) & (position >= lag)[:, None]
    context = np.unique(
        np.stack([np.where(position == 0, row, -1), *history(flat, row, position)], axis=1),
        axis=0,
        return_inverse=True,
    )[1]
    zeros = np.zeros_like(probs[:, :-1])
    return Places(probs, zeros, listed, counts, drawn, answer, position, context.ravel())


def history(flat, row, position):
    """Return columns that tell apart the texts before each place: first law, tokens, position."""
    columns = [position, row]
    columns += [np.where(position >= lag, np.roll(flat, lag), -1) for lag in range(1, 9)]
    columns.append(np.where(position > 8, np.arange(len(flat)), -1))
    return columns
