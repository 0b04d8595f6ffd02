"""Opening a target and its drafter from disk, so that they fit each other."""

from dataclasses import dataclass
from pathlib import Path

import torch

from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.torch_paged import TorchPagedAttention
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.checkpoint import load_head, read_head_config
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_head import Arch, EagleHeadConfig
from eaglegbv.errors import InvalidArgument
from eaglegbv.targets.base import FeatureSpec, Target
from eaglegbv.targets.hf import HFTarget, load_config

TINY = Path(__file__).parent / "assets" / "tiny"
TINY_TARGET = TINY / "target"
TINY_DRAFTERS = ("eagle3", "eagle1")


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the drafter that reads its features, or none."""

    target: Target
    drafter: Drafter | None


def load_pair(
    model: str | Path,
    drafter: str | Path | None,
    *,
    slots: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Pair:
    """Open a target, and an EAGLE head for it.

    Args:
        model: Folder or hub name of a transformers decoder-only model.
        drafter: Folder of a head, ``"eagle3"`` or ``"eagle1"`` for those of the tiny pair, or None.
        slots: Tokens the KV pools hold.
        dtype: None for float32 on CPU and bfloat16 on GPU.
        device: None for CUDA where there is one.

    Raises:
        InvalidArgument: There is no such model or drafter.
        ModelNotSupported: The engine cannot drive the model.
        DrafterMismatch: The head does not fit the target.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    if drafter is None:
        plain = HFTarget.from_pretrained(model, dtype=dtype, device=place, max_slots=slots)
        return Pair(plain, None)
    folder = _drafter_folder(drafter)
    config = load_config(model)
    head_config = read_head_config(folder, config)
    target = HFTarget.from_pretrained(
        model,
        dtype=dtype,
        device=place,
        max_slots=slots,
        features=_features(head_config),
    )
    head = load_head(
        folder,
        target_config=config,
        target_embedding=target.input_embeddings,
        target_lm_head=target.output_embeddings,
        dtype=dtype,
        device=place,
    )
    pool = KVPool(1, slots, head_config.num_kv_heads, head_config.head_dim, dtype, place)
    return Pair(target, EagleDrafter(head, TorchPagedAttention(pool)))


def _features(head: EagleHeadConfig) -> FeatureSpec:
    if head.arch is Arch.EAGLE1:
        return FeatureSpec.final()
    return FeatureSpec.layer_inputs(head.feature_layers)


def _drafter_folder(drafter: str | Path) -> Path:
    folder = TINY / str(drafter) if drafter in TINY_DRAFTERS else Path(drafter)
    if not folder.is_dir():
        names = " or ".join(repr(name) for name in TINY_DRAFTERS)
        raise InvalidArgument("drafter", str(drafter), f"a folder with an EAGLE head, or {names}")
    return folder
