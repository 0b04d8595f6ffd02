from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drafting import TokenSession
from support.grown_trees import check_tree, paths_of

from eaglegbv.config import Plan
from eaglegbv.drafters.ngram import LONGEST_MATCH, NgramDrafter
from eaglegbv.errors import InvalidArgument
from eaglegbv.tree import DraftSampling


def drafted(text, plan):
    """The tokens of each path of the tree after ``text``."""
    session = TokenSession(NgramDrafter())
    tree = session.draft([session.start(text[:-1], text[-1], plan)], DraftSampling.FIXED)
    check_tree(tree)
    assert tree.draft_sampling is DraftSampling.FIXED
    assert tree.width == 0
    return [list(path) for path in paths_of(tree, 0)]


def test_the_longest_match_comes_first_and_of_these_the_latest():
    text = [1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3]
    # (1, 2, 3) stood once, before 7; (2, 3) last before 8; (3,) adds nothing new.
    assert drafted(text, Plan(paths=1, depth=2)) == [[7, 9]]
    assert drafted(text, Plan(paths=2, depth=2)) == [[7, 9], [8, 9]]
    assert drafted(text, Plan(paths=4, depth=2)) == [[7, 9], [8, 9]]


def test_a_repeating_text_is_continued_through_its_own_end():
    assert drafted([4, 5, 4, 5, 4, 5], Plan(paths=1, depth=5)) == [[4, 5, 4, 5, 4]]
    assert drafted([6, 6], Plan(paths=1, depth=3)) == [[6, 6, 6]]


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        ([1, 2, 3], 0),
        ([1], 0),
        ([6, 6], 1),
        ([1, 2, 3, 7, 2, 3], 2),
        # Of four tokens the latest place counts, though more stood before an earlier one.
        ([9, 1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 4], 4),
        ([5, 1, 2, 3, 4, 6, 5, 1, 2, 3, 4], 5),
        ([4, 5] * 30, LONGEST_MATCH),
    ],
)
def test_it_says_how_much_of_the_texts_end_it_found(text, matched):
    session = TokenSession(NgramDrafter())
    assert session.drafter.matched(session.start(text[:-1], text[-1], Plan())) == matched
    assert bool(drafted(text, Plan(paths=2, depth=3))) == (matched > 0)  # else a root alone


def test_equal_beginnings_share_nodes_up_to_the_plans_number():
    text = [1, 5, 6, 7, 1, 5, 6, 8, 1]
    assert drafted(text, Plan(paths=2, depth=3)) == [[5, 6, 8], [5, 6, 7]]
    assert drafted(text, Plan(paths=2, depth=3, nodes=3)) == [[5, 6, 8]]


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    more=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5),
    paths=st.integers(1, 4),
    depth=st.integers(1, 5),
)
def test_a_text_that_grows_is_looked_up_like_one_that_was_there_at_once(prompt, more, paths, depth):
    plan = Plan(paths=paths, depth=depth)
    session = TokenSession(NgramDrafter())
    request = session.start(prompt, 0, plan)
    text = [*prompt, 0]
    for tokens in more:
        session.drafter.catch_up([request])
        request.token_ids += tokens
        text += tokens
    tree = session.draft([request], DraftSampling.FIXED)
    check_tree(tree)
    assert int(tree.num_nodes[0]) <= plan.tree_nodes
    assert (tree.drafts, tree.length) == (paths, depth)
    found = [list(path) for path in paths_of(tree, 0)]
    assert found == drafted(text, plan)
    # Every continuation followed some end of the text where it stood before.
    followers = {after for token, after in pairwise(text) if token == text[-1]}
    assert {path[0] for path in found} <= followers


def test_what_is_not_a_lookup_is_refused():
    session = TokenSession(NgramDrafter())
    request = session.start([1, 1], 1, Plan())
    with pytest.raises(InvalidArgument, match="draft_sampling='iid'"):
        session.draft([request], DraftSampling.IID)
    session.drafter.forget(request)
    session.drafter.catch_up([request])
