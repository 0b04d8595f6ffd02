"""``eaglegbv inspect`` and ``eaglegbv export``."""

from collections.abc import Callable

import pytest
from safetensors.torch import load_file
from support.cli import Result
from support.published_heads import PUBLISHED, make_target

from eaglegbv.loading import TINY, TINY_TARGET

Cli = Callable[..., Result]


def test_inspect_says_what_was_detected(cli):
    result = cli("inspect", "eagle3", "--target", "tiny")
    lines = dict(line.split("  ", 1) for line in result.out.splitlines() if "  " in line)
    facts = {label: fact.strip() for label, fact in lines.items()}
    assert facts["head"] == "EAGLE-3"
    assert facts["format"].startswith("eagle;")
    assert facts["vocabulary"].startswith("4096, all of which")
    assert facts["captures"].startswith(
        "the inputs of layers 2, 10, 17 (config.json says [2, 10, 17]"
    )
    assert facts["target"] == "fits"
    assert "SGLang and SpecForge count outputs" in result.out
    assert "forwards run natively" in result.out


def test_inspect_without_a_target(cli):
    result = cli("inspect", "eagle1")
    assert "EAGLE-1" in result.out
    assert "were not checked" in result.out
    assert "SGLang builds one all the same" in result.out


TRAPS = {
    "eagle3_llama31": ["2, L // 2 and L - 3"],
    "sglang_eagle3": ["config.json says [1, 3, 4]", "vLLM and speculators count inputs"],
    "sglang_eagle31": ["fc_norm, norm_output", "SpecForge"],
    "eagle1_vicuna": ["which vLLM would not load"],
    "eagle3_vicuna13b": ["num_hidden_layers is 40", "all of which can be drafted"],
    "speculators_norms": ["left aside", "verifier_lm_head.weight (the target's own is used)"],
    "eagle3_narrow": ["width 24 (target 32)", "in the file"],
    "specforge_sglang": ["llama3, theta 500000, factor 8.0"],
}


@pytest.mark.parametrize("name", sorted(TRAPS))
def test_inspect_tells_of_traps(name, cli, tmp_path):
    result = cli("inspect", str(PUBLISHED[name]().write(tmp_path)))
    for text in TRAPS[name]:
        assert text in result.out


def test_inspect_tells_of_what_the_target_adds(cli, tmp_path):
    head = PUBLISHED["eagle3_llama31"]()
    make_target(head.target).config.save_pretrained(tmp_path / "target")
    folder = head.write(tmp_path / "head")
    result = cli("inspect", str(folder), "--target", str(tmp_path / "target"))
    assert "the inputs of layers 2, 4, 5 (no ids in config.json" in result.out
    assert "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1" in result.out


def test_inspect_names_what_is_wrong(cli, tmp_path):
    result = cli(
        "inspect", "eagle3", "--target", str(PUBLISHED["eagle1_vicuna"]().write(tmp_path)), status=2
    )
    assert "config.json key vocab_size=4096" in result.err
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    result = cli("inspect", str(tmp_path), status=2)
    assert "pytorch_model.bin" in result.err


def test_export_writes_what_inspect_reads(cli, tmp_path):
    for form in ("eagle", "sglang", "speculators"):
        folder = tmp_path / form
        done = cli("export", "eagle3", str(folder), "--format", form, "--target", "tiny")
        assert str(folder) in done.out
        result = cli("inspect", str(folder), "--target", str(TINY_TARGET))
        assert f"{form}; " in result.out
        assert "the inputs of layers 2, 10, 17" in result.out
    exported = load_file(tmp_path / "speculators" / "model.safetensors")
    table = load_file(TINY_TARGET / "model.safetensors")["model.embed_tokens.weight"]
    assert exported["embed_tokens.weight"].equal(table)
    own = load_file(TINY / "eagle3" / "model.safetensors")
    assert exported["layers.0.mlp.up_proj.weight"].equal(own["midlayer.mlp.up_proj.weight"])


def test_export_refuses_what_would_be_lost(cli, tmp_path):
    head = PUBLISHED["speculators_residual"]().write(tmp_path / "c")
    result = cli("export", str(head), str(tmp_path / "d"), "--format", "sglang", status=2)
    assert "norm_before_residual" in result.err
    assert not (tmp_path / "d").exists()
