"""SGLang started with our drafts and verifiers: in this process, or as a server of its own."""

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from transformers import PreTrainedConfig

from eaglegbv.backends.sglang.ready import check_ready, read_options
from eaglegbv.backends.sglang.settings import JSON_VARIABLE, Settings
from eaglegbv.config import MAX_DEPTH, MAX_PATHS
from eaglegbv.drafters.checkpoint import CONFIG, Checkpoint, export_head, fit, read_checkpoint
from eaglegbv.drafters.eagle_model import Arch, EagleHeadConfig
from eaglegbv.drafters.formats.names import FC_BIAS
from eaglegbv.drafters.formats.read import SAFETENSORS, FormatName, read_json
from eaglegbv.errors import EagleGBVError, InvalidArgument, ModelNotSupported
from eaglegbv.loading import drafter_folder
from eaglegbv.models.hf import load_config
from eaglegbv.utils import require_integer

ALGORITHMS = {Arch.EAGLE1: "EAGLEGBV", Arch.EAGLE3: "EAGLEGBV3"}
"""Our ``--speculative-algorithm`` for the heads of each kind."""

LAUNCHER = (sys.executable, "-m", "sglang.launch_server")
"""The command of SGLang's server, before its options."""

SET_HERE = {
    "model_path": "MODEL",
    "model": "MODEL",
    "speculative_algorithm": "--verifier",
    "speculative_draft_model_path": "--drafter",
    "speculative_draft_model": "--drafter",
    "speculative_eagle_topk": "--paths",
    "speculative_num_steps": "--depth",
    "speculative_num_draft_tokens": "--paths and --depth",
}
"""SGLang's options that say what ours say, by name."""

POSITIONS = "max_position_embeddings"
DEFAULT_POSITIONS = 2048
"""How many a Llama configuration has that does not say."""

MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of configurations whose models have layers that predict further tokens."""


def engine(
    model: str | Path,
    drafter: str | Path | None,
    *,
    paths: int = 3,
    depth: int = 4,
    settings: Settings | None = None,
    **arguments: Any,
) -> Any:
    """Start ``sglang.Engine`` with sampled draft trees and a verifier of this project.

    Call its ``shutdown()`` to end it.

    Args:
        model: Folder or hub name of the target.
        drafter: Folder or hub name of an EAGLE head, in any format this project reads; None
            decodes plainly.
        paths: Number of drafted paths, K.
        depth: Length of a drafted path, L.
        settings: Verifier, draft width and temperature, seed; by default those of otbv.
        arguments: Other arguments of SGLang's engine, such as ``tp_size``.

    Raises:
        EagleGBVError: SGLang is missing or of another version, or something cannot be served; the
            message names the argument and the remedy.
    """
    check_ready(device=arguments.get("device"))
    settings = settings or Settings()
    paths, depth = settings.widest() or (paths, depth)
    settings.check_paths(paths)
    import sglang

    hub = {name: arguments[name] for name in ("revision", "trust_remote_code") if name in arguments}
    named = server_arguments(model, drafter, paths=paths, depth=depth, **hub)
    # SGLang's processes inherit the environment; all of them have started when the engine is ready.
    before = os.environ.get(JSON_VARIABLE)
    os.environ.update(settings.to_environment())
    try:
        return sglang.Engine(**(named | arguments))
    finally:
        del os.environ[JSON_VARIABLE]
        if before is not None:
            os.environ[JSON_VARIABLE] = before


def server_arguments(
    model: str | Path, drafter: str | Path | None, *, paths: int, depth: int, **hub: Any
) -> dict[str, Any]:
    """Return SGLang's arguments that name the models and the trees.

    See :func:`engine` for the first four; ``hub`` are further ones of :func:`served_head`.
    """
    if drafter is None:
        return {"model_path": str(model)}
    require_integer("paths", paths, 1, MAX_PATHS)
    require_integer("depth", depth, 1, MAX_DEPTH)
    folder, algorithm = served_head(drafter, model, **hub)
    return {
        "model_path": str(model),
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(folder),
        "speculative_eagle_topk": paths,
        "speculative_num_steps": depth,
    }


def served_head(
    drafter: str | Path,
    model: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    draft_revision: str | None = None,
) -> tuple[Path, str]:
    """Return a head's folder in SGLang's format, and the algorithm that serves it.

    The head, in any format that :mod:`eaglegbv.drafters.formats` reads, is checked against its
    target, and converted if necessary. Both are folders or hub names, or the head a packaged one.
    ``revision`` and ``trust_remote_code`` are for the target, ``draft_revision`` for the head.

    Raises:
        InvalidArgument: There is no such head, or it is of a kind that is not served.
        DrafterMismatch: The head is broken, or does not fit the target.
    """
    folder = drafter_folder(drafter, head=True, revision=draft_revision)
    config = read_json(folder / "config.json")
    names = ", ".join(map(str, config.get("architectures") or ()))
    if any(config.get(key) for key in MTP_KEYS) and "eagle" not in names.lower():
        expected = f"an EAGLE head; MTP layers ({names}) are drafted with by SGLang's own EAGLE"
        raise InvalidArgument("drafter", str(folder), expected)
    checkpoint = read_checkpoint(folder)
    target = target_config(model, revision=revision, trust_remote_code=trust_remote_code)
    head = fit(checkpoint, target).config
    if not isinstance(head, EagleHeadConfig):
        expected = "an EAGLE head: block drafters are drafted with by SGLang itself, see its DFLASH"
        raise InvalidArgument("drafter", str(folder), f"{expected} and DSPARK algorithms")
    algorithm = ALGORITHMS[head.arch]
    return _startable(checkpoint, getattr(target, POSITIONS, 0)), algorithm


def target_config(
    model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Return the configuration of a target's decoder.

    SGLang, which takes seconds to import, reads those of model types that transformers lacks, or
    has only as code of the model's repository.

    Raises:
        InvalidArgument: There is no such model, or neither of them can read its configuration.
    """
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        return load_config(model, **hub).get_text_config(decoder=True)
    except InvalidArgument as error:
        if not isinstance(error, ModelNotSupported) and error.argument != "trust_remote_code":
            raise
        unknown = error
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    try:
        config: PreTrainedConfig = get_hf_text_config(get_config(str(model), **hub))
    except Exception as error:  # as in load_config
        raise unknown from error
    return config


def _startable(checkpoint: Checkpoint, context: int) -> Path:
    """Return a folder from which SGLang starts a head beside a target of ``context`` tokens.

    It must be in SGLang's format, have the bias that SGLang would draw at random in an EAGLE-1 head
    that has none, and at least as many positions; rotary embeddings do not depend on their number.
    Another head is written into the temporary folder, unless an earlier server did. Servers that
    start at once write the same files, each in a folder of its own, and put them in their place
    whole.
    """
    home = checkpoint.folder.resolve()
    written = _written_for_sglang(checkpoint)
    positions = checkpoint.passed_on.get(POSITIONS) or DEFAULT_POSITIONS
    if written and positions >= context:
        return checkpoint.folder
    positions = max(positions, context)
    sources = [home / name for name in (CONFIG, *checkpoint.files)]
    times = sorted((str(file), file.stat().st_mtime_ns) for file in sources)
    key = hashlib.sha256(repr((times, positions)).encode()).hexdigest()
    place = Path(tempfile.gettempdir()) / f"eaglegbv-head-{key[:16]}"
    names = (*(checkpoint.files if written else (SAFETENSORS,)), CONFIG)
    if not all((place / name).is_file() for name in names):
        with tempfile.TemporaryDirectory(prefix=f"{place.name}-") as folder:
            _write_startable(checkpoint, positions, Path(folder))
            place.mkdir(exist_ok=True)
            for name in names:
                (Path(folder) / name).replace(place / name)
    return place


def _written_for_sglang(checkpoint: Checkpoint) -> bool:
    """Return whether SGLang reads a head's weights as they are."""
    named = checkpoint.named
    # A bias of zeros that the configuration denies is left aside.
    has_bias = FC_BIAS in named.tensors or any(name.endswith(FC_BIAS) for name in named.left_aside)
    head = checkpoint.config
    complete = has_bias or (isinstance(head, EagleHeadConfig) and head.arch is Arch.EAGLE3)
    return complete and checkpoint.format is FormatName.SGLANG


def _write_startable(checkpoint: Checkpoint, positions: int, folder: Path) -> None:
    """Write a head into an empty folder as SGLang reads it; weights that it reads are linked."""
    if not _written_for_sglang(checkpoint):
        longer = {**checkpoint.passed_on, POSITIONS: positions}
        export_head(replace(checkpoint, passed_on=longer), FormatName.SGLANG, folder)
        return
    home = checkpoint.folder.resolve()
    for name in checkpoint.files:
        (folder / name).symlink_to(home / name)
    config = read_json(home / CONFIG) | {POSITIONS: positions}
    (folder / CONFIG).write_bytes(msgspec.json.encode(config))


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, program first, and the variables to add to its environment."""

    command: list[str]
    environment: dict[str, str]


def launch(
    model: str | Path,
    drafter: str | Path | None,
    *,
    paths: int,
    depth: int,
    settings: Settings | None,
    others: Sequence[str] = (),
) -> Launch:
    """Return the command that starts a server.

    See :func:`engine` for the first five; without ``settings``, SGLang's own EAGLE drafts, whose
    trees keep as many nodes, the most likely of those that top-k ``paths`` expands. ``others`` are
    SGLang's own arguments, passed on unchanged.

    Raises:
        EagleGBVError: See :func:`served_head`; or a value is out of range, the verifier cannot use
            so many paths, or ``others`` say what the other arguments do.
    """
    for word in others:
        name = word.partition("=")[0]
        ours = SET_HERE.get(name.removeprefix("--").replace("-", "_"))
        if name.startswith("--") and ours is not None:
            raise InvalidArgument("option", word, f"{ours} in its place")
    if drafter is not None and settings is not None:
        paths, depth = settings.widest() or (paths, depth)
        settings.check_paths(paths)
    hub = vars(read_options(others))
    on_cpu = hub.pop("device") == "cpu"
    named = server_arguments(model, drafter, paths=paths, depth=depth, **hub)
    if settings is None:
        named["speculative_algorithm"] = named["speculative_algorithm"].replace("GBV", "")
        named["speculative_num_draft_tokens"] = paths * depth + 1
    command = [*LAUNCHER]
    for name, value in named.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    command += others
    if on_cpu and drafter is not None and settings is not None and settings.plans:
        command.append("--disable-cuda-graph")  # SGLang would try to capture the plans' graphs
    return Launch(command, {} if settings is None else settings.to_environment())


class ServerFailed(EagleGBVError):
    """A server ended by itself, or did not answer in time."""

    def __init__(self, happened: str, log: Path) -> None:
        text = log.read_text(encoding="utf-8", errors="replace")
        super().__init__(f"the server {happened}; the end of {log}:\n{text[-2000:]}")
        self.happened, self.log = happened, log


@contextmanager
def running(launch: Launch, log: Path, *, starts_within: float = 1800.0) -> Iterator[str]:
    """Start a server on a free port of this machine, and stop it at the end.

    Yields its address once it answers, which it must within ``starts_within`` seconds. Its output
    goes to the file ``log``.

    Raises:
        ServerFailed: The server ended, or did not answer in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            [*launch.command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | launch.environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + starts_within
        while not _answers(url):
            if process.poll() is not None:
                raise ServerFailed(f"ended with code {process.returncode}", log)
            if time.monotonic() > deadline:
                raise ServerFailed(f"did not answer within {starts_within:.0f} s", log)
            time.sleep(1)
        yield url
        if process.poll() is not None:
            raise ServerFailed(f"ended with code {process.returncode}", log)
    finally:
        process.terminate()
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/health_generate", timeout=60).raise_for_status()
    except httpx.HTTPError:
        return False
    return True
