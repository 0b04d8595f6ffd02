"""Papers that compare verifiers by paths, length and temperature: their tables, claims, figures."""

from dataclasses import replace

from eaglegbv.eval.papers.cells import Figure, Way
from eaglegbv.eval.papers.sheets import (
    Direction,
    GridPaper,
    Order,
    Quote,
    Rise,
    Sheet,
    Widening,
    cells_of,
)

_TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
_OURS = "this package's claim for otbv"

# Sun et al., Block Verification Accelerates Speculative Decoding, ICLR 2025. Its Tables 1 and 2
# compare token and block verification by data set, draft length and drafter; its Table 4 adds
# greedy block verification.

_SUN = "Sun et al., arXiv 2403.10444"
_LENGTHS = (4, 6, 8)
_BLOCK = Quote(
    text="1.083 (1.07 to 1.10)",
    models="PaLM-2-S and -XXS, L = 8, mean of eight data sets",
    source="public summaries of its Table 1: block efficiency 3.41 and 3.70, time 5% to 8% less",
    better="block",
    worse="token",
    paths=1,
    depth=8,
    temperature=1.0,
)

BV = GridPaper(
    name="bv",
    title=f"Block verification ({_SUN}): token, block and greedy block by draft length",
    sheets=(
        Sheet(
            name="drafts",
            title="Tables 1 and 2, on the same drafts",
            way=Way.SAME_DRAFTS,
            settings=cells_of(("token", "block"), depths=_LENGTHS, temperatures=_TEMPERATURES),
            directions=(
                Order("block", "token", f"{_SUN}, Theorem 2"),
                Rise("token", "depth", _SUN),
                Rise("block", "depth", _SUN),
                Widening("block", "token", f"{_SUN}, Figure 2"),
            ),
            quotes=(_BLOCK,),
        ),
        Sheet(
            name="engine",
            title="Table 4, in the engine",
            way=Way.ENGINE,
            settings=cells_of(("token", "block", "greedy_block"), depths=_LENGTHS),
            directions=(
                Order("block", "token", _SUN),
                Order("block", "greedy_block", f"{_SUN}, Table 4"),
            ),
            quotes=(_BLOCK,),
        ),
        Sheet(
            name="time",
            title="Table 1, time, one request at a time",
            way=Way.TIMED,
            settings=cells_of(("token", "block")),
            directions=(Order("block", "token", _SUN, Figure.TOKENS_A_SECOND),),
            quotes=(replace(_BLOCK, text="1.065 (1.05 to 1.08)", figure=Figure.TOKENS_A_SECOND),),
        ),
    ),
)

# Thomas & Pal, Greedy Multi-Path Block Verification. Its Tables 1, 2, 5, 6 and 7 compare verifiers
# by number of paths, temperature and path length.

_THOMAS = "Thomas & Pal, arXiv 2602.16961"
_MULTI = ("block", "gbv", "otbv", "specinfer", "spectr", "traversal")
_ALL = (*_MULTI, "global_resolution")
_PATHS = (1, 2, 3, 4)
_CLAIMS: tuple[Direction, ...] = (
    *(Order("gbv", other, _THOMAS) for other in ("block", "specinfer", "spectr", "traversal")),
    *(Order("otbv", other, _OURS) for other in _ALL if other != "otbv"),
    Rise("gbv", "paths", _THOMAS),
    Rise("otbv", "paths", _OURS),
)
_GREEDY = replace(_BLOCK, better="gbv", worse="block", paths=3)

GBV = GridPaper(
    name="gbv",
    title=f"Greedy multi-path block verification ({_THOMAS}): by paths, temperature and length",
    sheets=(
        Sheet(
            name="grid",
            title="By paths and temperature, on the same drafts",
            way=Way.SAME_DRAFTS,
            settings=cells_of(_ALL, paths=_PATHS, temperatures=_TEMPERATURES),
            directions=_CLAIMS,
            quotes=(
                replace(
                    _GREEDY,
                    text="about 1.23",
                    models="OPT 6.7B with 350M or 125M",
                    source="a public summary of the paper (K = 3, L = 8)",
                ),
                replace(
                    _GREEDY,
                    text="over 1.30, its best",
                    models="not said in the abstract",
                    source="the paper's abstract",
                    paths=4,
                ),
            ),
        ),
        Sheet(
            name="lengths",
            title="By paths and length, on the same drafts",
            way=Way.SAME_DRAFTS,
            settings=cells_of(_MULTI, paths=_PATHS, depths=(8, 16, 24)),
            directions=(
                *_CLAIMS,
                *(Rise(verifier, "depth", _THOMAS) for verifier in ("block", "gbv")),
            ),
        ),
        Sheet(
            name="engine",
            title="By paths, in the engine",
            way=Way.ENGINE,
            settings=cells_of(_MULTI, paths=_PATHS),
            directions=_CLAIMS,
            optional=True,
        ),
    ),
)

# Lin et al., SpecTr-GBV: Multi-Draft Block Verification. Its Table 1 compares it with token
# verification, SpecTr and greedy block verification of one path (its "GBV"), its Table 3 draft
# lengths, its Table 2 where the time goes.

_LIN = "Lin et al., arXiv 2604.25925"
_DEPTHS, _COOL = (4, 8, 12, 24), (0.4,)
_MULTI_DRAFT = Quote(
    text="",
    models="DeepSeek 33B and 1.3B, L = 12, K = 3, T = 0.4, mean of five data sets",
    source="public summaries of its Tables 1 and 2",
    better="spectr_gbv",
    worse="",
    paths=3,
    depth=12,
    temperature=0.4,
)
_OTHERS = (  # with the paper's ratios of tokens a step and a second
    ("token", "1.124", "1.293"),
    ("greedy_block", "1.097", "1.270"),
    ("spectr", "1.023", "1.082"),
)
_BY_STEP_AND_SECOND = (Figure.TOKENS_A_STEP, Figure.TOKENS_A_SECOND)

SPECTR_GBV = GridPaper(
    name="spectr-gbv",
    title=f"SpecTr-GBV ({_LIN}): by draft length, with the time each phase takes",
    sheets=(
        Sheet(
            name="engine",
            title="Tables 1 to 3, one request at a time",
            way=Way.TIMED,
            settings=(
                *cells_of(("token", "block", "greedy_block"), depths=_DEPTHS, temperatures=_COOL),
                *cells_of(
                    ("spectr", "spectr_gbv", "otbv"), paths=(3,), depths=_DEPTHS, temperatures=_COOL
                ),
            ),
            directions=(
                *(
                    Order("spectr_gbv", other, f"{_LIN}, Table 1", figure)
                    for figure in _BY_STEP_AND_SECOND
                    for other, *_ in _OTHERS
                ),
                Order("spectr_gbv", "spectr", f"{_LIN}, Table 2", Figure.VERIFYING),
                Rise("spectr_gbv", "depth", f"{_LIN}, Table 3"),
                Rise(
                    "spectr_gbv",
                    "depth",
                    f"{_LIN}, Table 3: speed falls again where drafts are long",
                    start=24,
                    end=8,
                    figure=Figure.TOKENS_A_SECOND,
                ),
                *(Order("otbv", "spectr_gbv", _OURS, figure) for figure in _BY_STEP_AND_SECOND),
            ),
            quotes=(
                *(
                    replace(_MULTI_DRAFT, text=text, worse=other, figure=figure)
                    for other, *texts in _OTHERS
                    for text, figure in zip(texts, _BY_STEP_AND_SECOND, strict=True)
                ),
                replace(
                    _MULTI_DRAFT,
                    text="2.15 (53.5% less time)",
                    worse="spectr",
                    figure=Figure.VERIFYING,
                ),
            ),
        ),
    ),
    notes=(
        "spectr_gbv is the lossless construction of this package: the acceptance rule of the "
        "paper's public code does not keep the target's distribution for two paths or more.",
        "For that it follows the target that earlier steps modified by the draft distributions of "
        "those steps, which the drafter recalls row by row: its verification takes longer the "
        "longer the drafts, where the paper's takes less time than SpecTr's.",
    ),
)

# Thomas & Pal, Global Resolution: its Table 4, SpecTr's trees with it, by number of paths. Its
# other tables are in global_resolution.py.

_RESOLUTION = "Thomas & Pal, arXiv 2511.15898"

GR_STEPS = GridPaper(
    name="gr-steps",
    title=f"Global Resolution ({_RESOLUTION}): trees of independent paths, by their number",
    sheets=(
        Sheet(
            name="paths",
            title="By paths (its Table 4)",
            way=Way.SAME_DRAFTS,
            settings=cells_of(("global_resolution", "spectr", "specinfer", "otbv"), paths=_PATHS),
            directions=(
                Rise("global_resolution", "paths", f"{_RESOLUTION}, Table 4"),
                Order("global_resolution", "spectr", f"{_RESOLUTION}: K-SEQ is not optimal"),
                Order("global_resolution", "specinfer", "its acceptance is optimal at every node"),
                Order("otbv", "global_resolution", _OURS),
            ),
        ),
    ),
    notes=(
        "of the paper's Table 4 one figure is known, second hand: with K = 4 and L = 8 on Gemma-2 "
        "27B/2B decoding is 1.98 times as fast as plain decoding; its block efficiencies were not "
        "at hand",
    ),
)
