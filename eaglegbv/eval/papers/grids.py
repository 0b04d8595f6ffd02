"""The papers: what is measured of each, its claims, and its own figures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from eaglegbv.config import Plan
from eaglegbv.eval.node_acceptance import RULES
from eaglegbv.eval.paired_comparison import Figure
from eaglegbv.eval.papers.cells import Way
from eaglegbv.eval.papers.sheets import (
    Direction,
    InTime,
    Order,
    Paper,
    Quote,
    Rise,
    Sheet,
    cells_of,
)
from eaglegbv.eval.records import Setting
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.global_resolution import Solver

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

BV = Paper(
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
                Rise("block", "depth", f"{_SUN}, Figure 2", over="token"),
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

GBV = Paper(
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

SPECTR_GBV = Paper(
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

# Thomas & Pal, Global Resolution: its Table 4, SpecTr's trees with it, by number of paths; and its
# solvers of optimal transport at a node of n drafts (K) from a top-k distribution (W): Table 1 has
# their times, Table 2 the best acceptance within a limit on the mean time a token.

_RESOLUTION = "Thomas & Pal, arXiv 2511.15898"

GR_STEPS = Paper(
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


def nodes_of(
    rules: Sequence[str], sizes: Sequence[tuple[int, int]], temperatures: Sequence[float] = (1.0,)
) -> tuple[Setting, ...]:
    """Return rules at single nodes, by sizes (k, n): a top-k draft distribution, n drafts."""
    return tuple(
        Setting(plan=Plan(verifier=rule, paths=n, depth=1, draft_width=k), temperature=temperature)
        for temperature, (k, n), rule in product(temperatures, sizes, rules)
    )


_SIZES = ((10, 2), (10, 3), (10, 4), (10, 5), (100, 2), (100, 3), (1000, 2))
_TIMES: Mapping[tuple[int, int], Mapping[str, str]] = {
    (10, 2): {"lp": "4.07", "max_flow": "2.45", "convex": "5.27 (98%)"},
    (10, 4): {"lp": "over 4000", "max_flow": "74.21", "convex": "40.30 (97%)"},
    (10, 5): {"lp": "over 400000", "max_flow": "over 10000", "convex": "70.75 (96%)"},
    (100, 2): {"lp": "over 4000", "max_flow": "72.28", "convex": "23.92 (38%)"},
    (1000, 2): {"lp": "out of memory", "max_flow": "over 400000", "convex": "34.94 (31%)"},
}
"""Its Table 1 as far as it was seen: milliseconds a token, in brackets the share it solved."""
_BEST: Mapping[float, Mapping[str, str]] = {
    1.0: {},
    10.0: {"lp": "82.53%", "max_flow": "83.94%", "convex": "85.65%"},
    100.0: {"lp": "83.94%", "max_flow": "89.01%", "convex": "90.04%"},
}
_SPEED, _TABLE_1 = Figure.STEPS_A_SECOND, f"{_RESOLUTION}, Table 1"
_EXACT = "this package's claim for its exact solver"


def _is_least(plan: Plan) -> bool:
    return (plan.draft_width, plan.paths) == (10, 2)


GR_SOLVERS = Paper(
    name="gr-solvers",
    title=f"Global Resolution ({_RESOLUTION}): solve times, and acceptance within a limit",
    sheets=(
        Sheet(
            name="solvers",
            title="Solvers (its Tables 1 and 2)",
            way=Way.SOLVERS,
            settings=nodes_of(tuple(map(str, Solver)), _SIZES),
            directions=(
                *(
                    order
                    for slow in ("lp", "max_flow")
                    for order in (
                        Order(slow, "convex", _TABLE_1, _SPEED, _is_least),
                        Order("convex", slow, _TABLE_1, _SPEED, lambda plan: not _is_least(plan)),
                    )
                ),
                *(Order("exact", one, _EXACT, _SPEED) for one in Solver if one != "exact"),
                InTime("convex", "max_flow", f"{_RESOLUTION}, Table 2"),
                InTime("max_flow", "lp", f"{_RESOLUTION}, Table 2"),
                InTime("exact", "convex", _EXACT),
            ),
            quotes=tuple(
                Quote(
                    text=text,
                    models="Llama-3 70B/8B",
                    source="two public notes on the paper, which agree",
                    better=solver,
                    worse="",
                    paths=n,
                    depth=1,
                    temperature=1.0,
                    draft_width=k,
                )
                for (k, n), texts in _TIMES.items()
                for solver, text in texts.items()
            ),
            limits=_BEST,
        ),
        Sheet(
            name="optima",
            title="Optimal acceptance (its Figures 1 and 2)",
            way=Way.NODES,
            settings=nodes_of(("optimum", "greedy"), tuple(product((10, 100, 1000), (2, 3, 4, 5)))),
            directions=(
                Rise("optimum", "draft_width", f"{_RESOLUTION}, Figure 1", 10, 100),
                Rise("optimum", "draft_width", f"{_RESOLUTION}, Figure 1", 100, 1000),
                Order(
                    *("optimum", "greedy", f"{_RESOLUTION}, Figure 2"),
                    where=lambda plan: plan.draft_width >= 100 and plan.paths == 5,
                ),
            ),
        ),
    ),
    notes=(
        "times are the processor's on this machine, up to the draft selected",
        "the paper's solver is a convex programme as `convex` is",
        "the acceptance of nodes where a solver's bound is above 1e-3 is K-SEQ's",
        "K is the number n of drafts, W that of tokens of the draft distribution",
    ),
)

# Hu et al., Towards Optimal Multi-draft Speculative Decoding: acceptance of rules and draft
# distributions at one node, against their optimum, by temperature and by number of drafts, and what
# trees of such drafts come to. Its own settings are 0.7 and 3 drafts, by public notes on it.

_HU = "Hu et al., arXiv 2502.18779"
_THEOREM = "a theorem: no rule is above its drafts' optimum"
_ORDERS = (
    Order("optimum", "RRS", _THEOREM),
    Order("optimum", "K-SEQ", _THEOREM),
    Order("optimum w/o", "RRS w/o", _THEOREM),
    Order("optimum w/o", "optimum", f"{_HU}, abstract"),
    Order("optimum w/o", "greedy", "no claim of the paper that was seen: a question of our own"),
)
_IID, _WOR, _GREEDY_DRAFTS = DraftSampling.IID, DraftSampling.WOR, DraftSampling.GREEDY

MDSD = Paper(
    name="mdsd",
    title=f"Optimal multi-draft speculative decoding ({_HU}): acceptance by draft distribution",
    sheets=(
        Sheet(
            name="temperatures",
            title="By temperature",
            way=Way.NODES,
            settings=nodes_of(tuple(RULES), ((1024, 3),), (0.2, 0.4, 0.6, 0.7, 0.8, 1.0, 1.2)),
            directions=(
                *_ORDERS,
                *(
                    Rise(
                        *("greedy", "temperature", f"{_HU}: notes on it (greedy drafts may lose)"),
                        *(1.2, 0.2),
                        over=other,
                    )
                    for other in ("optimum", "optimum w/o")
                ),
            ),
        ),
        Sheet(
            name="drafts",
            title="By number of drafts",
            way=Way.NODES,
            settings=nodes_of(tuple(RULES), tuple((1024, n) for n in (2, 4, 6, 8)), (0.7,)),
            directions=(
                *_ORDERS,
                *(Rise(rule, "paths", _HU) for rule in RULES if rule != "one draft"),
            ),
        ),
        Sheet(
            name="trees",
            title="Trees on the same texts",
            way=Way.SAME_DRAFTS,
            settings=tuple(
                Setting(
                    plan=Plan(verifier=verifier, draft_sampling=own, paths=paths, depth=depth),
                    temperature=0.7,
                )
                for paths, depth in ((2, 4), (4, 3))
                for own, verifiers in (
                    (_IID, ("specinfer", "spectr", "global_resolution", "otbv")),
                    (_WOR, ("specinfer",)),
                    (_GREEDY_DRAFTS, ("greedy_draft", "otbv")),
                )
                for verifier in verifiers
            ),
        ),
    ),
    notes=(
        "of the paper's text only the abstract could be read, and public notes on its settings",
        "acceptance is exact at every place but for RRS without replacement, which is a mean over "
        "drawn rejections",
        "trees have K paths of L tokens from the root on, not K children of every node as in the "
        "paper; wor and greedy concern the first token of the paths",
    ),
)

PAPERS: Mapping[str, Paper] = MappingProxyType(
    {paper.name: paper for paper in (BV, GBV, GR_SOLVERS, GR_STEPS, MDSD, SPECTR_GBV)}
)
"""Every comparison that ``eaglegbv bench paper`` makes."""
