import json
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.drafting import head_for
from support.published_heads import LLAMA3_ROPE
from transformers import AutoConfig, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from eaglegbv.drafters.checkpoint import read_checkpoint
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.parallel_model import ParallelHeadConfig
from eaglegbv.drafters.training.data import Document, TextSettings, join_documents
from eaglegbv.drafters.training.heads import (
    EagleTrainingConfig,
    ParallelTrainingConfig,
    frequent_tokens,
    head_config_of,
)
from eaglegbv.drafters.training.train import RunState, Schedule
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.validation import target_answers


def arguments(arch: str, target: Path, data: Path, out: Path, *extra: str) -> list[str]:
    sizes = "--window 48 --batch 8 --anchors 16 --depths 3 --max-new-tokens 16"
    pace = "--steps 16 --learning-rate 3e-3 --evaluate-every 8 --checkpoint-every 5"
    run = "--regenerate 40 --device cpu --no-bf16 --validate 2 --validate-tokens 4"
    kind = "parallel" if arch == "parallel" else f"eagle --arch {arch}"
    command = f"{kind} --target {target} --data {data} --out {out}"
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
def test_a_head_learns_and_loads(arch, extra, target, chats, tmp_path, train) -> None:
    printed = train(arguments(arch, target, chats, tmp_path, *extra))

    found = scores(tmp_path)
    assert min(found) < found[0]  # the score is minus the block efficiency
    assert "acceptance at depth 3" in printed
    model = LlamaForCausalLM.from_pretrained(target)
    head = head_for(model, tmp_path)
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
    assert all(1 <= length <= 4 for length in [*logged, report["held_out"][measured]])
    assert report["held_out"][measured] > 1
    shares = [report["held_out"][f"{d} or more accepted{measured[17:]}"] for d in (1, 2, 3)]
    assert 1 + sum(shares) == pytest.approx(report["held_out"][measured])

    # One step more at hardly any rate: the head is the same, rounded to bfloat16 when it was saved.
    more = ("--initial", str(tmp_path), "--samples", str(tmp_path / "samples.pt"))
    pace = ("--steps", "1", "--learning-rate", "1e-6", "--validate", "0")
    train(arguments(arch, target, chats, tmp_path / "more", *more, *pace, "--loss", "ce"))
    assert scores(tmp_path / "more")[-1] == pytest.approx(min(found), abs=0.02)


@pytest.mark.parametrize(
    "extra", [("--markov-rank", "8", "--loss", "block"), ("--markov-rank", "0", "--layers", "1")]
)
def test_a_block_drafter_learns_loads_and_goes_on(extra, target, chats, tmp_path, train) -> None:
    printed = train(arguments("parallel", target, chats, tmp_path, *extra, "--steps", "10"))
    found = scores(tmp_path)
    assert min(found) < found[0]
    assert "acceptance at depth 3" in printed
    assert "acceptance length, otbv, 3 paths of depth 3, temperature 1" in printed
    checkpoint = read_checkpoint(tmp_path)
    config = checkpoint.config
    assert isinstance(config, ParallelHeadConfig)
    assert checkpoint.format == ("dspark" if "8" in extra else "dflash")
    assert config.levels == 3
    assert all(sight.causal for sight in config.sights)
    train(arguments("parallel", target, chats, tmp_path, *extra, "--steps", "10", "--resume"))
    assert scores(tmp_path)[-1] == found[-1]
    more = ("--initial", str(tmp_path), "--samples", str(tmp_path / "samples.pt"), *extra)
    pace = ("--steps", "1", "--learning-rate", "1e-6", "--validate", "0")
    train(arguments("parallel", target, chats, tmp_path / "more", *more, *pace))
    assert scores(tmp_path / "more")[-1] == pytest.approx(min(found), abs=0.02)
    with pytest.raises(EagleGBVError, match="a block drafter of 3 layers"):
        train(arguments("parallel", target, chats, tmp_path / "other", *more, "--layers", "3"))
    with pytest.raises(EagleGBVError, match="an EAGLE head"):
        train(arguments("eagle3", target, chats, tmp_path / "other", *more[:4]))


@pytest.mark.thorough
def test_a_killed_run_ends_as_an_undisturbed_one(target, chats, tmp_path, train, kill_after):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    short = ("--steps", "9", "--validate", "0")
    began = time.monotonic()
    train(arguments("eagle3", target, chats, whole, *short))
    seconds = time.monotonic() - began
    # Killed while it reads, answers, trains or saves.
    moment = random.SystemRandom().uniform(0, seconds)
    print(f"killed after {moment:.2f} s of about {seconds:.2f}")  # noqa: T201  shown on failure
    kill_after(arguments("eagle3", target, chats, killed, *short), killed, moment)
    train(arguments("eagle3", target, chats, killed, *short, "--resume"))
    assert scores(killed) == scores(whole)
    weights = "model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()


def test_without_answers_a_run_on_kept_runs_is_the_same_again(target, chats, tmp_path, train):
    for out in ("first", "second"):
        kept = ("--keep-runs", str(tmp_path / "runs"), "--regenerate", "0", "--loss", "block")
        kept += ("--steps", "4", "--evaluate-every", "2", "--validate", "0")
        train(arguments("eagle3", target, chats, tmp_path / out, *kept))
        assert not (tmp_path / out / "samples.pt").exists()
        report = json.loads((tmp_path / out / "training_report.json").read_text())
        assert set(report["data"]) == {"counting", "prose"}
    assert scores(tmp_path / "first") == scores(tmp_path / "second")
    assert (tmp_path / "runs" / "held_out" / "features").exists()


def test_a_preset_gives_defaults_and_a_dry_run_tells_the_needs(target, chats, tmp_path, train):
    run = f"eagle --arch eagle3 --target {target} --data {chats} --out {tmp_path / 'out'}"
    options = "--preset quick --batch 2 --window 48 --max-new-tokens 16 --device cpu --dry-run"
    printed = train(f"{run} {options} --keep-runs {tmp_path / 'runs'}".split())
    assert "all 300 steps" in printed  # the preset's
    assert "96 tokens" in printed  # 2 rows of 48, as asked for
    assert "weights to train" in printed
    assert not list((tmp_path / "out").iterdir())


def test_minutes_hold_the_evaluations() -> None:
    schedule = Schedule(steps=1000, minutes=10)
    assert schedule.progress(RunState(step=100, seconds=60)) == pytest.approx(0.1)
    assert schedule.progress(RunState(step=100, seconds=60, evaluating=120)) == pytest.approx(0.5)
    rates = [schedule.rate(spent) for spent in (0.0, 0.025, 0.05, 1.0)]
    assert rates[0] == 0
    assert rates[1] == pytest.approx(rates[2] / 2, rel=0.01)
    assert rates[3] == pytest.approx(0.01 * schedule.learning_rate)


def test_a_head_goes_on_with_other_draft_tokens_and_as_no_other(target, chats, tmp_path, train):
    first, second = tmp_path / "first", tmp_path / "second"
    own = ("--regenerate", "0", "--validate", "0", "--draft-vocab", "20")
    train(arguments("eagle3", target, chats, first, *own, "--steps", "1"))
    begun = ("--initial", str(first), *own)
    for arch, more, said in (
        ("eagle1", (), "arch is eagle1"),
        ("eagle3", ("--intermediate", "40"), "intermediate is 40"),
    ):
        with pytest.raises(InvalidArgument, match=rf"^initial=.*{said}"):
            train(arguments(arch, target, chats, second, *begun, *more))

    once = ("--draft-vocab", "40", "--steps", "1", "--learning-rate", "1e-9")
    train(arguments("eagle3", target, chats, second, *begun, *once))
    small, large = (load_file(folder / "model.safetensors") for folder in (first, second))
    tokens, more = (torch.arange(len(h["d2t"])) + h["d2t"] for h in (small, large))
    assert len(more) == 40
    shared = torch.isin(more, tokens)
    assert torch.equal(more[shared], tokens)
    assert torch.equal(large["lm_head.weight"][shared], small["lm_head.weight"])
    assert torch.equal(large["fc.weight"], small["fc.weight"])


SIZES = {"vocab_size": 300, "num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 32}
LLAMA3 = LLAMA3_ROPE | {"rope_theta": 5e5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 2e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "changes", "sizes", "rope"),
    [
        # width of the feed-forward layer, heads, key heads, width of a head
        ("llama", {"intermediate_size": 48}, (48, 4, 4, 8), ("default", 1e4)),
        ("llama", {"head_dim": 16, "rope_parameters": LLAMA3}, (11008, 4, 4, 16), LLAMA3),
        ("llama", {"rope_parameters": DYNAMIC}, (11008, 4, 4, 8), ("default", 2e4)),
        ("qwen2", {"num_key_value_heads": 2}, (22016, 4, 2, 8), ("default", 1e4)),
        ("gpt2", {}, (128, 4, 4, 8), ("default", 1e4)),
        ("gpt_neox", {}, (24576, 4, 4, 8), ("default", 1e4)),
        ("gemma3_text", {"num_key_value_heads": 2}, (9216, 4, 2, 256), ("default", 1e6)),
    ],
)
def test_a_head_takes_what_a_targets_configuration_says(family, changes, sizes, rope, caplog):
    target = AutoConfig.for_model(family, **SIZES, **changes)
    config = head_config_of(target, Arch.EAGLE3, draft_vocab=20)
    found = (config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim)
    assert found == sizes
    assert (config.hidden_size, config.vocab_size, config.feature_layers) == (32, 300, (2, 3, 3))
    plain = {"rope_type": rope[0], "rope_theta": rope[1]} if isinstance(rope, tuple) else rope
    assert config.rope_parameters == plain
    own = target.to_dict().get("rope_parameters")
    assert ("rotary settings of the head" in caplog.text) == (plain != own)


def test_a_head_for_a_target_of_another_family(target, chats, tmp_path, train) -> None:
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


def test_the_targets_answers_are_those_of_plain_decoding(target, chats, tmp_path, train) -> None:
    own = ("--regenerate", "0", "--validate", "0", "--steps", "1")
    train(arguments("eagle3", target, chats, tmp_path, *own))
    # Repetition, for lookups that are accepted; more prompts than are answered together.
    prompts = [[1, n, 7, 8, 9, 7, 8, 9] * 2 for n in range(10, 76)]
    model = LlamaForCausalLM.from_pretrained(target)
    plain = model.generate(
        torch.tensor(prompts), do_sample=False, max_new_tokens=8, pad_token_id=0
    )[:, 16:].tolist()
    end = model.generation_config.eos_token_id
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in plain]
    for how in ({}, {"speculate": True}, {"speculate": True, "head": tmp_path}):
        answer = partial(target_answers, target=target, max_tokens=8, **how)
        assert answer(prompts, temperature=0.0) == expected
        drawn = [answer(prompts[:3] * 2, seed=seed) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert drawn[0][:3] != drawn[0][3:]  # each has numbers of its own


def test_a_prompt_that_cannot_be_answered_is_an_error(target: Path) -> None:
    with pytest.raises(EagleGBVError, match="not answered"):
        target_answers([[1, 2], [10**6]], target=target, max_tokens=2)


def test_draft_vocabulary_is_the_most_frequent_of_responses() -> None:
    chat = Document(0, [5, 5, 5, 2, 7, 7, 2, 9], [False] * 3 + [True] * 5)
    corpus = join_documents([chat], ("x",))
    assert frequent_tokens(corpus, 10, 2).tolist() == [2, 7]
    assert frequent_tokens(corpus, 10, None).tolist() == [2, 7, 9]  # 95% of them


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    texts = TextSettings(data=(tmp_path,), samples=tmp_path / "samples.pt")
    with pytest.raises(InvalidArgument, match=r"^max_new_tokens="):
        replace(texts, max_new_tokens=64, window=64)
    with pytest.raises(InvalidArgument, match=r"^window=64: expected more than max_new_tokens, 1"):
        replace(texts, window=64)
    with pytest.raises(InvalidArgument, match=r"^depths="):
        EagleTrainingConfig(arch=Arch.EAGLE1, texts=texts, out=tmp_path, depths=0)
    for name, least in (("depths", 1), ("layers", 1), ("markov_rank", 0)):
        with pytest.raises(InvalidArgument, match=f"^{name}="):
            ParallelTrainingConfig(texts=texts, out=tmp_path, **{name: least - 1})
