"""Heads that are named on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING

from eaglegbv.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from eaglegbv.drafters.checkpoint import Checkpoint


def open_head(drafter: str) -> "Checkpoint":
    """Read the head in a folder, of the hub, or the packaged head with this name."""
    from eaglegbv.drafters.checkpoint import CONFIG, read_checkpoint
    from eaglegbv.loading import drafter_folder

    folder = drafter_folder(drafter, head=True)
    if not (folder / CONFIG).is_file():
        raise InvalidArgument("drafter", drafter, f"a folder with an EAGLE head's {CONFIG}")
    return read_checkpoint(folder)


def read_embedding(model: str) -> "Tensor":
    """Return the token embedding of a model without opening the rest of the model."""
    import huggingface_hub
    import torch
    from transformers import AutoModelForCausalLM

    from eaglegbv.drafters.formats.read import read_weights
    from eaglegbv.errors import DrafterMismatch
    from eaglegbv.models.hf import load_config

    with torch.device("meta"):
        blank = AutoModelForCausalLM.from_config(load_config(model))
    table = blank.get_input_embeddings().weight
    [name] = [name for name, weight in blank.named_parameters() if weight is table]
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(huggingface_hub.snapshot_download(model))
    try:
        found = read_weights(folder).tensors
    except DrafterMismatch as error:
        raise InvalidArgument("target", model, f"a model with its weights ({error})") from error
    if name not in found:
        raise InvalidArgument("target", model, f"weights with the tensor {name}")
    return found[name]
