"""The structure that every draft tree has, checked on the host."""

from eaglegbv.errors import InvalidArgument
from eaglegbv.tree import DraftTree


def check_tree(tree: DraftTree) -> None:
    """Check the structure of ``tree``.

    Raises:
        InvalidArgument: A parent does not precede its child, a depth is not its parent's plus one,
            siblings share a token, or a path is not a chain of real nodes from the root.
    """
    for b in range(tree.batch):
        _check_nodes(tree, b)
        _check_paths(tree, b)


def _check_nodes(tree: DraftTree, b: int) -> None:
    count = int(tree.num_nodes[b])
    tokens, parents, depth = (
        x[b, :count].tolist() for x in (tree.token_ids, tree.parents, tree.depth)
    )
    if not 1 <= count <= tree.nodes:
        raise InvalidArgument(f"num_nodes[{b}]", count, f"an integer in [1, {tree.nodes}]")
    if parents[0] != 0 or depth[0] != 0:
        raise InvalidArgument(f"parents[{b}, 0]", parents[0], "the root: its own parent, depth 0")
    seen: set[tuple[int, int]] = set()
    for node in range(1, count):
        if not 0 <= parents[node] < node:
            raise InvalidArgument(f"parents[{b}, {node}]", parents[node], "an earlier node")
        if depth[node] != depth[parents[node]] + 1:
            raise InvalidArgument(f"depth[{b}, {node}]", depth[node], "its parent's depth + 1")
        if (parents[node], tokens[node]) in seen:
            raise InvalidArgument(
                f"token_ids[{b}, {node}]", tokens[node], "siblings with different tokens"
            )
        seen.add((parents[node], tokens[node]))


def _check_paths(tree: DraftTree, b: int) -> None:
    parents, count = tree.parents[b].tolist(), int(tree.num_nodes[b])
    for k, (nodes, length) in enumerate(
        zip(tree.path_nodes[b].tolist(), tree.path_lengths[b].tolist(), strict=True)
    ):
        if not 0 <= length <= tree.length:
            raise InvalidArgument(
                f"path_lengths[{b}, {k}]", length, f"an integer in [0, {tree.length}]"
            )
        if not all(0 <= node < count for node in nodes):
            raise InvalidArgument(f"path_nodes[{b}, {k}]", nodes, f"real nodes, below {count}")
        previous = 0
        for node in nodes[:length]:
            if node == 0 or parents[node] != previous:
                raise InvalidArgument(f"path_nodes[{b}, {k}]", nodes, "a chain from the root")
            previous = node
        if any(node != previous for node in nodes[length:]):
            raise InvalidArgument(
                f"path_nodes[{b}, {k}]", nodes, "its last node repeated past its end"
            )
