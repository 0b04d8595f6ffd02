"""The training loop of targets and heads: optimise, log, checkpoint, resume, report."""

import json
import logging
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import tokenizers
import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

from eaglegbv.drafters.training.data import BROKEN, Corpus
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import replacing, require_integers, write_whole

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
_SECONDS_BETWEEN_LINES = 20.0  # of progress, where there is no terminal
_LOG_EVERY = 10  # steps between two lines of the log
_WARM_UP = 0.05  # fraction of the budget in which the learning rate rises linearly
_LARGEST_GRADIENT = 1.0  # norm to which a step's gradient is clipped
_SEED_STRIDE = 1_000_003  # a prime beyond the number of steps of any run
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast to train.

    Training ends after ``steps`` steps or ``minutes`` minutes, whichever comes first; the learning
    rate follows the same fraction, so that its cosine always ends with the budget. A run limited by
    steps alone is reproducible bit by bit on a CPU.

    Attributes:
        steps: Most steps of the optimiser.
        minutes: Time budget, of all resumed parts together; the schedule is fitted to it.
        learning_rate: Peak learning rate.
        final_rate: Fraction of the peak learning rate at the end.
        weight_decay: AdamW's decay, of matrices only.
        evaluate_every: Steps between evaluations.
        checkpoint_every: Steps between checkpoints.
        seed: Seed of all random numbers.
        bf16: Forward in bfloat16; weights and optimiser stay float32.
    """

    steps: int = 3_000
    minutes: float | None = None
    learning_rate: float = 1.5e-3
    final_rate: float = 0.01
    weight_decay: float = 0.1
    evaluate_every: int = 250
    checkpoint_every: int = 250
    seed: int = 0
    bf16: bool = True

    def __post_init__(self) -> None:
        at_least_one = (1, None)
        require_integers(
            self, steps=at_least_one, evaluate_every=at_least_one, checkpoint_every=at_least_one
        )
        if self.minutes is not None and self.minutes <= 0:
            raise InvalidArgument("minutes", self.minutes, "a positive number or None")

    def step_seed(self, step: int) -> int:
        """Return the seed of what step number ``step`` draws.

        Runs whose seeds are neighbours must not share draws, as they would with ``seed + step``.
        """
        return self.seed * _SEED_STRIDE + step

    def progress(self, done: "RunState") -> float:
        """Return the spent fraction of the budget; 1 and above is the end.

        Time is left for the two evaluations at the end: of the last weights, and of the saved ones.
        """
        spent = done.step / self.steps
        if self.minutes is None:
            return spent
        return max(spent, (done.seconds + 2 * done.evaluating) / (60 * self.minutes))

    def rate(self, progress: float) -> float:
        """Return the learning rate at a fraction of the budget."""
        rising = min(1.0, progress / _WARM_UP)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * rising * (self.final_rate + (1 - self.final_rate) * cosine)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a held-out evaluation found: ``score`` (lower is better) chooses the weights to keep."""

    score: float
    values: Mapping[str, float]


@dataclass(slots=True)
class RunState:
    """The state of a run: all that a checkpoint holds beside weights and optimiser."""

    step: int = 0  # steps taken
    seconds: float = 0.0  # seconds spent on them and on evaluation
    evaluating: float = 0.0  # seconds of the last evaluation
    best_score: float = math.inf  # of the best evaluation
    best_step: int = 0  # its step
    best_weights: dict[str, Tensor] = field(default_factory=dict)  # the module's state then


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and on what."""

    title: str  # what it is, for the report
    data: Sequence[Path]  # its files and folders
    corpus: Corpus  # what they come to
    module: nn.Module  # the module whose trainable weights are optimised
    # Loss of a step, given its number and the spent fraction of the budget. It draws its batch as a
    # function of these alone.
    loss: Callable[[int, float], Tensor]
    evaluate: Callable[[], Evaluation]  # held-out evaluation
    finish: Callable[[], Evaluation]  # saves the module at the end, and evaluates what was saved
    tokens_per_step: int  # tokens a step trains on, for the log
    identity: Mapping[str, Any]  # what must be the same for a checkpoint to be resumed
    keep: Callable[[], None] = lambda: None  # saves the module, whose weights are the best so far


def train(task: Task, schedule: Schedule, folder: Path, *, command: str, resume: bool) -> str:
    """Train ``task.module``, save the weights of the best evaluation, and return a report.

    The report, which names ``command``, the command line, is written too. ``folder`` also receives
    ``checkpoint.pt`` (replaced atomically) and ``log.jsonl``. With ``resume`` the run continues
    from the checkpoint, if there is one. Every step reseeds torch's generator with the seed and its
    own number, and the batch depends on the step alone, so there is no generator state to lose.

    Raises:
        InvalidArgument: The checkpoint belongs to another run, or the loss is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT
    optimizer = _adamw(task.module, schedule)
    progress = RunState()
    if resume and checkpoint.exists():
        progress = _restore(checkpoint, task, optimizer)
    _drop_repeated(folder / LOG, progress.step, schedule.evaluate_every)
    with _Journal(folder / LOG, task, schedule, progress) as journal:
        while (spent := schedule.progress(progress)) < 1:
            began = time.monotonic()
            torch.manual_seed(schedule.step_seed(progress.step))
            loss = _step(task, schedule, optimizer, progress.step, spent)
            progress.step += 1
            journal.note_step(loss)
            if progress.step % schedule.evaluate_every == 0:
                journal.note_evaluation(_evaluate(task, schedule, progress))
            progress.seconds += time.monotonic() - began
            if progress.step % schedule.checkpoint_every == 0:
                _save(checkpoint, task, optimizer, progress)
        if progress.step % schedule.evaluate_every:
            journal.note_evaluation(_evaluate(task, schedule, progress))
    _save(checkpoint, task, optimizer, progress)
    task.module.load_state_dict(progress.best_weights)
    with torch.no_grad():
        final = task.finish()
    return _write_report(folder, task, progress, final, command)


class _Journal:
    """The log of a run, and its progress on standard error: a bar, or lines without a terminal."""

    def __init__(self, log: Path, task: Task, schedule: Schedule, progress: RunState) -> None:
        self._tokens = task.tokens_per_step
        self._schedule = schedule
        self._progress = progress
        self._lines = log.open("a", buffering=1)
        first = progress.step * self._tokens
        self._bar = tqdm(initial=first, unit="token", unit_scale=True, disable=None)
        self._printed = 0.0  # when a line was printed last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._lines.close()

    def note_step(self, loss: Tensor) -> None:
        """Note a step; InvalidArgument where the loss of one that is logged is not finite."""
        step = self._progress.step
        bar = self._bar
        bar.update(self._tokens)
        if step % _LOG_EVERY:
            return
        value = loss.item()
        if not math.isfinite(value):
            expected = f"a rate with a finite loss: step {step} has {value}"
            raise InvalidArgument("learning_rate", self._schedule.learning_rate, expected)
        # Estimated, as the budget may be in minutes.
        total = round(step / self._schedule.progress(self._progress))
        bar.total = total * self._tokens
        bar.set_postfix(loss=value, refresh=False)
        if bar.disable and time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            left = self._progress.seconds * (total / step - 1) / 60
            self._print(f"step {step:,} of about {total:,}, loss {value:.3f}, {left:.0f} min left")
        seconds = round(self._progress.seconds, 1)
        self._write(tokens=step * self._tokens, seconds=seconds, loss=value)

    def note_evaluation(self, evaluation: Evaluation) -> None:
        self._write(held_out=dict(evaluation.values), score=evaluation.score)
        self._print(f"step {self._progress.step:,}: score {evaluation.score:.4f}")

    def _write(self, **facts: object) -> None:
        self._lines.write(json.dumps({"step": self._progress.step, **facts}) + "\n")

    def _print(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)


def optimise_once(task: Task, schedule: Schedule, step: int) -> float:
    """Take one step with a new optimiser, and return the seconds that it took."""
    optimizer = _adamw(task.module, schedule)
    began = time.monotonic()
    _step(task, schedule, optimizer, step, 0.5).item()
    return time.monotonic() - began


def _adamw(module: nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    weights = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.dim() >= 2], "weight_decay": schedule.weight_decay},
        {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = weights[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=fused)


def _step(
    task: Task, schedule: Schedule, optimizer: torch.optim.AdamW, step: int, spent: float
) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = schedule.rate(spent)
    task.module.train()
    with _autocast(task, schedule):
        loss = task.loss(step, spent)
    loss.backward()
    nn.utils.clip_grad_norm_(task.module.parameters(), _LARGEST_GRADIENT)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _autocast(task: Task, schedule: Schedule) -> torch.autocast:
    device = next(task.module.parameters()).device
    return torch.autocast(device.type, torch.bfloat16, enabled=schedule.bf16)


def _evaluate(task: Task, schedule: Schedule, progress: RunState) -> Evaluation:
    """Evaluate, and keep the weights if they are the best so far."""
    task.module.eval()
    began = time.monotonic()
    # Evaluation runs at many shapes, too few times to be worth compiling for.
    with torch.no_grad(), _autocast(task, schedule), torch.compiler.set_stance("force_eager"):
        evaluation = task.evaluate()
    progress.evaluating = time.monotonic() - began
    if evaluation.score < progress.best_score:
        progress.best_score = evaluation.score
        progress.best_step = progress.step
        progress.best_weights = {
            name: tensor.to("cpu", copy=True) for name, tensor in task.module.state_dict().items()
        }
        task.keep()
    return evaluation


def _drop_repeated(log: Path, step: int, evaluate_every: int) -> None:
    """Drop what was logged after the checkpoint, and the evaluation at the end: they come again.

    Lines that a crash of the machine has damaged are dropped too, with a warning.
    """
    if not log.exists():
        return
    kept: list[bytes] = []
    damaged = 0
    # What follows the last newline was cut off as the run was killed.
    for line in log.read_bytes().split(b"\n")[:-1]:
        try:
            repeated = _comes_again(json.loads(line), step, evaluate_every)
        except (ValueError, LookupError, TypeError):
            damaged += 1
            continue
        if not repeated:
            kept.append(line + b"\n")
    if damaged and step:
        _log.warning("%d damaged lines of %s are left out", damaged, log)
    write_whole(log, b"".join(kept))


def _comes_again(entry: Mapping[str, Any], step: int, evaluate_every: int) -> bool:
    logged = entry["step"]
    at_the_end = "score" in entry and logged % evaluate_every != 0
    return not 0 < logged <= step or at_the_end


def _save(path: Path, task: Task, optimizer: torch.optim.AdamW, progress: RunState) -> None:
    checkpoint = {
        "identity": json.dumps(task.identity, sort_keys=True),
        "module": task.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        **{each.name: getattr(progress, each.name) for each in fields(progress)},
    }
    with replacing(path) as partial:
        torch.save(checkpoint, partial)


def _restore(path: Path, task: Task, optimizer: torch.optim.AdamW) -> RunState:
    identity = json.dumps(task.identity, sort_keys=True)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        _ = saved["identity"]
    except BROKEN as error:
        expected = f"a readable checkpoint ({type(error).__name__})"
        raise InvalidArgument("resume", str(path), expected) from error
    # Older checkpoints name settings that there are no more.
    identity_saved = {k: v for k, v in json.loads(saved["identity"]).items() if k in task.identity}
    if json.dumps(identity_saved, sort_keys=True) != identity:
        raise InvalidArgument("resume", saved["identity"], f"a checkpoint of this run, {identity}")
    task.module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    return RunState(**{each.name: saved[each.name] for each in fields(RunState)})


def _write_report(
    folder: Path, task: Task, progress: RunState, final: Evaluation, command: str
) -> str:
    """Write ``training_report.json``, and ``TRAINING.md``, a section of a model card, returned."""
    device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if (place := next(task.module.parameters()).device).type == "cuda":
        device = torch.cuda.get_device_name(place)
    versions = {"Python": platform.python_version()}
    versions |= {m.__name__: str(m.__version__) for m in (torch, transformers, tokenizers)}
    report: dict[str, Any] = {
        "title": task.title,
        "command": command,
        "config": {**task.identity, "data": [str(path) for path in task.data]},
        "parameters": sum(p.numel() for p in task.module.parameters()),
        "data": task.corpus.token_counts(),
        "steps": progress.step,
        "best_step": progress.best_step,
        "tokens": progress.step * task.tokens_per_step,
        "seconds": round(progress.seconds, 1),
        "held_out": dict(final.values),
        "device": device,
        "versions": versions,
    }
    counts = {source: f"{count:,}" for source, count in report["data"].items()}
    values = {name: f"{value:.3f}" for name, value in final.values.items()}
    card = (
        "## Training of the {title}\n\n"
        "{parameters:,} weights; {tokens:,} tokens in {steps:,} steps (weights of step "
        "{best_step:,} kept), {seconds:,.0f} s on {device}; "
    ).format(**report)
    card += f"{', '.join(f'{name} {version}' for name, version in versions.items())}.\n\n"
    card += f"```\n{command}\n```\n\n"
    card += _table("source", "tokens", counts) + "\n" + _table("held out", "value", values)
    report_json = json.dumps(report, indent=2, default=str)
    write_whole(folder / "training_report.json", f"{report_json}\n".encode())
    write_whole(folder / "TRAINING.md", card.encode())
    return card


def _table(name: str, value: str, rows: Mapping[str, str]) -> str:
    lines = (f"| {key} | {text} |\n" for key, text in {name: value, "---": "---:", **rows}.items())
    return "".join(lines)
