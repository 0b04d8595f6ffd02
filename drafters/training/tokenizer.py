"""The tiny chat model's tokenizer: byte-level BPE with a chat template."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

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
