"""Training of EAGLE heads on the hidden states of a frozen target, computed as they are needed."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from eaglegbv.drafters.checkpoint import load_head, save_head
from eaglegbv.drafters.eagle_head import (
    Arch,
    Eagle1Head,
    Eagle3Head,
    EagleHead,
    EagleHeadConfig,
    default_feature_layers,
)
from eaglegbv.drafters.training.data import (
    Corpus,
    build_corpus,
    draw_documents,
    find_files,
    mixture_weights,
    pack,
    read_rows,
)
from eaglegbv.drafters.training.loop import Evaluation, Schedule, Task, optimise
from eaglegbv.drafters.training.report import TrainingReport, device_name, versions
from eaglegbv.drafters.training.samples import regenerate
from eaglegbv.drafters.training.target import FINAL_MIXTURE, OTHER_SHARE
from eaglegbv.drafters.training.unroll import (
    AcceptanceMeter,
    Loss,
    TargetRun,
    draw_anchors,
    feature_loss,
    unroll,
)
from eaglegbv.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTrainingConfig:
    """Settings of a head training run.

    Attributes:
        arch: Which head.
        target: Folder of the target.
        data: JSON-lines files, or folders of them.
        out: Folder to write.
        intermediate: Width of the head's feed-forward layer; None is the target's.
        draft_vocab: Tokens an EAGLE-3 head can draft, the most frequent in responses; None is all.
        depths: Depths of the unroll.
        decay: Weight of a depth relative to the one before.
        anchors: Positions of a row that are unrolled.
        loss: What is lowered.
        feature_weight: Weight of EAGLE-1's feature regression.
        regenerate: Prompts the target answers itself before training; 0 trains on the data's own
            answers.
        samples: File the target's answers are kept in, shared by runs; None is one in ``out``.
        max_new_tokens: Longest answer of the target.
        generation_batch: Prompts answered together.
        window: Tokens of a row, packed with whole texts, and of a text at most.
        batch: Rows of a step.
        held_out: Held-out texts to measure acceptance on, at most.
        rows_per_source: Rows read of each file at most.
        schedule: Length and speed of training.
        device: Device, "cuda" or "cpu".
        compile: Compile the target's layers.
        initial: Folder of a head of the same sizes to go on from; None starts from random weights.
    """

    arch: Arch
    target: Path
    data: tuple[Path, ...]
    out: Path
    intermediate: int | None = None
    draft_vocab: int | None = None
    depths: int = 5
    decay: float = 0.9
    anchors: int = 48
    loss: Loss = Loss.MIX
    feature_weight: float = 0.1
    regenerate: int = 0
    samples: Path | None = None
    max_new_tokens: int = 128
    generation_batch: int = 64
    window: int = 256
    batch: int = 16
    held_out: int = 256
    rows_per_source: int = 20_000
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=3_000))
    device: str = "cpu"
    compile: bool = False
    initial: Path | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens >= self.window:
            raise InvalidArgument("max_new_tokens", self.max_new_tokens, f"below {self.window=}")
        if self.depths < 1:
            raise InvalidArgument("depths", self.depths, "an integer of at least 1")


@dataclass(frozen=True, slots=True)
class Texts:
    """What a head is trained on, ``weights`` ``[documents]`` float64, and measured on."""

    training: Corpus
    weights: Tensor
    held_out: Corpus


def train_eagle(
    config: EagleTrainingConfig, *, command: str = "", resume: bool = False
) -> TrainingReport:
    """Train a head and save it in the EAGLE repository's format.

    Raises:
        InvalidArgument: No data, or a checkpoint of another run.
        FloatingPointError: The loss is not finite.
    """
    device = torch.device(config.device)
    dtype = torch.bfloat16 if config.schedule.bf16 else torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype)
    model.to(device)  # type: ignore[arg-type]
    model.requires_grad_(False)
    config.out.mkdir(parents=True, exist_ok=True)
    texts = _texts(config, model)
    torch.manual_seed(config.schedule.seed)
    head = _new_head(config, model, texts.training).to(device)
    if config.compile:
        for layer in model.base_model.get_submodule("layers").children():
            layer.compile()
    trainer = _Trainer(config, model, head, texts)
    task = Task(
        module=head,
        loss=trainer.loss,
        evaluate=lambda: trainer.evaluate(head),
        tokens_per_step=config.batch * config.window,
        identity=_identity(config),
    )
    progress = optimise(task, config.schedule, config.out, resume=resume)
    save_head(head, config.out)
    saved = _loaded(config.out, model)
    with torch.no_grad():
        final = trainer.evaluate(saved)
    report = TrainingReport(
        title=f"{config.arch.upper()} head",
        command=command,
        config=_identity(config) | {"data": [str(p) for p in config.data]},
        parameters=sum(p.numel() for p in head.parameters()),
        data=texts.training.token_counts(),
        steps=progress.step,
        best_step=progress.best_step,
        tokens=progress.step * task.tokens_per_step,
        seconds=round(progress.seconds, 1),
        held_out=final.values,
        device=device_name(device),
        versions=versions(),
    )
    report.save(config.out)
    return report


class _Trainer:
    """The loss of each step and the held-out evaluation."""

    def __init__(
        self, config: EagleTrainingConfig, model: PreTrainedModel, head: EagleHead, texts: Texts
    ) -> None:
        self.config = config
        self.model = model
        self.head = head
        device = torch.device(config.device)
        self.training = texts.training.to(device)
        self.weights = texts.weights.to(device)
        self.held_out = texts.held_out.to(device)

    def loss(self, step: int, spent: float) -> Tensor:
        """Mean over depths, weighted by the decay."""
        config = self.config
        seed = config.schedule.seed * 1_000_003 + step
        # Texts are at least a few tokens long, so this many fill a row.
        shape = (config.batch, max(1, config.window // 8))
        documents = draw_documents(self.weights, shape, seed)
        run = self._run_target(self.training, documents)
        anchors = draw_anchors(run.is_response, config.anchors, seed)
        total, weight = torch.zeros((), device=run.token_ids.device), 1.0
        for depth in unroll(self.head, run, anchors, config.depths):
            total = total + weight * config.loss.of(depth, spent)
            if config.arch is Arch.EAGLE1:
                total = total + weight * config.feature_weight * feature_loss(depth)
            weight *= config.decay
        return total / sum(config.decay**d for d in range(config.depths))

    def evaluate(self, head: EagleHead) -> Evaluation:
        """Measure acceptance on the held-out texts."""
        meter = AcceptanceMeter(self.config.depths)
        # By length, so that a batch is padded little, and evenly over all lengths.
        every = max(1, len(self.held_out.lengths) // self.config.held_out)
        order = self.held_out.lengths.argsort()[::every]
        for documents in torch.split(order, self.config.batch):
            run = self._run_target(self.held_out, documents.unsqueeze(1))
            anchors = draw_anchors(run.is_response, self.config.anchors, seed=0)
            depths = unroll(head, run, anchors, self.config.depths)
            meter.add(depths, head.draft_to_target)
        found = meter.estimate()
        values = {f"acceptance at depth {d + 1}": a for d, a in enumerate(found.by_depth)}
        name = f"block efficiency, one path of depth {self.config.depths}, token verification"
        return Evaluation(-found.block_efficiency, values | {name: found.block_efficiency})

    @torch.no_grad()
    def _run_target(self, corpus: Corpus, documents: Tensor) -> TargetRun:
        window = min(self.config.window, int(corpus.lengths[documents].sum(dim=1).max()))
        rows = pack(corpus, documents, window)
        out = self.model(input_ids=rows.token_ids, output_hidden_states=True, use_cache=False)
        final = out.hidden_states[-1]
        layers = self.head.config.feature_layers
        features = [out.hidden_states[i] for i in layers] if layers else [final]
        return TargetRun(
            token_ids=rows.token_ids,
            is_response=rows.is_response,
            features=torch.cat(features, dim=-1).float(),
            final_hidden=final,
            logits=out.logits,
        )


def _texts(config: EagleTrainingConfig, model: PreTrainedModel) -> Texts:
    path = config.samples or config.out / "samples.pt"
    if config.regenerate and path.exists():
        saved = torch.load(path, weights_only=True)
        training, held_out = Corpus(**saved["training"]), Corpus(**saved["held_out"])
        return Texts(training, torch.ones(len(training.lengths), dtype=torch.float64), held_out)
    rows = list(read_rows(find_files(config.data), config.rows_per_source))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.target)
    training, held_out = (
        build_corpus([row for row in rows if row.held_out is kept], tokenizer, config.window)
        for kept in (False, True)
    )
    weights, held_out_weights = (
        mixture_weights(corpus, FINAL_MIXTURE, OTHER_SHARE, config.window)
        for corpus in (training, held_out)
    )
    if not config.regenerate:
        return Texts(training, weights, held_out)
    training = _answers(config, model, training, weights, config.regenerate, config.schedule.seed)
    number = min(config.held_out, config.regenerate)
    held_out = _answers(config, model, held_out, held_out_weights, number, config.schedule.seed + 1)
    torch.save({"training": asdict(training), "held_out": asdict(held_out)}, path)
    return Texts(training, torch.ones(len(training.lengths), dtype=torch.float64), held_out)


def _answers(
    config: EagleTrainingConfig,
    model: PreTrainedModel,
    corpus: Corpus,
    weights: Tensor,
    number: int,
    seed: int,
) -> Corpus:
    return regenerate(
        model,
        corpus,
        weights,
        number,
        max_prompt=config.window - config.max_new_tokens,
        max_new_tokens=config.max_new_tokens,
        batch=config.generation_batch,
        seed=seed,
    )


def _new_head(config: EagleTrainingConfig, model: PreTrainedModel, training: Corpus) -> EagleHead:
    target = model.config.get_text_config()
    eagle3 = config.arch is Arch.EAGLE3
    draft_vocab = (config.draft_vocab or target.vocab_size) if eagle3 else target.vocab_size
    head_config = EagleHeadConfig(
        arch=config.arch,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=config.intermediate or target.intermediate_size,
        num_heads=target.num_attention_heads,
        num_kv_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        feature_layers=default_feature_layers(target.num_hidden_layers) if eagle3 else (),
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=dict(target.rope_parameters),
    )
    embedding, lm_head = _embeddings(model)
    if config.initial is not None:
        return _loaded(config.initial, model).requires_grad_(True)
    if not eagle3:
        return Eagle1Head(head_config, embedding, lm_head)
    chosen = frequent_tokens(training, target.vocab_size, draft_vocab)
    head = Eagle3Head(head_config, embedding, chosen.to(embedding.device))
    with torch.no_grad():
        head.lm_head.weight.copy_(lm_head[chosen])
    return head


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


def frequent_tokens(corpus: Corpus, vocab_size: int, number: int) -> Tensor:
    """Return the ``number`` most frequent response tokens, ``[number]`` int64, sorted by id."""
    response = corpus.token_ids[corpus.is_response].long()
    counts = torch.bincount(response, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:number].sort().values


def _identity(config: EagleTrainingConfig) -> dict[str, object]:
    left_out = {"data", "out", "samples", "target", "device", "initial"}
    return {name: value for name, value in asdict(config).items() if name not in left_out}
