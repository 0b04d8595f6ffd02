"""Train a pair like the packaged one: a small chat model, and a head that drafts for it.

    python examples/train_tiny_pair.py DATA OUT

DATA is a folder of chats and texts as JSON lines. Each of the two takes an hour or two on a CPU
core; a run that was killed goes on with the same command. The head learns from answers that the
target gives itself. eaglegbv/assets/tiny/README.md tells in which runs the packaged pair was made.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eaglegbv.cli.train import app
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

CHARACTERS_PER_SOURCE = 8_000_000  # that the tokenizer learns from
CONTEXT = 2048  # positions the model is configured for


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the target, and of a step; it has half as many key and value heads as query heads."""

    vocab: int = 4096
    layers: int = 20
    hidden: int = 256
    heads: int = 4
    intermediate: int = 640
    window: int = 512  # tokens of a row, which is packed with whole documents
    batch: int = 10  # rows of a step


def train_target(data: Path, out: Path, sizes: Sizes, schedule: Schedule, *, resume: bool) -> str:
    """Train a tokenizer and a target and save both, in bfloat16; return a report in Markdown."""
    rows = list(read_rows(find_files((data,)), ROWS_PER_SOURCE))
    if resume and (out / CHECKPOINT).exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    else:
        tokenizer = train_tokenizer(tokenizer_texts(rows), sizes.vocab, CONTEXT)
        tokenizer.save_pretrained(out)
    training, held_out = build_corpora(rows, tokenizer, sizes.window)
    torch.manual_seed(schedule.seed)
    model = LlamaForCausalLM(config_of(sizes, tokenizer))

    def finish() -> Evaluation:
        model.to(torch.bfloat16).save_pretrained(out)
        return evaluate(model, held_out, sizes.batch)

    task = Task(
        title="target",
        data=(data,),
        corpus=training,
        module=model,
        loss=lambda step, _: loss(model, training, sizes, schedule.step_seed(step)),
        evaluate=lambda: evaluate(model, held_out, sizes.batch),
        finish=finish,
        tokens_per_step=sizes.batch * sizes.window,
        identity={"sizes": asdict(sizes), "schedule": asdict(schedule)},
    )
    return train(task, schedule, out, command=" ".join(sys.argv), resume=resume)


def config_of(sizes: Sizes, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=max(1, sizes.heads // 2),
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


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


def tokenizer_texts(rows: list[Row]) -> Iterator[str]:
    characters: Counter[str] = Counter()
    for row in rows:
        if row.held_out or characters[row.source] > CHARACTERS_PER_SOURCE:
            continue
        parts = [message.get("content") or "" for message in row.messages] or [row.text]
        characters[row.source] += sum(map(len, parts))
        yield from parts


def loss(model: LlamaForCausalLM, corpus: Corpus, sizes: Sizes, seed: int) -> Tensor:
    """Return the mean cross-entropy of a batch's tokens, all but those behind its documents."""
    shape = sizes.batch, documents_to_fill(sizes.window)
    rows = pack(corpus, draw_documents(len(corpus.lengths), shape, seed), sizes.window)
    counted = rows.is_real[:, 1:]
    return (token_losses(model, rows.token_ids) * counted).sum() / counted.sum()


def token_losses(model: LlamaForCausalLM, token_ids: Tensor) -> Tensor:
    """Return ``[rows, window - 1]`` float32 cross-entropies of all tokens but the first."""
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
    return functional.cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none")


def evaluate(model: LlamaForCausalLM, corpus: Corpus, batch: int) -> Evaluation:
    """Return the perplexity of the assistant's tokens, each document run alone."""
    nll = count = 0.0
    for documents in torch.split(corpus.lengths.argsort(), batch):
        rows = pack(corpus, documents.unsqueeze(1), int(corpus.lengths[documents].max()))
        counted = rows.is_response[:, 1:]
        nll += float((token_losses(model, rows.token_ids) * counted).sum())
        count += float(counted.sum())
    return Evaluation(nll / count, {"perplexity of assistant tokens": math.exp(nll / count)})


HEAD = (
    "eagle --arch eagle3 --target {out}/target --data {data} --out {out}/eagle3 --resume "
    "--regenerate 8000 --max-new-tokens 96 --depths 4 --anchors 96 --batch 12 --window 256 "
    "--intermediate 1280 --learning-rate 1.5e-3 --steps 5000 --keep-runs {out}/runs"
)

if __name__ == "__main__":
    data, out = map(Path, sys.argv[1:])
    schedule = Schedule(steps=10**9, minutes=90, learning_rate=1.3e-3, bf16=False)
    print(train_target(data, out / "target", Sizes(), schedule, resume=True))
    app(HEAD.format(data=data, out=out).split(), standalone_mode=False)
