"""Plans as SGLang's runtime states: all that a round of a plan runs, made when a server starts.

SGLang swaps the backends and graphs of such states for its own adaptive speculation, which knows
chains alone. :class:`Plans` takes the place of its controller: every plan has a state, with buffers
and a judge of its own, and rounds take the plan that a :class:`Choice` names.
"""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState

from eaglegbv.backends.sglang.choice import Choice, Costs, Why, most_requests
from eaglegbv.backends.sglang.rounds import RoundBuffers, shape_of
from eaglegbv.backends.sglang.timing import ForwardTimes, seconds_of
from eaglegbv.backends.sglang.verify import GraphJudge
from eaglegbv.config import Plan, plan_name
from eaglegbv.cuda_graphs import CudaRecorder, Recorder

if TYPE_CHECKING:
    from eaglegbv.backends.sglang.worker import SampledTreeWorker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class State:
    """What a plan's rounds run."""

    plan: Plan
    runtime: SpecRuntimeState
    buffers: RoundBuffers
    judge: GraphJudge


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return the batches for which rounds are timed: powers of two, and the most requests."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


class Plans:
    """SGLang's adaptive controller, with the plans of a worker: the first is the widest."""

    def __init__(self, worker: "SampledTreeWorker", plans: Sequence[Plan], costs: str) -> None:
        """Take the plans; ``costs`` is a file of their rounds' seconds, empty to measure them."""
        self._worker, self._plans, self._costs = worker, plans, costs
        self._states: list[State] = []
        self._now = 0
        self.seeded = False  # whether a request of the next round's batch has a seed
        self.rounds: Counter[tuple[str, Why]] = Counter()

    @property
    def now(self) -> State:
        """The state of the round under way."""
        return self._states[self._now]

    def most(self, plan: Plan) -> int:
        """Return the largest batch of a plan."""
        return most_requests(self._plans, plan, self._worker.most)

    def rows(self) -> int:
        """Return the most rows of p that any plan's rounds have."""
        shapes = [(self.most(plan), *shape_of(plan)) for plan in self._plans]
        return max(most * (1 + paths * length) for most, paths, length in shapes)

    def register(self, state: SpecRuntimeState) -> None:
        """Take SGLang's own state, that of the first plan."""
        self._own = state

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        """Make all states; ``cuda_graph_bs`` are the batches to capture, None without graphs."""
        worker, first = self._worker, self._worker.drafter.buffers
        graphs = cuda_graph_bs is not None and worker.probs.is_cuda
        recorder = CudaRecorder() if graphs else Recorder()
        for plan in self._plans:
            runtime, buffers, most = self._own, first, self.most(plan)
            if self._states:
                paths, length = shape_of(plan)
                buffers = worker.drafter.buffers = first.of_plan(plan)  # graphs read these
                self._take_paths(paths)
                sizes = None if cuda_graph_bs is None else [b for b in cuda_graph_bs if b <= most]
                runtime = worker.build_adaptive_runtime_state(length, 1 + paths * length, sizes)
            judge = GraphJudge(buffers, worker.probs, most)
            judge.record(recorder)
            self._states.append(State(plan, runtime, buffers, judge))
        worker.drafter.buffers = first
        self._take_paths(self._plans[0].paths)
        self._choice = Choice(self._plans, self._table(recorder))

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Let the next round follow the plan chosen for a batch."""
        index, why = self._choice.choose(batch_size, seeded=self.seeded)
        self.rounds[plan_name(self._plans[index]), why] += 1
        if index == self._now:
            return
        self._now, state, worker = index, self._states[index], self._worker
        self._take_paths(shape_of(state.plan)[0])
        worker.speculative_num_steps = -1  # SGLang takes states of equal steps for the same
        worker.apply_runtime_state(state.runtime)
        worker.drafter.buffers = state.buffers

    def on_verify_complete(self, accepted: Sequence[int], batch_size: int) -> None:
        """Learn from a round's result."""
        del batch_size
        self._choice.observe(accepted)

    def _take_paths(self, paths: int) -> None:
        """Let SGLang take so many branches: its states hold all of a plan but this."""
        self._worker.topk = self._worker.drafter.topk = paths
        get_context().override("eaglegbv.plans", speculative_eagle_topk=paths)

    def _table(self, recorder: Recorder) -> Costs:
        """Return the seconds of rounds: the file's, or the first rank's own measurement."""
        if len(self._plans) == 1:
            return Costs((self._worker.most,), np.ones((1, 1)))
        if self._costs:
            given = json.loads(Path(self._costs).read_text(encoding="utf-8"))
            batches = tuple(given["batches"])
            rows = [given["seconds"][plan_name(plan)] for plan in self._plans]
            table = torch.tensor(rows, dtype=torch.float64)
        else:
            batches = batch_sizes(self._worker.most)
            target = ForwardTimes(self._worker.target_worker.model_runner, recorder)
            head = ForwardTimes(self._worker.drafter.draft_runner, recorder)
            rows = [
                [self._seconds(s, batch, target, head) for batch in batches] for s in self._states
            ]
            table = torch.tensor(rows, dtype=torch.float64, device=self._worker.device)
            group = get_parallel().tp_group
            if group.world_size > 1:
                group.broadcast(table, src=0)
        seconds = table.cpu().numpy()
        for row, plan in zip(seconds, self._plans, strict=True):
            row[np.array(batches) > self.most(plan)] = np.inf
        _log.info("seconds of rounds of %s requests, by plan: %s", batches, seconds.tolist())
        return Costs(batches, seconds)

    def _seconds(self, state: State, batch: int, target: ForwardTimes, head: ForwardTimes) -> float:
        """Return the time of a round: its forwards and its verdict."""
        batch = min(batch, self.most(state.plan))
        paths, length = shape_of(state.plan)
        rows = batch * (1 + paths * length)
        drafting = max(0, length - 1) * head.of(batch * paths)
        judging = seconds_of(partial(state.judge.accept, batch), self._worker.device)
        return target.of(rows) + head.of(rows) + drafting + judging
