"""Training of EAGLE heads on the hidden states of a frozen target, computed as they are needed."""

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from eaglegbv.drafters.checkpoint import load_head, save_head
from eaglegbv.drafters.eagle_model import (
    Arch,
    Eagle1Head,
    Eagle3Head,
    EagleHead,
    EagleHeadConfig,
    default_feature_layers,
)
from eaglegbv.drafters.training.data import Corpus, documents_to_fill, draw_documents, evenly
from eaglegbv.drafters.training.loop import Evaluation, Schedule, Task, optimise, optimise_once
from eaglegbv.drafters.training.report import TrainingReport
from eaglegbv.drafters.training.runs import FrozenTarget, KeptRuns
from eaglegbv.drafters.training.texts import Texts, TextSettings, gather_texts
from eaglegbv.drafters.training.unroll import (
    AcceptanceMeter,
    Loss,
    TargetRun,
    draw_anchors,
    feature_loss,
    unroll,
)
from eaglegbv.errors import InvalidArgument

_COVERAGE = 0.95
_NOT_IDENTITY = frozenset(
    {
        "data",
        "device",
        "initial",
        "keep_runs",
        "out",
        "samples",
        "seed",
        "target",
        "validation_prompts",
    }
)
"""Settings that a resumed run may change. The seed is that of the texts, not the schedule's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTrainingConfig:
    """Settings of a head training run.

    Attributes:
        arch: Which head.
        texts: Which target, and which texts to train and measure on. Rows are packed with whole
            texts to ``texts.window`` tokens; ``texts.held_out`` is also how many held-out texts
            acceptance is measured on, at most.
        out: Folder to write.
        intermediate: Width of the head's feed-forward layer; None is the target's.
        draft_vocab: Tokens an EAGLE-3 head can draft, the most frequent in responses; None is as
            many as make up 95% of these: a rare token costs as many weights as a frequent one.
        depths: Depths of the unroll.
        decay: Weight of a depth relative to the one before.
        anchors: Positions of a row that are unrolled.
        loss: What is lowered.
        feature_weight: Weight of EAGLE-1's feature regression.
        batch: Rows of a step.
        keep_runs: Folder in which to keep what a head learns from, so that the target reads every
            text once and not at every step; None keeps nothing. Texts are then drawn evenly.
        schedule: Length and speed of training.
        device: Device, "cuda" or "cpu".
        compile: Compile the target's layers.
        initial: Folder of a trained head to start from. It must have the same sizes, except that
            its feed-forward layer may be narrower. None starts from random weights.
        validation_prompts: Held-out prompts on which a real verifier measures acceptance.
    """

    arch: Arch
    texts: TextSettings
    out: Path
    intermediate: int | None = None
    draft_vocab: int | None = None
    depths: int = 5
    decay: float = 0.9
    anchors: int = 48
    loss: Loss = Loss.MIX
    feature_weight: float = 0.1
    batch: int = 16
    keep_runs: Path | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=3_000))
    device: str = "cpu"
    compile: bool = False
    initial: Path | None = None
    validation_prompts: int = 16

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise InvalidArgument("depths", self.depths, "an integer of at least 1")


Validate = Callable[[EagleHead, Sequence[Sequence[int]]], Mapping[str, float]]
"""Measures a head on prompts with a real verifier; returns results by name."""


def train_eagle(
    config: EagleTrainingConfig,
    *,
    command: str = "",
    resume: bool = False,
    validate: Validate | None = None,
) -> TrainingReport:
    """Train a head and save it in the EAGLE repository's format.

    Args:
        config: Settings.
        command: Command line, for the report.
        resume: Continue from the checkpoint in ``config.out``, if there is one.
        validate: Measures the head at every evaluation, on ``config.validation_prompts`` held-out
            prompts.

    Raises:
        InvalidArgument: No data, or a checkpoint of another run.
        FloatingPointError: The loss is not finite.
    """
    run = _Trainer.of(config, validate)
    progress = optimise(run.task, config.schedule, config.out, resume=resume)
    save_head(run.head, config.out)
    saved = _loaded(config.out, run.target.model)
    with torch.no_grad():
        final = run.evaluate(saved)
    report = TrainingReport.of(
        run.task,
        progress,
        final,
        title=f"{config.arch.upper()} head",
        command=command,
        data=config.texts.data,
        corpus=run.texts.training,
        device=torch.device(config.device),
    )
    report.save(config.out)
    return report


def try_out(config: EagleTrainingConfig) -> str:
    """Take two steps of a run, and return what the whole of it will need; nothing is saved.

    Args:
        config: Settings. Only what ``keep_runs`` and ``texts.samples`` name is written.
    """
    run = _Trainer.of(config, None)
    seconds = [optimise_once(run.task, config.schedule, step) for step in range(2)][-1]
    weights = sum(p.numel() for p in run.head.parameters())
    if config.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Weights, their best and two moments in float32, and the head in bfloat16.
    disk = 18 * weights
    if config.keep_runs is not None:
        width = run.head.config.feature_size + run.head.config.target_hidden_size
        disk += 2 * width * int(run.texts.training.lengths.sum())
    return (
        f"weights to train  {weights:,}\n"
        f"peak memory       {memory / 1e9:.1f} GB\n"
        f"a step            {seconds:.2f} s, {run.task.tokens_per_step:,} tokens\n"
        f"all {config.schedule.steps:,} steps  {seconds * config.schedule.steps / 60:,.0f} minutes"
        f"{_limit(config.schedule.minutes)}, evaluations apart\n"
        f"disk              {disk / 1e9:.2f} GB\n"
    )


def _limit(minutes: float | None) -> str:
    return "" if minutes is None else f", of which {minutes:g} are taken"


class _Trainer:
    """The loss of each step and the held-out evaluation."""

    def __init__(
        self,
        config: EagleTrainingConfig,
        model: PreTrainedModel,
        head: EagleHead,
        texts: Texts,
        validate: Validate | None,
    ) -> None:
        self.config = config
        self.head = head
        self.texts = texts
        self.target = FrozenTarget(model, head.config.feature_layers, config.texts.window)
        self.draw, self.held_out = _runs(config, self.target, texts)
        self.validate = validate
        self.prompts = _prompts(texts.held_out, config.validation_prompts)
        self.task = Task(
            module=head,
            loss=self.loss,
            evaluate=lambda: self.evaluate(head),
            keep=lambda: save_head(head, config.out),
            tokens_per_step=config.batch * config.texts.window,
            identity=_identity(config),
        )

    @classmethod
    def of(cls, config: EagleTrainingConfig, validate: Validate | None) -> Self:
        """Open the target, gather the texts, and make a head."""
        dtype = torch.bfloat16 if config.schedule.bf16 else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(config.texts.target, dtype=dtype)
        model.to(config.device).requires_grad_(False)
        config.out.mkdir(parents=True, exist_ok=True)
        texts = gather_texts(config.texts, lambda: model)
        torch.manual_seed(config.schedule.seed)
        head = _new_head(config, model, texts.training).to(config.device)
        if config.compile:
            for layer in model.base_model.get_submodule("layers").children():
                layer.compile()
        return cls(config, model, head, texts, validate)

    def loss(self, step: int, spent: float) -> Tensor:
        """Return the mean over depths, weighted by the decay."""
        config = self.config
        seed = config.schedule.step_seed(step)
        run = self.draw(seed)
        anchors = draw_anchors(run.is_response, config.anchors, seed)
        depths = list(unroll(self.head, run, anchors, config.depths))
        loss = config.loss.of(depths, spent, config.decay)
        if config.arch is Arch.EAGLE3:
            return loss
        return loss + config.feature_weight * feature_loss(depths, config.decay)

    def evaluate(self, head: EagleHead) -> Evaluation:
        """Estimate acceptance on the held-out texts, and measure it on prompts, if asked to."""
        meter = AcceptanceMeter(self.config.depths)
        for run in tqdm(self.held_out(), desc="evaluation", leave=False, disable=None):
            anchors = draw_anchors(run.is_response, self.config.anchors, seed=0)
            meter.add(list(unroll(head, run, anchors, self.config.depths)))
        found = meter.estimate()
        values = {f"acceptance at depth {d + 1}": a for d, a in enumerate(found.by_depth)}
        name = f"block efficiency, one path of depth {self.config.depths}"
        values |= {f"{name}, token verification": found.token}
        values |= {f"{name}, block verification": found.block}
        if self.validate is not None and self.prompts:
            values |= self.validate(head, self.prompts)
        # The estimate chooses the weights to keep, as results on a few prompts are noisy.
        return Evaluation(-found.block, values)


Drawn = Callable[[int], TargetRun]
"""The batch of a seed."""
HeldOut = Callable[[], Iterator[TargetRun]]
"""The batches that acceptance is measured on."""


def _runs(config: EagleTrainingConfig, target: FrozenTarget, texts: Texts) -> tuple[Drawn, HeldOut]:
    device = torch.device(config.device)
    batch, folder, seed = config.batch, config.keep_runs, config.texts.seed
    training = texts.training.to(device)
    held_out = evenly(texts.held_out.to(device), config.texts.held_out)
    if folder is not None:
        kept = KeptRuns.over(target, training, folder / "training", seed=seed)
        others = KeptRuns.over(target, held_out, folder / "held_out", seed=seed)
        parts = torch.arange(len(others.rows)).split(batch)
        return lambda s: kept.of(kept.draw(batch, s)), lambda: map(others.of, parts)
    weights, shape = texts.weights.to(device), (batch, documents_to_fill(target.window))
    parts = torch.arange(len(held_out.lengths), device=device).unsqueeze(1).split(batch)
    return (
        lambda s: target.run(training, draw_documents(weights, shape, s)),
        lambda: (target.run(held_out, documents) for documents in parts),
    )


def _prompts(corpus: Corpus, number: int) -> list[list[int]]:
    """Return what comes before the first response of ``number`` documents, evenly over lengths."""
    prompts = []
    every = max(1, len(corpus.lengths) // max(1, number))
    for document in corpus.lengths.argsort()[::every].tolist():
        start, length = int(corpus.starts[document]), int(corpus.lengths[document])
        first = int(corpus.is_response[start : start + length].int().argmax())
        # Plain text is all response.
        if first > 0:
            prompts.append(corpus.token_ids[start : start + first].tolist())
    return prompts[:number]


def _new_head(config: EagleTrainingConfig, model: PreTrainedModel, training: Corpus) -> EagleHead:
    target = model.config.get_text_config()
    initial = None if config.initial is None else _loaded(config.initial, model)
    eagle3 = config.arch is Arch.EAGLE3
    chosen = _drafted_tokens(config, initial, training, target.vocab_size)
    head_config = EagleHeadConfig(
        arch=config.arch,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=config.intermediate or target.intermediate_size,
        num_heads=target.num_attention_heads,
        num_kv_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(chosen),
        feature_layers=default_feature_layers(target.num_hidden_layers) if eagle3 else (),
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=dict(target.rope_parameters),
    )
    embedding, lm_head = _embeddings(model)
    if not eagle3:
        return _taking_over(initial, Eagle1Head(head_config, embedding, lm_head))
    head = Eagle3Head(head_config, embedding, chosen.to(embedding.device))
    with torch.no_grad():
        head.lm_head.weight.copy_(lm_head[chosen])
    return _taking_over(initial, head)


def _drafted_tokens(
    config: EagleTrainingConfig, initial: EagleHead | None, training: Corpus, vocab: int
) -> Tensor:
    """Return the draft vocabulary: the initial head's, unless another size is asked for."""
    if config.arch is Arch.EAGLE1:
        return torch.arange(vocab)
    if initial is not None and config.draft_vocab in (None, len(initial.draft_to_target)):
        return initial.draft_to_target.cpu()
    return frequent_tokens(training, vocab, config.draft_vocab)


def _taking_over(initial: EagleHead | None, head: EagleHead) -> EagleHead:
    """Give ``head`` the weights of ``initial``, and in its output layer those of shared tokens.

    Features may come from other layers, as when the target has grown. The feed-forward layer may be
    wider; it computes the same at first, as its new part writes nothing yet.

    Raises:
        InvalidArgument: The heads are of different kinds or sizes.
    """
    if initial is None:
        return head
    theirs = dict(initial.named_parameters())
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name == "lm_head.weight":
                continue
            if name not in theirs or not _fits(name, theirs[name], weight):
                expected = "a head of the same kind and sizes, its feed-forward layer no wider"
                raise InvalidArgument("initial", name, expected)
            if name.endswith("down_proj.weight"):
                weight.zero_()
            rows, *columns = theirs[name].shape
            weight[:rows, *(slice(c) for c in columns)] = theirs[name]
        if isinstance(head, Eagle3Head):
            shared = torch.isin(head.draft_to_target, initial.draft_to_target)
            tokens = head.draft_to_target[shared]
            places = torch.searchsorted(initial.draft_to_target, tokens)
            head.lm_head.weight[shared] = theirs["lm_head.weight"][places]
    return head


def _fits(name: str, theirs: Tensor, weight: Tensor) -> bool:
    """Return whether a weight can be taken over: in a feed-forward layer, by a larger one."""
    if ".mlp." in name:
        return all(t <= n for t, n in zip(theirs.shape, weight.shape, strict=True))
    return theirs.shape == weight.shape


def _loaded(folder: Path, model: PreTrainedModel) -> EagleHead:
    embedding, lm_head = _embeddings(model)
    return load_head(
        folder,
        target_config=model.config,
        target_embedding=embedding,
        target_lm_head=lm_head,
        dtype=torch.float32,
        device=embedding.device,
    )


def _embeddings(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the target's token embedding and output layer, float32."""
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, lm_head = (part.get_parameter("weight").float() for part in parts)
    return embedding, lm_head


def frequent_tokens(corpus: Corpus, vocab_size: int, number: int | None) -> Tensor:
    """Return the ``number`` most frequent response tokens, ``[number]`` int64, sorted by id.

    None is as many as make up 95% of the responses. How many they make up is printed.
    """
    response = corpus.token_ids[corpus.is_response].long()
    counts, order = torch.bincount(response, minlength=vocab_size).sort(
        descending=True, stable=True
    )
    covered = counts.cumsum(0) / len(response)
    if number is None:
        number = int((covered < _COVERAGE).sum()) + 1
    number = min(number, vocab_size)
    share = float(covered[number - 1])
    tqdm.write(f"draft vocabulary: {number:,} tokens, {share:.2%} of the answers'", file=sys.stderr)
    return order[:number].sort().values


def _identity(config: EagleTrainingConfig) -> dict[str, object]:
    """Return the settings that a resumed run must share, those of its texts among them."""
    settings = asdict(config)
    settings |= settings.pop("texts")
    return {name: value for name, value in settings.items() if name not in _NOT_IDENTITY}
