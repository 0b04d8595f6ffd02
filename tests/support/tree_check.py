"""The structure that every draft tree has, checked on the host."""

from eaglegbv.tree import DraftTree


def check_tree(tree: DraftTree) -> None:
    """Assert that parents precede children, siblings differ, and paths are chains of real nodes."""
    for b in range(tree.batch):
        _check_nodes(tree, b)
        _check_paths(tree, b)


def _check_nodes(tree: DraftTree, b: int) -> None:
    count = int(tree.num_nodes[b])
    assert 1 <= count <= tree.nodes, b
    tokens, parents, depth = (
        x[b, :count].tolist() for x in (tree.token_ids, tree.parents, tree.depth)
    )
    assert parents[0] == depth[0] == 0, b
    for node in range(1, count):
        assert 0 <= parents[node] < node, (b, node)
        assert depth[node] == depth[parents[node]] + 1, (b, node)
    children = list(zip(parents[1:], tokens[1:], strict=True))
    assert len(set(children)) == len(children), f"siblings of tree {b} share a token"


def _check_paths(tree: DraftTree, b: int) -> None:
    parents, count = tree.parents[b].tolist(), int(tree.num_nodes[b])
    for nodes, length in zip(
        tree.path_nodes[b].tolist(), tree.path_lengths[b].tolist(), strict=True
    ):
        assert 0 <= length <= tree.length, b
        assert all(0 <= node < count for node in nodes), (b, nodes)
        chain = nodes[:length]
        assert all(chain), (b, nodes)
        assert [parents[node] for node in chain] == [0, *chain][:length], (b, nodes)
        # Past its end a path repeats its last node.
        assert set(nodes[length:]) <= {chain[-1] if chain else 0}, (b, nodes)
