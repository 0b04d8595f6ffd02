"""What options of several commands mean together."""

import pytest

from eaglegbv.cli.options import QUESTION_SETS, fitting_paths
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.questions import SUITES


def test_as_many_paths_as_a_verifier_takes() -> None:
    assert fitting_paths("otbv", 5) == 5
    assert fitting_paths("block", 5) == 1
    assert fitting_paths("greedy_block", 5) == 1
    assert fitting_paths("none", 5) == 5
    with pytest.raises(InvalidArgument, match="verifier"):
        fitting_paths("nothing", 5)


def test_help_names_every_set_of_questions() -> None:
    assert set(QUESTION_SETS.replace(" or ", ", ").split(", ")) == set(SUITES)
