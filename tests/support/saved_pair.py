"""A tiny random chat model and heads for it, saved as users' models are."""

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eaglegbv.drafters.checkpoint import save_head
from eaglegbv.drafters.eagle_model import Arch, Eagle1Head
from eaglegbv.drafters.parallel_model import ParallelHead, ParallelHeadConfig, Sight
from eaglegbv.drafters.training.heads import head_config_of
from eaglegbv.output_layer import OutputLayer
from support.tiny_models import random_llama

HIDDEN = 32
CONTEXT = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_pair(folder: Path) -> tuple[Path, Path]:
    """Write a random target and an EAGLE-1 head into ``folder`` and return their folders."""
    target, head = folder / "target", folder / "head"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(target))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"intermediate_size": 2 * HIDDEN, "max_position_embeddings": CONTEXT}
        model = random_llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
        model.save_pretrained(target)
        config = head_config_of(model.config, Arch.EAGLE1, draft_vocab=len(tokenizer))
        config = replace(config, num_kv_heads=config.num_heads)
        embedding = model.get_input_embeddings().weight.detach()
        eagle1 = Eagle1Head(config, embedding, OutputLayer.of(model))
        save_head(eagle1, head, torch.float32)
    return target, head


def save_block_head(target: Path, folder: Path) -> Path:
    """Write a random block drafter's head for a target of :func:`save_pair`; return its folder."""
    model = LlamaForCausalLM.from_pretrained(target)
    own = model.config
    config = ParallelHeadConfig(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_heads=2,
        num_kv_heads=1,
        head_dim=HIDDEN // 2,
        vocab_size=own.vocab_size,
        draft_vocab_size=own.vocab_size,
        feature_layers=(1,),
        qk_norm=True,
        block_size=6,
        sights=(Sight(), Sight()),
        mask_token_id=0,
        sample_from_anchor=True,
        markov_rank=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        embedding = model.get_input_embeddings().weight.detach()
        save_head(ParallelHead(config, embedding, OutputLayer.of(model)), folder, torch.float32)
    return folder
