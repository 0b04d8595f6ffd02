"""Drafters by folder and name, and what the hub has not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from httpx import ConnectError, Request, Response
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from support.block_drafter import BlockDrafter, BlockFiles
from support.drafting import random_table
from support.table_of import table_of
from support.tiny_models import random_llama
from transformers import AutoTokenizer

from eaglegbv import loading
from eaglegbv.config import EngineConfig, GraphMode, Plan
from eaglegbv.drafters import registry
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle import EagleDrafter, EagleFiles
from eaglegbv.drafters.registry import files_in, register_files
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.errors import DrafterMismatch, InvalidArgument
from eaglegbv.llm import LLM
from eaglegbv.loading import (
    TINY_TARGET,
    NamedModels,
    check_model,
    drafter_class,
    named_models,
)
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import log_once

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folders(
    saved_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A target, a head, a smaller model of the same tokenizer and a table."""
    (target, head), base = saved_pair, tmp_path_factory.mktemp("others")
    vocab = len(AutoTokenizer.from_pretrained(str(target)))
    small, table = base / "small", base / "table"
    random_llama(vocab, seed=1, max_position_embeddings=128).save_pretrained(small)
    AutoTokenizer.from_pretrained(str(target)).save_pretrained(str(small))
    table_of(random_table(vocab)).save(table)
    return {"target": target, "head": head, "small": small, "table": table}


@pytest.mark.parametrize("at_hand", [True, False])
def test_no_model_named_means_smollm2_if_it_is_at_hand_or_else_the_tiny_pair(
    at_hand, monkeypatch, caplog
):
    log_once.cache_clear()
    monkeypatch.setattr(loading, "smollm2_at_hand", lambda: at_hand)
    monkeypatch.setattr(loading, "find_model", lambda name, _: f"folder of {name}")
    smollm2 = NamedModels("smollm2", "folder of smollm2", "smollm2")
    tiny = NamedModels("tiny", TINY_TARGET, "eagle3")
    for _ in range(2):
        assert named_models(None, None) == (smollm2 if at_hand else tiny)
    assert ["the packaged tiny model answers" in told for told in caplog.messages] == (
        [] if at_hand else [True]
    )
    # Both have a name wherever a model is named, and a head of the tiny one says that it is meant.
    assert named_models("smollm2", None) == smollm2
    assert named_models("tiny", None) == named_models(None, "eagle3") == tiny
    assert named_models(None, "eagle1") == replace(tiny, drafter="eagle1")


def test_names_of_models_and_drafters_that_are_given_stay():
    alone = named_models(TINY_TARGET, None)  # a folder that is named is no choice of a drafter
    assert (alone.name, alone.drafter_name) == (str(TINY_TARGET), None)
    assert named_models("a/b", Path("head")).drafter_name == "head"


def test_a_folder_is_known_by_its_tensors(folders):
    assert {name: drafter_class(folder) for name, folder in folders.items()} == {
        "target": StandaloneDrafter,
        "head": EagleDrafter,
        "small": StandaloneDrafter,
        "table": TabularDrafter,
    }


def test_a_broken_head_is_a_head_still(folders, tmp_path):
    shutil.copytree(folders["head"], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert files_in(tmp_path) is EagleFiles
    with pytest.raises(DrafterMismatch, match=r"fc\.weight"):
        LLM(folders["target"], tmp_path)


@pytest.mark.parametrize("drafter", ["head", "table", "target"])
def test_text_at_temperature_0_does_not_depend_on_the_drafter(folders, drafter):
    engine = EngineConfig(kv_slots=1024)
    plain = LLM(folders["target"], verifier="none", engine=engine)
    llm = LLM(folders["target"], folders.get(drafter, drafter), engine=engine)
    expected, found = (x.generate("Hello, hello, hello", GREEDY) for x in (plain, llm))
    assert found.token_ids == expected.token_ids
    sampled = llm.generate("Hello", SamplingParams(max_tokens=12, seed=1))
    assert len(sampled.token_ids) == 12 or sampled.finish_reason == "stop"
    if drafter == "target":
        assert found.metrics.block_efficiency > 1.5  # plain steps of the planner included


def test_files_that_are_registered_open_a_drafter_of_one_forward(folders, tmp_path, monkeypatch):
    files = [*registry.DRAFTER_FILES]
    monkeypatch.setattr(registry, "DRAFTER_FILES", files)
    assert register_files(BlockFiles) is BlockFiles
    with pytest.raises(InvalidArgument, match="name='a block drafter': expected a new one, not"):
        register_files(BlockFiles)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "test-block", "seed": 3}))
    assert drafter_class(tmp_path) is BlockDrafter
    plain = LLM(folders["target"], verifier="none", engine=EngineConfig(kv_slots=1024))
    padded = EngineConfig(kv_slots=1024, cuda_graphs=GraphMode.EAGER)
    plan = Plan(paths=3, depth=3)
    llm = LLM(folders["target"], tmp_path, plan=plan, engine=padded)
    expected, found = (x.generate("Hello, hello, hello", GREEDY) for x in (plain, llm))
    assert found.token_ids == expected.token_ids
    assert found.metrics.drafted_nodes > len(found.token_ids)
    drafter = llm.pair.drafter
    assert isinstance(drafter, BlockDrafter)
    assert drafter.forwards == drafter.graph_counts["replayed"] > 0


def test_beyond_the_context_of_a_smaller_model_nothing_is_drafted(folders):
    engine = EngineConfig(kv_slots=1024)
    plain = LLM(folders["target"], verifier="none", engine=engine)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = ["x" * length for length in (100, 130)]
    expected = [answer.token_ids for answer in plain.generate(prompts, params)]
    for plan in (Plan(), "auto"):
        llm = LLM(folders["target"], folders["small"], plan=plan, engine=engine)
        answers = llm.generate(prompts, params)
        assert [answer.token_ids for answer in answers] == expected
        if plan != "auto":
            assert [bool(answer.metrics.drafted_nodes) for answer in answers] == [True, False]


def test_another_tokenizer_is_refused(folders, tmp_path):
    shutil.copytree(folders["small"], tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DrafterMismatch, match=r"drafter's id of token 'a'=.* 2 tokens differ"):
        LLM(folders["target"], tmp_path)


def test_another_vocabulary_is_refused(folders, tmp_path):
    random_llama(300, seed=1).save_pretrained(tmp_path / "model")
    with pytest.raises(DrafterMismatch, match="vocab_size=300: expected the target's, 257, or a"):
        LLM(folders["target"], tmp_path / "model")
    table_of(random_table(300)).save(tmp_path / "table")
    with pytest.raises(DrafterMismatch, match="vocab_size=300: expected the target's, 257"):
        LLM(folders["target"], tmp_path / "table")


def test_what_is_no_drafter_is_refused(folders, tmp_path):
    with pytest.raises(InvalidArgument, match=r"a table or a language model, or .*'ngram'"):
        LLM(folders["target"], "nowhere")
    with pytest.raises(DrafterMismatch, match=r"config\.json"):
        LLM(folders["target"], tmp_path)
    shutil.copy(folders["small"] / "config.json", tmp_path)
    with pytest.raises(DrafterMismatch, match=r"model\.safetensors or pytorch_model\.bin"):
        LLM(folders["target"], tmp_path)


# What the hub has not is said at once, and why.


def _response(status: int) -> Response:
    return Response(status, request=Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectError("no network"), "the hub could not be reached"),
        (
            RepositoryNotFoundError("no", response=_response(404)),
            "the hub has none of this name, or not",
        ),
    ],
)
def test_a_name_the_hub_does_not_know_is_said_at_once(monkeypatch, error, why):
    monkeypatch.setattr(HfApi, "repo_info", asked := Mock(side_effect=error))
    with pytest.raises(InvalidArgument, match=rf"model='nobody/none': expected .* \({why}"):
        LLM("nobody/none", "ngram")
    assert [call.args for call in asked.call_args_list] == [("nobody/none",)]


def test_what_the_hub_minds_besides_is_left_to_the_download(monkeypatch):
    error = HfHubHTTPError("too many", response=_response(429))
    monkeypatch.setattr(HfApi, "repo_info", Mock(side_effect=error))
    check_model("nobody/some")
