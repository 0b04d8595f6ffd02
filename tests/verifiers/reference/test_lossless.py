"""The completed output law of every verifier equals the target's, by exact enumeration."""

import pytest
from support.tables import KINDS, Model, Shape, max_error

from eaglegbv.tree import Law
from eaglegbv.verifiers.reference.block import block
from eaglegbv.verifiers.reference.gbv import gbv
from eaglegbv.verifiers.reference.otbv import otbv
from eaglegbv.verifiers.reference.target_only import target_only
from eaglegbv.verifiers.reference.token import token

TOLERANCE = 1e-12

SINGLE_PATH = [Shape(4, 1, 1), Shape(4, 2, 1), Shape(3, 3, 1), Shape(2, 3, 1)]
SEVERAL = [Shape(4, 1, 3), Shape(3, 2, 2), Shape(2, 3, 2), Shape(2, 2, 3)]

CASES = [
    (token, Law.IID, SINGLE_PATH, 10),
    (block, Law.IID, SINGLE_PATH, 10),
    (gbv, Law.IID, SEVERAL, 4),
    (otbv, Law.IID, SEVERAL, 2),
    (otbv, Law.GREEDY, SEVERAL, 6),
    (otbv, Law.FIXED, SEVERAL, 6),
    *((target_only, law, SEVERAL, 2) for law in (Law.IID, Law.WOR, Law.GREEDY, Law.FIXED)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("verify", "law", "shapes", "seeds"), CASES, ids=[f"{v.__name__}-{w}" for v, w, _, _ in CASES]
)
def test_lossless(verify, law: Law, shapes: list[Shape], seeds: int, kind: str) -> None:
    for shape in shapes:
        for seed in range(seeds):
            model = Model(shape.vocab, kind, seed)
            error = max_error(verify, law, model.p, model.q, shape)
            assert error < TOLERANCE, (shape, seed)


@pytest.mark.parametrize(
    ("verify", "law"), [(gbv, Law.IID), (otbv, Law.IID), (otbv, Law.GREEDY), (target_only, Law.WOR)]
)
@pytest.mark.parametrize("kind", ["random", "zeros"])
def test_lossless_when_paths_stop_early(verify, law: Law, kind: str) -> None:
    """Paths end after token 0, a rule that looks at the emitted prefix only."""
    shape = Shape(3, 2, 2)
    for seed in range(4):
        model = Model(3, kind, seed)
        error = max_error(verify, law, model.p, model.q, shape, stop=lambda c: 0 in c)
        assert error < TOLERANCE, seed
