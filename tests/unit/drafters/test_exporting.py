import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.published_heads import HIDDEN, INPUTS, OUTPUTS, PUBLISHED, TABLE, TARGETS
from torch import Tensor

from eaglegbv.drafters.checkpoint import Checkpoint, export_head, fit, read_checkpoint
from eaglegbv.drafters.formats.read import FormatName
from eaglegbv.drafters.formats.write import check_holds
from eaglegbv.errors import DrafterMismatch, InvalidArgument

TARGET = TARGETS["llama"]()
TARGET.name_or_path, TARGET.architectures = "some/target", ["LlamaForCausalLM"]
FOR_TARGET = TARGET, lambda _: TABLE


def holds(form: FormatName, checkpoint: Checkpoint) -> bool:
    try:
        check_holds(form, checkpoint.config)
    except DrafterMismatch:
        return False
    return True


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_bytes = (t.contiguous().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def check_same(found: Checkpoint, source: Checkpoint, family: str, *, extra: set[str]) -> None:
    assert found.config == source.config
    tensors = found.named.tensors
    assert set(tensors) == set(source.named.tensors) | extra
    for name, tensor in source.named.tensors.items():
        assert same_bits(tensors[name], tensor), name
    target = TARGETS[family]()
    assert fit(found, target).config == fit(source, target).config


PAIRS = [(name, form) for name in sorted(PUBLISHED) for form in FormatName]


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_round_trips_keep_every_bit(name: str, form: FormatName, tmp_path: Path) -> None:
    published = PUBLISHED[name]()
    source = read_checkpoint(published.write(tmp_path / "source"))
    if not holds(form, source):
        with pytest.raises(DrafterMismatch, match=f"^format='{form}'"):
            export_head(source, form, tmp_path / "there", *FOR_TARGET)
        assert not (tmp_path / "there").exists()
        return

    export_head(source, form, tmp_path / "there", *FOR_TARGET)

    there = read_checkpoint(tmp_path / "there")
    assert there.format is form
    wants_table = form is FormatName.SPECULATORS and "embed_tokens.weight" not in published.tensors
    extra = {"embed_tokens.weight"} if wants_table else set()
    check_same(there, source, published.target, extra=extra)
    if wants_table:
        assert same_bits(there.named.tensors["embed_tokens.weight"], TABLE)
    export_head(there, source.format, tmp_path / "back")
    back = read_checkpoint(tmp_path / "back")
    assert back.format is source.format
    check_same(back, source, published.target, extra=extra)


def test_variants_each_format_holds(tmp_path: Path) -> None:
    kept = {form: set() for form in FormatName}
    for name, head in PUBLISHED.items():
        source = read_checkpoint(head().write(tmp_path / name))
        for form in FormatName:
            if holds(form, source):
                kept[form].add(name)
    eagle1 = {name for name in PUBLISHED if "eagle1" in name}
    normed = {"speculators_residual", "speculators_norms", "speculators_qwen3"}
    own = {"sglang_eagle31", "sglang_aux_norms"} | {n for n in PUBLISHED if "norm_before_fc" in n}
    assert kept[FormatName.EAGLE] == set(PUBLISHED) - normed - own - {"speculators_biases"}
    assert kept[FormatName.SGLANG] == set(PUBLISHED) - normed - {"speculators_biases"}
    assert kept[FormatName.SPECULATORS] == set(PUBLISHED) - eagle1


def stored(folder: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_what_sglang_reads(tmp_path: Path) -> None:
    head = PUBLISHED["speculators_residual"]()
    head.config["norm_before_residual"] = False
    export_head(read_checkpoint(head.write(tmp_path / "0")), "sglang", tmp_path / "sglang")
    config, tensors = stored(tmp_path / "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == OUTPUTS
    assert (config["draft_vocab_size"], config["tie_word_embeddings"]) == (24, False)
    assert config["max_position_embeddings"] == 128
    assert "midlayer.self_attn.q_proj.weight" in tensors
    eagle1 = read_checkpoint(PUBLISHED["eagle1_llama3"]().write(tmp_path / "1"))
    export_head(eagle1, "sglang", tmp_path / "2")
    config, tensors = stored(tmp_path / "2")
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert (config["bias"], config["rope_theta"]) == (False, 500000.0)
    assert "layers.0.self_attn.q_proj.weight" in tensors
    # SGLang gives fc a bias always, and a random one where the file has none.
    assert tensors["fc.bias"].tolist() == [0.0] * HIDDEN
    assert tensors["fc.bias"].dtype == torch.float16


def test_two_norms_before_fc_are_too_many_for_speculators(tmp_path: Path) -> None:
    head = PUBLISHED["sglang_eagle31"]()
    head.config["norm_before_fc"] = True
    head.tensors["input_norm.weight"] = torch.ones(3 * HIDDEN)
    source = read_checkpoint(head.write(tmp_path / "source"))
    with pytest.raises(DrafterMismatch, match="both norm_before_fc and fc_norm"):
        export_head(source, "speculators", tmp_path / "there", *FOR_TARGET)


def test_what_speculators_reads(tmp_path: Path) -> None:
    source = read_checkpoint(PUBLISHED["sglang_eagle3"]().write(tmp_path / "source"))
    export_head(source, "speculators", tmp_path / "there", *FOR_TARGET)
    config, tensors = stored(tmp_path / "there")
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == INPUTS
    verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert {"embed_tokens.weight", "layers.0.hidden_norm.weight", "d2t", "t2d"} <= set(tensors)
    source = read_checkpoint(PUBLISHED["speculators_qwen3"]().write(tmp_path / "qwen3"))
    export_head(source, "speculators", tmp_path / "again")
    layer = stored(tmp_path / "again")[0]["transformer_layer_config"]
    assert (layer["model_type"], layer["head_dim"], layer["rope_theta"]) == ("qwen3", 16, 1e6)


def test_embeddings_formats_and_folders_are_checked(tmp_path: Path) -> None:
    source = read_checkpoint(PUBLISHED["sglang_eagle3"]().write(tmp_path / "source"))
    with pytest.raises(DrafterMismatch, match=r"^embed_tokens\.weight=None.*name the target"):
        export_head(source, "speculators", tmp_path / "there")
    with pytest.raises(InvalidArgument, match=r"^format='gguf'.*one of eagle, sglang, speculators"):
        export_head(source, "gguf", tmp_path / "there")
    with pytest.raises(InvalidArgument, match=r"^directory="):
        export_head(source, "eagle", tmp_path / "source")
