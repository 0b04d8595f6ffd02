"""Strict loading and saving of heads, in any format of :mod:`eaglegbv.drafters.formats`.

The tensors decide what a checkpoint is, never the ``architectures`` string, which is the same for
most. Every expected tensor must be there, and every tensor there must be used or be one of the few
that are known to be unneeded: a head that loads only in part silently drafts noise.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eaglegbv.devices import dtype_name
from eaglegbv.drafters.eagle_model import (
    Arch,
    Eagle1Head,
    Eagle3Head,
    EagleHeadConfig,
    Head,
    HeadConfig,
)
from eaglegbv.drafters.formats.names import (
    EMBEDDING,
    FC_BIAS,
    MEMBERS,
    OFFSETS,
    NamedTensors,
    Remark,
    RemarkKind,
    detect_arch,
    name_tensors,
)
from eaglegbv.drafters.formats.parallel import (
    MASK_EMBEDDING,
    OUTPUT,
    check_holds_block,
    detect_parallel,
    is_parallel,
    name_parallel,
    read_parallel_settings,
    write_block,
)
from eaglegbv.drafters.formats.read import (
    FORMATS,
    LAYER_IDS,
    VARIANTS,
    FeatureLayers,
    FormatName,
    HeadSettings,
    detect_format,
    read_json,
    read_settings,
    read_weights,
)
from eaglegbv.drafters.formats.write import Contents, check_holds, write_head
from eaglegbv.drafters.parallel_model import ParallelHead, ParallelHeadConfig
from eaglegbv.errors import DrafterMismatch, InvalidArgument, one_of
from eaglegbv.output_layer import OutputLayer

logger = logging.getLogger(__name__)

CONFIG = "config.json"
_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
# A table stored in bfloat16 is this close to the one it was rounded from.
_ROUNDING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(HeadSettings):
    """A head as stored in a folder, checked against its own configuration."""

    folder: Path
    files: tuple[str, ...]  # its files with weights
    format: FormatName
    named: NamedTensors

    @property
    def draft_to_target(self) -> Tensor | None:
        """``[draft_vocab]`` int64, the target's ids; None for the full vocabulary."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        offsets = self.named.tensors[OFFSETS]
        return offsets + torch.arange(len(offsets))


@dataclass(frozen=True, slots=True)
class Fit:
    """A checkpoint checked against its target."""

    config: HeadConfig  # the head's configuration, its layer numbers resolved
    layers: FeatureLayers | None  # EAGLE-3: the target layers whose inputs it reads, and why
    remarks: tuple[Remark, ...]  # the checkpoint's, and those that the target adds


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and check the head in ``folder``: a config.json and weights in one of the formats.

    Raises:
        DrafterMismatch: A file is missing or broken, a tensor is missing, unknown, of a wrong
            shape or type, or a key is missing or contradicts the tensors; the message names the
            file, tensor or key.
    """
    stored = read_json(folder / CONFIG)
    _refuse_other_kinds(folder, stored)
    weights = read_weights(folder)
    if is_parallel(weights.tensors):
        if (folder / MASK_EMBEDDING).exists():
            raise DrafterMismatch(MASK_EMBEDDING, "there", "mask tokens that the target embeds")
        name = detect_parallel(stored)
        named = name_parallel(weights.tensors, name)
        settings = read_parallel_settings(stored, name, named)
    else:
        named = name_tensors(weights.tensors, weights.files[0])
        kind = detect_format(stored, named)
        name = kind.name
        settings = read_settings(stored, detect_arch(named), kind, named)
    remarks = list(settings.remarks)
    if weights.ignored:
        text = f"{', '.join(weights.ignored)} not read, as {weights.files[0]} is there"
        remarks.append(Remark(RemarkKind.NOTE, text))
    named, more = _checked(settings.config, named)
    known = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return Checkpoint(
        **known | {"remarks": (*remarks, *more)},
        folder=folder,
        files=weights.files,
        format=name,
        named=named,
    )


def _refuse_other_kinds(folder: Path, stored: Mapping[str, Any]) -> None:
    """Raise DrafterMismatch if the configuration is that of a head of another kind."""
    kind = stored.get("speculators_model_type")
    kinds = (*(stored.get("architectures") or ()), stored.get("model_type"), kind)
    expected = ""
    if any(word in str(name).lower() for name in kinds for word in ("mtp", "nextn")):
        expected = "an EAGLE head, not an MTP head"
    elif kind not in (None, "eagle3", "dflash", "dspark"):
        named = "EAGLE-1" if kind == "eagle" else repr(kind)
        expected = "an EAGLE-3 head or a DFlash or DSpark one where it is in speculators' format"
        expected += f", not {named}"
    if expected:
        raise DrafterMismatch("drafter", str(folder), expected)


def fit(checkpoint: Checkpoint, target_config: PreTrainedConfig) -> Fit:
    """Check a head against its target and resolve the layers it reads.

    Raises:
        DrafterMismatch: Vocabulary, hidden size or layers do not fit; the message names the key.
    """
    target = target_config.get_text_config(decoder=True)
    config = checkpoint.config
    for key, value, expected in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
    ):
        if value != expected:
            raise DrafterMismatch(f"config.json key {key}", value, f"the target's, {expected}")
    remarks = list(checkpoint.remarks)
    limit = checkpoint.passed_on.get("max_position_embeddings")
    context = getattr(target, "max_position_embeddings", None)
    if isinstance(limit, int) and isinstance(context, int) and limit < context:
        text = (
            f"max_position_embeddings is {limit}, the target's {context}; SGLang starts only with "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )
        remarks.append(Remark(RemarkKind.WARNING, text))
    if checkpoint.layers is None:
        return Fit(config, None, tuple(remarks))
    layers = checkpoint.layers.resolve(target.num_hidden_layers)
    if layers is None or len(layers.inputs) != len(config.feature_layers):
        expected = f"{len(config.feature_layers)} layers, as fc.weight reads"
        raise DrafterMismatch(f"config.json key {LAYER_IDS}", checkpoint.layers.ids, expected)
    layers.check(target.num_hidden_layers)
    remarks += layers.remarks()
    return Fit(replace(config, feature_layers=layers.inputs), layers, tuple(remarks))


def load_head(
    path: Path,
    *,
    target_config: PreTrainedConfig,
    target_embedding: Tensor,
    read_output: Callable[[], OutputLayer],
    dtype: torch.dtype,
    device: torch.device,
) -> Head:
    """Load the head in the folder ``path``, of any format, its weights as ``dtype`` on ``device``.

    The target's embedding ``[vocab, hidden]`` is shared with a head that carries none, its output
    layer, which ``read_output`` returns, with one that has none either.

    Raises:
        DrafterMismatch: See :func:`read_checkpoint` and :func:`fit`.
        ModelNotSupported: The target has no output layer that can be shared.
    """
    checkpoint = read_checkpoint(path)
    fitted = fit(checkpoint, target_config)
    _log(checkpoint, fitted)
    output = None if OUTPUT in checkpoint.named.tensors else read_output()
    embedding = _embedding(checkpoint, target_embedding, dtype)
    draft_to_target = checkpoint.draft_to_target
    with torch.device("meta"):
        head = _blank(fitted.config, embedding, output, draft_to_target)
    tensors = checkpoint.named.tensors
    head.load_state_dict({name: tensors[name].to(dtype) for name in head.state_dict()}, assign=True)
    return head.to(device).requires_grad_(False).eval()


def save_head(head: Head, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Save ``head``, its weights in type ``dtype``.

    A block drafter's is saved in the format of DSpark or DFlash, others in the EAGLE repository's.
    The embedding is saved only where its width differs from the target's.
    """
    config = head.config
    layers = config.feature_layers or None
    contents = Contents(config=config, layers=layers, dtype=dtype, passed_on={})
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if isinstance(config, ParallelHeadConfig):
        kind = FormatName.DSPARK if config.markov_rank else FormatName.DFLASH
        return write_block(path, kind, contents, tensors)
    if config.hidden_size != config.target_hidden_size:
        tensors[EMBEDDING] = head.embedding.to("cpu", dtype).contiguous()
    if config.draft_vocab_size < config.vocab_size:
        chosen = head.draft_to_target.cpu()
        tensors[OFFSETS] = chosen - torch.arange(len(chosen))
        tensors[MEMBERS] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors[MEMBERS][chosen] = True
    return write_head(path, FORMATS[FormatName.EAGLE], contents, tensors)


def _blank(
    config: HeadConfig,
    embedding: Tensor,
    output: OutputLayer | None,
    draft_to_target: Tensor | None,
) -> Head:
    if isinstance(config, ParallelHeadConfig):
        return ParallelHead(config, embedding, output, draft_to_target)
    assert isinstance(config, EagleHeadConfig)
    if config.arch is Arch.EAGLE1:
        assert output is not None
        return Eagle1Head(config, embedding, output)
    return Eagle3Head(config, embedding, draft_to_target)


def _checked(config: HeadConfig, named: NamedTensors) -> tuple[NamedTensors, list[Remark]]:
    """Return exactly the tensors of a head of this configuration, and what was assumed of them.

    Raises:
        DrafterMismatch: One is missing, unknown, or of a wrong shape or type.
    """
    bias = named.tensors.get(FC_BIAS)
    biased = isinstance(config, EagleHeadConfig) and (config.arch is Arch.EAGLE3 or config.fc_bias)
    if bias is not None and not biased and not bool(bias.any()):
        # SGLang wants one in every EAGLE-1 head.
        reason = {named.stored.pop(FC_BIAS): "zeros, and config.json says there is none"}
        del named.tensors[FC_BIAS]
        named = replace(named, left_aside={**named.left_aside, **reason})
    with torch.device("meta"):
        table = torch.empty(config.vocab_size, config.hidden_size)
        expected = _blank(config, table, OutputLayer(table), None).state_dict()
    for name, tensor in expected.items():
        _check(named, name, tuple(tensor.shape))
    if config.hidden_size != config.target_hidden_size or EMBEDDING in named.tensors:
        _check(named, EMBEDDING, (config.vocab_size, config.hidden_size))
    for name, tensor in named.tensors.items():
        if name not in expected and name not in (EMBEDDING, OFFSETS, MEMBERS):
            wanted = f"no such tensor in this {config.kind} by its config.json"
            raise DrafterMismatch(named.shown(name), list(tensor.shape), wanted)
    return _with_vocabulary(config, named)


def _with_vocabulary(config: HeadConfig, named: NamedTensors) -> tuple[NamedTensors, list[Remark]]:
    """Check the draft vocabulary's tensors; t2d follows from d2t where it is missing."""
    size = config.draft_vocab_size
    full = size == config.vocab_size
    if full and OFFSETS not in named.tensors and MEMBERS not in named.tensors:
        return named, []
    offsets = _check(named, OFFSETS, (size,), torch.int64)
    ids = offsets + torch.arange(size)
    if not bool(((ids >= 0) & (ids < config.vocab_size)).all()) or len(ids.unique()) < size:
        expected = f"offsets to different target ids in [0, {config.vocab_size})"
        raise DrafterMismatch(OFFSETS, [int(ids.min()), int(ids.max())], expected)
    members = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    remarks = []
    if MEMBERS not in named.tensors:  # NVIDIA's ModelOpt writes none
        tensors = named.tensors | {MEMBERS: members}
        stored = named.stored | {MEMBERS: MEMBERS}
        named = replace(named, tensors=tensors, stored=stored)
        text = f"{MEMBERS} follows from {OFFSETS}, being absent; the EAGLE repository needs it"
        remarks.append(Remark(RemarkKind.NOTE, text))
    if not torch.equal(_check(named, MEMBERS, (config.vocab_size,), torch.bool), members):
        members_stored = int(named.tensors[MEMBERS].sum())
        raise DrafterMismatch(MEMBERS, members_stored, f"the {size} target ids of d2t")
    if full and bool(offsets.any()):
        text = "d2t reorders a full vocabulary; left aside, as EAGLE does and SGLang does not"
        remarks.append(Remark(RemarkKind.ASSUMED, text))
    return named, remarks


def _check(
    named: NamedTensors, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """Return the tensor ``name``, checked; ``dtype`` None means any float type."""
    shown = named.shown(name)
    if name not in named.tensors:
        raise DrafterMismatch(shown, None, f"a tensor of shape {list(shape)}")
    tensor = named.tensors[name]
    if tuple(tensor.shape) != shape:
        raise DrafterMismatch(shown, list(tensor.shape), f"shape {list(shape)}")
    if tensor.dtype not in (_FLOATS if dtype is None else (dtype,)):
        expected = "a float type of 16 bits or more" if dtype is None else str(dtype)
        raise DrafterMismatch(shown, tensor.dtype, expected)
    return tensor


def _embedding(checkpoint: Checkpoint, target_embedding: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the head's own embedding, or the target's where both are the same."""
    stored = checkpoint.named.tensors.get(EMBEDDING)
    if stored is None:
        return target_embedding
    if stored.shape == target_embedding.shape:
        distance = _distance(stored, target_embedding)
        if distance < _ROUNDING:
            logger.info("%s is the target's, which is shared", EMBEDDING)
            return target_embedding
        told = "%s: %s is not the target's (relative distance %.2g); was it made for this target?"
        logger.warning(told, checkpoint.folder, EMBEDDING, distance)
    return stored.to(dtype)


def _distance(table: Tensor, other: Tensor) -> float:
    """Return the distance of two tables relative to the second, without copying them whole."""
    if table.dtype == other.dtype and torch.equal(table, other.cpu()):
        return 0.0
    difference = norm = 0.0
    for rows, others in zip(table.split(4096), other.split(4096), strict=True):
        exact = others.cpu().double()
        difference += float((rows.double() - exact).square().sum())
        norm += float(exact.square().sum())
    return (difference / norm) ** 0.5 if norm else float(difference > 0)


def _log(checkpoint: Checkpoint, fitted: Fit) -> None:
    captured = "the final hidden state"
    if fitted.layers is not None:
        captured = f"the inputs of layers {list(fitted.layers.inputs)} ({fitted.layers.reason})"
    message = "%s of %s, format %s, reads %s"
    logger.info(message, fitted.config.kind, checkpoint.folder, checkpoint.format, captured)
    for name, reason in checkpoint.named.left_aside.items():
        logger.info("left aside: %s (%s)", name, reason)
    for remark in fitted.remarks:
        if remark.kind is RemarkKind.ASSUMED:
            logger.warning("%s: %s", checkpoint.folder, remark.text)


def is_block_head(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether ``folder``, with this config.json, holds a block drafter's head.

    Errors are those of :func:`is_head`.
    """
    _refuse_other_kinds(folder, config)
    return is_parallel(read_weights(folder).tensors)


def is_head(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether ``folder``, with this config.json, holds a head, broken or not.

    Its tensors tell, as configurations do not.

    Raises:
        DrafterMismatch: There is no weight file, one is broken, or the head is of another kind.
    """
    _refuse_other_kinds(folder, config)
    names = read_weights(folder).tensors
    # Nothing but a head fuses features or drops ``model.``.
    fuses = {"fc.weight", "d2t", "t2d"} & {name.removeprefix("model.") for name in names}
    return bool(fuses) or any(name.startswith(("midlayer.", "layers.0.")) for name in names)


_KINDS = {Arch.EAGLE1: "EAGLE-1 (the weights of EAGLE-2 are the same)", Arch.EAGLE3: "EAGLE-3"}
_WORDS = {
    RemarkKind.NOTE: "Notes",
    RemarkKind.ASSUMED: "Assumed, as the files leave it open",
    RemarkKind.WARNING: "Warnings: other engines read these files otherwise",
}


def inspect_head(checkpoint: Checkpoint, fitted: Fit | None) -> str:
    """Return a report on a checkpoint as lines; ``fitted`` is None where no target is known."""
    remarks = checkpoint.remarks
    layers = None if checkpoint.layers is None else checkpoint.layers.resolve(None)
    if fitted is not None:
        layers = fitted.layers
        remarks = fitted.remarks
    elif layers is not None:
        remarks = (*remarks, *layers.remarks())
    facts = _facts(checkpoint, layers)
    facts["target"] = "not given: sizes and layers were not checked" if fitted is None else "fits"
    width = max(map(len, facts)) + 2
    lines = [f"{label:<{width}}{fact}" for label, fact in facts.items()]
    for kind, words in _WORDS.items():
        lines_of_kind = [f"  - {remark.text}" for remark in remarks if remark.kind is kind]
        lines += ["", f"{words}:", *lines_of_kind] if lines_of_kind else []
    return "\n".join(lines)


def _facts(checkpoint: Checkpoint, layers: FeatureLayers | None) -> dict[str, str]:
    config = checkpoint.config
    named = checkpoint.named
    known = VARIANTS & {each.name for each in fields(config)}
    variants = sorted(name for name in known if getattr(config, name))
    weights = [t for name, t in named.tensors.items() if name not in (OFFSETS, MEMBERS)]
    dtypes = _list(sorted({dtype_name(t.dtype) for t in weights}))
    rope = dict(config.rope_parameters)
    kind = rope.pop("rope_type")
    theta = rope.pop("rope_theta")
    width = f"width {config.hidden_size}"
    if config.hidden_size != config.target_hidden_size:
        width += f" (target {config.target_hidden_size})"
    heads = f"{config.num_heads} query heads and {config.num_kv_heads} key heads"
    embedding = "the target's"
    if EMBEDDING in named.tensors:
        embedding = "in the file; shared with the target where it is the same"
    vocabulary = f"{config.vocab_size}, all of which can be drafted"
    if config.draft_vocab_size < config.vocab_size:
        share = config.draft_vocab_size / config.vocab_size
        drafted = f"{config.draft_vocab_size} of {config.vocab_size}"
        vocabulary = f"{drafted} can be drafted ({share:.0%})"
    captures = "the final hidden state, after the last norm"
    if layers is not None:
        captures = f"the inputs of layers {_list(map(str, layers.inputs))} ({layers.reason})"
    elif checkpoint.layers is not None:
        captures = f"the inputs of layers {checkpoint.layers.default} (no ids given)"
    facts = {
        "drafter": f"{checkpoint.folder} ({', '.join(checkpoint.files)})",
        "head": _KINDS[config.arch] if isinstance(config, EagleHeadConfig) else config.kind,
        **(config.facts if isinstance(config, ParallelHeadConfig) else {}),
        "format": f"{checkpoint.format}; architectures: {_list(checkpoint.architectures)}",
        "tensors": f"{len(named.tensors)}, {sum(t.numel() for t in weights):,} weights, {dtypes}",
        "layer": f"{width}, feed-forward {config.intermediate_size}, {heads} of {config.head_dim}",
        "biases": _list(name for name in variants if "bias" in name),
        "norms": _list(name for name in variants if "norm" in name),
        "rope": _list([kind, f"theta {theta:g}", *(f"{k} {v}" for k, v in sorted(rope.items()))]),
        "vocabulary": vocabulary,
        "embedding": embedding,
        "captures": captures,
        "made for": checkpoint.verifier or "",
        "left aside": ", ".join(f"{name} ({why})" for name, why in named.left_aside.items()),
    }
    return {label: fact for label, fact in facts.items() if fact}


def _list(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"


def export_head(
    checkpoint: Checkpoint,
    format_name: str,
    folder: Path,
    target: PreTrainedConfig | None = None,
    read_table: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a checkpoint into ``folder`` in another format; tensors keep every bit.

    Layer ids are written the way the format counts. A checkpoint that names no layers leaves them
    to the default, which is the same in all engines. Known tensors that are not needed are not
    written. ``read_table`` returns the target's table of a name; it is needed where the format
    wants one and the checkpoint has none. The target's name is written where the format has a place
    for it.

    Raises:
        InvalidArgument: There is no such format, or the folder is not empty.
        DrafterMismatch: The format cannot express the head, or an embedding is missing.
    """
    if format_name not in set(FormatName):
        raise InvalidArgument("format", format_name, one_of(FormatName, format_name))
    name = FormatName(format_name)
    config = checkpoint.config
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument("directory", str(folder), "a folder that is empty or not there yet")
    if isinstance(config, EagleHeadConfig):
        check_holds(name, config)
    else:
        check_holds_block(name, config)
    tensors = dict(checkpoint.named.tensors)
    if name is FormatName.SPECULATORS:
        for table in {EMBEDDING, OUTPUT} - {*tensors}:
            if read_table is None:
                expected = f"the target's, which {name} heads carry; name the target"
                raise DrafterMismatch(table, None, expected)
            tensors[table] = read_table(table)
    # An EAGLE head's checkpoint that names no layers leaves them open.
    layers = None
    eagle = isinstance(config, EagleHeadConfig)
    if checkpoint.layers is not None and not (eagle and checkpoint.layers.ids is None):
        decoder = None if target is None else target.get_text_config(decoder=True)
        layers = checkpoint.layers.resolve(None if decoder is None else decoder.num_hidden_layers)
    contents = Contents(
        config=config,
        layers=None if layers is None else layers.inputs,
        dtype=tensors["fc.weight"].dtype,
        passed_on=checkpoint.passed_on,
        verifier=checkpoint.verifier if target is None else target.name_or_path,
        verifier_architectures=() if target is None else tuple(target.architectures or ()),
    )
    if isinstance(config, EagleHeadConfig):
        return write_head(folder, FORMATS[name], contents, tensors)
    return write_block(folder, name, contents, tensors)
