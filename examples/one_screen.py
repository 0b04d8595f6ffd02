"""The whole loop on one screen: draft, forward, verify, commit, with models of transformers.

One sequence, K independent paths of L tokens, and no cache of keys and values: what the engine adds
is speed. The text follows the target's distribution exactly, whatever the drafter is.
"""

import argparse

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eaglegbv import Plan
from eaglegbv.drafters.draft_probs import DraftProbs
from eaglegbv.drafters.tree_growth import TreeGrowth, level_table
from eaglegbv.loading import TINY_TARGET
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftSampling, DraftTree, WarpedLogits
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.registry import make_verifier

PLAN = Plan(verifier="otbv", paths=3, depth=4)
K, L = PLAN.paths, PLAN.depth


def draft(drafter, sequence: Tensor, uniforms: Tensor) -> tuple[DraftTree, Tensor]:
    """Draw K paths by q; return their tree, and the sequence with each path ``[K, tokens + L]``."""
    table = level_table(PLAN, DraftSampling.IID, sequence.device)
    growth, paths = TreeGrowth(table, sequence[-1:], uniforms), sequence.unsqueeze(0)
    for _ in range(L):
        q = drafter(paths).logits[:, -1].softmax(-1, dtype=torch.float64)
        every_token = torch.arange(q.shape[1]).expand_as(q)
        drawn = growth.grow(DraftProbs(every_token, q)).token_ids
        paths = torch.cat((paths.expand(K, -1), drawn.view(K, 1)), dim=1)
    return growth.finish(), paths


def forward(target, tree: DraftTree, paths: Tensor) -> WarpedLogits:
    """Return p at the nodes: after the root, and after every drafted token."""
    logits = target(paths).logits[:, -L - 1 :]
    rows = torch.zeros_like(tree.token_ids)  # paths that begin alike share nodes: any row will do
    rows[0, tree.draws[0].T] = torch.arange(K * (L + 1)).view(K, L + 1)[:, 1:]
    return WarpedLogits.of(logits.flatten(0, 1), rows)


@torch.inference_mode()
def step(target, drafter, sequence: Tensor, rng: RequestRng, number: int) -> Tensor:
    """Return the sequence with the tokens of one step: accepted ones, and one of the target's."""
    uniforms = torch.from_numpy(rng.draw(number, Purpose.DRAFT, K * L)).view(1, K, L)
    tree, paths = draft(drafter, sequence, uniforms)
    target_probs = forward(target, tree, paths)
    chances = VerifyUniforms.draw([rng], [number], drafts=K, length=L)
    verdict = make_verifier(PLAN.verifier).verify(tree, target_probs, chances)
    accepted = verdict.path_nodes[0, : int(verdict.accepted)]
    return torch.cat((sequence, tree.token_ids[0, accepted], verdict.token_ids))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=TINY_TARGET, help="the target")
    parser.add_argument("--layers", type=int, default=2, help="first layers of it, which draft")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    target = AutoModelForCausalLM.from_pretrained(args.model)
    drafter = AutoModelForCausalLM.from_pretrained(args.model)
    drafter.model.layers = drafter.model.layers[: args.layers]
    start = sequence = tokenizer("Once upon a time", return_tensors="pt").input_ids[0]
    for number in range(args.steps):
        sequence = step(target, drafter, sequence, RequestRng(seed=1), number)
    print(tokenizer.decode(sequence))
    print(f"-- {(len(sequence) - len(start)) / args.steps:.2f} tokens a target forward")
