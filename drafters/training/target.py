"""Training of a small chat model from scratch: a tokenizer, and a deep and narrow Llama."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eaglegbv.drafters.training.data import (
    OTHER_SHARE,
    ROWS_PER_SOURCE,
    Corpus,
    Row,
    build_corpora,
    documents_to_fill,
    draw_documents,
    find_files,
    mixture_weights,
    pack,
    read_rows,
)
from eaglegbv.drafters.training.train import (
    CHECKPOINT,
    Evaluation,
    Schedule,
    Task,
    optimise,
    write_report,
)
from eaglegbv.errors import InvalidArgument, first_line

BOS = "<|bos|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
PAD = "<|pad|>"

# A system message opens the first user turn: the training text has no system role to learn from.
CHAT_TEMPLATE = """\
{%- set prefix = '' -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set prefix = messages[0]['content'] | trim + '\\n\\n' -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['user', 'assistant'] -%}
{{- raise_exception('role ' + message['role'] + ': expected user or assistant') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if loop.first -%}{{- prefix -}}{%- endif -%}
{{- message['content'] | trim + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

_TOKENIZER_CHARACTERS_PER_SOURCE = 8_000_000
_CONTEXT = 2048
"""Positions the model is configured for."""
_HEAD_DIM = 64
_FINAL_MAX_TOKENS = 320
"""Longest document of the final phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTrainingConfig:
    """Settings of a target training run.

    Attributes:
        data: JSON-lines files, or folders of them.
        out: Folder to write.
        vocab_size: Number of tokens of the tokenizer.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        intermediate: Width of the feed-forward layers.
        window: Tokens of a training row, packed with whole documents.
        batch: Rows of a step.
        dropout: Dropout on what each attention and feed-forward block adds to the residual stream.
        prompt_weight: Loss weight of tokens the assistant did not write.
        final_phase: Fraction of the budget trained on the final mixture.
        mixture: Relative share of the tokens by source; those not named have 0.1.
        final_mixture: The same in the final phase; also what the score weighs sources by.
        schedule: Length and speed of training.
        device: Device, "cuda" or "cpu".
        compile: Compile the decoder layers.
        initial: Folder of a trained shallower target to grow from, tokenizer included; None starts
            from random weights.
    """

    data: tuple[Path, ...]
    out: Path
    vocab_size: int = 6144
    layers: int = 20
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 640
    window: int = 1024
    batch: int = 32
    dropout: float = 0.1
    prompt_weight: float = 0.3
    final_phase: float = 0.25
    mixture: Mapping[str, float] = field(default_factory=dict)
    final_mixture: Mapping[str, float] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=5_000))
    device: str = "cpu"
    compile: bool = False
    initial: Path | None = None


def train_target(config: TargetTrainingConfig, *, command: str = "", resume: bool = False) -> str:
    """Train a tokenizer and a target and save both, bf16, in transformers' format.

    Returns:
        A report on the run, in Markdown.

    Raises:
        InvalidArgument: No data, a checkpoint of another run, or a loss that is not finite.
    """
    device = torch.device(config.device)
    rows = list(read_rows(find_files(config.data), ROWS_PER_SOURCE))
    tokenizer = _tokenizer(config, rows, resume=resume)
    training, held_out = build_corpora(rows, tokenizer, config.window)
    held_out = held_out.to(device)
    torch.manual_seed(config.schedule.seed)
    with device:
        model = LlamaForCausalLM(_model_config(config, tokenizer))
    if config.initial is not None:
        grow(_opened(LlamaForCausalLM, config.initial, dtype=torch.float32), model)
    _add_dropout(model, config.dropout)
    if config.compile:
        for layer in model.model.layers:
            layer.compile()
    batches = _Batches(training.to(device), config)
    task = Task(
        module=model,
        loss=lambda step, spent: batches.loss(model, step, spent),
        evaluate=lambda: _evaluate(model, held_out, config),
        tokens_per_step=config.batch * config.window,
        identity=_identity(config),
    )
    progress = optimise(task, config.schedule, config.out, resume=resume)
    saved = _save(model, config.out)
    saved.to(device)  # type: ignore[arg-type]
    with torch.no_grad():
        final = _evaluate(saved, held_out, config)
    return write_report(
        config.out,
        task,
        progress,
        final,
        title="target",
        command=command,
        data=config.data,
        corpus=training,
        device=device,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that decodes every text to exactly what was encoded.

    Each digit is split off, so that numbers of any length are spelled the same way.

    Args:
        texts: Training text.
        vocab_size: Number of tokens, the 256 bytes and five special tokens included.
        context: Number of positions of the model, recorded in the tokenizer.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, USER, ASSISTANT, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, bpe.token_to_id(BOS))],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _tokenizer(
    config: TargetTrainingConfig, rows: list[Row], *, resume: bool
) -> PreTrainedTokenizerFast:
    """Take the tokenizer of the run resumed or grown from, or train one; save it with the model."""
    started = resume and (config.out / CHECKPOINT).exists()
    folder = config.out if started else config.initial
    tokenizer: PreTrainedTokenizerFast
    if folder is None:
        tokenizer = train_tokenizer(_tokenizer_texts(rows), config.vocab_size, _CONTEXT)
    else:
        tokenizer = _opened(PreTrainedTokenizerFast, folder)
    tokenizer.save_pretrained(config.out)
    return tokenizer


def _opened(kind: Any, folder: Path, **settings: object) -> Any:  # noqa: ANN401
    try:
        return kind.from_pretrained(folder, **settings)
    except Exception as error:  # a broken tokenizer.json is a plain Exception
        expected = f"the folder of a target that this command trained ({first_line(error)})"
        raise InvalidArgument("initial", str(folder), expected) from error


def _tokenizer_texts(rows: list[Row]) -> Iterator[str]:
    characters: Counter[str] = Counter()
    for row in rows:
        if row.held_out or characters[row.source] > _TOKENIZER_CHARACTERS_PER_SOURCE:
            continue
        parts = [message["content"] for message in row.messages] or [row.text]
        characters[row.source] += sum(map(len, parts))
        yield from parts


def _model_config(config: TargetTrainingConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=_HEAD_DIM,
        max_position_embeddings=_CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def grow(shallow: LlamaForCausalLM, deep: LlamaForCausalLM) -> None:
    """Copy ``shallow`` into ``deep``, whose further layers start by adding nothing.

    Every layer of ``shallow`` is followed by copies of itself whose last matrices are zero, so
    that the deep model computes what the shallow one does and learns from there (LLaMA Pro, arXiv
    2401.02415, section 3.2). Shallow layers train faster: growing late buys depth at little cost.
    Where the depth is no multiple, the layers with one copy more are spread evenly.

    Raises:
        InvalidArgument: ``deep`` has fewer layers.
    """
    few, many = len(shallow.model.layers), len(deep.model.layers)
    if many < few:
        raise InvalidArgument("layers", many, f"at least the {few} layers to grow from")
    weights = {n: w for n, w in shallow.state_dict().items() if not n.startswith("model.layers.")}
    origins = [i * few // many for i in range(many)]
    for i, origin in enumerate(origins):
        is_copy = i > 0 and origins[i - 1] == origin
        for name, weight in shallow.model.layers[origin].state_dict().items():
            last = name in {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
            grown = torch.zeros_like(weight) if is_copy and last else weight
            weights[f"model.layers.{i}.{name}"] = grown
    deep.load_state_dict(weights)


def _add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Apply dropout to what each block adds to the residual stream; Llama has no such option."""

    def drop(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, probability, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


class _Batches:
    """The loss of each step, on rows packed with documents drawn by the mixture."""

    def __init__(self, corpus: Corpus, config: TargetTrainingConfig) -> None:
        self.corpus = corpus
        self.config = config
        self.early = mixture_weights(corpus, config.mixture, config.window)
        self.final = mixture_weights(corpus, config.final_mixture, _FINAL_MAX_TOKENS)
        # Compiled code never writes out the vocabulary-wide float32 copies.
        self.token_losses = torch.compile(_token_losses) if config.compile else _token_losses

    def loss(self, model: LlamaForCausalLM, step: int, spent: float) -> Tensor:
        config = self.config
        weights = self.final if spent >= 1 - config.final_phase else self.early
        shape = config.batch, documents_to_fill(config.window)
        documents = draw_documents(weights, shape, config.schedule.step_seed(step))
        rows = pack(self.corpus, documents, config.window)
        logits = model(input_ids=rows.token_ids, use_cache=False).logits[:, :-1]
        weight = torch.where(rows.is_response, 1.0, config.prompt_weight) * rows.is_real
        losses = self.token_losses(logits.flatten(0, 1), rows.token_ids[:, 1:].flatten())
        weight = weight[:, 1:].flatten()
        return (losses * weight).sum() / weight.sum()


def _token_losses(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return ``[tokens]`` float32 cross-entropies of ``logits`` ``[tokens, vocab]``."""
    return functional.cross_entropy(logits.float(), token_ids, reduction="none")


def _evaluate(model: LlamaForCausalLM, corpus: Corpus, config: TargetTrainingConfig) -> Evaluation:
    """Return the perplexity of the assistant's tokens, by source and overall.

    Each document is run alone. The score is the mean log-perplexity under the final mixture.
    """
    nll = torch.zeros(len(corpus.sources), dtype=torch.float64, device=corpus.lengths.device)
    count = torch.zeros_like(nll)
    for documents in torch.split(corpus.lengths.argsort(), config.batch):
        window = int(corpus.lengths[documents].max())
        rows = pack(corpus, documents.unsqueeze(1), window)
        logits = model(input_ids=rows.token_ids, use_cache=False).logits[:, :-1]
        losses = _token_losses(logits.flatten(0, 1), rows.token_ids[:, 1:].flatten())
        losses = losses.view(len(documents), -1)
        counted = rows.is_response[:, 1:]
        source = corpus.source_of[documents]
        nll.index_add_(0, source, (losses * counted).sum(1).double())
        count.index_add_(0, source, counted.sum(1).double())
    found = {
        source: float(nll[i] / count[i]) for i, source in enumerate(corpus.sources) if count[i] > 0
    }
    share = {source: config.final_mixture.get(source, OTHER_SHARE) for source in found}
    score = sum(share[s] * found[s] for s in share) / sum(share.values())
    values = {f"perplexity, {source}": math.exp(mean) for source, mean in found.items()}
    values["perplexity, all assistant tokens"] = math.exp(float(nll.sum() / count.sum()))
    return Evaluation(score, values | {"score, final mixture's log-perplexity": score})


def _identity(config: TargetTrainingConfig) -> dict[str, object]:
    return {
        name: value
        for name, value in asdict(config).items()
        if name not in {"data", "out", "initial"}
    }


def _save(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """Save bfloat16 weights and return the model as a user will load it."""
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    saved: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return saved
