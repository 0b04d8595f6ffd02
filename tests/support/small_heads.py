"""Small heads with random weights, norms too, in float64."""

from dataclasses import replace

import torch

from eaglegbv.drafters.eagle_model import Arch, Eagle1Head, Eagle3Head, EagleHead, EagleHeadConfig


def config_of(arch: Arch, **changes: object) -> EagleHeadConfig:
    eagle3 = arch is Arch.EAGLE3
    config = EagleHeadConfig(
        arch=arch,
        hidden_size=24,
        target_hidden_size=24,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        vocab_size=30,
        draft_vocab_size=12 if eagle3 else 30,
        feature_layers=(2, 4, 5) if eagle3 else (),
        rms_norm_eps=1e-5,
    )
    return replace(config, **changes)


def make_head(config: EagleHeadConfig, seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    head: EagleHead
    if config.arch is Arch.EAGLE1:
        head = Eagle1Head(config, embedding, torch.randn_like(embedding))
    else:
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        head = Eagle3Head(config, embedding, ids)
    for parameter in head.parameters():  # norms start at one, which would hide a missing one
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return head.double().requires_grad_(False)
