"""What a training run reports, as JSON and as a section of a model card."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import tokenizers
import torch
import transformers

from eaglegbv.drafters.training.data import Corpus
from eaglegbv.drafters.training.loop import Evaluation, Progress, Task


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The facts of a finished run.

    Attributes:
        title: What was trained.
        command: Command line that was run.
        config: The run's configuration.
        parameters: Number of trained weights.
        data: Tokens by source, before weighting.
        steps: Optimiser steps taken; ``best_step`` is the one whose weights were kept.
        best_step: Step of the kept weights.
        tokens: Tokens trained on, repetitions counted.
        seconds: Seconds of training, evaluations included.
        held_out: Held-out results by name, of the kept weights as saved.
        device: Device trained on.
        versions: Versions of what the run depends on.
    """

    title: str
    command: str
    config: Mapping[str, Any]
    parameters: int
    data: Mapping[str, int]
    steps: int
    best_step: int
    tokens: int
    seconds: float
    held_out: Mapping[str, float]
    device: str
    versions: Mapping[str, str]

    @classmethod
    def of(
        cls,
        task: Task,
        progress: Progress,
        held_out: Evaluation,
        *,
        title: str,
        command: str,
        data: Sequence[Path],
        corpus: Corpus,
        device: torch.device,
    ) -> Self:
        """Report on a finished run.

        Args:
            task: What was trained.
            progress: Where the run ended.
            held_out: The last evaluation, of the weights as saved.
            title: What was trained, in words.
            command: Command line that was run.
            data: Files and folders of the data.
            corpus: What was trained on.
            device: Device trained on.
        """
        return cls(
            title=title,
            command=command,
            config={**task.identity, "data": [str(path) for path in data]},
            parameters=sum(p.numel() for p in task.module.parameters()),
            data=corpus.token_counts(),
            steps=progress.step,
            best_step=progress.best_step,
            tokens=progress.step * task.tokens_per_step,
            seconds=round(progress.seconds, 1),
            held_out=held_out.values,
            device=_device_name(device),
            versions=_versions(),
        )

    def save(self, folder: Path) -> None:
        """Write ``training_report.json`` and the model card's section ``TRAINING.md``."""
        text = json.dumps(asdict(self), indent=2, default=str)
        (folder / "training_report.json").write_text(text + "\n")
        (folder / "TRAINING.md").write_text(self.card())

    def card(self) -> str:
        """Return the section of a model card, in Markdown."""
        held_out = "\n".join(f"| {name} | {value:.3f} |" for name, value in self.held_out.items())
        data = "\n".join(f"| {name} | {count:,} |" for name, count in self.data.items())
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"## Training of the {self.title}\n\n"
            f"{self.parameters:,} weights; {self.tokens:,} tokens in {self.steps:,} steps "
            f"(weights of step {self.best_step:,} kept), {self.seconds:,.0f} s on {self.device}; "
            f"{versions}.\n\n```\n{self.command}\n```\n\n"
            f"| source | tokens |\n| --- | ---: |\n{data}\n\n"
            f"| held out | value |\n| --- | ---: |\n{held_out}\n"
        )


def _device_name(device: torch.device) -> str:
    """Return a name for ``device`` that a reader can place."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    """Return the versions of Python and the libraries that shape a run."""
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
