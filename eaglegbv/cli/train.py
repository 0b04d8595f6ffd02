"""``eaglegbv train``: the target, the EAGLE heads, and a table with which to compare them."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import opt
from eaglegbv.config import Plan
from eaglegbv.devices import AUTO_DTYPE, named_device, place_of
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.training.bigram import train_bigram
from eaglegbv.drafters.training.data import Texts, TextSettings, gather_texts
from eaglegbv.drafters.training.heads import EagleTrainingConfig, train_eagle, try_out
from eaglegbv.drafters.training.target import TargetTrainingConfig, train_target
from eaglegbv.drafters.training.train import Schedule
from eaglegbv.drafters.training.unroll import Loss
from eaglegbv.eval.validation import HeadValidator, target_answers
from eaglegbv.loading import check_model, find_target
from eaglegbv.models.hf import load_config, load_model, load_tokenizer

app = opts.make_app("Train a target, an EAGLE head or a bigram table.")


Data = Annotated[list[Path], opt("JSON-lines file or folder; may be repeated.")]
Out = Annotated[Path, opt("Folder to write.")]
Target = Annotated[str, opt("The target: a folder, a GGUF file, a hub name, smollm2 or tiny.")]
Regenerate = Annotated[int, opt("Prompts the target answers itself first; 0: the data's own.")]
Samples = Annotated[Path | None, opt("File in which to keep the target's answers for reuse.")]
Longest = Annotated[int, opt("Most tokens of the target's answers.")]
Minutes = Annotated[float | None, opt("Time budget; the schedule is fitted to it.")]
Rate = Annotated[float, opt("Peak learning rate.")]
FinalRate = Annotated[float, opt("Fraction of the peak learning rate at the end.")]
EvaluateEvery = Annotated[int, opt("Steps between evaluations.")]
CheckpointEvery = Annotated[int, opt("Steps between checkpoints.")]
Batch = Annotated[int, opt("Rows per step.")]
Window = Annotated[int, opt("Tokens per row, and most tokens per text.")]
Seed = Annotated[int, opt("Seed of all random numbers.")]
Device = Annotated[str, opt("Device: cuda, cpu, or auto.")]
Bf16 = Annotated[
    bool | None, opt("Forward in bfloat16; default: where it is faster.", "--bf16/--no-bf16")
]
Compile = Annotated[bool, opt("Compile the target's layers.", "--compile/--no-compile")]
Resume = Annotated[bool, opt("Continue from the checkpoint in the folder, if any.")]


class Preset(StrEnum):
    """Settings of a head's training at once."""

    QUICK = "quick"
    """Minutes on two cores: whether everything works, and a head that drafts a little."""
    GOOD = "good"  # hours on a CPU, less than one on a GPU


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


@app.command()
def target(
    data: Data,
    out: Out,
    tokens: Annotated[int, opt("Most tokens to train on.")] = 160_000_000,
    minutes: Minutes = None,
    batch: Batch = 32,
    window: Window = 1024,
    layers: Annotated[int, opt("Number of decoder layers.")] = 20,
    hidden: Annotated[int, opt("Width of the residual stream.")] = 256,
    heads: Annotated[int, opt("Query heads; half as many key and value heads.")] = 4,
    intermediate: Annotated[int, opt("Width of the feed-forward layers.")] = 640,
    vocab_size: Annotated[int, opt("Size of the vocabulary.")] = 6144,
    learning_rate: Rate = 1.5e-3,
    evaluate_every: EvaluateEvery = 250,
    checkpoint_every: CheckpointEvery = 250,
    final_rate: FinalRate = 0.01,
    seed: Seed = 0,
    device: Device = "auto",
    bf16: Bf16 = None,
    resume: Resume = False,
) -> None:
    """Train a tokenizer and a small chat model from scratch."""
    given = locals()
    config = opts.made_of(
        given,
        TargetTrainingConfig,
        data=tuple(data),
        kv_heads=max(1, heads // 2),
        schedule=_schedule(given, steps=max(1, tokens // (batch * window))),
        device=_resolve(device),
    )
    print(train_target(config, command=_command_line(), resume=resume))


@app.command()
def eagle(
    arch: Annotated[Arch, opt("Kind of head.")],
    target: Target,
    data: Data,
    out: Out,
    preset: Annotated[
        Preset | None,
        typer.Option(help="Settings that others change.", is_eager=True, callback=_take_preset),
    ] = None,
    dry_run: Annotated[bool, opt("Take two steps; say what the run will need.")] = False,
    held_out: Annotated[int, opt("Most held-out texts that an evaluation reads.")] = 64,
    steps: Annotated[int, opt("Most steps.")] = 3_000,
    minutes: Minutes = None,
    batch: Batch = 16,
    window: Window = 256,
    intermediate: Annotated[int | None, opt("Feed-forward width; default: target's.")] = None,
    draft_vocab: Annotated[
        int | None, opt("Draft vocabulary of EAGLE-3; default: 95% of the answers' tokens.")
    ] = None,
    depths: Annotated[int, opt("Depths of the training-time test.")] = 5,
    decay: Annotated[float, opt("Weight of a depth relative to the last.")] = 0.9,
    anchors: Annotated[int, opt("Positions of a row that are unrolled.")] = 48,
    loss: Annotated[Loss, opt("Loss to minimise.")] = Loss.MIX,
    feature_weight: Annotated[float, opt("Weight of EAGLE-1's feature regression.")] = 0.1,
    regenerate: Regenerate = 0,
    samples: Samples = None,
    max_new_tokens: Longest = 128,
    keep_runs: Annotated[
        Path | None, opt("Folder for what a head learns from: the target reads texts once.")
    ] = None,
    learning_rate: Rate = 1e-3,
    final_rate: FinalRate = 0.01,
    evaluate_every: EvaluateEvery = 250,
    checkpoint_every: CheckpointEvery = 250,
    initial: Annotated[Path | None, opt("Trained head to continue from.")] = None,
    validate: Annotated[
        int, opt("Prompts answered at evaluations, by otbv and another copy of the target.")
    ] = 16,
    validate_tokens: Annotated[int, opt("Most tokens of their answers.")] = 64,
    validate_paths: Annotated[int, opt("Paths drafted for them, of --depths tokens.")] = 3,
    seed: Seed = 0,
    device: Device = "auto",
    bf16: Bf16 = None,
    compile_layers: Compile = False,
    resume: Resume = False,
) -> None:
    """Train an EAGLE head for a target."""
    given = locals()  # the preset's settings are the other options' defaults by now
    config = opts.made_of(
        given,
        EagleTrainingConfig,
        texts=_text_settings(given),
        schedule=_schedule(given, weight_decay=0.01),
        device=_resolve(device),
        compile=compile_layers,
        validation_prompts=validate,
    )
    dtype = torch.bfloat16 if config.schedule.bf16 else torch.float32
    name = _found(target, dtype)
    # The texts come first, as their engine holds a target of its own.
    texts = _texts(config.texts, name, head=initial, dtype=dtype, device=config.device)
    model = load_model(name, dtype=dtype, device=config.device)
    if dry_run:
        print(try_out(config, model, texts), end="")
        return
    plan = Plan(paths=validate_paths, depth=depths)
    measure = HeadValidator(name, plan, max_tokens=validate_tokens, device=config.device, seed=seed)
    command = _command_line()
    print(train_eagle(config, model, texts, command=command, resume=resume, validate=measure))


@app.command(short_help="Count a bigram table, the yardstick of heads.")
def bigram(
    target: Target,
    data: Data,
    out: Out,
    width: Annotated[int, opt("Followers kept for every token.")] = 256,
    window: Window = 256,
    regenerate: Regenerate = 0,
    samples: Samples = None,
    max_new_tokens: Longest = 128,
    seed: Seed = 0,
) -> None:
    """Count a bigram table, the yardstick of heads, on the texts that heads are trained on.

    With the same --data, --window, --regenerate, --samples and --seed, the texts are the same.
    """
    settings = _text_settings(locals())
    name = _found(target, place_of(None, AUTO_DTYPE)[1])
    vocab = int(load_config(name).get_text_config(decoder=True).vocab_size)
    texts = _texts(settings, name)
    print(train_bigram(texts, out, vocab=vocab, width=width, command=_command_line()))


def _found(target: str, dtype: torch.dtype) -> Path:
    found = find_target(target, dtype)
    check_model(found, "target")
    return Path(found)


def _text_settings(given: Mapping[str, Any]) -> TextSettings:
    samples = given["samples"] or given["out"] / "samples.pt"
    return opts.made_of(given, TextSettings, data=tuple(given["data"]), samples=samples)


def _texts(settings: TextSettings, target: Path, **engine: Any) -> Texts:  # noqa: ANN401
    """Return the texts; the engine, opened with these arguments, answers if the target has to."""
    longest, seed = settings.max_new_tokens, settings.seed
    settings.samples.parent.mkdir(parents=True, exist_ok=True)
    answer = partial(target_answers, target=target, max_tokens=longest, seed=seed, **engine)
    return gather_texts(settings, load_tokenizer(target), answer)


def _schedule(given: Mapping[str, Any], **more: float) -> Schedule:
    bf16 = given["bf16"]
    if bf16 is None:
        bf16 = place_of(_resolve(given["device"]), AUTO_DTYPE)[1] is torch.bfloat16
    return opts.made_of(given, Schedule, **more, bf16=bf16)


def _command_line() -> str:
    arguments = sys.argv[1:]
    return " ".join(["eaglegbv", *([] if arguments[:1] == ["train"] else ["train"]), *arguments])


def _resolve(device: str) -> str:
    if device != "auto":
        return str(named_device(device))
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    app()
