"""Training of heads on the hidden states of a frozen target, computed as they are needed."""

import logging
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from eaglegbv.devices import torch_as_usual
from eaglegbv.drafters.checkpoint import load_head, save_head
from eaglegbv.drafters.eagle_model import (
    FIXED_ROPE_TYPES,
    Arch,
    Eagle1Head,
    Eagle3Head,
    EagleHead,
    EagleHeadConfig,
    Head,
    default_feature_layers,
)
from eaglegbv.drafters.parallel_model import ParallelHead, ParallelHeadConfig, Sight
from eaglegbv.drafters.training.data import (
    Corpus,
    Texts,
    TextSettings,
    documents_to_fill,
    draw_documents,
)
from eaglegbv.drafters.training.train import Evaluation, Schedule, Task, optimise_once, train
from eaglegbv.drafters.training.unroll import (
    FrozenTarget,
    KeptRuns,
    Loss,
    TargetRun,
    draw_anchors,
    feature_loss,
    measure,
    unroll,
)
from eaglegbv.errors import InvalidArgument
from eaglegbv.output_layer import OutputLayer
from eaglegbv.utils import require_integer

_COVERAGE = 0.95
_NOT_IDENTITY = frozenset(
    {"data", "device", "initial", "keep_runs", "out", "samples", "seed", "validation_prompts"}
)
"""Settings that a resumed run may change. The seed is that of the texts, not the schedule's."""
_FEWEST_LAYERS = 4  # of a target, of whose inputs EAGLE-3 reads three
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainingConfig:
    """Settings of a head training run, whatever the kind of head.

    Attributes:
        texts: Which texts to train and measure on. Rows are packed with whole ones.
        out: Folder to write.
        intermediate: Feed-forward width; by default the target's.
        depths: Tokens of a path that the head learns to draft.
        decay: Weight of a depth relative to the one before.
        anchors: Positions of a row that are unrolled.
        loss: Loss to minimise: ce, tv, mix or block.
        batch: Rows per step.
        keep_runs: Folder for what a head learns from: the target reads texts once, and not at every
            step. They are then drawn evenly.
        schedule: Length and speed of training.
        device: Device: cuda or cpu.
        compile: Compile the target's layers.
        initial: Trained head of the same kind and sizes to continue from, with its draft vocabulary
            unless another size is asked for.
        validation_prompts: Prompts answered at evaluations, by otbv and another copy of the target.
    """

    texts: TextSettings
    out: Path
    intermediate: int | None = None
    depths: int = 5
    decay: float = 0.9
    anchors: int = 48
    loss: Loss = Loss.MIX
    batch: int = 16
    keep_runs: Path | None = None
    schedule: Schedule = field(default_factory=Schedule)
    device: str = "cpu"
    compile: bool = False
    initial: Path | None = None
    validation_prompts: int = 16

    def __post_init__(self) -> None:
        require_integer("depths", self.depths, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTrainingConfig(HeadTrainingConfig):
    """Settings of an EAGLE head's training run.

    Attributes:
        arch: Kind of head.
        draft_vocab: Draft vocabulary of EAGLE-3, the most frequent tokens of responses; by default
            those that make up 95% of them: a rare token costs as many weights as a frequent one.
        feature_weight: Weight of EAGLE-1's feature regression.
    """

    arch: Arch
    draft_vocab: int | None = None
    feature_weight: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelTrainingConfig(HeadTrainingConfig):
    """Settings of a block drafter's training run. Rows see their block causally.

    Attributes:
        layers: Layers of the head.
        markov_rank: Rank of the term of the token before (DSpark); 0 for independent levels
            (DFlash).
        mask_token: Token whose embedding mask tokens have; by default the target's padding, or its
            last token.
    """

    layers: int = 2
    markov_rank: int = 64
    mask_token: int | None = None

    def __post_init__(self) -> None:
        HeadTrainingConfig.__post_init__(self)
        require_integer("layers", self.layers, 1)
        require_integer("markov_rank", self.markov_rank, 0)


Validate = Callable[[Head, Sequence[Sequence[int]]], Mapping[str, float]]
"""Measures a head on prompts with a real verifier; returns results by name."""


@torch_as_usual()
def train_head(
    config: HeadTrainingConfig,
    model: PreTrainedModel,
    texts: Texts,
    *,
    command: str = "",
    resume: bool = False,
    validate: Validate | None = None,
) -> str:
    """Train a head, save it as :func:`save_head` does, and return a report in Markdown.

    ``model`` is the target, on the device, and gets frozen; ``texts`` are those of the settings,
    ``command`` is the command line for the report. With ``resume`` the run goes on from the
    checkpoint in ``config.out``, if there is one. ``validate`` measures the head at every
    evaluation, on ``config.validation_prompts`` held-out prompts.

    Raises:
        InvalidArgument: A target that no such head fits, a checkpoint of another run, or a loss
            that is not finite.
    """
    task = _Run(config, model, texts, validate).task
    return train(task, config.schedule, config.out, command=command, resume=resume)


def try_out(config: HeadTrainingConfig, model: PreTrainedModel, texts: Texts) -> str:
    """Take two steps of a run, and return what the whole of it will need.

    Nothing is written but what ``keep_runs`` names. See :func:`train_head` for the arguments.
    """
    run = _Run(config, model, texts, None)
    schedule = config.schedule
    seconds = [optimise_once(run.task, schedule, step) for step in range(2)][-1]
    weights = sum(p.numel() for p in run.head.parameters())
    if config.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Weights, their best and two moments in float32, and the head in bfloat16.
    disk = 18 * weights
    if config.keep_runs is not None:
        width = run.head.config.feature_size + run.head.config.target_hidden_size
        disk += 2 * width * int(texts.training.lengths.sum())
    limit = "" if schedule.minutes is None else f", of which {schedule.minutes:g} are taken"
    return (
        f"weights to train  {weights:,}\n"
        f"peak memory       {memory / 1e9:.1f} GB\n"
        f"a step            {seconds:.2f} s, {run.task.tokens_per_step:,} tokens\n"
        f"all {schedule.steps:,} steps  {seconds * schedule.steps / 60:,.0f} minutes"
        f"{limit}, evaluations apart\n"
        f"disk              {disk / 1e9:.2f} GB\n"
    )


class _Run:
    """The loss of each step and the held-out evaluation."""

    def __init__(
        self,
        config: HeadTrainingConfig,
        model: PreTrainedModel,
        texts: Texts,
        validate: Validate | None,
    ) -> None:
        self.config = config
        self.model = model
        self.validate = validate
        model.requires_grad_(requires_grad=False)
        texts.training.check_vocabulary(model.config.get_text_config(decoder=True).vocab_size)
        torch.manual_seed(config.schedule.seed)
        self.head = _new_head(config, model, texts.training).to(config.device)
        if config.compile:  # the decoder's layers, whatever the family calls them
            modules = model.base_model.modules()
            for layer in next(m for m in modules if isinstance(m, nn.ModuleList)):
                layer.compile()
        target = FrozenTarget(model, self.head.config.feature_layers, config.texts.window)
        self.draw, self.held_out = _runs(config, target, texts)
        self.prompts = _prompts(texts.held_out, config.validation_prompts)
        settings = asdict(config)
        settings |= settings.pop("texts")
        self.task = Task(
            title=self.head.config.kind,
            data=config.texts.data,
            corpus=texts.training,
            module=self.head,
            loss=self.loss,
            evaluate=lambda: self.evaluate(self.head),
            finish=self.finish,
            keep=lambda: save_head(self.head, config.out),
            tokens_per_step=config.batch * config.texts.window,
            identity={name: v for name, v in settings.items() if name not in _NOT_IDENTITY},
        )

    def loss(self, step: int, spent: float) -> Tensor:
        config = self.config
        seed = config.schedule.step_seed(step)
        run = self.draw(seed)
        anchors = draw_anchors(run.is_response, config.anchors, seed)
        depths = list(unroll(self.head, run, anchors, config.depths))
        loss = config.loss.of(depths, spent, config.decay)
        if not isinstance(config, EagleTrainingConfig) or config.arch is Arch.EAGLE3:
            return loss
        return loss + config.feature_weight * feature_loss(depths, config.decay)

    def finish(self) -> Evaluation:
        save_head(self.head, self.config.out)
        return self.evaluate(_loaded(self.config.out, self.model))

    def evaluate(self, head: Head) -> Evaluation:
        """Estimate acceptance on the held-out texts, and measure it on prompts, if asked to."""
        depths = self.config.depths
        number = self.config.anchors
        runs = tqdm(self.held_out(), desc="evaluation", leave=False, disable=None)
        measured = measure(
            list(unroll(head, run, draw_anchors(run.is_response, number, seed=0), depths))
            for run in runs
        )
        values = {f"acceptance at depth {d}": a for d, a in enumerate(measured.by_depth, start=1)}
        name = f"block efficiency, one path of depth {depths}"
        values |= {f"{name}, token verification": measured.token}
        values |= {f"{name}, block verification": measured.block}
        if self.validate is not None and self.prompts:
            values |= self.validate(head, self.prompts)
        # The estimate chooses the weights to keep, as results on a few prompts are noisy.
        return Evaluation(-measured.block, values)


def _runs(
    config: HeadTrainingConfig, target: FrozenTarget, texts: Texts
) -> tuple[Callable[[int], TargetRun], Callable[[], Iterator[TargetRun]]]:
    """Return what draws the batch of a seed, and the batches that acceptance is measured on."""
    device = torch.device(config.device)
    batch = config.batch
    folder = config.keep_runs
    seed = config.texts.seed
    training = texts.training.to(device)
    held_out = texts.held_out.to(device)
    held_out = held_out.of(_evenly(held_out, config.texts.held_out)[: config.texts.held_out])
    if folder is not None:
        kept = KeptRuns.over(target, training, folder / "training", seed=seed)
        others = KeptRuns.over(target, held_out, folder / "held_out", seed=seed)
        parts = torch.arange(len(others.rows)).split(batch)
        return lambda s: kept.of(kept.draw(batch, s)), lambda: map(others.of, parts)
    number = len(training.lengths)
    shape = (batch, documents_to_fill(target.window))
    parts = torch.arange(len(held_out.lengths), device=device).unsqueeze(1).split(batch)
    return (
        lambda s: target.run(training, draw_documents(number, shape, s).to(device)),
        lambda: (target.run(held_out, documents) for documents in parts),
    )


def _evenly(corpus: Corpus, number: int) -> Tensor:
    """Return ``number`` documents of ``corpus`` or some more, evenly over lengths, short first."""
    every = max(1, len(corpus.lengths) // max(1, number))
    return corpus.lengths.argsort()[::every]


def _prompts(corpus: Corpus, number: int) -> list[list[int]]:
    """Return what comes before the first response of ``number`` documents, evenly over lengths."""
    prompts = []
    for document in _evenly(corpus, number).tolist():
        start = int(corpus.starts[document])
        length = int(corpus.lengths[document])
        first = int(corpus.is_response[start : start + length].int().argmax())
        # Plain text is all response.
        if first > 0:
            prompts.append(corpus.token_ids[start : start + first].tolist())
    return prompts[:number]


def _new_head(config: HeadTrainingConfig, model: PreTrainedModel, training: Corpus) -> Head:
    """Return the head that a run begins with."""
    if isinstance(config, ParallelTrainingConfig):
        return _new_block_head(config, model)
    assert isinstance(config, EagleTrainingConfig)
    return _new_eagle_head(config, model, training)


def _new_block_head(config: ParallelTrainingConfig, model: PreTrainedModel) -> ParallelHead:
    """Return a head whose term of the token before is 0 at first; or one to continue from."""
    target = model.config.get_text_config(decoder=True)
    head_config = block_config_of(target, config)
    if config.initial is not None:
        initial = _loaded(config.initial, model)
        if not isinstance(initial, ParallelHead) or initial.config != head_config:
            expected = f"a block drafter of {config.layers} layers, with these settings"
            raise InvalidArgument("initial", str(config.initial), expected)
        return initial.requires_grad_()
    head = ParallelHead(head_config, _embedding(model), OutputLayer.of(model).float())
    if head.markov_head is not None:
        nn.init.zeros_(head.markov_head.markov_w2.weight)
    return head


def _new_eagle_head(
    config: EagleTrainingConfig, model: PreTrainedModel, training: Corpus
) -> EagleHead:
    target = model.config.get_text_config(decoder=True)
    eagle3 = config.arch is Arch.EAGLE3
    if eagle3 and target.num_hidden_layers < _FEWEST_LAYERS:
        expected = f"eagle1 for a target of {target.num_hidden_layers} layers; eagle3 reads three"
        raise InvalidArgument("arch", str(config.arch), expected)
    if config.initial is not None:
        initial = _loaded(config.initial, model)
        if not isinstance(initial, EagleHead):
            raise InvalidArgument("initial", str(config.initial), "an EAGLE head")
        _check_initial(config, initial.config)
        if not eagle3 or config.draft_vocab in (None, initial.config.draft_vocab_size):
            return initial.requires_grad_()
        return _with_vocabulary(initial, config, model, training)
    if not eagle3:
        vocab = target.vocab_size
        width = config.intermediate
        eagle1 = head_config_of(target, config.arch, draft_vocab=vocab, intermediate=width)
        return Eagle1Head(eagle1, _embedding(model), OutputLayer.of(model).float())
    chosen = frequent_tokens(training, target.vocab_size, config.draft_vocab)
    head_config = head_config_of(
        target, config.arch, draft_vocab=len(chosen), intermediate=config.intermediate
    )
    return _eagle3_head(head_config, model, chosen)


def _check_initial(config: EagleTrainingConfig, initial: EagleHeadConfig) -> None:
    for name, asked, known in (
        ("arch", config.arch, initial.arch),
        ("intermediate", config.intermediate, initial.intermediate_size),
    ):
        if asked not in (None, known):
            expected = f"a head whose {name} is {asked}, not {known}"
            raise InvalidArgument("initial", str(config.initial), expected)


def _with_vocabulary(
    initial: EagleHead, config: EagleTrainingConfig, model: PreTrainedModel, training: Corpus
) -> Eagle3Head:
    """Return a head with another draft vocabulary; rows of tokens that both have are kept."""
    chosen = frequent_tokens(training, initial.config.vocab_size, config.draft_vocab)
    head = _eagle3_head(replace(initial.config, draft_vocab_size=len(chosen)), model, chosen)
    shared = torch.isin(head.draft_to_target, initial.draft_to_target)
    places = torch.searchsorted(initial.draft_to_target, head.draft_to_target[shared])
    weights = initial.state_dict()
    rows = head.lm_head.weight.detach().clone()
    rows[shared] = weights["lm_head.weight"][places]
    head.load_state_dict({**weights, "lm_head.weight": rows})
    return head


def _eagle3_head(config: EagleHeadConfig, model: PreTrainedModel, chosen: Tensor) -> Eagle3Head:
    """Return a new head that drafts the ``chosen`` tokens by the target's own output layer."""
    embedding = _embedding(model)
    output = OutputLayer.of(model).float()
    head = Eagle3Head(config, embedding, chosen.to(embedding.device))
    with torch.no_grad():
        head.lm_head.weight.copy_(output.scale * output.weight[chosen])
    return head


def head_config_of(
    target: PreTrainedConfig, arch: Arch, *, draft_vocab: int, intermediate: int | None = None
) -> EagleHeadConfig:
    """Return the configuration of a new head for a target, whatever family it is of.

    Of the keys of the target's decoder only sizes that all have are needed; others are taken where
    they are there. ``intermediate``, the width of the feed-forward layer, is None for the target's.
    """
    eagle3 = arch is Arch.EAGLE3
    return EagleHeadConfig(
        arch=arch,
        draft_vocab_size=draft_vocab,
        feature_layers=default_feature_layers(target.num_hidden_layers) if eagle3 else (),
        **_sizes(target, intermediate),
    )


def block_config_of(target: PreTrainedConfig, config: ParallelTrainingConfig) -> ParallelHeadConfig:
    """Return the configuration of a new block drafter's head; see :func:`head_config_of`.

    It reads the target's layers that EAGLE-3 reads.
    """
    mask = target.vocab_size - 1 if target.pad_token_id is None else target.pad_token_id
    linked = config.markov_rank > 0
    return ParallelHeadConfig(
        draft_vocab_size=target.vocab_size,
        feature_layers=default_feature_layers(target.num_hidden_layers),
        qk_norm=True,
        block_size=config.depths + (not linked),
        sights=(Sight(causal=True),) * config.layers,
        mask_token_id=mask if config.mask_token is None else config.mask_token,
        sample_from_anchor=linked,
        markov_rank=config.markov_rank,
        **_sizes(target, config.intermediate),
    )


def _sizes(target: PreTrainedConfig, intermediate: int | None) -> dict[str, Any]:
    """Return what a head's configuration takes of its target's."""
    facts = target.to_dict()
    hidden = int(target.hidden_size)
    heads = int(target.num_attention_heads)
    width = intermediate or facts.get("intermediate_size") or facts.get("n_inner")
    eps = [facts[key] for key in _NORM_EPS if facts.get(key)]
    return {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        # Some say a number for each layer.
        "intermediate_size": width if isinstance(width, int) else 4 * hidden,
        "num_heads": heads,
        "num_kv_heads": facts.get("num_key_value_heads") or heads,
        "head_dim": facts.get("head_dim") or hidden // heads,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": eps[0] if eps else 1e-6,
        "rope_parameters": _rope(facts),
    }


def _rope(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target's rotary settings where a head can have them, or plain ones of its base.

    A head cannot follow settings that differ among layers (Gemma 3), change with the text's length
    (dynamic, longrope), or rotate a part of each head (Phi, GPT-NeoX).
    """
    stored = facts.get("rope_parameters") or {}
    settings = stored.get("full_attention", stored)
    if settings is stored and any(isinstance(value, Mapping) for value in stored.values()):
        settings = next(value for value in stored.values() if isinstance(value, Mapping))
    kind = settings.get("rope_type", "default")
    part = settings.get("partial_rotary_factor") or 1.0
    if settings is stored and kind in FIXED_ROPE_TYPES and part == 1.0 and "rope_theta" in settings:
        return dict(settings) | {"rope_type": kind}
    plain = {"rope_type": "default", "rope_theta": float(settings.get("rope_theta") or 10_000.0)}
    _log.warning("rotary settings of the head: %s; the target's are %s", plain, stored or "none")
    return plain


def _loaded(folder: Path, model: PreTrainedModel) -> Head:
    embedding = _embedding(model)
    return load_head(
        folder,
        target_config=model.config,
        target_embedding=embedding,
        read_output=lambda: OutputLayer.of(model).float(),
        dtype=torch.float32,
        device=embedding.device,
    )


def _embedding(model: PreTrainedModel) -> Tensor:
    """Return the target's token embedding, float32."""
    embedding: Tensor = model.get_input_embeddings().get_parameter("weight").float()
    return embedding


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
