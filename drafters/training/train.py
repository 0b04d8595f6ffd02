"""The training loop of targets and heads: optimise, log, checkpoint, resume, report."""

import json
import math
import pickle
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

import tokenizers
import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

from eaglegbv.drafters.training.data import Corpus
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import replacing, write_whole

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
_SECONDS_BETWEEN_LINES = 20.0
_LOG_EVERY = 10  # steps between two lines of the log
_WARM_UP = 0.05  # fraction of the budget in which the learning rate rises linearly
_LARGEST_GRADIENT = 1.0  # norm to which a step's gradient is clipped
_SEED_STRIDE = 1_000_003  # a prime beyond the number of steps of any run


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast to train.

    Training ends after ``steps`` steps or ``minutes`` minutes, whichever comes first; the learning
    rate follows the same fraction, so that its cosine always ends with the budget. A run limited by
    steps alone is reproducible bit by bit on a CPU.
    """

    steps: int  # optimiser steps at most
    # Minutes of training and evaluation at most, over all resumed parts; None is no limit.
    minutes: float | None = None
    learning_rate: float = 1.5e-3  # peak learning rate of AdamW
    final_rate: float = 0.01  # fraction of the peak the cosine ends at
    weight_decay: float = 0.1  # AdamW's decay, of matrices only
    evaluate_every: int = 250  # steps between two evaluations
    checkpoint_every: int = 250  # steps between two checkpoints
    seed: int = 0  # seed of everything random
    bf16: bool = True  # run the forward in bfloat16; weights and optimiser stay float32

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, getattr(self, name), "an integer of at least 1")
        if self.minutes is not None and self.minutes <= 0:
            raise InvalidArgument("minutes", self.minutes, "a positive number or None")

    def step_seed(self, step: int) -> int:
        """Return the seed of what step number ``step`` draws.

        Runs whose seeds are neighbours must not share draws, as they would with ``seed + step``.
        """
        return self.seed * _SEED_STRIDE + step

    def progress(self, done: "Progress") -> float:
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
class Progress:
    """The state of a run: all that a checkpoint holds beside weights and optimiser."""

    step: int = 0  # steps taken
    seconds: float = 0.0  # seconds spent on them and on evaluation
    evaluating: float = 0.0  # seconds of the last evaluation
    best_score: float = math.inf  # of the best evaluation
    best_step: int = 0  # its step
    best_weights: dict[str, Tensor] = field(default_factory=dict)  # the module's state then


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained."""

    module: nn.Module  # the module whose trainable weights are optimised
    # Loss of a step, given its number and the spent fraction of the budget. It draws its batch as a
    # function of these alone.
    loss: Callable[[int, float], Tensor]
    evaluate: Callable[[], Evaluation]  # held-out evaluation
    tokens_per_step: int  # tokens a step trains on, for the log
    identity: Mapping[str, Any]  # what must be the same for a checkpoint to be resumed
    keep: Callable[[], None] = lambda: None  # saves the module, whose weights are the best so far


def optimise(task: Task, schedule: Schedule, folder: Path, *, resume: bool) -> Progress:
    """Train ``task.module``, leaving the weights of the best evaluation in it.

    ``folder`` receives ``checkpoint.pt`` (replaced atomically) and ``log.jsonl``. With ``resume``
    the run continues from the checkpoint, if there is one. Every step reseeds torch's generator
    with the seed and its own number, and the batch depends on the step alone, so there is no
    generator state to lose.

    Raises:
        InvalidArgument: The checkpoint belongs to another run, or the loss is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, log = folder / CHECKPOINT, folder / LOG
    optimizer = _adamw(task.module, schedule)
    progress = Progress()
    if resume and checkpoint.exists():
        progress = _restore(checkpoint, task, optimizer)
    _drop_repeated(log, progress.step, schedule.evaluate_every)
    bar = tqdm(initial=progress.step, unit="step", smoothing=0.1, disable=None)
    with log.open("a") as lines, bar:
        journal = _Journal(lines, bar, task.tokens_per_step, progress.step)
        while (spent := schedule.progress(progress)) < 1:
            began = time.monotonic()
            torch.manual_seed(schedule.step_seed(progress.step))
            loss = _step(task, schedule, optimizer, progress.step, spent)
            progress.step += 1
            bar.update()
            if progress.step % _LOG_EVERY == 0:
                if not math.isfinite(value := loss.item()):
                    expected = (
                        f"a rate at which the loss is finite: step {progress.step} has {value}"
                    )
                    raise InvalidArgument("learning_rate", schedule.learning_rate, expected)
                journal.write_loss(progress, value, schedule.progress(progress))
            if progress.step % schedule.evaluate_every == 0:
                journal.write_evaluation(progress.step, _evaluate(task, schedule, progress))
            progress.seconds += time.monotonic() - began
            if progress.step % schedule.checkpoint_every == 0:
                _save(checkpoint, task, optimizer, progress)
        if progress.step % schedule.evaluate_every:
            journal.write_evaluation(progress.step, _evaluate(task, schedule, progress))
    _save(checkpoint, task, optimizer, progress)
    task.module.load_state_dict(progress.best_weights)
    return progress


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


def _evaluate(task: Task, schedule: Schedule, progress: Progress) -> Evaluation:
    """Evaluate, and keep the weights if they are the best so far."""
    task.module.eval()
    began = time.monotonic()
    # Evaluation runs at many shapes, too few times to be worth compiling for.
    with torch.no_grad(), _autocast(task, schedule), torch.compiler.set_stance("force_eager"):
        found = task.evaluate()
    progress.evaluating = time.monotonic() - began
    if found.score < progress.best_score:
        progress.best_score, progress.best_step = found.score, progress.step
        progress.best_weights = {
            name: tensor.to("cpu", copy=True) for name, tensor in task.module.state_dict().items()
        }
        task.keep()
    return found


@dataclass(slots=True)
class _Journal:
    """The output of a run: a progress bar, or lines where there is no terminal; and the log.

    ``first`` is the step at which this part of the run began, and ``shown`` when a line of progress
    was last printed.
    """

    lines: TextIO
    bar: "tqdm[Any]"
    tokens_per_step: int
    first: int
    began: float = field(default_factory=time.monotonic)
    shown: float = 0.0

    def write_loss(self, progress: Progress, loss: float, spent: float) -> None:
        now = time.monotonic()
        speed = self.tokens_per_step * (progress.step - self.first) / (now - self.began)
        facts = f"loss {loss:.3f}, {speed:,.0f} tokens/s"
        self.bar.total = round(progress.step / spent)  # estimated, as the budget may be in minutes
        self.bar.set_postfix_str(facts)
        if self.bar.disable and now - self.shown > _SECONDS_BETWEEN_LINES:
            self.shown = now
            left = progress.seconds * (1 - spent) / spent / 60
            where = f"step {progress.step:,} of about {self.bar.total:,}"
            tqdm.write(f"{where}, {facts}, {left:.0f} min left", file=sys.stderr)
        tokens, seconds = progress.step * self.tokens_per_step, round(progress.seconds, 1)
        self._write({"step": progress.step, "tokens": tokens, "seconds": seconds, "loss": loss})

    def write_evaluation(self, step: int, found: Evaluation) -> None:
        self._write({"step": step, "held_out": dict(found.values), "score": found.score})
        tqdm.write(f"step {step:,}: held-out score {found.score:.4f}", file=sys.stderr)

    def _write(self, entry: Mapping[str, Any]) -> None:
        self.lines.write(json.dumps(entry) + "\n")
        self.lines.flush()


def _drop_repeated(log: Path, step: int, evaluate_every: int) -> None:
    """Drop what was logged after the checkpoint, and the evaluation at the end: they come again."""
    if not log.exists():
        return

    def stays(line: str) -> bool:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the line being written when the run was killed
            return False
        at_end = "score" in entry and entry["step"] % evaluate_every != 0
        return bool(0 < entry["step"] <= step and not at_end)

    kept = filter(stays, log.read_text().splitlines(keepends=True))
    write_whole(log, "".join(kept).encode())


def _save(path: Path, task: Task, optimizer: torch.optim.AdamW, progress: Progress) -> None:
    checkpoint = {
        "identity": json.dumps(task.identity, sort_keys=True),
        "module": task.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        **{each.name: getattr(progress, each.name) for each in fields(progress)},
    }
    with replacing(path) as partial:
        torch.save(checkpoint, partial)


def _restore(path: Path, task: Task, optimizer: torch.optim.AdamW) -> Progress:
    own = json.dumps(task.identity, sort_keys=True)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        _ = saved["identity"]
    except (
        OSError, EOFError, RuntimeError, LookupError, TypeError, pickle.UnpicklingError,
    ) as error:  # fmt: skip
        expected = f"a readable checkpoint ({type(error).__name__})"
        raise InvalidArgument("resume", str(path), expected) from error
    # Older checkpoints name settings that there are no more.
    theirs = {k: v for k, v in json.loads(saved["identity"]).items() if k in task.identity}
    if json.dumps(theirs, sort_keys=True) != own:
        raise InvalidArgument("resume", saved["identity"], f"a checkpoint of this run, {own}")
    task.module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    return Progress(**{each.name: saved[each.name] for each in fields(Progress)})


# What a run reports.


def write_report(
    folder: Path,
    task: Task,
    progress: Progress,
    final: Evaluation,
    *,
    title: str,
    command: str,
    data: Sequence[Path],
    corpus: Corpus,
) -> str:
    """Write ``training_report.json``, and ``TRAINING.md``, which is returned.

    Args:
        folder: Folder to write into.
        task: What was trained.
        progress: Where the run ended.
        final: The last evaluation, of the weights as saved.
        title: What was trained, in words.
        command: Command line that was run.
        data: Files and folders of the data.
        corpus: What was trained on.

    Returns:
        A section of a model card, in Markdown.
    """
    device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if (place := next(task.module.parameters()).device).type == "cuda":
        device = torch.cuda.get_device_name(place)
    versions = {"Python": platform.python_version()}
    versions |= {m.__name__: str(m.__version__) for m in (torch, transformers, tokenizers)}
    held_out, sources = dict(final.values), corpus.token_counts()
    weights = sum(p.numel() for p in task.module.parameters())
    tokens, seconds = progress.step * task.tokens_per_step, round(progress.seconds, 1)
    report = {
        "title": title,
        "command": command,
        "config": {**task.identity, "data": [str(path) for path in data]},
        "parameters": weights,
        "data": sources,
        "steps": progress.step,
        "best_step": progress.best_step,
        "tokens": tokens,
        "seconds": seconds,
        "held_out": held_out,
        "device": device,
        "versions": versions,
    }
    card = (
        f"## Training of the {title}\n\n"
        f"{weights:,} weights; {tokens:,} tokens in {progress.step:,} steps (weights of step "
        f"{progress.best_step:,} kept), {seconds:,.0f} s on {device}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}.\n\n"
        f"```\n{command}\n```\n\n"
        + _table("source", "tokens", {name: f"{count:,}" for name, count in sources.items()})
        + "\n"
        + _table("held out", "value", {name: f"{value:.3f}" for name, value in held_out.items()})
    )
    write_whole(
        folder / "training_report.json", f"{json.dumps(report, indent=2, default=str)}\n".encode()
    )
    write_whole(folder / "TRAINING.md", card.encode())
    return card


def _table(name: str, value: str, rows: Mapping[str, str]) -> str:
    lines = (f"| {key} | {told} |\n" for key, told in {name: value, "---": "---:", **rows}.items())
    return "".join(lines)
