"""``eaglegbv train``: the target, the EAGLE heads, and a table with which to compare them."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from eaglegbv.config import Plan
from eaglegbv.devices import named_device
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.training.bigram import train_bigram
from eaglegbv.drafters.training.heads import EagleTrainingConfig, train_eagle, try_out
from eaglegbv.drafters.training.loop import Schedule
from eaglegbv.drafters.training.target import TargetTrainingConfig, train_target
from eaglegbv.drafters.training.texts import TextSettings
from eaglegbv.drafters.training.unroll import Loss
from eaglegbv.eval.validation import HeadValidator
from eaglegbv.gguf import find_model

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # as for the command that this is part of
    help="Train a target, an EAGLE head or a bigram table.",
)

Data = Annotated[list[Path], typer.Option(help="JSON-lines file or folder; may be repeated.")]
Out = Annotated[Path, typer.Option(help="Folder to write.")]
Minutes = Annotated[float | None, typer.Option(help="Time budget; the schedule is fitted to it.")]
Device = Annotated[str, typer.Option(help="Device: cuda, cpu, or auto.")]
Bf16 = Annotated[
    bool | None,
    typer.Option("--bf16/--no-bf16", help="Run the forward in bfloat16; default: on a GPU."),
]
Resume = Annotated[bool, typer.Option(help="Continue from the checkpoint in the folder, if any.")]


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
    tokens: Annotated[int, typer.Option(help="Most tokens to train on.")] = 160_000_000,
    minutes: Minutes = None,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = 32,
    window: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    layers: Annotated[int, typer.Option(help="Number of decoder layers.")] = 20,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256,
    heads: Annotated[
        int, typer.Option(help="Number of query heads; half as many key and value heads.")
    ] = 4,
    intermediate: Annotated[int, typer.Option(help="Width of the feed-forward layers.")] = 640,
    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 6144,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    dropout: Annotated[float, typer.Option(help="Residual dropout.")] = 0.1,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 250,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    final_rate: Annotated[
        float, typer.Option(help="Fraction of the peak learning rate at the end.")
    ] = 0.01,
    final_phase: Annotated[
        float, typer.Option(help="Final fraction of training that uses only short instructions.")
    ] = 0.25,
    prompt_weight: Annotated[
        float, typer.Option(help="Loss weight of tokens that the assistant did not write.")
    ] = 0.3,
    initial: Annotated[
        Path | None, typer.Option(help="Trained, shallower target to grow from.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    device: Device = "auto",
    bf16: Bf16 = None,
    compile_layers: Annotated[bool, typer.Option("--compile/--no-compile")] = False,
    resume: Resume = False,
) -> None:
    """Train a tokenizer and a small chat model from scratch."""
    config = TargetTrainingConfig(
        data=tuple(data),
        out=out,
        vocab_size=vocab_size,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=max(1, heads // 2),
        intermediate=intermediate,
        window=window,
        batch=batch,
        dropout=dropout,
        prompt_weight=prompt_weight,
        final_phase=final_phase,
        initial=initial,
        schedule=Schedule(
            steps=max(1, tokens // (batch * window)),
            minutes=minutes,
            learning_rate=learning_rate,
            final_rate=final_rate,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            seed=seed,
            bf16=_resolve(device) == "cuda" if bf16 is None else bf16,
        ),
        device=_resolve(device),
        compile=compile_layers,
    )
    print(train_target(config, command=_command_line(), resume=resume).card())


@app.command()
def eagle(
    arch: Annotated[Arch, typer.Option(help="Kind of head.")],
    target: Annotated[
        str, typer.Option(help="The target: a folder, a GGUF file, a hub name, or smollm2.")
    ],
    data: Data,
    out: Out,
    preset: Annotated[
        Preset | None,
        typer.Option(
            is_eager=True,
            callback=_take_preset,
            help="Settings for minutes or for hours, which other options change.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Take two steps, and say what the whole run will need."),
    ] = False,
    held_out: Annotated[
        int, typer.Option(help="Held-out texts that every evaluation reads, at most.")
    ] = 64,
    steps: Annotated[int, typer.Option(help="Most steps.")] = 3_000,
    minutes: Minutes = None,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = 16,
    window: Annotated[int, typer.Option(help="Tokens per row, and most tokens per text.")] = 256,
    intermediate: Annotated[
        int | None, typer.Option(help="Width of the head's feed-forward layer; default: target's.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Draft vocabulary of an EAGLE-3 head; default: 95% of the answers' tokens."
        ),
    ] = None,
    depths: Annotated[int, typer.Option(help="Depths of the training-time test.")] = 5,
    decay: Annotated[float, typer.Option(help="Weight of a depth relative to the last.")] = 0.9,
    anchors: Annotated[int, typer.Option(help="Positions of a row that are unrolled.")] = 48,
    loss: Annotated[Loss, typer.Option(help="Loss to minimise.")] = Loss.MIX,
    feature_weight: Annotated[
        float, typer.Option(help="Weight of EAGLE-1's feature regression.")
    ] = 0.1,
    regenerate: Annotated[
        int, typer.Option(help="Prompts the target first answers itself; 0 keeps the data's.")
    ] = 0,
    samples: Annotated[
        Path | None, typer.Option(help="File in which to keep the target's answers for reuse.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of the target's answers.")] = 128,
    keep_runs: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which to keep what a head learns from, so that the target reads every "
            "text once."
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    final_rate: Annotated[
        float, typer.Option(help="Fraction of the peak learning rate at the end.")
    ] = 0.01,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 250,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    initial: Annotated[Path | None, typer.Option(help="Trained head to continue from.")] = None,
    validate: Annotated[
        int,
        typer.Option(
            help="Held-out prompts on which every evaluation measures acceptance, with the engine, "
            "verifier otbv and a second copy of the target; 0 for none."
        ),
    ] = 16,
    validate_tokens: Annotated[int, typer.Option(help="Most tokens of their answers.")] = 64,
    validate_paths: Annotated[
        int, typer.Option(help="Paths drafted for them, of --depths tokens each.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    device: Device = "auto",
    bf16: Bf16 = None,
    compile_layers: Annotated[bool, typer.Option("--compile/--no-compile")] = False,
    resume: Resume = False,
) -> None:
    """Train an EAGLE head for a target."""
    del preset  # its settings are the other options' defaults by now
    model = Path(find_model(target))
    config = EagleTrainingConfig(
        arch=arch,
        texts=TextSettings(
            target=model,
            data=tuple(data),
            regenerate=regenerate,
            samples=samples or out / "samples.pt",
            max_new_tokens=max_new_tokens,
            window=window,
            held_out=held_out,
            seed=seed,
        ),
        out=out,
        intermediate=intermediate,
        draft_vocab=draft_vocab,
        depths=depths,
        decay=decay,
        anchors=anchors,
        loss=loss,
        feature_weight=feature_weight,
        keep_runs=keep_runs,
        batch=batch,
        initial=initial,
        schedule=Schedule(
            steps=steps,
            minutes=minutes,
            learning_rate=learning_rate,
            final_rate=final_rate,
            weight_decay=0.01,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            seed=seed,
            bf16=_resolve(device) == "cuda" if bf16 is None else bf16,
        ),
        device=_resolve(device),
        compile=compile_layers,
        validation_prompts=validate,
    )
    if dry_run:
        print(try_out(config), end="")
        return
    measure = HeadValidator(
        model,
        Plan(paths=validate_paths, depth=depths),
        max_tokens=validate_tokens,
        device=config.device,
        seed=seed,
    )
    report = train_eagle(config, command=_command_line(), resume=resume, validate=measure)
    print(report.card())


@app.command(short_help="Count a bigram table, the yardstick of heads.")
def bigram(
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    data: Data,
    out: Out,
    width: Annotated[int, typer.Option(help="Followers kept for every token.")] = 256,
    window: Annotated[int, typer.Option(help="Most tokens of a text.")] = 256,
    regenerate: Annotated[
        int, typer.Option(help="Prompts the target first answers itself; 0 keeps the data's.")
    ] = 0,
    samples: Annotated[
        Path | None, typer.Option(help="File in which to keep the target's answers for reuse.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of the target's answers.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
) -> None:
    """Count a bigram table, the yardstick of heads, on the texts that heads are trained on.

    With the same --data, --window, --regenerate, --samples and --seed, the texts are the same.
    """
    out.mkdir(parents=True, exist_ok=True)
    texts = TextSettings(
        target=target,
        data=tuple(data),
        regenerate=regenerate,
        samples=samples or out / "samples.pt",
        max_new_tokens=max_new_tokens,
        window=window,
        seed=seed,
    )
    print(train_bigram(texts, out, width=width, command=_command_line()))


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
