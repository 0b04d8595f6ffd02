"""A target whose type transformers does not know, but SGLang does."""

import json
import shutil
from dataclasses import replace

import pytest
from support.cli import run
from support.sglang_engine import (
    NEEDS_SGLANG,
    PROMPT,
    pair_arguments,
    sglang_engine,
    three_tokens,
    token_ids,
)
from support.sglang_pair import SGLangPair
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

pytestmark = NEEDS_SGLANG


@pytest.fixture
def registered(pair: SGLangPair, tmp_path) -> SGLangPair:
    """The pair with its target under another name: Nanbeige of one loop is a Llama."""
    assert "nanbeige" not in CONFIG_MAPPING_NAMES  # transformers' own, not what SGLang adds
    target = tmp_path / "target"
    shutil.copytree(pair.target, target)
    config = json.loads((target / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"model_type": "nanbeige", "architectures": ["NanbeigeForCausalLM"], "num_loops": 1}
    config["rope_theta"] = rope["rope_theta"]
    (target / "config.json").write_text(json.dumps(config))
    return replace(pair, target=target)


def test_a_dry_run_reads_the_targets_sizes(registered, capsys):
    words = ("--drafter", str(registered.eagle1), "--dry-run", "--device=cpu")
    result = run(capsys, "serve", str(registered.target), "--backend=sglang", *words)
    assert result.status == 0, result.err
    assert f"--model-path {registered.target} --speculative-algorithm EAGLEGBV " in result.out
    config = registered.target / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 32'))
    assert (
        "target_hidden_size=64: expected the target's, 32"
        in run(capsys, "serve", str(registered.target), "--backend=sglang", *words).err
    )


def test_texts_follow_its_distribution(pair, registered):
    params = {"temperature": 1.0, "max_new_tokens": 5, "ignore_eos": True}
    with sglang_engine(**pair_arguments(registered, "eagle1", 3, 3)) as engine:
        answers = [
            answer
            for _ in range(2)
            for answer in engine.generate(input_ids=[PROMPT] * 240, sampling_params=params)
        ]
    assert three_tokens(pair, token_ids(answers)).p_value > 1e-5
    efficiency = [answer["meta_info"]["block_efficiency"] for answer in answers]
    assert sum(efficiency) / len(efficiency) > 1.1
