import torch
from support.tree_check import check_tree

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.proof.tree import from_draft_tree


def test_a_request_of_a_batch_reads_as_token_paths() -> None:
    tree = DraftTree(
        draft_sampling=DraftSampling.IID,
        token_ids=torch.tensor([[9, 0, 0, 0], [9, 2, 1, 0]]),
        parents=torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]),
        depth=torch.tensor([[0, 0, 0, 0], [0, 1, 2, 2]]),
        num_nodes=torch.tensor([1, 4]),
        path_nodes=torch.tensor([[[0, 0], [0, 0]], [[1, 2], [1, 3]]]),
        path_lengths=torch.tensor([[0, 0], [2, 2]]),
        draft_ids=torch.tensor([[[0, 1]] * 4, [[2, 1], [1, 0], [0, 1], [0, 1]]]),
        draft_probs=torch.tensor([[[0.5, 0.5]] * 4, [[0.9, 0.1], [0.3, 0.7], [1, 0], [1, 0]]]),
    )
    check_tree(tree)
    probs = torch.rand(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probs /= probs.sum(-1, keepdim=True)
    one = from_draft_tree(tree, TargetProbs.of_probs(probs), 1)
    assert one.paths == ((2, 1), (2, 0))
    assert one.nodes() == {(2,): 1, (2, 1): 2, (2, 0): 3}
    assert one.drafts(()) == {0: 2, 1: 2}
    assert one.children((2,)) == {1: 0, 0: 1}
    assert one.drafts((2, 1)) == {}
    assert torch.allclose(torch.tensor(one.draft_probs(())), torch.tensor([0.0, 0.1, 0.9]))
    assert torch.allclose(torch.tensor(one.draft_probs((2,))), torch.tensor([0.7, 0.3, 0.0]))
    dist = torch.tensor(one.target_probs((2, 0)), dtype=torch.float64)
    assert torch.allclose(dist, probs[1, 3], atol=1e-15)
    assert from_draft_tree(tree, TargetProbs.of_probs(probs), 0).children(()) == {}
