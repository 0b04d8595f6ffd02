"""``eaglegbv serve``: the command that starts SGLang's OpenAI-compatible server."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglegbv.backends.sglang.engine import server_arguments
from eaglegbv.backends.sglang.settings import Settings

SGLANGS_OWN = {"EAGLEGBV": "EAGLE", "EAGLEGBV3": "EAGLE3"}
"""SGLang's algorithm for the heads of each of our algorithms."""


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
