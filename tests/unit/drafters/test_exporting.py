"""Exported heads: the same bits, the same meaning, in every format that can hold them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.published_heads import (
    HIDDEN,
    INPUTS,
    LAYERS,
    OUTPUTS,
    PUBLISHED,
    TARGETS,
    VOCAB,
)
from torch import Tensor

from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.checkpoint import Checkpoint, ExportTarget, export_head, fit, read_checkpoint
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.formats.read import FORMATS, FormatName
from eaglegbv.drafters.formats.write import check_holds
from eaglegbv.engine import Engine
from eaglegbv.errors import DrafterMismatch, InvalidArgument
from eaglegbv.loading import TINY, TINY_TARGET, load_pair
from eaglegbv.sampling import SamplingParams

TABLE = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(8))
TARGET = ExportTarget("some/target", ("LlamaForCausalLM",), LAYERS, lambda: TABLE)


def holds(form: FormatName, checkpoint: Checkpoint) -> bool:
    try:
        check_holds(FORMATS[form], checkpoint.config)
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
            export_head(source, form, tmp_path / "there", TARGET)
        assert not (tmp_path / "there").exists()
        return

    export_head(source, form, tmp_path / "there", TARGET)

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


def test_a_way_round_all_formats(tmp_path: Path) -> None:
    published = PUBLISHED["sglang_eagle3"]()
    first = checkpoint = read_checkpoint(published.write(tmp_path / "0"))
    order = ("eagle", "speculators", "sglang", "speculators", "eagle", "sglang")
    for i, form in enumerate(order, start=1):
        export_head(checkpoint, form, tmp_path / str(i), TARGET)
        checkpoint = read_checkpoint(tmp_path / str(i))
    check_same(checkpoint, first, published.target, extra={"embed_tokens.weight"})


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
    eagle3 = read_checkpoint(speculators_without_variants(tmp_path / "source"))
    export_head(eagle3, "sglang", tmp_path / "sglang")
    config, tensors = stored(tmp_path / "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == OUTPUTS
    assert (config["draft_vocab_size"], config["tie_word_embeddings"]) == (24, False)
    assert config["max_position_embeddings"] == 128
    assert "midlayer.self_attn.q_proj.weight" in tensors
    export_head(
        read_checkpoint(PUBLISHED["eagle1_llama3"]().write(tmp_path / "1")),
        "sglang",
        tmp_path / "2",
    )
    config, tensors = stored(tmp_path / "2")
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert (config["bias"], config["rope_theta"]) == (False, 500000.0)
    assert "layers.0.self_attn.q_proj.weight" in tensors
    # SGLang gives fc a bias always, and a random one where the file has none.
    assert tensors["fc.bias"].tolist() == [0.0] * HIDDEN
    assert tensors["fc.bias"].dtype == torch.float16


@pytest.mark.parametrize("form", ["eagle", "sglang"])
def test_true_bias_is_left_to_the_default(form: str, tmp_path: Path) -> None:
    source = read_checkpoint(PUBLISHED["eagle1_qwen2"]().write(tmp_path / "source"))
    export_head(source, form, tmp_path / "there")
    config, tensors = stored(tmp_path / "there")
    assert "bias" not in config  # SGLang takes a true one for biases of attention
    assert config["qkv_bias"] is True
    assert tensors["fc.bias"].any()
    if form == "sglang":
        assert config["architectures"] == ["Qwen2ForCausalLMEagle"]
        assert config["model_type"] == "qwen2"


def test_two_norms_before_fc_are_too_many_for_speculators(tmp_path: Path) -> None:
    head = PUBLISHED["sglang_eagle31"]()
    head.config["norm_before_fc"] = True
    head.tensors["input_norm.weight"] = torch.ones(3 * HIDDEN)
    source = read_checkpoint(head.write(tmp_path / "source"))
    with pytest.raises(DrafterMismatch, match="both norm_before_fc and fc_norm"):
        export_head(source, "speculators", tmp_path / "there", TARGET)


def test_speculators_heads_keep_the_name_of_their_target(tmp_path: Path) -> None:
    source = read_checkpoint(PUBLISHED["speculators_residual"]().write(tmp_path / "source"))
    assert source.verifier == "meta-llama/Llama-3.1-8B-Instruct"
    export_head(source, "speculators", tmp_path / "there")
    assert read_checkpoint(tmp_path / "there").verifier == source.verifier


def speculators_without_variants(folder: Path) -> Path:
    head = PUBLISHED["speculators_residual"]()
    head.config["norm_before_residual"] = False
    return head.write(folder)


def test_what_speculators_reads(tmp_path: Path) -> None:
    source = read_checkpoint(PUBLISHED["sglang_eagle3"]().write(tmp_path / "source"))
    export_head(source, "speculators", tmp_path / "there", TARGET)
    config, tensors = stored(tmp_path / "there")
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == INPUTS
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert {"embed_tokens.weight", "layers.0.hidden_norm.weight", "d2t", "t2d"} <= set(tensors)
    source = read_checkpoint(PUBLISHED["speculators_qwen3"]().write(tmp_path / "qwen3"))
    export_head(source, "speculators", tmp_path / "again")
    layer = stored(tmp_path / "again")[0]["transformer_layer_config"]
    assert (layer["model_type"], layer["head_dim"], layer["rope_theta"]) == ("qwen3", 16, 1e6)


def test_layers_left_open_stay_open(tmp_path: Path) -> None:
    source = read_checkpoint(PUBLISHED["eagle3_llama31"]().write(tmp_path / "source"))
    for form in FormatName:
        export_head(source, form, tmp_path / form, TARGET)
        found = read_checkpoint(tmp_path / form)
        assert found.layers is not None
        assert found.layers.ids is None


def test_an_export_without_its_embedding_is_refused(tmp_path: Path) -> None:
    source = read_checkpoint(PUBLISHED["sglang_eagle3"]().write(tmp_path / "source"))
    with pytest.raises(DrafterMismatch, match=r"^embed_tokens\.weight=None.*name the target"):
        export_head(source, "speculators", tmp_path / "there")


def test_formats_and_folders_are_checked(tmp_path: Path) -> None:
    source = read_checkpoint(PUBLISHED["sglang_eagle3"]().write(tmp_path / "source"))
    with pytest.raises(InvalidArgument, match=r"^format='gguf'.*one of eagle, sglang, speculators"):
        export_head(source, "gguf", tmp_path / "there")
    with pytest.raises(InvalidArgument, match=r"^directory="):
        export_head(source, "eagle", tmp_path / "source")


@pytest.mark.parametrize(
    ("drafter", "forms"),
    [("eagle1", ["eagle", "sglang"]), ("eagle3", ["eagle", "sglang", "speculators"])],
)
def test_packaged_heads_draft_the_same_tokens_in_every_format(
    drafter: str, forms: list[str], tmp_path: Path
) -> None:
    source = read_checkpoint(TINY / drafter)
    assert source.config.arch is Arch(drafter)
    table = load_file(TINY_TARGET / "model.safetensors")["model.embed_tokens.weight"]
    target = ExportTarget(str(TINY_TARGET), ("LlamaForCausalLM",), 12, lambda: table)
    for form in forms:
        export_head(source, form, tmp_path / form, target)

    runs = [run(folder) for folder in (TINY / drafter, *(tmp_path / form for form in forms))]

    assert all(found == runs[0] for found in runs)
    assert runs[0][1] > 0


def run(folder: Path) -> tuple[list[int], int, int]:
    """Return the tokens of a sampled text, and how many were drafted and accepted."""
    pair = load_pair(TINY_TARGET, folder, slots=512, dtype=torch.float32, device="cpu")
    assert pair.drafter is not None
    engine = Engine(pair.target, pair.drafter, EngineConfig(kv_slots=512))
    plan = Plan(verifier="otbv", paths=2, depth=4)
    request = engine.add(
        [0, 300, 200, 100], SamplingParams(temperature=0.7, max_tokens=20, seed=1), plan
    )
    while engine.has_work:
        engine.step()
    return request.token_ids, request.metrics.accepted_tokens, request.metrics.drafted_nodes
