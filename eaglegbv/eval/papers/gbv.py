"""Thomas & Pal, Greedy Multi-Path Block Verification (arXiv 2602.16961).

Its Tables 1, 2, 5, 6 and 7 compare verifiers by number of paths, temperature and path length.
"""

from eaglegbv.eval.papers.cells import Way
from eaglegbv.eval.papers.sheets import GridPaper, Order, Quote, Rise, Sheet, cells_of

_PAPER = "Thomas & Pal, arXiv 2602.16961"
_OURS = "this package's claim for otbv"
_MULTI = ("block", "gbv", "otbv", "specinfer", "spectr", "traversal")
_ALL = (*_MULTI, "global_resolution")
_PATHS = (1, 2, 3, 4)
_ORDERS = (
    *(Order("gbv", other, _PAPER) for other in ("block", "specinfer", "spectr", "traversal")),
    *(Order("otbv", other, _OURS) for other in _ALL if other != "otbv"),
)
_RISES = (Rise("gbv", "paths", _PAPER), Rise("otbv", "paths", _OURS))

GBV = GridPaper(
    name="gbv",
    title=f"Greedy multi-path block verification ({_PAPER}): by paths, temperature and length",
    sheets=(
        Sheet(
            name="grid",
            title="By paths and temperature, on the same drafts",
            way=Way.SAME_DRAFTS,
            settings=cells_of(
                _ALL, paths=_PATHS, depths=(8,), temperatures=(0.2, 0.4, 0.6, 0.8, 1.0)
            ),
            directions=(*_ORDERS, *_RISES),
            quotes=(
                Quote(
                    text="about 1.23",
                    models="OPT 6.7B with 350M or 125M",
                    source="a public summary of the paper (K = 3, L = 8)",
                    better="gbv",
                    worse="block",
                    paths=3,
                    depth=8,
                    temperature=1.0,
                ),
                Quote(
                    text="over 1.30, its best",
                    models="not said in the abstract",
                    source="the paper's abstract",
                    better="gbv",
                    worse="block",
                    paths=4,
                    depth=8,
                    temperature=1.0,
                ),
            ),
        ),
        Sheet(
            name="lengths",
            title="By paths and length, on the same drafts",
            way=Way.SAME_DRAFTS,
            settings=cells_of(_MULTI, paths=_PATHS, depths=(8, 16, 24), temperatures=(1.0,)),
            directions=(
                *_ORDERS,
                *_RISES,
                *(Rise(verifier, "depth", _PAPER) for verifier in ("block", "gbv")),
            ),
        ),
        Sheet(
            name="engine",
            title="By paths, in the engine",
            way=Way.ENGINE,
            settings=cells_of(_MULTI, paths=_PATHS, depths=(8,), temperatures=(1.0,)),
            directions=(*_ORDERS, *_RISES),
            optional=True,
        ),
    ),
)
