"""Formats of block drafters: what is read, refused, reported and written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.published_blocks import BLOCKS, HIDDEN, LAYERS, VOCAB, Block, make_target
from torch import Tensor

from eaglegbv.drafters.checkpoint import export_head, fit, inspect_head, read_checkpoint, save_head
from eaglegbv.drafters.eagle_model import HeadConfig
from eaglegbv.drafters.formats.read import FormatName
from eaglegbv.drafters.parallel_model import ParallelHead, ParallelHeadConfig, Sight
from eaglegbv.errors import DrafterMismatch
from eaglegbv.output_layer import OutputLayer

TARGET = make_target().config
TABLES = {
    name: torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("embed_tokens.weight", "lm_head.weight"))
}
HOMES = {
    "dflash": FormatName.DFLASH,
    "dflash causal": FormatName.DFLASH,
    "dflash2": FormatName.DFLASH,
    "dspark": FormatName.DSPARK,
    "dspark gated": FormatName.DSPARK,
    "speculators dflash": FormatName.SPECULATORS,
    "speculators dspark": FormatName.SPECULATORS,
}
HELD = {
    "dflash": {FormatName.DFLASH, FormatName.DSPARK, FormatName.SPECULATORS},
    "dflash causal": {FormatName.SPECULATORS},
    "dflash2": {FormatName.DFLASH},
    "dspark": {FormatName.DSPARK, FormatName.SPECULATORS},
    "dspark gated": {FormatName.DSPARK, FormatName.SPECULATORS},
    "speculators dflash": {FormatName.SPECULATORS},
    "speculators dspark": {FormatName.SPECULATORS},
}
"""The formats whose readers would lose nothing of a drafter."""


def read_config(block: Block, folder: Path) -> ParallelHeadConfig:
    config = read_checkpoint(block.write(folder)).config
    assert isinstance(config, ParallelHeadConfig)
    return config


@pytest.mark.parametrize("name", BLOCKS)
def test_files_are_read_as_what_they_mean(name, tmp_path):
    block = BLOCKS[name]()
    checkpoint = read_checkpoint(block.write(tmp_path))
    assert checkpoint.format is HOMES[name]
    config = fit(checkpoint, TARGET).config
    assert isinstance(config, ParallelHeadConfig)
    assert config.feature_layers == tuple(block.inputs)
    pairs = zip(block.windows, block.causal, strict=True)
    assert config.sights == tuple(Sight(window, causal) for window, causal in pairs)
    assert config.first_row == block.first
    assert (config.conv_kernel_size, config.selector_top_k) == (block.taps, block.top_k)
    assert config.markov_gate is block.gated


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("form", FormatName)
@pytest.mark.parametrize("name", BLOCKS)
def test_exports_keep_every_bit_or_say_what_would_be_lost(name, form, tmp_path):
    source = read_checkpoint(BLOCKS[name]().write(tmp_path / "source"))
    there = tmp_path / "there"
    if form not in HELD[name]:
        with pytest.raises(DrafterMismatch, match=f"^format='{form}': expected a format that"):
            export_head(source, form, there, TARGET, TABLES.__getitem__)
        assert not there.exists()
        return
    export_head(source, form, there, TARGET, TABLES.__getitem__)
    found = read_checkpoint(there)
    assert found.format is form
    known = source.named.tensors
    added = set(found.named.tensors) - set(known)
    assert added == (set(TABLES) - set(known) if form is FormatName.SPECULATORS else set())
    for tensor_name, tensor in found.named.tensors.items():
        assert bits(tensor) == bits(known.get(tensor_name, TABLES.get(tensor_name)))
    assert without_output(fit(found, TARGET).config) == without_output(fit(source, TARGET).config)


def without_output(config: HeadConfig) -> dict[str, Any]:
    """What a head computes, but for whose output layer it takes."""
    facts = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return facts | {"own_output": None}


def test_exports_that_need_the_target_say_so(tmp_path):
    source = read_checkpoint(BLOCKS["dflash causal"]().write(tmp_path / "1"))
    with pytest.raises(DrafterMismatch, match="the target's name, as the file names none"):
        export_head(source, "speculators", tmp_path / "out", None, TABLES.__getitem__)
    source = read_checkpoint(BLOCKS["dspark"]().write(tmp_path / "2"))
    with pytest.raises(DrafterMismatch, match=r"weight=None.*name the target"):
        export_head(source, "speculators", tmp_path / "out")


@pytest.mark.parametrize("rank", [0, 6])
def test_heads_are_saved_as_dflash_or_dspark(rank, tmp_path):
    model = make_target()
    config = read_config(BLOCKS["dspark"](), tmp_path / "source")
    facts = {name: getattr(config, name) for name in config.__dataclass_fields__}
    facts |= {"markov_rank": rank, "feature_layers": (2, 4, 6)}
    head = ParallelHead(
        ParallelHeadConfig(**facts),
        model.get_input_embeddings().weight.detach(),
        OutputLayer.of(model),
    )
    save_head(head, tmp_path / "saved", torch.float32)
    found = read_checkpoint(tmp_path / "saved")
    assert found.format is (FormatName.DSPARK if rank else FormatName.DFLASH)
    assert fit(found, TARGET).config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.named.tensors[name], tensor)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dspark", {"markov_head_type": "rnn"}, "markov_head_type='rnn'"),
    ("dspark", {"architectures": ["Gemma4DSparkModel"]}, "architectures=.*Qwen3DSparkModel"),
    ("dflash", {"projector_type": "domino"}, "projector_type='domino'"),
    ("dflash", {"dflash_config.projector_type": "domino"}, "projector_type='domino'"),
    ("dflash", {"dflash_config.attention_sink_bias": True}, "attention_sink_bias=True"),
    ("dflash", {"dflash_config.attention_value_scale": 2.0}, r"attention_value_scale=2\.0"),
    ("dflash", {"quantization_config": {"quant_algo": "W4A16"}}, "quantization_config="),
    ("dflash", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("dflash", {"layer_types": ["full_attention"]}, "layer_types="),
    ("dflash", {"layer_types": ["linear_attention"] * 2}, "layer_types="),
    ("dflash", {"layer_types": ["sliding_attention"] * 2}, "sliding_window=None"),
    ("dflash", {"dflash_config.mask_token_id": VOCAB}, f"mask_token_id={VOCAB}"),
    ("dflash", {"dflash_config.mask_token_id": None}, "mask_token_id"),
    ("dflash", {"block_size": 1}, "block_size=1"),
    ("dflash2", {"dflash_config.conv_group_size": 5}, "conv_group_size=5"),
    (
        "speculators dflash",
        {"speculators_model_type": "peagle"},
        "DFlash or DSpark one.* not 'peagle'",
    ),
    ("speculators dflash", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids=None"),
    ("speculators dspark", {"markov_head_type": "rnn"}, "markov_head_type='rnn'"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_known_is_refused_by_its_name(name, changes, message, tmp_path):
    block = BLOCKS[name]()
    for key, value in changes.items():
        section, _, inner = key.rpartition(".")
        keys = block.files.config[section] if section else block.files.config
        keys[inner] = value
        if value is None:
            del keys[inner]
    with pytest.raises(DrafterMismatch, match=message):
        read_checkpoint(block.write(tmp_path))


def test_tensors_and_files_that_nothing_reads_are_refused(tmp_path):
    block = BLOCKS["dspark"]()
    block.files.tensors["markov_head.joint_proj.weight"] = torch.zeros(1)
    with pytest.raises(DrafterMismatch, match=r"markov_head\.joint_proj\.weight"):
        read_checkpoint(block.write(tmp_path / "1"))
    block = BLOCKS["dflash"]()
    del block.files.tensors["layers.1.self_attn.q_norm.weight"]
    with pytest.raises(DrafterMismatch, match=r"layers\.1\.self_attn\.q_norm\.weight=None"):
        read_checkpoint(block.write(tmp_path / "2"))
    block = BLOCKS["dflash"]()
    block.files.tensors["fc.weight"] = block.files.tensors["encoder.fc.weight"].clone()
    with pytest.raises(DrafterMismatch, match="a single tensor of this meaning"):
        read_checkpoint(block.write(tmp_path / "3"))
    folder = BLOCKS["dflash"]().write(tmp_path / "4")
    torch.save({}, folder / "mask_embedding.pt")
    with pytest.raises(DrafterMismatch, match=r"mask_embedding\.pt"):
        read_checkpoint(folder)
    block = BLOCKS["dflash"]()
    block.files.config["vocab_size"] = VOCAB + 8
    with pytest.raises(DrafterMismatch, match="vocab_size"):
        fit(read_checkpoint(block.write(tmp_path / "5")), TARGET)
    block = BLOCKS["dflash"]()
    block.files.config["dflash_config"]["target_layer_ids"] = [1, 3, LAYERS]
    with pytest.raises(DrafterMismatch, match="inputs of layers from 1 to"):
        fit(read_checkpoint(block.write(tmp_path / "6")), TARGET)


TOLD = {
    "dflash": ["block drafter", "levels", "8, independent", "inputs of layers 2, 4, 6"],
    "dflash causal": ["causal in layers: 1", "windows", "spreads evenly", "causal within a block"],
    "dflash2": ["linked by scores of the 6 best candidates"],
    "dspark": ["linked by a term of rank 10", "confidence_head.proj.weight (drafts end by"],
    "dspark gated": ["linked by a gated term of rank 10"],
    "speculators dspark": ["24 of 40 can be drafted", "layer ids count inputs", "some/target"],
}


@pytest.mark.parametrize("name", TOLD)
def test_reports_tell_of_blocks_and_traps(name, tmp_path):
    checkpoint = read_checkpoint(BLOCKS[name]().write(tmp_path))
    report = inspect_head(checkpoint, fit(checkpoint, TARGET))
    for text in TOLD[name]:
        assert text in report
    assert inspect_head(checkpoint, None)
