"""``eaglegbv serve`` says to SGLang what was asked for."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli import documented, documented_commands, run
from support.saved_pair import save_block_head
from support.sglang_engine import missing_sglang

from eaglegbv.backends.sglang.launch import launch, served_head, server_arguments
from eaglegbv.backends.sglang.ready import _drivers_exist, check_ready
from eaglegbv.backends.sglang.settings import AUTOMATIC, JSON_VARIABLE, Settings
from eaglegbv.errors import DrafterMismatch, InvalidArgument
from eaglegbv.loading import TINY_TARGET
from eaglegbv.models.hf import load_config


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        (Settings(verifier="gbv", seed=5), {"--speculative-algorithm": "EAGLEGBV3"}),
        # SGLang's own EAGLE has as many nodes.
        (None, {"--speculative-algorithm": "EAGLE3", "--speculative-num-draft-tokens": "11"}),
    ],
)
def test_flags_and_environment(pair, settings, own):
    others = ["--port", "31000"]
    start = launch(pair.target, pair.eagle3, paths=2, depth=5, settings=settings, others=others)
    assert start.command[1:3] == ["-m", "sglang.launch_server"]
    flags = dict(zip(start.command[3::2], start.command[4::2], strict=True))
    assert flags == own | {
        "--model-path": str(pair.target),
        "--speculative-draft-model-path": str(pair.eagle3),
        "--speculative-eagle-topk": "2",
        "--speculative-num-steps": "5",
        "--port": "31000",
    }
    assert bool(start.environment) == (settings is not None)
    assert Settings.from_environment(start.environment) == (settings or Settings())


def test_heads_of_other_formats_are_written_anew(saved_pair):
    target, head = saved_pair
    named = server_arguments(target, head, paths=3, depth=4)
    folder = Path(named["speculative_draft_model_path"])
    assert named["speculative_algorithm"] == "EAGLEGBV"
    assert folder != head
    assert "LlamaForCausalLMEagle" in (folder / "config.json").read_text()
    assert server_arguments(target, head, paths=3, depth=4) == named


def test_the_targets_configuration_is_read_as_sglang_is_told_to(pair, monkeypatch):
    load = Mock(return_value=load_config(pair.target))
    monkeypatch.setattr("eaglegbv.backends.sglang.launch.load_config", load)
    for others in ([], ["--tp", "2", "--revision", "abc", "--trust-remote-code"]):
        launch(pair.target, pair.eagle1, paths=3, depth=4, settings=Settings(), others=others)
    assert [call.kwargs for call in load.call_args_list] == [
        {"revision": None, "trust_remote_code": False},
        {"revision": "abc", "trust_remote_code": True},
    ]


@pytest.mark.parametrize("foreign", [{"model_type": "new"}, {"auto_map": {"AutoConfig": "a.B"}}])
def test_sglang_reads_the_sizes_of_a_target_that_transformers_does_not_know(
    foreign, pair, tmp_path, monkeypatch
):
    """``foreign`` are keys of a type that only SGLang knows, or only the model's own code."""
    target = tmp_path / "target"
    shutil.copytree(pair.target, target)
    stored = json.loads((target / "config.json").read_text()) | {"model_type": "new"} | foreign
    (target / "config.json").write_text(json.dumps(stored))
    registry = "sglang.srt.utils.hf_transformers_utils"
    known = load_config(pair.target)
    read = Mock(return_value=SimpleNamespace(decoder=known))
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry, Mock(get_config=read))
    sys.modules[registry].get_hf_text_config = lambda config: config.decoder
    assert served_head(pair.eagle3, target) == (pair.eagle3, "EAGLEGBV3")
    read.assert_called_once_with(str(target), revision=None, trust_remote_code=False)
    known.hidden_size += 1
    with pytest.raises(DrafterMismatch, match="target_hidden_size=64: expected the target's, 65"):
        served_head(pair.eagle3, target)
    read.side_effect = ValueError("nobody knows it")
    with pytest.raises(InvalidArgument, match=r"model type `new`|trust_remote_code=False"):
        served_head(pair.eagle3, target)
    read.reset_mock()
    with pytest.raises(InvalidArgument, match="a folder with config"):
        served_head(pair.eagle3, tmp_path)
    read.assert_not_called()


def test_without_a_drafter_nothing_is_drafted():
    assert server_arguments("some/model", None, paths=3, depth=4) == {"model_path": "some/model"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks that need SGLang pass, where it is not installed."""
    for check in ("ready.check_version", "ready.check_plugin", "server_args.check_command"):
        monkeypatch.setattr(f"eaglegbv.backends.sglang.{check}", lambda *_: None)


@pytest.mark.usefixtures("installed")
def test_documented_commands_and_calls_start_what_they_say(pair, capsys, monkeypatch):
    install, serve, _, by_hand, _ = documented_commands(
        "sglang.md",
        **{
            "meta-llama/Llama-3.1-8B-Instruct": pair.target,
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": pair.eagle3,
            "MODEL": pair.target,
            "HEAD": pair.eagle3,
        },
    )
    assert install == ["pip", "install", "-e", ".[sglang]"]
    started = shlex.split(run(capsys, *serve[1:], "--dry-run").out)
    assert started[0].startswith(f"{JSON_VARIABLE}=")
    assert started[-2:] == ["--port", "30000"]
    # SGLang's own command starts the same.
    assert Settings.from_environment(dict([by_hand[0].split("=")])) == Settings(plans="auto")
    assert by_hand[2:4] == started[2:4]
    pairs = zip(*[iter(started[4:-2])] * 2, strict=True)
    assert set(pairs) == set(zip(*[iter(by_hand[4:])] * 2, strict=True))

    sglang, asked = ModuleType("sglang"), dict[str, Any]()
    engine = SimpleNamespace(generate=lambda *prompts: prompts)
    vars(sglang)["Engine"] = lambda **named: asked.update(named, **os.environ) or engine
    monkeypatch.setitem(sys.modules, "sglang", sglang)
    monkeypatch.setattr("eaglegbv.backends.sglang.launch.check_ready", lambda **_: None)
    code = documented("sglang.md", "python")[0]
    exec(code.replace("MODEL", str(pair.target)).replace("HEAD", str(pair.eagle1)), {})
    assert (asked["speculative_eagle_topk"], asked["tp_size"]) == (3, 2)
    assert Settings.from_environment(asked) == Settings(verifier="gbv")
    assert JSON_VARIABLE not in os.environ


@pytest.mark.usefixtures("installed")
def test_without_an_accelerator_the_advice_is_what_helps(monkeypatch):
    monkeypatch.setattr("eaglegbv.backends.sglang.ready._drivers_exist", lambda: True)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    check_ready(["--tp", "2"], accelerator=False)
    for others, named in ((["--tp", "2"], "device=None"), (["--device=cpu"], "device='cpu'")):
        with pytest.raises(InvalidArgument, match=r"; 'eaglegbv serve MODEL --b") as caught:
            check_ready(others)
        assert str(caught.value).startswith(f"{named}: expected an accelerator")
        assert "\n" not in str(caught.value)
    # A build of SGLang's kernels for CPUs, as the stand-in is.
    monkeypatch.setitem(sys.modules, "sgl_kernel", Mock())
    check_ready(["--device=cpu"])
    check_ready(device="cpu")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    check_ready()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("built", "driver", "plugins", "asked"),
    [
        ({"cuda": None, "hip": None}, True, [], False),
        ({"cuda": "13.0", "hip": None, "xpu": None}, False, [], False),
        ({"cuda": "13.0", "hip": None, "xpu": None}, True, [], True),
        ({"cuda": None, "hip": "7.2"}, False, [], True),
        ({"cuda": None, "hip": None, "xpu": "20260000"}, False, [], True),
        ({"cuda": None, "hip": None}, False, ["torch_npu"], True),  # a device of a plug-in
    ],
)
def test_pytorch_is_asked_where_it_may_find_an_accelerator(
    built, driver, plugins, asked, monkeypatch
):
    ready = "eaglegbv.backends.sglang.ready"
    monkeypatch.setattr(f"{ready}.runpy.run_path", lambda _: built)
    monkeypatch.setattr(f"{ready}.entry_points", lambda *, group: plugins)
    monkeypatch.setattr(f"{ready}.ctypes.CDLL", Mock(side_effect=None if driver else OSError))
    available = Mock(return_value=True)
    monkeypatch.setattr("torch.accelerator.is_available", available)
    if asked:
        check_ready()
    else:
        with pytest.raises(InvalidArgument, match="there is none here"):
            check_ready()
    assert available.called == asked


MISSING = """
import sys
from eaglegbv.cli.main import main

try:
    main(["serve", "tiny", "--backend", "sglang"])
finally:
    assert not {"torch", "transformers", "sglang", "sgl_kernel"} & {*sys.modules}
"""


@pytest.mark.skipif(_drivers_exist(), reason="there may be an accelerator here")
def test_a_missing_accelerator_is_one_line_before_anything_large_is_imported():
    result = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, check=False
    )
    assert result.stderr.startswith("eaglegbv: no --device: expected an accelerator")
    assert "'eaglegbv serve MODEL --backend local'" in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.returncode == 2


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--drafter eagle3 --verifier nosuch", "verifier='nosuch': expected one of block, gbv"),
        (
            "--drafter eagle3 --verifier block --paths 3",
            "--paths=3: expected at most 1 for 'block'",
        ),
        ("--drafter eagle3 --paths 17", "--paths=17: expected an integer in [1, 16]"),
        ("--drafter eagle3 --depth 0", "--depth=0: expected an integer in [1, 32]"),
        ("--drafter eagle3 --draft-width 0", "--draft-width=0: expected an integer in [1, 1024]"),
        ("--drafter eagle3 --speculative-num-steps 3", "expected --depth in its place"),
        ("--drafter no/such/head", "--drafter='no/such/head'"),
        ("--verifier gbv", "no --drafter: expected an EAGLE head, for verifier"),
    ],
)
def test_what_is_wrong_is_one_line_before_sglang_loads(capsys, monkeypatch, words, said):
    monkeypatch.setattr("os.execve", Mock(side_effect=AssertionError("SGLang would load")))
    monkeypatch.setattr("eaglegbv.backends.sglang.ready.accelerator_exists", lambda: True)
    result = run(capsys, "serve", str(TINY_TARGET), "--backend", "sglang", *words.split())
    assert (result.status, result.out) == (2, "")
    assert said in result.err
    assert result.err.count("\n") == 1


@pytest.mark.usefixtures("installed")
def test_packaged_models_are_served_with_their_heads(capsys, monkeypatch):
    monkeypatch.setattr("eaglegbv.loading.find_model", lambda name: TINY_TARGET)
    words = shlex.split(run(capsys, "serve", "tiny", "--backend", "sglang", "--dry-run").out)
    assert words[5:7] == [str(TINY_TARGET), "--speculative-algorithm"]
    assert "EAGLEGBV3" in words
    with pytest.raises(DrafterMismatch, match="vocab_size=49152"):  # this stands in for SmolLM2
        launch(TINY_TARGET, "smollm2", paths=3, depth=4, settings=Settings())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "plans"),
    [
        ("", AUTOMATIC),
        ("--device cpu", AUTOMATIC),
        ("--plans 2x2,1x2,none", "2x2,1x2,none"),
        ("--paths 2", ""),
        ("--depth 2", ""),
        ("--verifier block --paths 1", ""),
        ("--verifier spectr_gbv", ""),
    ],
)
def test_rounds_follow_the_load_unless_one_plan_is_asked_for(words, plans, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", Mock())
    start = shlex.split(
        run(capsys, "serve", "tiny", "--backend", "sglang", "--dry-run", *words.split()).out
    )
    settings = Settings.from_environment(dict([start[0].split("=", maxsplit=1)]))
    paths = int(start[1 + start.index("--speculative-eagle-topk")])
    assert settings.plans == plans
    assert (settings.widest() or (paths,))[0] == paths
    assert ("--disable-cuda-graph" in start) == ("cpu" in words)


def test_a_head_is_converted_once_by_servers_that_start_at_once(saved_pair, tmp_path, monkeypatch):
    """And what an earlier one left half done is no obstacle."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(served_head, saved_pair[1], saved_pair[0]) for _ in range(4)]
    [(folder, _)] = {job.result() for job in jobs}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    written = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert sorted(written) == ["config.json", "model.safetensors"]
    (folder / "config.json").unlink()
    (folder / "model.safetensors.partial").write_bytes(b"broken off")
    assert served_head(saved_pair[1], saved_pair[0])[0] == folder
    assert all((folder / name).read_bytes() == content for name, content in written.items())


def test_block_drafters_are_left_to_sglang(saved_pair, tmp_path):
    head = save_block_head(saved_pair[0], tmp_path)
    with pytest.raises(InvalidArgument, match=r"an EAGLE head: .*SGLang.* DFLASH and DSPARK"):
        served_head(head, saved_pair[0])


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_a_head_of_fewer_positions_than_its_target_is_given_as_many(
    head, pair, tmp_path, monkeypatch
):
    """SGLang would not start, and takes 2048 where the head does not say."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source, short = getattr(pair, head), tmp_path / "short"
    shutil.copytree(source, short)
    assert served_head(source, pair.target)[0] == source
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    served, _ = served_head(short, pair.target)
    assert json.loads((served / "config.json").read_text()) == config
    assert (served / "model.safetensors").resolve() == short / "model.safetensors"
    assert served_head(short, pair.target)[0] == served


def test_a_head_without_a_bias_gets_zeros_where_sglang_would_draw_one(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    head = tmp_path / "head"
    shutil.copytree(pair.eagle1, head)
    tensors = load_file(head / "model.safetensors")
    bias = tensors.pop("fc.bias")
    save_file(tensors, head / "model.safetensors")
    served, algorithm = served_head(head, pair.target)
    assert (served != head, algorithm) == (True, "EAGLEGBV")
    written = load_file(served / "model.safetensors")
    assert written.keys() == {*tensors, "fc.bias"}
    assert torch.equal(written["fc.bias"], bias)
    assert served_head(served, pair.target)[0] == served


def test_a_converted_head_has_its_targets_positions(saved_pair, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    target = tmp_path / "target"
    shutil.copytree(saved_pair[0], target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 9000}))
    served, _ = served_head(saved_pair[1], target)
    assert json.loads((served / "config.json").read_text())["max_position_embeddings"] == 9000


@pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang()))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mem-fraction-statik 0.8", "expected an option of SGLang (--mem-fraction-static, per"),
        ("--tp two", "SGLang's options: argument --tp-size"),
        ("--attention-backend torch_native", "it has no tree masks"),
        ("--page-size 16", "use --page-size 1"),
        ("--pp-size 2", "sampled trees are not relayed between pipeline stages"),
    ],
)
def test_a_dry_run_checks_sglangs_options(capsys, words, said):
    result = run(capsys, "serve", "tiny", "--backend", "sglang", "--dry-run", *words.split())
    assert (result.status, result.out) == (2, "")
    assert said in result.err


# Settings come from the environment and are checked before a server starts.

LARGEST = Settings(verifier="block", draft_width=5, draft_temperature=0.5, seed=2**64 - 1)
SINGLE = {"EAGLEGBV_VERIFIER": "gbv", "EAGLEGBV_DRAFT_WIDTH": "8", "EAGLEGBV_SEED": "7"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PATH": "/bin"}, Settings()),
        (
            SINGLE | {"EAGLEGBV_DRAFT_TEMPERATURE": "1.5"},
            Settings(verifier="gbv", draft_width=8, draft_temperature=1.5, seed=7),
        ),
        # JSON wins over single variables.
        (
            SINGLE | {JSON_VARIABLE: '{"verifier": "block", "seed": 3}'},
            Settings(verifier="block", draft_width=8, seed=3),
        ),
        (LARGEST.to_environment(), LARGEST),
    ],
    ids=["defaults", "variables", "json", "its own"],
)
def test_what_is_said_is_read(environment, expected):
    assert Settings.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"EAGLEGBV_DRAFT_WIDTH": "0"}, "draft_width=0"),
        ({"EAGLEGBV_DRAFT_WIDTH": "many"}, "EAGLEGBV_DRAFT_WIDTH='many'"),
        ({"EAGLEGBV_DRAFT_TEMPERATURE": "0"}, "draft_temperature=0"),
        ({"EAGLEGBV_DRAFT_TEMPERATURE": "nan"}, "draft_temperature=nan"),
        ({"EAGLEGBV_SEED": "-1"}, "seed=-1"),
        ({JSON_VARIABLE: "{"}, JSON_VARIABLE),
        ({JSON_VARIABLE: "[]"}, JSON_VARIABLE),
        ({JSON_VARIABLE: '{"paths": 3}'}, "'paths'"),
        ({JSON_VARIABLE: '{"draft_width": true}'}, "draft_width=True"),
        ({JSON_VARIABLE: '{"verifier": 3}'}, "verifier=3"),
    ],
)
def test_what_is_wrong_is_named(environment, named):
    with pytest.raises(InvalidArgument, match=named.replace("[", r"\[")):
        Settings.from_environment(environment)
