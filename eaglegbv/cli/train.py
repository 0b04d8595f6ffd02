"""``eaglegbv train``: heads that draft."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import opt
from eaglegbv.cli.structs import Fields, member
from eaglegbv.config import Plan
from eaglegbv.devices import AUTO_DTYPE, named_device, place_of
from eaglegbv.drafters.training.data import Texts, TextSettings, gather_texts
from eaglegbv.drafters.training.heads import (
    EagleTrainingConfig,
    HeadTrainingConfig,
    ParallelTrainingConfig,
    train_head,
    try_out,
)
from eaglegbv.drafters.training.train import Schedule
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.validation import HeadValidator, target_answers
from eaglegbv.loading import check_model, find_target
from eaglegbv.models.hf import load_model, load_tokenizer

app = opts.make_app("Train a head.")


Target = Annotated[str, opt("The target: a folder, a GGUF file, a hub name, smollm2 or tiny.")]
Resume = Annotated[bool, opt("Continue from the checkpoint in the folder, if any.", "--resume")]
DryRun = Annotated[bool, opt("Take two steps; say what the run will need.", "--dry-run")]
ValidateTokens = Annotated[int, opt("Most tokens of the answers of --validate.")]
ValidatePaths = Annotated[int, opt("Paths drafted for them, of --depths tokens.")]


class Preset(StrEnum):
    """Settings of a head's training at once."""

    QUICK = "quick"
    """Minutes on two cores: whether everything works, and a head that drafts a little."""
    GOOD = "good"  # hours on a CPU, less than one on a GPU


_PRESETS: Mapping[Preset, Mapping[str, float]] = {
    Preset.QUICK: {
        "steps": 300, "batch": 4, "window": 256, "anchors": 64, "depths": 4, "draft_vocab": 4096,
        "held_out": 32, "validation_prompts": 0, "evaluate_every": 100, "checkpoint_every": 50,
    },
    Preset.GOOD: {
        "steps": 8_000, "batch": 4, "window": 512, "anchors": 160, "depths": 4,
        "learning_rate": 1.5e-3, "validation_prompts": 0,
    },
}  # fmt: skip


def _take_preset(context: typer.Context, preset: str | None) -> str | None:
    if preset is not None:
        settings = _PRESETS[member("preset", preset, Preset)]
        options = {option.name for option in context.command.params}
        assert settings.keys() - options <= {"draft_vocab"}  # of EAGLE-3 alone
        context.default_map = {name: settings[name] for name in settings.keys() & options}
    return preset


PresetName = Annotated[
    Preset | None,
    typer.Option(help="Settings that others change.", is_eager=True, callback=_take_preset),
]
_DEFAULTS: Mapping[str, Any] = {
    "samples": None, "held_out": 64, "learning_rate": 1e-3, "weight_decay": 0.01,
    "device": "auto", "bf16": None,
}  # fmt: skip


_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}


@app.command(hidden=True, context_settings=_ANYTHING)
def target() -> None:
    """Say where it went."""
    raise InvalidArgument("train", "target", "eagle; examples/train_tiny_pair.py trains a target")


@app.command(hidden=True, context_settings=_ANYTHING)
def bigram() -> None:
    """Say where it went."""
    raise InvalidArgument("train", "bigram", "eagle; examples/train_bigram.py counts a table")


@app.command()
def eagle(
    target: Target,
    config: Annotated[EagleTrainingConfig, Fields(**_DEFAULTS)],
    preset: PresetName = None,
    dry_run: DryRun = False,
    validate_tokens: ValidateTokens = 64,
    validate_paths: ValidatePaths = 3,
    resume: Resume = False,
) -> None:
    """Train an EAGLE head for a target.

    \b
    Examples:
      eaglegbv train eagle --target smollm2 --data answers.jsonl --out head --preset quick --dry-run
      eaglegbv train eagle --target smollm2 --data answers.jsonl --out head --preset good --resume
    """
    del preset  # its settings are other options' defaults by now
    _train(target, config, dry_run, validate_tokens, validate_paths, resume)


@app.command()
def parallel(
    target: Target,
    config: Annotated[ParallelTrainingConfig, Fields(**_DEFAULTS)],
    preset: PresetName = None,
    dry_run: DryRun = False,
    validate_tokens: ValidateTokens = 64,
    validate_paths: ValidatePaths = 3,
    resume: Resume = False,
) -> None:
    """Train a block drafter's head for a target: DSpark's, or DFlash's."""
    del preset
    _train(target, config, dry_run, validate_tokens, validate_paths, resume)


def _train(
    target: str,
    config: HeadTrainingConfig,
    dry_run: bool,
    tokens: int,
    paths: int,
    resume: bool,
) -> None:
    device = _resolve(config.device)
    texts = _text_settings(config.texts, config.out)
    schedule = _schedule(config.schedule, device)
    config = replace(config, texts=texts, schedule=schedule, device=device)
    dtype = torch.bfloat16 if schedule.bf16 else torch.float32
    folder = _folder(target, dtype)
    # The texts come first, as their engine holds a target of its own.
    corpora = _texts(texts, folder, head=config.initial, dtype=dtype, device=device)
    model = load_model(folder, dtype=dtype, device=device)
    if dry_run:
        print(try_out(config, model, corpora), end="")
        return
    plan = Plan(paths=paths, depth=config.depths)
    seed = schedule.seed
    validator = HeadValidator(folder, plan, max_tokens=tokens, device=device, seed=seed)
    command = _command_line()
    print(train_head(config, model, corpora, command=command, resume=resume, validate=validator))


def _folder(target: str, dtype: torch.dtype) -> Path:
    folder = find_target(target, dtype)
    check_model(folder, "target")
    return Path(folder)


def _text_settings(settings: TextSettings, out: Path) -> TextSettings:
    """Return settings whose answers are kept where the results are, if nothing else is said."""
    return replace(settings, samples=settings.samples or out / "samples.pt")


def _texts(settings: TextSettings, target: Path, **engine: Any) -> Texts:  # noqa: ANN401
    """Return the texts; the engine, opened with these arguments, answers if the target has to."""
    longest, seed = settings.max_new_tokens, settings.seed
    settings.samples.parent.mkdir(parents=True, exist_ok=True)
    answer = partial(target_answers, target=target, max_tokens=longest, seed=seed, **engine)
    return gather_texts(settings, load_tokenizer(target), answer)


def _schedule(schedule: Schedule, device: str) -> Schedule:
    """Return a schedule that says whether to compute in bfloat16, which is if that is faster."""
    if schedule.bf16 is not None:
        return schedule
    return replace(schedule, bf16=place_of(device, AUTO_DTYPE)[1] is torch.bfloat16)


def _command_line() -> str:
    arguments = sys.argv[1:]
    return " ".join(["eaglegbv", *([] if arguments[:1] == ["train"] else ["train"]), *arguments])


def _resolve(device: str) -> str:
    if device != "auto":
        return str(named_device(device))
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    app()
