"""``eaglegbv train``: the target, the EAGLE heads, and a table with which to compare them."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from eaglegbv.config import Plan
from eaglegbv.devices import named_device
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.training.bigram import train_bigram
from eaglegbv.drafters.training.data import TextSettings
from eaglegbv.drafters.training.heads import EagleTrainingConfig, train_eagle, try_out
from eaglegbv.drafters.training.target import TargetTrainingConfig, train_target
from eaglegbv.drafters.training.train import Schedule
from eaglegbv.drafters.training.unroll import Loss
from eaglegbv.eval.validation import HeadValidator
from eaglegbv.gguf import find_model
from eaglegbv.loading import check_model
from eaglegbv.models.hf import load_config, load_model, load_tokenizer
from eaglegbv.utils import decode_json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # as for the command that this is part of
    help="Train a target, an EAGLE head or a bigram table.",
)

Settings = TypeVar("Settings")


def _help(text: str, *names: str, **more: Any) -> Any:  # noqa: ANN401  typer says so too
    return typer.Option(*names, help=text, **more)


Data = Annotated[list[Path], _help("JSON-lines file or folder; may be repeated.")]
Out = Annotated[Path, _help("Folder to write.")]
Target = Annotated[str, _help("The target: a folder, a GGUF file, a hub name, or smollm2.")]
Mixture = Annotated[str, _help("JSON object of the shares of the tokens by file; others: 0.1.")]
Regenerate = Annotated[int, _help("Prompts the target answers itself first; 0: the data's own.")]
Samples = Annotated[Path | None, _help("File in which to keep the target's answers for reuse.")]
Longest = Annotated[int, _help("Most tokens of the target's answers.")]
Minutes = Annotated[float | None, _help("Time budget; the schedule is fitted to it.")]
Rate = Annotated[float, _help("Peak learning rate.")]
FinalRate = Annotated[float, _help("Fraction of the peak learning rate at the end.")]
EvaluateEvery = Annotated[int, _help("Steps between evaluations.")]
CheckpointEvery = Annotated[int, _help("Steps between checkpoints.")]
Batch = Annotated[int, _help("Rows per step.")]
Window = Annotated[int, _help("Tokens per row, and most tokens per text.")]
Seed = Annotated[int, _help("Seed of all random numbers.")]
Device = Annotated[str, _help("Device: cuda, cpu, or auto.")]
Bf16 = Annotated[bool | None, _help("Forward in bfloat16; default: on a GPU.", "--bf16/--no-bf16")]
Compile = Annotated[bool, _help("Compile the target's layers.", "--compile/--no-compile")]
Resume = Annotated[bool, _help("Continue from the checkpoint in the folder, if any.")]


class Preset(StrEnum):
    """Settings of a head's training at once."""

    QUICK = "quick"
    """Minutes on two cores: whether everything works, and a head that drafts a little."""
    GOOD = "good"
    """Hours on a CPU, less than one on a GPU."""


_PRESETS: Mapping[Preset, Mapping[str, float]] = {
    Preset.QUICK: {
        "steps": 300, "batch": 4, "window": 256, "anchors": 64, "depths": 4, "draft_vocab": 4096,
        "held_out": 32, "validate": 0, "evaluate_every": 100, "checkpoint_every": 50,
    },
    Preset.GOOD: {
        "steps": 8_000, "batch": 4, "window": 512, "anchors": 160, "depths": 4,
        "learning_rate": 1.5e-3, "validate": 0,
    },
}  # fmt: skip


def _take_preset(context: typer.Context, preset: Preset | None) -> Preset | None:
    if preset is not None:
        context.default_map = {**_PRESETS[preset]}
    return preset


@app.callback()
def main() -> None:
    """Train a target, an EAGLE head or a bigram table."""


@app.command()
def target(
    data: Data,
    out: Out,
    tokens: Annotated[int, _help("Most tokens to train on.")] = 160_000_000,
    mixture: Mixture = "{}",
    final_mixture: Annotated[str, _help("The same of the final phase, and of the score.")] = "{}",
    minutes: Minutes = None,
    batch: Batch = 32,
    window: Window = 1024,
    layers: Annotated[int, _help("Number of decoder layers.")] = 20,
    hidden: Annotated[int, _help("Width of the residual stream.")] = 256,
    heads: Annotated[int, _help("Query heads; half as many key and value heads.")] = 4,
    intermediate: Annotated[int, _help("Width of the feed-forward layers.")] = 640,
    vocab_size: Annotated[int, _help("Size of the vocabulary.")] = 6144,
    learning_rate: Rate = 1.5e-3,
    dropout: Annotated[float, _help("Residual dropout.")] = 0.1,
    evaluate_every: EvaluateEvery = 250,
    checkpoint_every: CheckpointEvery = 250,
    final_rate: FinalRate = 0.01,
    final_phase: Annotated[float, _help("Final fraction, of short texts of final-mixture.")] = 0.25,
    prompt_weight: Annotated[float, _help("Loss weight of tokens the assistant reads.")] = 0.3,
    initial: Annotated[Path | None, _help("Trained, shallower target to grow from.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    bf16: Bf16 = None,
    compile_layers: Compile = False,
    resume: Resume = False,
) -> None:
    """Train a tokenizer and a small chat model from scratch."""
    given = locals()
    config = _of(
        TargetTrainingConfig,
        given,
        mixture=_mixture("mixture", mixture),
        final_mixture=_mixture("final_mixture", final_mixture),
        kv_heads=max(1, heads // 2),
        schedule=_schedule(given, steps=max(1, tokens // (batch * window))),
        device=_resolve(device),
        compile=compile_layers,
    )
    print(train_target(config, command=_command_line(), resume=resume))


@app.command()
def eagle(
    arch: Annotated[Arch, _help("Kind of head.")],
    target: Target,
    data: Data,
    out: Out,
    preset: Annotated[
        Preset | None,
        _help("Settings that others change.", is_eager=True, callback=_take_preset),
    ] = None,
    dry_run: Annotated[bool, _help("Take two steps; say what the run will need.")] = False,
    held_out: Annotated[int, _help("Most held-out texts that an evaluation reads.")] = 64,
    steps: Annotated[int, _help("Most steps.")] = 3_000,
    minutes: Minutes = None,
    batch: Batch = 16,
    window: Window = 256,
    intermediate: Annotated[int | None, _help("Feed-forward width; default: target's.")] = None,
    draft_vocab: Annotated[
        int | None, _help("Draft vocabulary of EAGLE-3; default: 95% of the answers' tokens.")
    ] = None,
    depths: Annotated[int, _help("Depths of the training-time test.")] = 5,
    decay: Annotated[float, _help("Weight of a depth relative to the last.")] = 0.9,
    anchors: Annotated[int, _help("Positions of a row that are unrolled.")] = 48,
    loss: Annotated[Loss, _help("Loss to minimise.")] = Loss.MIX,
    feature_weight: Annotated[float, _help("Weight of EAGLE-1's feature regression.")] = 0.1,
    mixture: Mixture = "{}",
    regenerate: Regenerate = 0,
    samples: Samples = None,
    max_new_tokens: Longest = 128,
    keep_runs: Annotated[
        Path | None, _help("Folder for what a head learns from: the target reads texts once.")
    ] = None,
    learning_rate: Rate = 1e-3,
    final_rate: FinalRate = 0.01,
    evaluate_every: EvaluateEvery = 250,
    checkpoint_every: CheckpointEvery = 250,
    initial: Annotated[Path | None, _help("Trained head to continue from.")] = None,
    validate: Annotated[
        int, _help("Prompts answered at evaluations, by otbv and another copy of the target.")
    ] = 16,
    validate_tokens: Annotated[int, _help("Most tokens of their answers.")] = 64,
    validate_paths: Annotated[int, _help("Paths drafted for them, of --depths tokens.")] = 3,
    seed: Seed = 0,
    device: Device = "auto",
    bf16: Bf16 = None,
    compile_layers: Compile = False,
    resume: Resume = False,
) -> None:
    """Train an EAGLE head for a target."""
    given = locals()  # the preset's settings are the other options' defaults by now
    name = _found(target)
    config = _of(
        EagleTrainingConfig,
        given,
        texts=_texts(given),
        schedule=_schedule(given, weight_decay=0.01),
        device=_resolve(device),
        compile=compile_layers,
        validation_prompts=validate,
    )
    dtype = torch.bfloat16 if config.schedule.bf16 else torch.float32
    opened = load_model(name, dtype=dtype, device=config.device), load_tokenizer(name)
    if dry_run:
        print(try_out(config, *opened), end="")
        return
    plan = Plan(paths=validate_paths, depth=depths)
    measure = HeadValidator(name, plan, max_tokens=validate_tokens, device=config.device, seed=seed)
    command = _command_line()
    print(train_eagle(config, *opened, command=command, resume=resume, validate=measure))


@app.command(short_help="Count a bigram table, the yardstick of heads.")
def bigram(
    target: Target,
    data: Data,
    out: Out,
    width: Annotated[int, _help("Followers kept for every token.")] = 256,
    window: Window = 256,
    mixture: Mixture = "{}",
    regenerate: Regenerate = 0,
    samples: Samples = None,
    max_new_tokens: Longest = 128,
    seed: Seed = 0,
) -> None:
    """Count a bigram table, the yardstick of heads, on the texts that heads are trained on.

    With the same --data, --window, --regenerate, --samples and --seed, the texts are the same.
    """
    given, name = locals(), _found(target)
    out.mkdir(parents=True, exist_ok=True)
    vocab = int(load_config(name).get_text_config(decoder=True).vocab_size)
    opened = load_tokenizer(name), lambda: load_model(name)
    told = _command_line()
    print(train_bigram(_texts(given), *opened, out, vocab=vocab, width=width, command=told))


def _found(target: str) -> Path:
    """Return the folder or hub name of a target, after checking that it is there."""
    found = find_model(target)
    check_model(found, "target")
    return Path(found)


def _of(kind: type[Settings], given: Mapping[str, Any], **more: object) -> Settings:
    """Return settings of a kind: those of a command's options that it has, and ``more``."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    own = {name: value for name, value in given.items() if name in names}
    own = {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()}
    return kind(**{**own, **more})


def _texts(given: Mapping[str, Any]) -> TextSettings:
    samples = given["samples"] or given["out"] / "samples.pt"
    shares = _mixture("mixture", given["mixture"])
    return _of(TextSettings, given, samples=samples, mixture=shares)


def _schedule(given: Mapping[str, Any], **more: float) -> Schedule:
    bf16 = given["bf16"]
    return _of(
        Schedule, given, **more, bf16=_resolve(given["device"]) == "cuda" if bf16 is None else bf16
    )


def _mixture(argument: str, text: str) -> dict[str, float]:
    shares, shape = dict[str, float], "a JSON object of numbers"
    return decode_json(text.encode(), shares, argument=argument, place=text, expected=shape)


def _command_line() -> str:
    """Return the command line of this process, for the report."""
    arguments = sys.argv[1:]
    return " ".join(["eaglegbv", *([] if arguments[:1] == ["train"] else ["train"]), *arguments])


def _resolve(device: str) -> str:
    if device != "auto":
        return str(named_device(device))
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    app()
