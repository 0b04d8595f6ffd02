"""``eaglegbv convert``: a model in a GGUF file as a folder that everything here reads."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    file: Annotated[Path, typer.Argument(help="GGUF file of a language model.")],
    directory: Annotated[Path, typer.Argument(help="Folder to write, not existing yet.")],
) -> None:
    """Write the model in a GGUF file, its weights dequantised, as a transformers folder.

    It needs the packages gguf and accelerate. With --model FILE.gguf the same is done once, in the
    user's cache.
    """
    from eaglegbv import gguf

    gguf.convert(file, directory)
    typer.echo(f"{file.name}, dequantised to float32: {directory}")
