"""SGLang started with our drafts and verifiers: in this process, or as a server of its own."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglegbv.backends.sglang.guard import check_plugin, check_version
from eaglegbv.backends.sglang.heads import served_head
from eaglegbv.backends.sglang.settings import Settings

SGLANGS_OWN = {"EAGLEGBV": "EAGLE", "EAGLEGBV3": "EAGLE3"}
"""SGLang's algorithm for the heads of each of our algorithms."""


def server_arguments(
    model: str | Path,
    drafter: str | Path | None,
    *,
    paths: int,
    depth: int,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Return SGLang's arguments that name the models and the trees.

    Args:
        model: Folder or hub name of the target.
        drafter: Folder of an EAGLE head, or None.
        paths: Number of drafted paths.
        depth: Length of a drafted path.
        revision: Revision of the target on the hub, with which the head is compared.
        trust_remote_code: Whether to run code from the target's repository.

    Raises:
        DrafterMismatch: The head does not fit the target.
    """
    if drafter is None:
        return {"model_path": str(model)}
    head = served_head(drafter, model, revision=revision, trust_remote_code=trust_remote_code)
    return {
        "model_path": str(model),
        "speculative_algorithm": head.algorithm,
        "speculative_draft_model_path": str(head.folder),
        "speculative_eagle_topk": paths,
        "speculative_num_steps": depth,
    }


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

    Args:
        model: Folder or hub name of the target.
        drafter: Folder of an EAGLE head in any format this project reads; None decodes plainly.
        paths: Number of drafted paths, K.
        depth: Length of a drafted path, L.
        settings: Verifier, draft width and temperature, seed; by default those of otbv.
        arguments: Other arguments of SGLang's engine, such as ``tp_size``.

    Returns:
        The engine, ready to ``generate``; call ``shutdown()`` to end it.

    Raises:
        EagleGBVError: SGLang is missing or of another version, or something cannot be served; the
            message names the argument and the remedy.
    """
    check_version()
    check_plugin()
    import sglang

    hub = {name: arguments[name] for name in ("revision", "trust_remote_code") if name in arguments}
    named = server_arguments(model, drafter, paths=paths, depth=depth, **hub)
    # SGLang's processes inherit the environment; all of them have started when the engine is ready.
    with _environment((settings or Settings()).to_environment()):
        return sglang.Engine(**(named | arguments))


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, and the variables to add to its environment.

    Attributes:
        command: Program and arguments.
        environment: Additional variables.
    """

    command: list[str]
    environment: dict[str, str]


def launch(
    model: str | Path,
    drafter: str | Path | None,
    *,
    paths: int,
    depth: int,
    settings: Settings,
    others: Sequence[str] = (),
) -> Launch:
    """Return the command that starts the server.

    Args:
        model: Folder or hub name of the target.
        drafter: Folder of an EAGLE head; None serves without speculation.
        paths: Number of drafted paths.
        depth: Length of a drafted path.
        settings: Verifier, draft width and temperature, seed.
        others: SGLang's own arguments, passed on unchanged.

    Raises:
        DrafterMismatch: The head does not fit the target.
    """
    named = server_arguments(model, drafter, paths=paths, depth=depth, **_hub_options(others))
    return Launch([*_command(named), *others], settings.to_environment())


def launch_eagle(
    model: str | Path, drafter: str | Path, *, paths: int, depth: int, others: Sequence[str] = ()
) -> Launch:
    """Return the command for SGLang with its own EAGLE, for comparison; see :func:`launch`.

    Its trees keep the ``paths * depth`` most likely nodes among those that top-k ``paths`` expands.
    """
    named = server_arguments(model, drafter, paths=paths, depth=depth, **_hub_options(others))
    named["speculative_algorithm"] = SGLANGS_OWN[named["speculative_algorithm"]]
    named["speculative_num_draft_tokens"] = paths * depth + 1
    return Launch([*_command(named), *others], {})


def _hub_options(others: Sequence[str]) -> dict[str, Any]:
    """Return those of SGLang's arguments that affect how the target's configuration is read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--revision")
    parser.add_argument("--trust-remote-code", action="store_true")
    return vars(parser.parse_known_args(others)[0])


def _command(named: Mapping[str, object]) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in named.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
