"""Lin et al., SpecTr-GBV: Multi-Draft Block Verification (arXiv 2604.25925).

Its Table 1 compares it with token verification, SpecTr and greedy block verification of one path
(its "GBV"), its Table 3 draft lengths, its Table 2 where the time goes.
"""

from eaglegbv.eval.papers.cells import Figure, Way
from eaglegbv.eval.papers.sheets import GridPaper, Order, Quote, Rise, Sheet, cells_of

_PAPER = "Lin et al., arXiv 2604.25925"
_MODELS = "DeepSeek 33B and 1.3B, L = 12, K = 3, T = 0.4, mean of five data sets"
_READ = "public summaries of its Tables 1 and 2"
_LENGTHS = (4, 8, 12, 24)
_TEMPERATURE = 0.4
_PATHS = 3


def _quote(text: str, worse: str, figure: Figure = Figure.TOKENS_A_STEP) -> Quote:
    return Quote(
        text=text,
        models=_MODELS,
        source=_READ,
        better="spectr_gbv",
        worse=worse,
        paths=_PATHS,
        depth=12,
        temperature=_TEMPERATURE,
        figure=figure,
    )


def _beaten(figure: Figure) -> tuple[Order, ...]:
    others = ("token", "greedy_block", "spectr")
    return tuple(Order("spectr_gbv", other, f"{_PAPER}, Table 1", figure) for other in others)


SPECTR_GBV = GridPaper(
    name="spectr-gbv",
    title=f"SpecTr-GBV ({_PAPER}): by draft length, with the time each phase takes",
    sheets=(
        Sheet(
            name="engine",
            title="Tables 1 to 3, one request at a time",
            way=Way.TIMED,
            settings=(
                *cells_of(
                    ("token", "block", "greedy_block"),
                    depths=_LENGTHS,
                    temperatures=(_TEMPERATURE,),
                ),
                *cells_of(
                    ("spectr", "spectr_gbv", "otbv"),
                    paths=(_PATHS,),
                    depths=_LENGTHS,
                    temperatures=(_TEMPERATURE,),
                ),
            ),
            directions=(
                *_beaten(Figure.TOKENS_A_STEP),
                *_beaten(Figure.TOKENS_A_SECOND),
                Order("spectr_gbv", "spectr", f"{_PAPER}, Table 2", Figure.VERIFYING),
                Rise("spectr_gbv", "depth", f"{_PAPER}, Table 3"),
                Rise(
                    "spectr_gbv",
                    "depth",
                    f"{_PAPER}, Table 3: speed falls again where drafts are long",
                    start=24,
                    end=8,
                    figure=Figure.TOKENS_A_SECOND,
                ),
                Order("otbv", "spectr_gbv", "this package's claim for otbv"),
                Order(
                    "otbv",
                    "spectr_gbv",
                    "this package's claim for otbv",
                    Figure.TOKENS_A_SECOND,
                ),
            ),
            quotes=(
                _quote("1.124", "token"),
                _quote("1.293", "token", Figure.TOKENS_A_SECOND),
                _quote("1.097", "greedy_block"),
                _quote("1.270", "greedy_block", Figure.TOKENS_A_SECOND),
                _quote("1.023", "spectr"),
                _quote("1.082", "spectr", Figure.TOKENS_A_SECOND),
                _quote("2.15 (53.5% less time)", "spectr", Figure.VERIFYING),
            ),
        ),
    ),
    notes=(
        "spectr_gbv is the lossless construction of this package: the acceptance rule of the "
        "paper's public code does not keep the target's distribution for two paths or more.",
        "For that it follows the modified target through the draft distributions of earlier "
        "steps, which the drafter recalls row by row: its verification takes longer the longer the "
        "drafts, where the paper's takes less time than SpecTr's.",
    ),
)
