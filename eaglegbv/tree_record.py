"""What became of one request's draft tree in one step, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRecord:
    """A draft tree and the verdict on it.

    A sequence with an entry a node begins with the root's, the last token the target had not read
    yet; what a node does not have is None.

    Attributes:
        request: Running number of the request.
        start: Tokens of the answer before the step.
        prompt_ids: The prompt, in the record of the step that read it to its end and drew the
            first token of the answer from its law; empty in all others.
        plan: The request's plan, such as ``otbv 3x4``.
        verifier: Name of the rule that judged.
        law: How the children of a node arose.
        paths: Number of drafted paths.
        token_ids: Tokens of the nodes.
        parents: Parents of the nodes; the root is its own.
        multiplicity: How many of the paths run through each node.
        target_probs: p of each node's token after its parent, by the request's settings: what the
            verifier saw.
        draft_probs: q likewise, what the token was drawn with; None where the law draws nothing.
        figures: What else the rule went by, by the letters of its documentation.
        accepted: The accepted nodes, from the root's child down.
        next_token: The token after them: the correction, or the bonus token.
        next_target_prob: p of that token after the last accepted node.
        committed: The tokens that were kept of the accepted ones and the next: all, but where one
            of them ended the text.
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
