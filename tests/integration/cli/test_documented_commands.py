"""Documented commands: their options; those for real models with stand-ins in the hub's cache."""

import json
import os
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from support.cli import PAGES, ROOT, documented_commands, process
from support.published_heads import PUBLISHED, VOCAB, make_target
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from eaglegbv.cli import audit, bench, demo, main, train, view
from eaglegbv.eval.observations import Run

REVISION = "0" * 40
ONE_BY_ONE = """
import json, sys
from eaglegbv.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            raise
"""  # one process: the hub's cache is looked for when its client is imported
TEMPLATE = "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}"


STAND_INS = {
    ("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"): "eagle3_llama31",
    ("Qwen/Qwen2-7B-Instruct", "yuhuili/EAGLE-Qwen2-7B-Instruct"): "eagle1_qwen2",
    ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3"): "speculators_qwen3",
}
"""Heads in the layouts of these repositories, by target and drafter."""


def commands() -> list[list[str]]:
    """Those of the section on real models."""
    return [c for c in documented_commands("benchmarks.md") if "/" in option(c, "--model")]


def option(command: list[str], name: str) -> str:
    """What follows an option; nothing where it is not given."""
    return dict(pairwise(command)).get(name, "")


def snapshot(home: Path, repository: str) -> Path:
    """Return the folder in which the hub's client looks for a repository."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    folder = root / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(REVISION)
    return folder


def save_tokenizer(folder: Path) -> None:
    letters = ["<unk>", *"abcdefghijklmnopqrstuvwxyz .,?!'\n0123456"][:VOCAB]
    model = BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[], unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))


def test_every_documented_pair_has_a_stand_in():
    pairs = [(option(c, "--model"), option(c, "--drafter")) for c in commands()]
    assert sorted(pairs) == sorted(STAND_INS)
    assert all(command[:3] == ["eaglegbv", "bench", "mt-bench"] for command in commands())


@pytest.mark.thorough
def test_they_run_as_documented(tmp_path):
    home, prompts = tmp_path / "home", tmp_path / "data" / "prompts"
    for (model, drafter), name in STAND_INS.items():
        target, head = snapshot(home, model), PUBLISHED[name]()
        make_target(head.target).save_pretrained(target)
        save_tokenizer(target)
        head.write(snapshot(home, drafter))
    prompts.mkdir(parents=True)
    for name in ("mt_bench", "humaneval", "spec_bench"):
        rows = [{"id": i, "turns": ["ab?", "cd?"], "category": "math"} for i in range(80)]
        (prompts / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    environment = os.environ | {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "EAGLEGBV_DATA": str(tmp_path / "data"),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("HF_HUB_CACHE", None)
    short = ["--questions", "1", "--max-tokens", "5", "--repeats", "1", "--device", "cpu"]
    words = json.dumps([[*command[1:], *short] for command in commands()])
    process(sys.executable, "-c", ONE_BY_ONE, words, env=environment, cwd=tmp_path)
    for command in commands():
        run = Run.read(tmp_path / option(command, "--out"))
        setup, [settings] = run.head.setup, run.head.sheets.values()
        named = option(command, "--model"), option(command, "--drafter")
        assert (setup["model"], setup["drafter"], setup["template"]) == (*named, TEMPLATE)
        observed = run.observations("conversations")
        assert len(observed) == len(settings)
        for one in observed:
            assert one.error is None
            assert one.sums["answer_tokens"] == 10
        assert ",".join(s.who for s in settings if s.who) == option(command, "--baselines")


def named_options() -> list[tuple[str, list[str]]]:
    """The words of every command in README and docs, and its page."""
    found = []
    for page in [ROOT / "README.md", *PAGES.values()]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"^\s*(?:[A-Z_]+=\S+ )*(eaglegbv [a-z].*)$", text, re.MULTILINE)
        lines += re.findall(r"`(eaglegbv [a-z][^`]*--[^`]*)`", text)
        found += [(f"{page.name}: {line}", shlex.split(line, comments=True)) for line in lines]
    return found


@pytest.mark.parametrize(("place", "words"), named_options(), ids=lambda value: str(value)[:60])
def test_every_option_that_the_pages_name_is_there(place, words):
    _, name, *rest = words
    apps = {"audit": audit.app, "bench": bench.app, "demo": demo.app, "train": train.app}
    command = typer.main.get_command(apps.get(name, main.app))
    if name == "view":
        command = typer.main.get_command(view.app)
    elif name not in apps:
        rest = [name, *rest]
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    known = {"-h", "--help"}
    for parameter in command.params:
        known |= {*parameter.opts, *parameter.secondary_opts}
    asked = {word.partition("=")[0] for word in rest if word.startswith("--")}
    passed_on = command.context_settings.get("ignore_unknown_options", False)
    assert asked <= known or passed_on, place
