"""Expected acceptance against exact values."""

from fractions import Fraction

import pytest
from support.tables import Shape, acceptance_length, constant, law_error, output_law

from eaglegbv.tree import Law
from eaglegbv.verifiers.reference.block import block
from eaglegbv.verifiers.reference.gbv import gbv
from eaglegbv.verifiers.reference.otbv import otbv
from eaglegbv.verifiers.reference.token import token

TOY = (constant("1/3", "2/3"), constant("2/3", "1/3"))


@pytest.mark.parametrize(
    ("verify", "length", "paths", "expected"),
    [
        (token, 2, 1, "10/9"),
        (block, 2, 1, "11/9"),
        (token, 3, 1, "38/27"),
        (block, 3, 1, "5/3"),
        (block, 4, 1, "166/81"),
        (otbv, 1, 2, "8/9"),
        (otbv, 2, 2, "131/81"),
        (otbv, 2, 3, "1238/675"),
        (otbv, 3, 2, "1621/729"),
        (gbv, 1, 2, "8/9"),
        (gbv, 2, 2, "131/81"),
        (gbv, 2, 3, "1289/729"),
        (gbv, 3, 2, "1621/729"),
    ],
)
def test_toy(verify, length: int, paths: int, expected: str) -> None:
    law = output_law(verify, Law.IID, *TOY, Shape(2, length, paths))
    assert acceptance_length(law) == Fraction(expected)
    assert law_error(law, TOY[0], 2, length + 1) == 0
