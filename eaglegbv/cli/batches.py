"""``eaglegbv bench batch``: tokens a second by batch and context, against plain decoding."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.options import (
    Compiled,
    Device,
    Drafter,
    Dtype,
    Model,
    integers,
    load_llm,
    names,
    numbers,
)
from eaglegbv.errors import InvalidArgument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eaglegbv.auto_plan import Planning
    from eaglegbv.eval.batches import Way
    from eaglegbv.llm import LLM


def batch(
    batches: Annotated[str, typer.Option(help="Numbers of prompts at once.")] = "1,2,4,8,16",
    contexts: Annotated[
        str, typer.Option(help="Lengths of prompts in tokens; 0 for the questions as they are.")
    ] = "0",
    temperature: Annotated[str, typer.Option(help="Sampling temperatures.")] = "1.0",
    ways: Annotated[
        str,
        typer.Option(
            help="What to compare: auto, none, PATHSxDEPTH for a fixed plan of --verifier, "
            "transformers, lookup:TOKENS or exit:LAYERS:TOKENS for its assisted generation."
        ),
    ] = "auto,3x4,none,transformers",
    verifier: Annotated[str, typer.Option(help="Verifier of the fixed plans.")] = "otbv",
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="How often everything is run.")] = 3,
    questions_set: Annotated[str, typer.Option(help="mt-bench or builtin.")] = "mt-bench",
    data: Annotated[
        Path | None, typer.Option(help="JSON lines of questions instead of the usual sources.")
    ] = None,
    assistant: Annotated[
        str | None,
        typer.Option(help="Folder of a small model: adds assisted generation by it."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything drawn.")] = 0,
    model: Model = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    compiled: Compiled = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also say which plans auto used, and why.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file for all timings.")] = None,
) -> None:
    """Time ways to generate side by side, and print medians, with ratios to plain decoding.

    Answers have all the same length. Ratios are taken within a repeat, and then their median.
    """
    import msgspec
    from tqdm import tqdm

    from eaglegbv.eval.batches import Grid, PromptSource, measure, summarise, table
    from eaglegbv.eval.questions import load_questions
    from eaglegbv.eval.records import describe_environment
    from eaglegbv.eval.report import plain_text

    grid = Grid(
        batches=integers("batches", batches),
        contexts=integers("contexts", contexts),
        temperatures=numbers("temperature", temperature),
        tokens=tokens,
        repeats=repeats,
        seed=seed,
    )
    fleet = _Fleet(model, drafter, device, dtype, verifier, compiled=compiled)
    wanted = names("ways", ways)
    chosen = [fleet.way(name) for name in wanted]
    if assistant is not None:
        chosen.append(fleet.assisted(assistant))
    questions = load_questions(questions_set, data).questions
    prompts = PromptSource.of(fleet.plain, [question.turns[0] for question in questions])
    timings = []
    cells = len(grid.batches) * len(grid.contexts) * len(grid.temperatures) * repeats * len(chosen)
    with tqdm(total=cells, unit="call") as bar:
        for timing in measure(chosen, prompts.take, grid):
            timings.append(timing)
            bar.set_postfix_str(
                f"{timing.way}, batch {timing.batch}: {timing.rate:.0f} tokens/s", refresh=False
            )
            bar.update()
    typer.echo(plain_text(table(summarise(timings))))
    if explain and "auto" in wanted:
        typer.echo(fleet.explain())
    if out is not None:
        environment = describe_environment(str(fleet.plain.device))
        out.write_bytes(msgspec.json.encode({"environment": environment, "timings": timings}))
        typer.echo(f"wrote {out}", err=True)


class _Fleet:
    """The models of the ways, each loaded once, and only if it is needed."""

    def __init__(
        self,
        model: str | None,
        drafter: str | None,
        device: str | None,
        dtype: str | None,
        verifier: str,
        *,
        compiled: bool,
    ) -> None:
        from eaglegbv.config import PLAIN

        self._names = model, drafter, device, dtype
        self._verifier = verifier
        self._compiled = compiled
        # Plain decoding has an engine of its own, which need not keep anything for a drafter.
        self.plain = self._load(PLAIN)
        self._drafting: LLM | None = None

    def way(self, name: str) -> "Way":
        """Return the way that a name stands for."""
        from eaglegbv.auto_plan import AUTO
        from eaglegbv.config import PLAIN, Plan
        from eaglegbv.eval.batches import EngineWay, TransformersWay

        if name == "none":
            return EngineWay(name, self.plain, PLAIN)
        if name == "auto":
            return EngineWay(name, self.drafting, AUTO)
        if name == "transformers":
            return TransformersWay(name, self._hf(), {})
        if found := re.fullmatch(r"(\d+)x(\d+)", name):
            paths, depth = map(int, found.groups())
            plan = Plan(verifier=self._verifier, paths=paths, depth=depth)
            return EngineWay(name, self.drafting, plan)
        if found := re.fullmatch(r"lookup:(\d+)", name):
            options: dict[str, object] = {"prompt_lookup_num_tokens": int(found[1])}
            return TransformersWay(name, self._hf(), options, max_batch=1)
        if found := re.fullmatch(r"exit:(\d+):(\d+)", name):
            model = self._hf()
            model.generation_config.num_assistant_tokens = int(found[2])
            options = {"assistant_early_exit": int(found[1])}
            return TransformersWay(name, model, options, max_batch=1)
        expected = "auto, none, PATHSxDEPTH, transformers, lookup:TOKENS or exit:LAYERS:TOKENS"
        raise InvalidArgument("ways", name, expected)

    def assisted(self, folder: str) -> "Way":
        """Return transformers' assisted generation by a small model."""
        from torch import nn
        from transformers import AutoModelForCausalLM

        from eaglegbv.eval.batches import TransformersWay

        small = AutoModelForCausalLM.from_pretrained(folder, dtype=self.plain.dtype)
        nn.Module.to(small, self.plain.device)
        options = {"assistant_model": small}
        return TransformersWay("assisted", self._hf(), options, max_batch=1)

    @property
    def drafting(self) -> "LLM":
        """The engine with a drafter."""
        from eaglegbv.config import Plan

        if self._drafting is None:
            self._drafting = self._load(Plan())
        return self._drafting

    def explain(self) -> str:
        """Say which plans were used and why, all calls together."""
        from eaglegbv.metrics import FORWARDS, REASONS

        lines = []
        for metric in (FORWARDS, REASONS):
            cells = self.drafting.metrics.values.get(metric, {})
            total = sum(cells.values()) or 1.0
            shares = sorted(cells.items(), key=lambda item: -item[1])
            figures = ", ".join(f"{name} {count / total:.1%}" for name, count in shares)
            lines.append(f"{metric.label}s: {figures}")
        return "\n".join(lines)

    def _load(self, plan: "Planning") -> "LLM":
        from eaglegbv.config import EngineConfig

        model, drafter, device, dtype = self._names
        # Prompts come again in every repeat, and every way has to read them.
        config = EngineConfig(prefix_cache=False, kv_slots=65_536, max_batch=256)
        return load_llm(model, drafter, plan, device, dtype, engine=config, compiled=self._compiled)

    def _hf(self) -> "PreTrainedModel":
        """Return a model for transformers' own loop; every way has one, with its settings."""
        from torch import nn
        from transformers import AutoModelForCausalLM

        name, dtype = self.plain.model_name, self.plain.dtype
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        nn.Module.to(model, self.plain.device)
        model.train(mode=False)
        # Answers have all the same length.
        model.generation_config.eos_token_id = None
        return model
