"""Settings of a head: what is refused, and what stands where a checkpoint says nothing."""

import pytest
from support.small_heads import config_of

from eaglegbv.drafters.eagle_model import Arch, default_feature_layers
from eaglegbv.errors import DrafterMismatch


def test_default_feature_layers_of_a_32_layer_target() -> None:
    assert default_feature_layers(32) == (2, 16, 29)


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        (Arch.EAGLE1, {"target_hidden_size": 16}, "hidden_size"),
        (Arch.EAGLE1, {"draft_vocab_size": 10}, "draft_vocab_size"),
        (Arch.EAGLE1, {"feature_layers": (1, 2, 3)}, "feature_layers"),
        (Arch.EAGLE1, {"norm_output": True}, "norm_output"),
        (Arch.EAGLE1, {"fc_norm": True}, "fc_norm"),
        (Arch.EAGLE3, {"draft_vocab_size": 31}, "draft_vocab_size"),
        (Arch.EAGLE3, {"num_kv_heads": 3}, "num_kv_heads"),
        (Arch.EAGLE3, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
        (
            Arch.EAGLE3,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_impossible_sizes_are_refused(arch: Arch, changes: dict[str, object], named: str) -> None:
    with pytest.raises(DrafterMismatch, match=f"^{named}="):
        config_of(arch, **changes)
