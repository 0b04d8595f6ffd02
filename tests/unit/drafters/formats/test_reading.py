import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import published_heads
from support.published_heads import HIDDEN, INPUTS, OUTPUTS, PUBLISHED, TABLE, TARGETS, VOCAB
from torch import Tensor

from eaglegbv.drafters.checkpoint import (
    export_head,
    fit,
    load_head,
    read_checkpoint,
    save_head,
)
from eaglegbv.drafters.eagle_model import Arch, EagleHead
from eaglegbv.drafters.formats.read import LAYER_SECTION, VARIANTS, FormatName
from eaglegbv.drafters.registry import files_in
from eaglegbv.errors import DrafterMismatch
from eaglegbv.output_layer import OutputLayer

ONE_EACH = ("eagle1_vicuna", "eagle3_narrow", "sglang_aux_norms", "speculators_qwen3")


def load(head: published_heads.Published, folder: Path) -> EagleHead:
    return loaded_for(head.target, head.write(folder))


def loaded_for(family: str, folder: Path) -> EagleHead:
    return load_head(
        folder,
        target_config=TARGETS[family](),
        target_embedding=TABLE,
        read_output=lambda: OutputLayer(TABLE),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def idle(stored: str, tensor: Tensor) -> bool:
    """Whether a tensor is known and not needed: the target's, or zeros that SGLang asks for."""
    return stored.startswith("verifier_") or (stored == "fc.bias" and not bool(tensor.any()))


def our_name(stored: str) -> str:
    for prefix in ("midlayer.", "layers.0."):
        stored = stored.replace(prefix, "layer.")
    for i, where in enumerate(("low", "mid", "high")):
        stored = stored.replace(f"aux_norm_{where}", f"fc_norm.{i}")
    return stored


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_tensor_lands_where_it_belongs(name: str, tmp_path: Path) -> None:
    head = PUBLISHED[name]()
    loaded = load(head, tmp_path)
    not_weights = {"d2t", "t2d", "embed_tokens.weight"}
    weights = {
        our_name(stored): tensor
        for stored, tensor in head.tensors.items()
        if stored not in not_weights and not idle(stored, tensor)
    }
    state = loaded.state_dict()
    assert set(state) == set(weights)
    for key, tensor in weights.items():
        assert torch.equal(state[key], tensor.float()), key
    own = head.tensors.get("embed_tokens.weight")
    assert torch.equal(loaded.embedding, TABLE if own is None else own.float())
    if loaded.config.draft_vocab_size == VOCAB:
        assert torch.equal(loaded.draft_to_target, torch.arange(VOCAB))
    else:
        assert torch.equal(loaded.draft_to_target, head.tensors["t2d"].nonzero().squeeze(1))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("eagle")])
def test_a_saved_head_is_the_same(name: str, tmp_path: Path) -> None:
    head = PUBLISHED[name]()
    if name != "eagle3_narrow":  # the target's is not saved
        head.tensors.pop("embed_tokens.weight", None)
    first = load(head, tmp_path / "first")
    save_head(first, tmp_path / "second", torch.float32)
    again = loaded_for(head.target, tmp_path / "second")
    assert again.config == first.config
    for which in ("embedding", "draft_to_target"):
        assert torch.equal(getattr(again, which), getattr(first, which))
    assert again.state_dict().keys() == first.state_dict().keys()
    for key, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert not any(parameter.requires_grad for parameter in again.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_of_the_target_embedding_is_shared(dtype, tmp_path, caplog) -> None:
    head = PUBLISHED["eagle3_vllm"]()
    head.tensors["embed_tokens.weight"] = TABLE.to(dtype)
    with caplog.at_level(logging.INFO):
        assert load(head, tmp_path).embedding is TABLE
    assert "embed_tokens.weight is the target's" in caplog.text


def test_an_embedding_of_its_own_is_kept_and_told(tmp_path, caplog) -> None:
    head = PUBLISHED["eagle3_vllm"]()
    head.tensors["embed_tokens.weight"] = TABLE + 0.1
    assert torch.equal(load(head, tmp_path).embedding, TABLE + 0.1)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "made for this target" in record.getMessage()


@pytest.mark.parametrize(
    ("head", "form", "arch", "variants"),
    [
        ("eagle1_vicuna", FormatName.EAGLE, Arch.EAGLE1, {"fc_bias"}),
        ("eagle3_llama31", FormatName.EAGLE, Arch.EAGLE3, set()),
        ("sglang_eagle31", FormatName.SGLANG, Arch.EAGLE3, {"fc_norm", "norm_output"}),
        ("sglang_aux_norms", FormatName.SGLANG, Arch.EAGLE3, {"fc_norm"}),
        (
            "speculators_norms",
            FormatName.SPECULATORS,
            Arch.EAGLE3,
            {"norm_before_residual", "fc_norm", "norm_output"},
        ),
        ("speculators_norm_before_fc", FormatName.SPECULATORS, Arch.EAGLE3, {"norm_before_fc"}),
        ("sglang_eagle1_zeros", FormatName.SGLANG, Arch.EAGLE1, set()),
        ("speculators_qwen3", FormatName.SPECULATORS, Arch.EAGLE3, {"qk_norm"}),
    ],
)
def test_format_head_and_variants(head, form, arch, variants, tmp_path) -> None:
    found = read_checkpoint(PUBLISHED[head]().write(tmp_path))
    assert (found.format, found.config.arch) == (form, arch)
    assert {name for name in VARIANTS if getattr(found.config, name)} == variants


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded_files(suffix: str, tmp_path: Path) -> None:
    head = PUBLISHED["sglang_eagle3"]()
    head.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    save = save_file if suffix == "safetensors" else torch.save
    shards = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    names = sorted(head.tensors)
    halves = (names[:7], names[7:])
    for file, half in zip(shards, halves, strict=True):
        save({name: head.tensors[name] for name in half}, tmp_path / file)
    index = {name: file for file, half in zip(shards, halves, strict=True) for name in half}
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    found = read_checkpoint(tmp_path)
    assert found.files == tuple(shards)
    assert len(found.named.tensors) == len(head.tensors)
    (tmp_path / shards[1]).unlink()
    with pytest.raises(DrafterMismatch, match=shards[1]):
        read_checkpoint(tmp_path)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemError('code of a pickle ran')",)


def test_pickled_code_does_not_run(tmp_path: Path) -> None:
    head = PUBLISHED["eagle3_llama31"]()
    file = head.write(tmp_path) / "pytorch_model.bin"
    for write in (
        lambda: torch.save({**head.tensors, "more": _Evil()}, file),
        lambda: file.write_bytes(pickle.dumps(_Evil(), protocol=2)),
    ):
        write()
        with pytest.raises(DrafterMismatch, match=r"pytorch_model\.bin.*tensors alone"):
            read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("cut", [3, 2000])
def test_truncated_files_are_named(name: str, cut: int, tmp_path: Path) -> None:
    head = PUBLISHED[name]()
    head.write(tmp_path)
    file = tmp_path / ("pytorch_model.bin" if head.pickled else "model.safetensors")
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(DrafterMismatch, match=f"{file.name}.*complete"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ONE_EACH)
def test_each_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    complete = PUBLISHED[name]()
    narrow = complete.config.get("target_hidden_size") is not None
    optional = {"t2d"} if narrow else {"t2d", "embed_tokens.weight"}
    needed = {key for key, tensor in complete.tensors.items() if not idle(key, tensor)}
    for missing in sorted(needed - optional):
        head = PUBLISHED[name]()
        head.tensors = {key: t for key, t in complete.tensors.items() if key != missing}
        with pytest.raises(DrafterMismatch) as caught:
            read_checkpoint(head.write(tmp_path))
        today = our_name(missing).replace("layer.", "")
        assert missing in str(caught.value) or today in caught.value.argument, missing


def test_a_head_with_d2t_alone_is_read_and_exported_with_t2d(tmp_path: Path) -> None:
    head = PUBLISHED["eagle3_llama31"]()
    members = head.tensors.pop("t2d")  # NVIDIA's ModelOpt writes none
    found = read_checkpoint(head.write(tmp_path / "there"))
    assert torch.equal(found.named.tensors["t2d"], members)
    assert found.draft_to_target is not None
    assert torch.equal(found.draft_to_target, members.nonzero().squeeze(1))
    assert "t2d follows from d2t" in str(found.remarks)
    export_head(found, "eagle", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["t2d"], members)


@pytest.mark.parametrize("name", ONE_EACH)
def test_wrong_tensors_are_named(name: str, tmp_path: Path) -> None:
    def refused(changes: dict[str, Tensor], expected: str) -> None:
        head = PUBLISHED[name]()
        head.tensors |= changes
        with pytest.raises(DrafterMismatch) as caught:
            read_checkpoint(head.write(tmp_path))
        assert caught.value.argument == expected

    tensors = PUBLISHED[name]().tensors
    prefix = "midlayer." if "midlayer.mlp.up_proj.weight" in tensors else "layers.0."
    up = f"{prefix}mlp.up_proj.weight"
    refused({up: tensors[up].to(torch.int8)}, up)
    refused({up: tensors[up].to(torch.float8_e4m3fn)}, up)
    refused({up: tensors[up][:-1].clone()}, up)
    refused({"extra.weight": torch.zeros(2)}, "extra.weight")
    refused({"layers.1.mlp.up_proj.weight": tensors[up].clone()}, "layers.1.mlp.up_proj.weight")
    if "d2t" in tensors:
        size = len(tensors["d2t"])
        refused({"d2t": tensors["d2t"].int()}, "d2t")
        refused({"d2t": tensors["d2t"] + VOCAB}, "d2t")
        refused({"d2t": tensors["d2t"] - VOCAB}, "d2t")
        refused({"d2t": torch.full((size,), 3) - torch.arange(size)}, "d2t")
        refused({"t2d": ~tensors["t2d"]}, "t2d")


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_head_of_another_target_is_refused(name: str, tmp_path: Path) -> None:
    head = PUBLISHED[name]()
    checkpoint = read_checkpoint(head.write(tmp_path))
    for key in ("vocab_size", "hidden_size"):
        target = TARGETS[head.target]()
        setattr(target, key, getattr(target, key) + 8)
        with pytest.raises(DrafterMismatch, match=f"key (target_)?{key}="):
            fit(checkpoint, target)


REFUSED = [
    # a head, changes to its configuration, what the message names
    *(
        ("sglang_eagle3", {key: value}, shown)
        for key, value, shown in (
            ("hidden_size", None, "hidden_size"),
            ("vocab_size", "40", "vocab_size"),
            ("draft_vocab_size", VOCAB + 1, f"^draft_vocab_size={VOCAB + 1}"),
            ("hidden_act", "gelu", "hidden_act"),
            ("bias", "yes", "bias"),
            ("eagle_config", [2], "eagle_config"),
            ("eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state"),
            ("num_aux_hidden_states", 4, "num_aux_hidden_states"),
            ("layer_types", ["sliding_attention"], "layer_types"),
            ("mlp_bias", True, "mlp_bias"),
            ("rope_scaling", {"rope_type": "linear"}, "rope_scaling"),
            ("rope_parameters", {"full_attention": {"rope_theta": 1e6}}, "kinds of layers"),
            ("rope_theta", "10000", "rope_theta"),
            ("rms_norm_eps", True, "rms_norm_eps"),
            ("architectures", "LlamaForCausalLM", "architectures"),
            ("eagle_aux_hidden_state_layer_ids", INPUTS, "eagle_aux_hidden_state_layer_ids"),
            ("fc_norm", True, "fc_norm.0.weight"),
        )
    ),
    # Keys and tensors that contradict each other.
    ("eagle1_llama3", {"bias": True}, "fc.bias"),
    ("eagle1_llama3", {"bias": None}, "fc.bias"),
    ("eagle1_vicuna", {"bias": False}, "fc.bias"),
    ("eagle1_qwen2", {"qkv_bias": False}, "layers.0.self_attn.k_proj.bias"),
    ("eagle1_llama3", {"qkv_bias": True}, "layers.0.self_attn.q_proj.bias"),
    ("sglang_eagle31", {"fc_norm": False}, "fc_norm.0.weight"),
    ("speculators_norm_before_fc", {"norm_before_fc": False}, "input_norm.weight"),
    ("speculators_plain", {"norm_before_fc": True}, "input_norm.weight"),
    *(
        ("speculators_plain", {"transformer_layer_config": layer}, shown)
        for layer, shown in (
            ({"model_type": "qwen3"}, "q_norm"),
            ({"model_type": "qwen3_next"}, "transformer_layer_config.model_type"),
            ({"attention_bias": True}, "proj.bias"),
            ({"hidden_size": None}, "transformer_layer_config.hidden_size"),
        )
    ),
]


@pytest.mark.parametrize(("head", "changes", "shown"), REFUSED)
def test_wrong_keys_are_named(head, changes, shown, tmp_path) -> None:
    published = PUBLISHED[head]()
    for key, value in changes.items():
        inner = published.config.get(key) if key == LAYER_SECTION else None
        published.config[key] = value if inner is None else inner | value
    with pytest.raises(DrafterMismatch, match=shown):
        read_checkpoint(published.write(tmp_path))


@pytest.mark.parametrize(
    ("name", "changes", "shown"),
    [
        ("sglang_aux_norms", {"fc_norm.0.weight": torch.ones(HIDDEN)}, r"fc_norm\.0|aux_norm_low"),
        # of a whole model
        ("sglang_eagle3", None, "an EAGLE head"),
    ],
)
def test_tensors_of_something_else_are_refused(name, changes, shown, tmp_path) -> None:
    head = PUBLISHED[name]()
    whole = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}
    head.tensors = whole if changes is None else head.tensors | changes
    with pytest.raises(DrafterMismatch, match=shown):
        read_checkpoint(head.write(tmp_path))


LAYER_IDS = [
    # stored ids, whose file, the key that settles it, layers read, whether that is a guess
    (None, "sglang_eagle3", None, INPUTS, False),
    (INPUTS, "sglang_eagle3", None, INPUTS, False),
    (OUTPUTS, "sglang_eagle3", None, INPUTS, False),
    ([1, 3, 6], "sglang_eagle3", None, [2, 4, 7], True),
    ([1, 3, 6], "eagle3_llama31", None, [1, 3, 6], True),
    ([1, 3, 6], "sglang_eagle3", "inputs", [1, 3, 6], False),
    ([1, 3, 6], "eagle3_llama31", "outputs", [2, 4, 7], False),
    (OUTPUTS, "sglang_eagle3", "inputs", OUTPUTS, False),
    (INPUTS, "speculators_residual", None, INPUTS, False),
    ([1, 3, 6], "speculators_residual", None, [1, 3, 6], True),
]


@pytest.mark.parametrize(("ids", "head", "stated", "reads", "guessed"), LAYER_IDS)
def test_layer_ids(ids, head, stated, reads, guessed, tmp_path, caplog) -> None:
    published = PUBLISHED[head]()
    if "eagle_aux_hidden_state_layer_ids" in published.config:
        published.config["eagle_aux_hidden_state_layer_ids"] = ids
    else:
        keys = {"eagle_aux_hidden_state_layer_ids": ids, "layer_ids_are": stated}
        published.config["eagle_config"] = {k: v for k, v in keys.items() if v is not None}

    with caplog.at_level(logging.INFO):
        loaded = load(published, tmp_path)

    assert list(loaded.config.feature_layers) == reads
    assert f"reads the inputs of layers {reads}" in caplog.text
    assert (str(ids) if ids else "no ids") in caplog.text
    warned = [r for r in caplog.records if "layer_ids_are" in r.getMessage()]
    assert bool(warned) == guessed


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([1, 3, published_heads.LAYERS - 1], "from 1 to 7"),
        ([0, 2], "fc.weight"),
        ([], "eagle_aux_hidden_state_layer_ids"),
        ([True, 2, 3], "eagle_aux_hidden_state_layer_ids"),
        ("2,4,5", "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_impossible_layer_ids_are_refused(ids: object, shown: str, tmp_path: Path) -> None:
    head = PUBLISHED["sglang_eagle3"]()
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    with pytest.raises(DrafterMismatch, match=shown):
        fit(read_checkpoint(head.write(tmp_path)), TARGETS["llama"]())


REORDERED = {"d2t": torch.arange(VOCAB).flip(0) - torch.arange(VOCAB)}


@pytest.mark.parametrize(
    ("name", "left_out", "changes", "kind", "said"),
    [
        ("speculators_plain", "norm_before_residual", {}, "assumed", "norm_before_residual"),
        ("specforge_hf", "", {"tensors": REORDERED}, "assumed", "d2t reorders"),
        ("eagle1_vicuna", "", {"config": {"bias": True}}, "warning", "biases of attention"),
    ],
)
def test_what_the_files_leave_open_is_said(name, left_out, changes, kind, said, tmp_path) -> None:
    head = PUBLISHED[name]()
    assert said not in str(read_checkpoint(head.write(tmp_path)).remarks)
    head.config.pop(left_out, None)
    for part, new in changes.items():
        getattr(head, part).update(new)
    found = read_checkpoint(head.write(tmp_path))
    assert [remark.kind for remark in found.remarks if said in remark.text] == [kind]
    assert found.config.norm_before_residual is False
    assert (found.draft_to_target is None) == (name != "speculators_plain")


def test_safe_file_comes_before_a_pickled_one(tmp_path: Path) -> None:
    head = PUBLISHED["eagle3_llama31"]()
    head.write(tmp_path)
    head.pickled = False
    found = read_checkpoint(head.write(tmp_path))
    assert found.files == ("model.safetensors",)
    assert any("pytorch_model.bin" in remark.text for remark in found.remarks)


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2], {"fc.weight": 3}])
def test_pickled_files_of_something_else(content: object, tmp_path: Path) -> None:
    PUBLISHED["eagle3_llama31"]().write(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(DrafterMismatch, match="tensor"):
        read_checkpoint(tmp_path)


def test_layer_of_speculators_without_a_type_goes_by_its_tensors(tmp_path: Path) -> None:
    for i, head in enumerate((PUBLISHED["speculators_plain"](), PUBLISHED["speculators_qwen3"]())):
        del head.config["transformer_layer_config"]["model_type"]
        assert read_checkpoint(head.write(tmp_path / str(i))).config.qk_norm is bool(i)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "an EAGLE head, not an MTP head"),
        ({"model_type": "qwen3_next_mtp"}, "an EAGLE head, not an MTP head"),
        ({"speculators_model_type": "eagle"}, "an EAGLE-3 head .* format, not EAGLE-1"),
        ({"speculators_model_type": "peagle"}, "an EAGLE-3 head .* format, not 'peagle'"),
    ],
)
def test_heads_of_other_kinds_are_called_so(changes, said, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changes))
    for read in (files_in, read_checkpoint):
        with pytest.raises(DrafterMismatch, match=f"^drafter='.*': expected {said}"):
            read(tmp_path)
