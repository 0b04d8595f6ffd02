"""What options of several commands mean together."""

import pytest

from eaglegbv.cli.options import fitting_paths
from eaglegbv.errors import InvalidArgument


def test_as_many_paths_as_a_verifier_takes() -> None:
    assert fitting_paths("otbv", 5) == 5
    assert fitting_paths("block", 5) == 1
    assert fitting_paths("greedy_block", 5) == 1
    assert fitting_paths("none", 5) == 5
    with pytest.raises(InvalidArgument, match="verifier"):
        fitting_paths("nothing", 5)
