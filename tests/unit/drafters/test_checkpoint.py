"""Saving and strict loading of heads."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_heads import config_of, make_head
from torch import Tensor
from transformers import LlamaConfig

from eaglegbv.drafters.checkpoint import load_head, save_head
from eaglegbv.drafters.eagle_model import Arch, Eagle1Head, EagleHead
from eaglegbv.errors import DrafterMismatch


def target_config(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 8, "num_attention_heads": 4}
    return LlamaConfig(**(sizes | changes))


def saved_head(arch: Arch, folder: Path, *, target_hidden: int = 24) -> EagleHead:
    config = config_of(arch, target_hidden_size=target_hidden, fc_bias=arch is Arch.EAGLE1)
    head = make_head(config).float()
    save_head(head, folder, torch.float32)
    return head


def load(folder: Path, saved: EagleHead, config: LlamaConfig | None = None) -> EagleHead:
    """Load a head for the target of the one that was saved."""
    return load_head(
        folder,
        target_config=config or target_config(),
        target_embedding=saved.embedding,
        target_lm_head=saved.target_lm_head if isinstance(saved, Eagle1Head) else saved.embedding,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def edit(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace tensors of the file; None removes one."""
    tensors: dict[str, Tensor | None] = dict(load_file(folder / "model.safetensors"))
    tensors |= changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def pass_through(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * v.sum()


@pytest.mark.parametrize("arch", list(Arch))
def test_a_saved_head_computes_the_same(arch: Arch, tmp_path: Path) -> None:
    head = saved_head(arch, tmp_path)

    loaded = load(tmp_path, head)

    assert loaded.config == head.config
    assert torch.equal(loaded.draft_to_target, head.draft_to_target)
    token_ids, positions = torch.arange(5), torch.arange(5)
    features = torch.randn(5, head.config.feature_size)
    hidden, expected = (
        h(token_ids, h.fuse(features), positions, pass_through) for h in (loaded, head)
    )
    assert torch.equal(hidden, expected)
    assert torch.equal(loaded.logits(hidden), head.logits(hidden))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_embedding_of_a_head_narrower_than_its_target(tmp_path: Path) -> None:
    head = saved_head(Arch.EAGLE3, tmp_path, target_hidden=32)
    loaded = load(tmp_path, head, target_config(hidden_size=32))
    assert loaded.config.feature_size == 3 * 32
    assert torch.equal(loaded.embedding, head.embedding)
    edit(tmp_path, {"embed_tokens.weight": None})
    with pytest.raises(DrafterMismatch, match=r"^embed_tokens\.weight="):
        load(tmp_path, head, target_config(hidden_size=32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_of_the_target_embedding_is_shared(dtype, tmp_path, caplog) -> None:
    head = saved_head(Arch.EAGLE1, tmp_path)
    edit(tmp_path, {"embed_tokens.weight": head.embedding.to(dtype)})
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path, head)
    assert loaded.embedding is head.embedding
    assert "embed_tokens.weight is the target's" in caplog.text


def test_an_embedding_of_its_own_is_kept_and_told(tmp_path, caplog) -> None:
    head = saved_head(Arch.EAGLE3, tmp_path)
    own = head.embedding + 0.1
    edit(tmp_path, {"embed_tokens.weight": own})
    loaded = load(tmp_path, head)
    assert torch.equal(loaded.embedding, own)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "made for this target" in record.getMessage()
