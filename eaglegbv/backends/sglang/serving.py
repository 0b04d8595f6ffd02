"""``eaglegbv serve``: the command that starts SGLang's OpenAI-compatible server."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eaglegbv.backends.sglang.engine import server_arguments
from eaglegbv.backends.sglang.settings import Settings


@dataclass(frozen=True, slots=True)
class Launch:
    """A command and what its environment has beside the caller's.

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
    """Return what starts the server.

    Args:
        model: Folder or hub name of the target.
        drafter: Folder of an EAGLE head; None serves without speculation.
        paths: Number of drafted paths.
        depth: Length of a drafted path.
        settings: Verifier, draft width and temperature, seed.
        others: SGLang's own arguments, handed on as they are.

    Raises:
        DrafterMismatch: The head does not fit the target.
    """
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in server_arguments(model, drafter, paths=paths, depth=depth).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return Launch([*command, *others], settings.to_environment())
