"""Training of a small chat model from scratch: a tokenizer, and a deep and narrow Llama."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eaglegbv.devices import torch_as_usual
from eaglegbv.drafters.training.data import (
    ROWS_PER_SOURCE,
    Corpus,
    Row,
    build_corpora,
    documents_to_fill,
    draw_documents,
    find_files,
    pack,
    read_rows,
)
from eaglegbv.drafters.training.train import CHECKPOINT, Evaluation, Schedule, Task, train

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
_CONTEXT = 2048  # positions the model is configured for
_HEAD_DIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTrainingConfig:
    """Settings of a target training run.

    Attributes:
        data: JSON-lines file or folder; may be repeated.
        out: Folder to write.
        vocab_size: Size of the vocabulary.
        layers: Number of decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        intermediate: Width of the feed-forward layers.
        window: Tokens of a row, which is packed with whole documents.
        batch: Rows per step.
        schedule: Length and speed of training.
        device: Device: cuda or cpu.
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
    schedule: Schedule
    device: str = "cpu"


@torch_as_usual()
def train_target(config: TargetTrainingConfig, *, command: str = "", resume: bool = False) -> str:
    """Train a tokenizer and a target and save both, bf16, in transformers' format.

    Return a report on the run, in Markdown.

    Raises:
        InvalidArgument: No data, a checkpoint of another run, or a loss that is not finite.
    """
    device = torch.device(config.device)
    rows = list(read_rows(find_files(config.data), ROWS_PER_SOURCE))
    if resume and (config.out / CHECKPOINT).exists():
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(config.out)
    else:
        tokenizer = train_tokenizer(_tokenizer_texts(rows), config.vocab_size, _CONTEXT)
        tokenizer.save_pretrained(config.out)
    training, held_out = (c.to(device) for c in build_corpora(rows, tokenizer, config.window))
    torch.manual_seed(config.schedule.seed)
    settings = LlamaConfig(
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
    with device:
        model = LlamaForCausalLM(settings)

    def finish() -> Evaluation:
        model.to(torch.bfloat16)  # type: ignore[arg-type]
        model.save_pretrained(config.out)
        return _evaluate(model, held_out, config.batch)

    task = Task(
        title="target",
        data=config.data,
        corpus=training,
        module=model,
        loss=lambda step, _: _loss(model, training, config, step),
        evaluate=lambda: _evaluate(model, held_out, config.batch),
        finish=finish,
        tokens_per_step=config.batch * config.window,
        identity={k: v for k, v in asdict(config).items() if k not in {"data", "out"}},
    )
    return train(task, config.schedule, config.out, command=command, resume=resume)


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that decodes every text to exactly what was encoded.

    Each digit is split off, so that numbers of any length are spelled the same way. The 256 bytes
    and five special tokens count to ``vocab_size``; ``context``, the model's positions, is noted.
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
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
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


def _tokenizer_texts(rows: list[Row]) -> Iterator[str]:
    characters: Counter[str] = Counter()
    for row in rows:
        if row.held_out or characters[row.source] > _TOKENIZER_CHARACTERS_PER_SOURCE:
            continue
        parts = [message.get("content") or "" for message in row.messages] or [row.text]
        characters[row.source] += sum(map(len, parts))
        yield from parts


def _loss(
    model: LlamaForCausalLM, corpus: Corpus, config: TargetTrainingConfig, step: int
) -> Tensor:
    """Return the mean cross-entropy of a batch's tokens, all but those behind its documents."""
    shape = config.batch, documents_to_fill(config.window)
    documents = draw_documents(len(corpus.lengths), shape, config.schedule.step_seed(step))
    rows = pack(corpus, documents.to(corpus.lengths.device), config.window)
    counted = rows.is_real[:, 1:]
    return (_token_losses(model, rows.token_ids) * counted).sum() / counted.sum()


def _token_losses(model: LlamaForCausalLM, token_ids: Tensor) -> Tensor:
    """Return ``[rows, window - 1]`` float32 cross-entropies of all tokens but the first."""
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
    return functional.cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none")


def _evaluate(model: LlamaForCausalLM, corpus: Corpus, batch: int) -> Evaluation:
    """Return the perplexity of the assistant's tokens, each document run alone."""
    nll = count = 0.0
    for documents in torch.split(corpus.lengths.argsort(), batch):
        rows = pack(corpus, documents.unsqueeze(1), int(corpus.lengths[documents].max()))
        counted = rows.is_response[:, 1:]
        nll += float((_token_losses(model, rows.token_ids) * counted).sum())
        count += float(counted.sum())
    return Evaluation(nll / count, {"perplexity of assistant tokens": math.exp(nll / count)})
