"""``eaglegbv inspect``, ``export`` and ``convert``: files of heads and models, in other formats."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.options import opt
from eaglegbv.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from eaglegbv.drafters.checkpoint import Checkpoint

Head = Annotated[
    str,
    typer.Argument(help="Folder or hub name of a head; 'eagle1' or 'eagle3' of the tiny model."),
]
_TARGET = "Folder or hub name of the target; smollm2; or tiny, the packaged one."


def inspect(drafter: Head, target: Annotated[str | None, opt(_TARGET)] = None) -> None:
    """Print what a head's files contain, check them, and warn where engines disagree about them.

    \b
    Examples:
      eaglegbv inspect eagle3 --target tiny
      eaglegbv inspect yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct
    """
    from eaglegbv.drafters.checkpoint import fit, inspect_head
    from eaglegbv.models.hf import load_config
    from eaglegbv.models.native import unknown_of

    checkpoint = _open_head(drafter)
    config = None if target is None else load_config(_target_named(target))
    fitted = None if config is None else fit(checkpoint, config)
    typer.echo(inspect_head(checkpoint, fitted))
    if config is not None:
        unknown = unknown_of(config)
        runs = "natively" if unknown is None else f"through transformers ({unknown})"
        typer.echo(f"On a CPU the target's forwards run {runs}.")


def export(
    drafter: Head,
    directory: Annotated[Path, typer.Argument(help="Folder to write, empty or not existing yet.")],
    format_: Annotated[str, opt("One of eagle, sglang, speculators, dflash, dspark.", "--format")],
    target: Annotated[
        str | None,
        opt(f"{_TARGET} The head is checked against it; the speculators format takes its table."),
    ] = None,
) -> None:
    """Write a head in another format, with all weights unchanged.

    \b
    Examples:
      eaglegbv export eagle3 FOLDER --format sglang
      eaglegbv export HEAD FOLDER --format speculators --target MODEL
    """
    from eaglegbv.drafters.checkpoint import export_head, fit
    from eaglegbv.models.hf import load_config

    checkpoint = _open_head(drafter)
    config = read_table = None
    if target is not None:
        name = _target_named(target)
        config, read_table = load_config(name), partial(_read_table, name)
        fit(checkpoint, config)
    export_head(checkpoint, format_, directory, config, read_table)
    typer.echo(f"{checkpoint.config.kind} in format {format_}: {directory}")


def convert(
    file: Annotated[Path, typer.Argument(help="GGUF file of a language model.")],
    directory: Annotated[Path, typer.Argument(help="Folder to write, not existing yet.")],
) -> None:
    """Write the model in a GGUF file, its weights dequantised, as a transformers folder.

    It needs the packages gguf and accelerate. With --model FILE.gguf the same is done once, in the
    user's cache.

    \b
    Examples:
      eaglegbv convert model.gguf FOLDER
      eaglegbv generate "Hello." --model model.gguf
    """
    from eaglegbv import gguf

    gguf.convert(file, directory)
    typer.echo(f"{file.name}, dequantised to float32: {directory}")


def _target_named(target: str) -> str:
    from eaglegbv.devices import AUTO_DTYPE, place_of
    from eaglegbv.loading import check_model, find_target

    _, dtype = place_of(None, AUTO_DTYPE)  # what a conversion is kept in
    name = str(find_target(target, dtype))
    check_model(name, "target")
    return name


def _open_head(drafter: str) -> "Checkpoint":
    """Read the head in a folder, of the hub, or the packaged head with this name."""
    from eaglegbv.drafters.checkpoint import CONFIG, read_checkpoint
    from eaglegbv.loading import drafter_folder

    folder = drafter_folder(drafter, head=True)
    if not (folder / CONFIG).is_file():
        raise InvalidArgument("drafter", drafter, f"a folder with an EAGLE head's {CONFIG}")
    return read_checkpoint(folder)


def _read_table(model: str, table: str) -> "Tensor":
    """Return a target's embedding, or its output layer, by what heads' files call them."""
    import huggingface_hub
    import torch
    from transformers import AutoModelForCausalLM

    from eaglegbv.drafters.formats.parallel import OUTPUT
    from eaglegbv.drafters.formats.read import read_weights
    from eaglegbv.errors import DrafterMismatch
    from eaglegbv.models.hf import load_config

    with torch.device("meta"):
        blank = AutoModelForCausalLM.from_config(load_config(model))
    output = table == OUTPUT
    layer = blank.get_output_embeddings() if output else blank.get_input_embeddings()
    [name] = [name for name, weight in blank.named_parameters() if weight is layer.weight]
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(huggingface_hub.snapshot_download(model))
    try:
        tensors = read_weights(folder).tensors
    except DrafterMismatch as error:
        raise InvalidArgument("target", model, f"a model with its weights ({error})") from error
    if name not in tensors:
        raise InvalidArgument("target", model, f"weights with the tensor {name}")
    return tensors[name]
