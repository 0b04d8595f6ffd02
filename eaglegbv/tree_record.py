"""Record of one request's draft tree in one step and its verdict, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRecord:
    """A draft tree and the verdict on it.

    Sequences with one entry per node begin with the root, the last token that the target had not
    read yet. A value that a node does not have is None.

    Attributes:
        request: Running number of the request.
        start: Number of tokens of the answer before the step.
        prompt_ids: The prompt, in the record of the step that read it to its end and drew the
            first token of the answer from its law; empty in all others.
        plan: The request's plan, such as ``otbv 3x4``.
        verifier: Name of the rule that judged.
        law: How the children of a node arose.
        paths: Number of drafted paths.
        token_ids: Tokens of the nodes.
        parents: Parents of the nodes; the root is its own.
        multiplicity: How many of the paths run through each node.
        target_probs: p of each node's token after its parent, with the request's settings, as the
            verifier saw it.
        draft_probs: q of each node's token after its parent, from which it was drawn; None where
            the law draws nothing.
        figures: Other numbers on which the rule based its verdict, by the symbols of its
            documentation.
        accepted: The accepted nodes, from the root's child downwards.
        next_token: The token after them: the correction or bonus token.
        next_target_prob: p of that token after the last accepted node.
        committed: The tokens that were kept of the accepted ones and the next: all of them, unless
            one of them ended the text.
        finish_reason: Why the request ended with this step, or None.
    """

    request: int
    start: int
    prompt_ids: tuple[int, ...]
    plan: str
    verifier: str
    law: str
    paths: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    multiplicity: tuple[int, ...]
    target_probs: tuple[float | None, ...]
    draft_probs: tuple[float | None, ...]
    figures: Mapping[str, tuple[float | None, ...]]
    accepted: tuple[int, ...]
    next_token: int
    next_target_prob: float
    committed: tuple[int, ...]
    finish_reason: str | None
