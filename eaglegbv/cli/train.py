"""``eaglegbv train``: the target, the EAGLE heads, and a table to measure them by."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from eaglegbv.config import Plan
from eaglegbv.devices import named_device
from eaglegbv.drafters.eagle_head_config import Arch
from eaglegbv.drafters.training.bigram import train_bigram
from eaglegbv.drafters.training.heads import EagleTrainingConfig, train_eagle
from eaglegbv.drafters.training.loop import Schedule
from eaglegbv.drafters.training.target import TargetTrainingConfig, train_target
from eaglegbv.drafters.training.texts import TextSettings
from eaglegbv.drafters.training.unroll import Loss
from eaglegbv.eval.validation import HeadValidator

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # as of the command this is part of
    help="Train a target, an EAGLE head or a bigram table.",
)

Data = Annotated[list[Path], typer.Option(help="JSON-lines file or folder; may be repeated.")]
Out = Annotated[Path, typer.Option(help="Folder to write.")]
Minutes = Annotated[float | None, typer.Option(help="Time budget; shapes the schedule.")]
Device = Annotated[str, typer.Option(help="cuda, cpu, or auto.")]
Bf16 = Annotated[bool, typer.Option(help="Run the forward in bfloat16.")]
Resume = Annotated[bool, typer.Option(help="Go on from the checkpoint in the folder, if any.")]


@app.callback()
def main() -> None:
    """Train a target, an EAGLE head or a bigram table."""


@app.command()
def target(
    data: Data,
    out: Out,
    tokens: Annotated[int, typer.Option(help="Tokens to train on at most.")] = 160_000_000,
    minutes: Minutes = None,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 32,
    window: Annotated[int, typer.Option(help="Tokens of a row.")] = 1024,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 20,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256,
    heads: Annotated[int, typer.Option(help="Query heads, half as many key and value heads.")] = 4,
    intermediate: Annotated[int, typer.Option(help="Width of the feed-forward layers.")] = 640,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 6144,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    dropout: Annotated[float, typer.Option(help="Residual dropout.")] = 0.1,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 250,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    final_rate: Annotated[
        float, typer.Option(help="Fraction of the peak learning rate at the end.")
    ] = 0.01,
    final_phase: Annotated[
        float, typer.Option(help="Fraction of training on short instructions alone, at the end.")
    ] = 0.25,
    prompt_weight: Annotated[
        float, typer.Option(help="Loss weight of tokens the assistant did not write.")
    ] = 0.3,
    initial: Annotated[
        Path | None, typer.Option(help="Trained shallower target to grow from.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Device = "auto",
    bf16: Bf16 = True,
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
            bf16=bf16,
        ),
        device=_resolve(device),
        compile=compile_layers,
    )
    print(train_target(config, command=_command_line(), resume=resume).card())


@app.command()
def eagle(
    arch: Annotated[Arch, typer.Option(help="Which head.")],
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    data: Data,
    out: Out,
    steps: Annotated[int, typer.Option(help="Steps at most.")] = 3_000,
    minutes: Minutes = None,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 16,
    window: Annotated[int, typer.Option(help="Tokens of a row and of a text.")] = 256,
    intermediate: Annotated[
        int | None, typer.Option(help="Width of the head's feed-forward layer; default: target's.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Draft vocabulary of an EAGLE-3 head; default: all.")
    ] = None,
    depths: Annotated[int, typer.Option(help="Depths of the training-time test.")] = 5,
    decay: Annotated[float, typer.Option(help="Weight of a depth relative to the last.")] = 0.9,
    anchors: Annotated[int, typer.Option(help="Positions of a row that are unrolled.")] = 48,
    loss: Annotated[Loss, typer.Option(help="What is lowered.")] = Loss.MIX,
    feature_weight: Annotated[float, typer.Option(help="EAGLE-1's feature regression.")] = 0.1,
    regenerate: Annotated[
        int, typer.Option(help="Prompts the target answers itself first; 0: the data's answers.")
    ] = 0,
    samples: Annotated[
        Path | None, typer.Option(help="File to keep the target's answers in and reuse.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer of the target.")] = 128,
    keep_runs: Annotated[
        bool,
        typer.Option(
            "--keep-runs/--no-keep-runs",
            help="Run the target once over its answers, and keep what a head learns from.",
        ),
    ] = False,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 250,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    initial: Annotated[Path | None, typer.Option(help="Trained head to go on from.")] = None,
    validate: Annotated[
        int,
        typer.Option(
            help="Held-out prompts that every evaluation measures acceptance on, by the engine, "
            "with verifier otbv and a second copy of the target; 0: none."
        ),
    ] = 16,
    validate_tokens: Annotated[int, typer.Option(help="Tokens of their answers at most.")] = 64,
    validate_paths: Annotated[int, typer.Option(help="Drafted paths, of --depths tokens.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Device = "auto",
    bf16: Bf16 = True,
    compile_layers: Annotated[bool, typer.Option("--compile/--no-compile")] = False,
    resume: Resume = False,
) -> None:
    """Train an EAGLE head for a target."""
    config = EagleTrainingConfig(
        arch=arch,
        texts=TextSettings(
            target=target,
            data=tuple(data),
            regenerate=regenerate,
            samples=samples or out / "samples.pt",
            max_new_tokens=max_new_tokens,
            window=window,
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
            weight_decay=0.01,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            seed=seed,
            bf16=bf16,
        ),
        device=_resolve(device),
        compile=compile_layers,
        validation_prompts=validate,
    )
    measure = HeadValidator(
        target,
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
    width: Annotated[int, typer.Option(help="Followers kept of every token.")] = 256,
    window: Annotated[int, typer.Option(help="Tokens of a text at most.")] = 256,
    regenerate: Annotated[
        int, typer.Option(help="Prompts the target answers itself first; 0: the data's answers.")
    ] = 0,
    samples: Annotated[
        Path | None, typer.Option(help="File to keep the target's answers in and reuse.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer of the target.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Count a bigram table, the yardstick of heads, on the texts that heads are trained on.

    With the same --data, --window, --regenerate, --samples and --seed the texts are the same.
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
