"""Sun et al., Block Verification Accelerates Speculative Decoding, ICLR 2025 (arXiv 2403.10444).

Its Tables 1 and 2 compare token and block verification by data set, draft length and drafter; its
Table 4 adds greedy block verification.
"""

from eaglegbv.eval.papers.cells import Figure, Way
from eaglegbv.eval.papers.sheets import GridPaper, Order, Quote, Rise, Sheet, Widening, cells_of

_PAPER = "Sun et al., arXiv 2403.10444"
_MODELS = "PaLM-2-S and -XXS, L = 8, mean of eight data sets"
_READ = "public summaries of its Table 1: block efficiency 3.41 and 3.70, time 5% to 8% less"
_LENGTHS = (4, 6, 8)


def _quote(text: str, figure: Figure = Figure.TOKENS_A_STEP) -> Quote:
    return Quote(
        text=text,
        models=_MODELS,
        source=_READ,
        better="block",
        worse="token",
        paths=1,
        depth=8,
        temperature=1.0,
        figure=figure,
    )


BV = GridPaper(
    name="bv",
    title=f"Block verification ({_PAPER}): token, block and greedy block by draft length",
    sheets=(
        Sheet(
            name="drafts",
            title="Tables 1 and 2, on the same drafts",
            way=Way.SAME_DRAFTS,
            settings=cells_of(
                ("token", "block"), depths=_LENGTHS, temperatures=(0.2, 0.4, 0.6, 0.8, 1.0)
            ),
            directions=(
                Order("block", "token", f"{_PAPER}, Theorem 2"),
                Rise("token", "depth", _PAPER),
                Rise("block", "depth", _PAPER),
                Widening("block", "token", f"{_PAPER}, Figure 2"),
            ),
            quotes=(_quote("1.083 (1.07 to 1.10)"),),
        ),
        Sheet(
            name="engine",
            title="Table 4, in the engine",
            way=Way.ENGINE,
            settings=cells_of(
                ("token", "block", "greedy_block"), depths=_LENGTHS, temperatures=(1.0,)
            ),
            directions=(
                Order("block", "token", _PAPER),
                Order("block", "greedy_block", f"{_PAPER}, Table 4"),
            ),
            quotes=(_quote("1.083 (1.07 to 1.10)"),),
        ),
        Sheet(
            name="time",
            title="Table 1, time, one request at a time",
            way=Way.TIMED,
            settings=cells_of(("token", "block"), depths=(8,), temperatures=(1.0,)),
            directions=(Order("block", "token", _PAPER, Figure.TOKENS_A_SECOND),),
            quotes=(_quote("1.065 (1.05 to 1.08)", Figure.TOKENS_A_SECOND),),
        ),
    ),
)
