"""Draft and target distributions of a pair, collected at positions of plainly decoded texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.node_acceptance import RULES, NodeProbs
from eaglegbv.eval.paired_comparison import Bench, Cell, Sampling, Text
from eaglegbv.eval.records import Setting
from eaglegbv.eval.solvers import Node, solve_all
from eaglegbv.loading import Pair
from eaglegbv.metrics import Phase
from eaglegbv.verifiers.global_resolution import Solver

NODES = 10  # most nodes of a size that solvers get of a part of the texts


@dataclass(frozen=True, slots=True)
class Harvest:
    """Distributions at one temperature, at places of texts that the target wrote at it."""

    # At every place, the drafter's distribution of the next token, which is the first level of its
    # trees, and the target's distribution on its support.
    probs: NodeProbs
    texts: NDArray[np.int64]  # [places], index of the text of each place

    def nodes(self, *, width: int, drafts: int, count: int, seed: int) -> list[Node]:
        """Return at most ``count`` nodes for the solvers, spread evenly over the places.

        Draft distributions keep the ``width`` most likely tokens; n ``drafts`` are drawn.
        """
        probs = self.probs.top(width)
        last = probs.count - 1
        places = np.unique(np.linspace(0, last, min(count, last + 1)).astype(np.int64))
        nodes = []
        for place in places.tolist():
            rng = np.random.default_rng((seed, place, width, drafts))
            q, p = probs.draft[place].numpy(), probs.target[place].numpy()
            kept = np.flatnonzero(q)
            q = q[kept]
            # One token at the end stands for all tokens that the drafter cannot propose.
            target = np.append(p[kept], max(0.0, 1 - p[kept].sum()))
            nodes.append(
                Node(
                    # The target's own sum is 1 except for the rounding of its logits.
                    target=target / target.sum(),
                    ids=np.arange(len(q)),
                    draft=q,
                    drawn=rng.choice(len(q), size=drafts, p=q / q.sum()),
                    uniforms=rng.random((drafts, 2)),
                )
            )
        return nodes


def harvest(
    pair: Pair, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling
) -> Harvest:
    """Return the distributions at places of texts that ``paired_comparison.collect`` wrote.

    Texts and settings are of one temperature; draft distributions keep as many tokens as the widest
    of the settings'.

    Raises:
        InvalidArgument: The temperature is 0, where distributions are points, or no text is long
            enough.
    """
    width, temperature = max(s.plan.draft_width for s in settings), settings[0].temperature
    if not temperature > 0:
        raise InvalidArgument("temperature", temperature, "a positive number")
    plan = Plan(verifier="block", paths=1, depth=1, draft_width=width)
    parts_found: list[tuple[Tensor, Tensor, Tensor]] = []
    numbers: list[int] = []
    bench = Bench(pair, sampling)
    [drafting] = bench.draftings([Setting(plan=plan, temperature=temperature)])
    for readers in bench.visit(texts):
        offer = bench.draft(list(readers.values()), drafting)
        ids, q = offer.tree.draft_ids[:, :1], offer.tree.draft_probs[:, 0]
        p = offer.target.probs_at(ids)[:, 0] * (q > 0)
        parts_found.append((ids[:, 0].cpu(), q.cpu(), p.cpu()))
        numbers += readers
    if not parts_found:
        raise InvalidArgument("texts", len(texts), "texts of two tokens or more")
    columns = [
        pad_sequence([row for part in parts for row in part], batch_first=True)
        for parts in zip(*parts_found, strict=True)
    ]
    return Harvest(NodeProbs.of(*columns), np.array(numbers))


def node_cells(
    pair: Pair, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling
) -> list[Cell]:
    """Compute the acceptance of rules at places of texts, summed over each text.

    The verifier of a setting names a rule of :data:`RULES`, its paths are the n drafts, and its
    draft width the tokens that draft distributions keep; all have one temperature. Errors are those
    of :func:`harvest`.
    """
    places = harvest(pair, texts, settings, sampling)
    steps = tuple(np.bincount(places.texts, minlength=len(texts)).tolist())
    cells = []
    for setting in settings:
        plan = setting.plan
        accepted = RULES[plan.verifier](places.probs.top(plan.draft_width), plan.paths)
        sums = np.bincount(places.texts, weights=accepted.numpy(), minlength=len(texts))
        cells.append(Cell(setting=setting, tokens=tuple(sums.tolist()), steps=steps))
    return cells


def solver_cells(
    pair: Pair, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling
) -> list[Cell]:
    """Give some places to solvers: acceptance and seconds of each node, as of a question.

    Settings are as in :func:`node_cells`, with a solver for a rule. The cell of a solver for which
    a node is too large is empty.
    """
    places, cells = harvest(pair, texts, settings, sampling), []
    for setting in settings:
        plan = setting.plan
        sizes = {"width": plan.draft_width, "drafts": plan.paths, "count": NODES}
        given = places.nodes(**sizes, seed=texts[0].seed)
        solved = solve_all(Solver(plan.verifier), given)
        answers = [] if None in solved else [answer for answer in solved if answer is not None]
        tokens = tuple(answer.acceptance for answer in answers)
        seconds = {Phase.VERIFY: tuple(answer.seconds for answer in answers)}
        steps = (1,) * len(answers)
        cells.append(Cell(setting=setting, tokens=tokens, steps=steps, seconds=seconds))
    return cells
