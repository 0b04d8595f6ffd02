"""Heads trained for a tiny random target: they learn its distribution, survive a kill, and load."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
)

from eaglegbv.drafters.checkpoint import load_head
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.training.data import Document, TextSettings, join_documents, regenerate
from eaglegbv.drafters.training.heads import EagleTrainingConfig, frequent_tokens, head_config_of
from eaglegbv.drafters.training.train import Progress, Schedule
from eaglegbv.errors import InvalidArgument

Run = Callable[[list[str]], str]


def arguments(arch: str, target: Path, data: Path, out: Path, *extra: str) -> list[str]:
    sizes = "--window 48 --batch 8 --anchors 16 --depths 3 --max-new-tokens 16"
    pace = "--steps 24 --learning-rate 3e-3 --evaluate-every 8 --checkpoint-every 5"
    run = "--regenerate 40 --device cpu --no-bf16 --validate 2 --validate-tokens 4"
    command = f"eagle --arch {arch} --target {target} --data {data} --out {out}"
    return [*f"{command} {sizes} {pace} {run}".split(), *extra]


def scores(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["score"] for line in lines if "score" in line]


@pytest.mark.parametrize(
    ("arch", "extra"),
    [
        ("eagle1", ("--loss", "ce")),
        ("eagle3", ("--draft-vocab", "100", "--loss", "mix")),
        ("eagle3", ("--draft-vocab", "100", "--loss", "block")),
    ],
)
def test_a_head_learns_and_loads(
    arch: str, extra: tuple[str, ...], target: Path, chats: Path, tmp_path: Path, train: Run
) -> None:
    printed = train(arguments(arch, target, chats, tmp_path, *extra))

    found = scores(tmp_path)
    assert min(found) < found[0]  # the score is minus the block efficiency
    assert "acceptance at depth 3" in printed
    model = LlamaForCausalLM.from_pretrained(target)
    head = load_head(
        tmp_path,
        target_config=model.config,
        target_embedding=model.get_input_embeddings().weight,
        target_lm_head=model.lm_head.weight,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert head.config.arch == arch
    assert head.config.draft_vocab_size == (100 if arch == "eagle3" else model.config.vocab_size)
    assert head.config.feature_layers == ((2, 3, 3) if arch == "eagle3" else ())
    report = json.loads((tmp_path / "training_report.json").read_text())
    name = "block efficiency, one path of depth 3, block verification"
    assert report["held_out"][name] == pytest.approx(-min(found), abs=0.02)
    # What the engine measured, with the estimates, at every evaluation and of the head as saved.
    measured = "acceptance length, otbv, 3 paths of depth 3, temperature 1"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = [line["held_out"][measured] for line in lines if "score" in line]
    assert len(logged) == len(found)
    assert all(0 <= length <= 3 for length in [*logged, report["held_out"][measured]])
    assert report["held_out"][measured] > 0
    shares = [report["held_out"][f"{d} or more accepted{measured[17:]}"] for d in (1, 2, 3)]
    assert sum(shares) == pytest.approx(report["held_out"][measured])


def test_a_run_killed_at_any_time_ends_as_an_undisturbed_one(
    target: Path,
    chats: Path,
    tmp_path: Path,
    train: Run,
    kill_midway: Callable[..., None],
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    train(arguments("eagle3", target, chats, whole))
    seconds = time.monotonic() - began
    # Killed while it reads, answers, trains or saves; and once more after that.
    moment = random.SystemRandom().uniform(0, seconds)
    print(f"killed after {moment:.2f} s of about {seconds:.2f}")  # noqa: T201  shown on failure
    kill_midway(arguments("eagle3", target, chats, killed), killed, seconds=moment)
    kill_midway(arguments("eagle3", target, chats, killed, "--resume"), killed)
    train(arguments("eagle3", target, chats, killed, "--resume"))
    assert scores(killed) == scores(whole)
    weights = "model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()


def test_training_without_the_targets_answers(
    target: Path, chats: Path, tmp_path: Path, train: Run
) -> None:
    train(arguments("eagle1", target, chats, tmp_path, "--regenerate", "0", "--steps", "2"))
    assert not (tmp_path / "samples.pt").exists()
    report = json.loads((tmp_path / "training_report.json").read_text())
    assert set(report["data"]) == {"counting", "prose"}


def test_a_run_with_kept_runs_is_the_same_on_files_that_are_there(
    target: Path, chats: Path, tmp_path: Path, train: Run
) -> None:
    for out in ("first", "second"):
        kept = ("--keep-runs", str(tmp_path / "runs"), "--regenerate", "0", "--loss", "block")
        train(arguments("eagle3", target, chats, tmp_path / out, *kept))
    assert scores(tmp_path / "first") == scores(tmp_path / "second")
    assert (tmp_path / "runs" / "held_out" / "features").exists()


def test_a_preset_gives_defaults_and_a_dry_run_says_what_the_run_needs(
    target: Path, chats: Path, tmp_path: Path, train: Run
) -> None:
    run = f"eagle --arch eagle3 --target {target} --data {chats} --out {tmp_path / 'out'}"
    options = "--preset quick --batch 2 --window 48 --max-new-tokens 16 --device cpu --dry-run"
    printed = train(f"{run} {options} --keep-runs {tmp_path / 'runs'}".split())
    assert "all 300 steps" in printed  # the preset's
    assert "96 tokens" in printed  # 2 rows of 48, as asked for
    assert "weights to train" in printed
    assert not list((tmp_path / "out").iterdir())


def test_minutes_hold_the_evaluations() -> None:
    schedule = Schedule(steps=1000, minutes=10)
    assert schedule.progress(Progress(step=100, seconds=60)) == pytest.approx(0.1)
    assert schedule.progress(Progress(step=100, seconds=60, evaluating=120)) == pytest.approx(0.5)
    rates = [schedule.rate(spent) for spent in (0.0, 0.025, 0.05, 1.0)]
    assert rates[0] == 0
    assert rates[1] == pytest.approx(rates[2] / 2, rel=0.01)
    assert rates[3] == pytest.approx(0.01 * schedule.learning_rate)


def test_training_goes_on_from_a_trained_head(
    target: Path, chats: Path, tmp_path: Path, train: Run
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    samples = ("--samples", str(tmp_path / "samples.pt"))
    train(arguments("eagle3", target, chats, first, "--draft-vocab", "100", *samples))
    train(
        arguments(
            "eagle3", target, chats, second, "--initial", str(first), *samples,
            "--steps", "1", "--learning-rate", "1e-6",
        )
    )  # fmt: skip
    # One step at hardly any rate: the head is the first one, rounded to bfloat16 when saved. Its
    # draft vocabulary comes with it.
    assert scores(second)[-1] == pytest.approx(min(scores(first)), abs=0.02)


def test_a_head_goes_on_with_a_larger_draft_vocabulary(
    target: Path, chats: Path, tmp_path: Path, train: Run
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    samples = ("--samples", str(tmp_path / "samples.pt"))
    train(arguments("eagle3", target, chats, first, "--draft-vocab", "20", *samples))
    train(
        arguments(
            "eagle3", target, chats, second, "--initial", str(first), *samples,
            "--draft-vocab", "40", "--steps", "1", "--learning-rate", "1e-9",
        )
    )  # fmt: skip
    small, large = (load_file(folder / "model.safetensors") for folder in (first, second))
    tokens, more = (torch.arange(len(h["d2t"])) + h["d2t"] for h in (small, large))
    assert len(more) == 40
    shared = torch.isin(more, tokens)
    assert torch.equal(more[shared], tokens)
    assert torch.equal(large["lm_head.weight"][shared], small["lm_head.weight"])
    assert torch.equal(large["fc.weight"], small["fc.weight"])


@pytest.mark.parametrize("arch", ["eagle1", "eagle3"])
def test_a_head_goes_on_with_a_wider_feed_forward_layer(
    target: Path, chats: Path, tmp_path: Path, train: Run, arch: str
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    samples = ("--samples", str(tmp_path / "samples.pt"))
    once = ("--steps", "1", "--learning-rate", "1e-9")
    train(arguments(arch, target, chats, first, "--intermediate", "24", *samples))
    wider = ("--initial", str(first), "--intermediate", "40")
    train(arguments(arch, target, chats, second, *wider, *samples, *once))
    assert scores(second)[-1] == pytest.approx(min(scores(first)), abs=0.02)
    narrow, wide = (load_file(folder / "model.safetensors") for folder in (first, second))
    [name] = [name for name in wide if name.endswith("up_proj.weight")]
    assert (len(narrow[name]), len(wide[name])) == (24, 40)
    assert torch.equal(wide[name][:24], narrow[name])
    assert wide[name][24:].any()
    back = ("--initial", str(second), "--intermediate", "24")
    with pytest.raises(InvalidArgument, match=r"^initial=.*no wider"):
        train(arguments(arch, target, chats, third, *back, *samples, *once))


def test_a_head_of_another_kind_is_no_beginning(
    target: Path, chats: Path, tmp_path: Path, train: Run
) -> None:
    first = tmp_path / "first"
    samples = ("--samples", str(tmp_path / "samples.pt"))
    train(arguments("eagle3", target, chats, first, *samples, "--steps", "1"))
    with pytest.raises(InvalidArgument, match=r"^initial="):
        train(
            arguments(
                "eagle1", target, chats, tmp_path / "second", "--initial", str(first), *samples
            )
        )


SIZES = {"vocab_size": 300, "num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 2e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("target", "sizes", "rope"),
    [
        # width of the feed-forward layer, heads, key heads, width of a head
        (LlamaConfig(**SIZES, intermediate_size=48), (48, 4, 4, 8), ("default", 1e4)),
        (LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3), (11008, 4, 4, 16), LLAMA3),
        (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), (11008, 4, 4, 8), ("default", 2e4)),
        (Qwen2Config(**SIZES, num_key_value_heads=2), (22016, 4, 2, 8), ("default", 1e4)),
        (
            GPT2Config(vocab_size=300, n_layer=6, n_head=4, n_embd=32),
            (128, 4, 4, 8),
            ("default", 1e4),
        ),
        (GPTNeoXConfig(**SIZES), (24576, 4, 4, 8), ("default", 1e4)),
        (
            Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=16),
            (9216, 4, 2, 16),
            ("default", 1e6),
        ),
    ],
    ids=["llama", "llama3", "dynamic", "qwen2", "gpt2", "gpt_neox", "gemma3"],
)
def test_a_head_takes_what_a_targets_configuration_says(
    target: PreTrainedConfig,
    sizes: tuple[int, ...],
    rope: tuple[str, float] | dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = head_config_of(target, Arch.EAGLE3, draft_vocab=20)
    found = (config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim)
    assert found == sizes
    assert (config.hidden_size, config.vocab_size, config.feature_layers) == (32, 300, (2, 3, 3))
    plain = {"rope_type": rope[0], "rope_theta": rope[1]} if isinstance(rope, tuple) else rope
    assert config.rope_parameters == plain
    own = target.to_dict().get("rope_parameters")
    assert ("rotary settings of the head" in caplog.text) == (plain != own)


def test_a_head_for_a_target_of_another_family(
    target: Path, chats: Path, tmp_path: Path, train: Run
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=4, n_head=2, n_embd=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    once = ("--regenerate", "0", "--steps", "1", "--validate", "0")
    train(arguments("eagle3", tmp_path / "gpt2", chats, tmp_path / "out", *once))
    assert (tmp_path / "out" / "model.safetensors").exists()
    config.n_layer = 3
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(InvalidArgument, match=r"^arch='eagle3'.*3 layers"):
        train(arguments("eagle3", tmp_path / "gpt2", chats, tmp_path / "out", *once))


def test_answers_continue_prompts_of_the_data(target: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target)
    chat = Document(1, [0, 1, 9, 3, 2, 8, 3], [False] * 5 + [True] * 2)
    prose = Document(0, [0, 7, 7], [True] * 3)
    corpus = join_documents([chat, prose], ("prose", "chats"))
    weights = torch.ones(2, dtype=torch.float64)

    settings = TextSettings(data=(), samples=Path("x"), window=14, max_new_tokens=6)
    answers = regenerate(model, corpus, weights, 10, settings, seed=0)

    assert 0 < len(answers.lengths) < 10  # plain text has no prompt
    assert (answers.source_of == 1).all()
    for start, length in zip(answers.starts.tolist(), answers.lengths.tolist(), strict=True):
        token_ids = answers.token_ids[start : start + length].tolist()
        assert token_ids[:5] == [0, 1, 9, 3, 2]
        response = token_ids[5:]
        assert 3 not in response[:-1]
        assert response[-1] == 3 or len(response) == 6
        is_response = answers.is_response[start : start + length].tolist()
        assert is_response == [False] * 5 + [True] * len(response)


def test_draft_vocabulary_is_the_most_frequent_of_responses() -> None:
    chat = Document(0, [5, 5, 5, 2, 7, 7, 2, 9], [False] * 3 + [True] * 5)
    corpus = join_documents([chat], ("x",))
    assert frequent_tokens(corpus, 10, 2).tolist() == [2, 7]
    assert frequent_tokens(corpus, 10, None).tolist() == [2, 7, 9]  # 95% of them


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    texts = TextSettings(data=(tmp_path,), samples=tmp_path / "samples.pt")
    with pytest.raises(InvalidArgument, match=r"^max_new_tokens="):
        replace(texts, max_new_tokens=64, window=64)
    with pytest.raises(InvalidArgument, match=r"^depths="):
        EagleTrainingConfig(arch=Arch.EAGLE1, texts=texts, out=tmp_path, depths=0)
