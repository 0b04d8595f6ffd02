import errno
import io
import itertools
import json
import re
import shutil
import sys
import time
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest

from eaglegbv.cli.main import main
from eaglegbv.config import AUTO, plan_name
from eaglegbv.engine import Engine
from eaglegbv.eval.observations import Run
from eaglegbv.llm import LLM, Stream
from eaglegbv.request import RequestOutput
from eaglegbv.text import Delta, TextDecoder

FULL = Path("/dev/full")


def generate(cli, pair, *arguments: str, **ends: int):
    return cli("generate", *pair, "--max-tokens", "12", "--seed", "3", *arguments, **ends)


def test_stream_and_no_stream_print_the_json_text(cli, pair):
    # A seed gives the same text again under a fixed plan.
    options = ["--prompt", "Hello", "--verifier", "otbv", "--ignore-eos"]
    text = json.loads(generate(cli, pair, *options, "--json").out)["text"]
    for stream in ("--stream", "--no-stream"):
        result = generate(cli, pair, *options, stream)
        assert result.out == text + "\n"
        assert re.fullmatch(
            r"\[(\d+) forwards? wrote 11 tokens \(\d\.\d each\), \d+ tokens/s, plan otbv 3x4, "
            r"cut off at 12 tokens \(-n, --max-tokens\)\]\n",
            result.err,
        )


def test_a_seed_that_was_not_given_is_told_where_it_repeats_the_text(cli, pair):
    options = ("--prompt", "Hello", "--max-tokens", "12", "--ignore-eos")
    fixed = ("generate", *pair, *options, "--verifier", "gbv")
    first = cli(*fixed)
    found = re.search(r", --seed (\d+) repeats it\]$", first.err.strip())
    again = cli(*fixed, "--seed", found[1])
    assert again.out == first.out
    assert "seed" not in again.err
    for other in (["--temperature", "0", "--verifier", "gbv"], []):  # by no seed, or by none alone
        assert "seed" not in cli("generate", *pair, *options, *other).err


def test_options_come_before_the_models_own_settings(cli, pair, tmp_path):
    target = shutil.copytree(pair[1], tmp_path / "target")
    settings = {"temperature": 0.5, "max_new_tokens": 3}
    (target / "generation_config.json").write_text(json.dumps(settings))
    usual = (
        "generate",
        "--model",
        str(target),
        *pair[2:],
        "--prompt",
        "Hello",
        "--verifier",
        "none",
    )
    usual = (*usual, "--ignore-eos", "--json")
    lengths = [
        len(json.loads(cli(*usual, *options).out)["token_ids"])
        for options in ((), ("--max-tokens", "5"), ("--generation-config", "none"))
    ]
    assert lengths == [3, 5, 128]


def test_prompt_comes_from_a_file_or_standard_input(cli, pair, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("Hello", encoding="utf-8-sig")
    fixed = ("--verifier", "otbv")
    expected = generate(cli, pair, "--prompt", "Hello", *fixed).out
    assert generate(cli, pair, "--prompt-file", str(file), *fixed).out == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello"), encoding="utf-8"))
    assert generate(cli, pair, "--prompt-file", "-", *fixed).out == expected
    file.write_bytes("café".encode("latin-1"))
    refused = generate(cli, pair, "--prompt-file", str(file), status=2)
    assert "expected a readable file" in refused.err


def test_the_prompt_needs_no_option_and_others_have_a_letter(cli, pair):
    spelt = generate(cli, pair, "--prompt", "Hello", "--verifier", "otbv", "--temperature", "0.5")
    short = ("-n", "12", "-t", "0.5", "--seed", "3", "--verifier", "otbv", "-m", *pair[1:])
    for words in (["Hello"], ["-p", "Hello"]):
        assert cli("generate", *words, *short).out == spelt.out
    twice = cli("generate", "Hello", "-p", "Hello", *short, status=2)
    assert "expected no second prompt" in twice.err
    assert "expected PROMPT" in cli("generate", *short, status=2).err


def test_quiet_prints_the_answer_alone(cli, pair):
    without_drafter = pair[:2]
    assert generate(cli, without_drafter, "Hello", "--quiet").err == ""


def test_system_and_raw_change_what_the_model_reads(cli, pair):
    def prompt_ids(*options: str) -> list[int]:
        result = generate(cli, pair, "--prompt", "Hello", "--json", *options)
        return json.loads(result.out)["prompt_token_ids"]

    plain, system, raw = prompt_ids(), prompt_ids("--system", "Be brief."), prompt_ids("--raw")
    assert len(system) > len(plain) > len(raw) == len("Hello")


def test_the_drafter_is_told_how_to_draft(cli, pair):
    expected = {"verifier": "gbv", "paths": 2, "depth": 3, "draft_sampling": "iid"}
    expected |= {"draft_width": 8, "draft_temperature": 1.5}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in expected.items()]
    result = generate(cli, pair, "--prompt", "Hello", "--json", *options)
    plan = json.loads(result.out)["plan"]
    assert {name: plan[name] for name in expected} == expected
    # A verifier of a single path gets one unless it is told otherwise.
    single = generate(cli, pair, "--prompt", "Hello", "--verifier", "block", "--json")
    assert json.loads(single.out)["plan"]["paths"] == 1


def test_widths_of_paths_give_the_text_of_paths(cli, pair):
    fixed = ("--prompt", "Hello", "--seed", "1", "--max-tokens", "12")
    paths = generate(cli, pair, *fixed, "--paths", "3", "--depth", "4").out
    assert generate(cli, pair, *fixed, "--widths", "3x1x1x1").out == paths
    for temperature in ("1", "0"):
        options = ("--widths", "3x2x1", "--temperature", temperature, "--json")
        found = json.loads(generate(cli, pair, *fixed, *options).out)
        assert found["plan"]["widths"] == [3, 2, 1]
    both = generate(cli, pair, *fixed, "--widths", "3x2", "--depth", "2", status=2)
    assert "depth=2: expected none where widths are given" in both.err


def test_without_a_drafter_drafts_are_looked_up_and_a_line_says_so(cli, pair):
    said = "no --drafter: drafts are looked up in the text itself (ngram)\n"
    result = generate(cli, pair[:2], "--prompt", "Hello", "--verifier", "otbv", "--ignore-eos")
    assert result.err.startswith(said)
    assert said not in generate(cli, pair[:2], "--prompt", "Hello", "--verifier", "none").err


def test_code_that_a_model_brings_runs_only_if_it_is_trusted(cli, pair, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(pair[1], folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    code = "from transformers import LlamaConfig\nclass Own(LlamaConfig):\n    model_type = 'own'\n"
    (folder / "own.py").write_text(code + f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a prompt on the terminal"))
    options = ("--prompt", "Hello", "--verifier", "none", "--max-tokens", "3")
    refused = cli("generate", "--model", str(folder), *options, status=2)
    assert refused.err.startswith("eaglegbv: --trust-remote-code=False: expected True for")
    assert not (tmp_path / "ran").exists()
    # It is no causal model, but its code ran.
    cli("generate", "--model", str(folder), *options, "--trust-remote-code", status=2)
    assert (tmp_path / "ran").exists()


def test_json_tells_all_and_the_engine_plans_itself_unless_told_otherwise(cli, pair):
    result = generate(cli, pair, "--prompt", "Hello", "--ignore-eos", "--json")
    answer = json.loads(result.out)
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (12, "length")
    metrics, plans = answer["metrics"], answer["metrics"]["plans"]
    assert metrics["committed_tokens"] == 11
    assert metrics["block_efficiency"] == 11 / metrics["target_forwards"]
    assert metrics["cached_tokens"] == 0
    assert 0 < metrics["decode_seconds"] < answer["seconds"]
    assert answer["plan"]["max_paths"] > 1
    assert sum(plans.values()) == metrics["target_forwards"]
    assert set(plans) <= {"none", *(plan_name(plan) for plan in AUTO.candidates)}


def test_a_trace_holds_every_step(cli, pair, tmp_path):
    path = tmp_path / "trace.json"
    result = generate(cli, pair, "--prompt", "Hello", "--json", "--trace", str(path))
    forwards = json.loads(result.out)["metrics"]["target_forwards"]
    steps = [event for event in json.loads(path.read_text()) if event["name"] == "step"]
    # The first step reads the prompt.
    assert len(steps) == 1 + forwards


@pytest.mark.parametrize("how", ["--stream", "--no-stream", "--json"])
def test_ctrl_c_keeps_the_text_so_far_and_its_figures(cli, pair, monkeypatch, how):
    fixed = ("--prompt", "Hello", "--verifier", "none", "--ignore-eos", "--max-tokens", "200")
    whole = generate(cli, pair, *fixed).out
    taken = itertools.count()
    take = Stream.__next__
    step = Engine.step

    def interrupted(stream: Stream) -> Delta:
        if next(taken) == 5:
            raise KeyboardInterrupt
        return take(stream)

    def slow_step(engine: Engine) -> list[RequestOutput]:
        time.sleep(0.005)
        return step(engine)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    monkeypatch.setattr(Engine, "step", slow_step)
    cut = generate(cli, pair, *fixed, how, status=130)
    if how == "--json":
        told = json.loads(cut.out)
        tokens = len(told["token_ids"])
        assert told["finish_reason"] == "cancelled"
        assert told["metrics"]["target_forwards"] == tokens - 1  # the first token is the prompt's
        text = told["text"]
    else:
        footer = re.match(
            r"\[(\d+) forwards wrote (\d+) tokens \(1.0 each\), \d+ tokens/s, plain decoding "
            r"\(as asked\), interrupted after (\d+) tokens\]\n$",
            cut.err,
        )
        assert footer is not None
        tokens = int(footer[3])
        assert tokens - 1 == int(footer[1]) == int(footer[2])
        text = cut.out.removesuffix("\n")
    assert 5 <= tokens < 200
    assert 0 < len(text) < len(whole)
    assert whole.startswith(text)


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line(cli, pair, tmp_path):
    fixed = ("--prompt", "Hello", "--verifier", "otbv", "--ignore-eos")
    result = generate(cli, pair, *fixed, "--trace", str(FULL), status=2)
    assert result.out.strip()  # the answer is not lost
    footer, error = result.err.splitlines()
    assert " wrote 11 tokens" in footer
    why = "([Errno 28] No space left on device)"
    assert error == f"eaglegbv: --trace='/dev/full': expected a file to write {why}"
    trace = tmp_path / "trace.json"
    generate(cli, pair, *fixed, "--trace", str(trace))
    page = cli("view", str(trace), "--out", str(FULL), status=2)
    assert page.err.startswith("eaglegbv: --out='/dev/full': expected a file to write")
    assert page.err.count("\n") == 1


def test_an_error_of_the_disk_is_one_line(cli, pair, tmp_path, monkeypatch):
    error = OSError(errno.EROFS, "Read-only file system", "observations.jsonl")
    monkeypatch.setattr(Run, "part", Mock(side_effect=error))
    short = ("--questions-set", "builtin", "--questions", "1", "--max-tokens", "4")
    result = cli("bench", "mt-bench", *pair, *short, "--out", str(tmp_path / "run"), status=2)
    expected, refused = result.err.splitlines()
    assert expected.startswith("up to ")  # how long it would have taken
    assert refused == "eaglegbv: [Errno 30] Read-only file system: 'observations.jsonl'"


@pytest.mark.parametrize(
    ("command", "encoding"),
    [
        *product(("--no-stream", "--stream", "--json"), ("ascii", "latin-1", "cp1252", "utf-8")),
        ("demo", "latin-1"),
    ],
)
def test_a_console_of_any_encoding_loses_nothing(pair, monkeypatch, command, encoding):
    odd = "é€\u2028語🙂"
    monkeypatch.setattr(TextDecoder, "add", lambda self, token: odd)
    monkeypatch.setattr(LLM, "decode", lambda self, token_ids, **_: odd * len(token_ids))
    words = ["generate", "--verifier", "otbv", "--ignore-eos", command, *pair]
    if command == "demo":
        words = ["demo", "--questions", "1", "--model", pair[1]]
    written = io.BytesIO()
    console = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", console)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--prompt", "Hello", "--max-tokens", "2"])
    assert ended.value.code in (0, None)

    # Where a console claims to know ASCII alone, click writes UTF-8.
    said = written.getvalue().decode("utf-8" if encoding == "ascii" else encoding)
    whole = re.sub(r"(\\u[0-9a-f]{4})+", lambda found: json.loads(f'"{found[0]}"'), said)
    assert odd * 2 in whole
    if command == "--json":
        assert json.loads(said)["text"] == odd * 2
    if encoding == "cp1252":
        assert "é€" in said
