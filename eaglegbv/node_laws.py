"""The target's laws at the nodes of a step's trees: logits, penalised and warped."""

import torch
from torch import Tensor

from eaglegbv.scheduler.batch import Group, Layout
from eaglegbv.target_law import TargetLaw
from eaglegbv.transfer import send, upload
from eaglegbv.warp import PenaltySettings, WarpSettings, penalise, warp


def law_of_nodes(group: Group, layout: Layout, logits: Tensor) -> TargetLaw:
    """Warp the logits of a group's nodes, each with its request's settings and its own path.

    Args:
        group: The trees.
        layout: Positions of their nodes among the logits.
        logits: ``[rows, vocab]``, those of the whole forward.
    """
    params = [request.params for request in group.requests]
    counts = group.counts
    own = logits[layout.logits]
    if any(p.penalised for p in params):
        own = penalise(
            own,
            *_occurrences(group, counts, logits.shape[1]),
            PenaltySettings.of(params, counts, device=logits.device),
        )
    warped = warp(own, WarpSettings.of(params, counts, device=logits.device))
    rows = send(layout.node_rows, logits.device)
    if logits.device.type != "cpu":  # there may be rows of padding nodes, without meaning
        real = torch.arange(group.tree.nodes, device=rows.device) < group.tree.num_nodes[:, None]
        rows = torch.where(real, rows, rows[:, :1])
    return TargetLaw.of_warped(warped, rows)


def _occurrences(group: Group, counts: list[int], vocab: int) -> tuple[Tensor, Tensor]:
    """Return what penalties depend on, for each node: tokens of the prompt, and counts of the rest.

    Both are ``[rows, vocab]``; a node counts the generated tokens and the drafted ones on its path.
    """
    device = group.tree.token_ids.device
    in_prompt = torch.zeros((sum(counts), vocab), dtype=torch.bool, device=device)
    generated = torch.zeros((sum(counts), vocab), dtype=torch.int64, device=device)
    ancestors = group.tree.ancestor_mask()
    row = 0
    for b, (request, count) in enumerate(zip(group.requests, counts, strict=True)):
        own = slice(row, row + count)
        prompt = upload(request.prompt_ids, dtype=torch.int64, device=device)
        in_prompt[own].index_fill_(1, prompt, value=True)
        seen = torch.tensor(request.token_ids, dtype=torch.int64)
        generated[own] = send(torch.bincount(seen, minlength=vocab), device)
        # The root is the last of the request's own tokens, so it is counted among those.
        drafted = ancestors[b, :count, 1:count].to(torch.int64)
        tokens = group.tree.token_ids[b, 1:count].expand(count, -1)
        generated[own].scatter_add_(1, tokens, drafted)
        row += count
    return in_prompt, generated
