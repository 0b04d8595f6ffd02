"""What SGLang makes of a server's arguments on GPUs that are not here.

:func:`resolved_on` asks a process of its own: SGLang keeps what it finds out about a platform.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from eaglegbv.backends.sglang.launch import LAUNCHER, Launch
from support.cli import process

HOPPER = {"is_sm90": True, "is_hopper_with_cuda_12_3": True}
MACHINES: dict[str, tuple[int, dict[str, bool]]] = {
    "A100": (80, {}),
    "H100": (80, HOPPER),
    "H200": (141, HOPPER),
    "B200": (180, {"is_sm100": True, "is_blackwell": True}),
}
"""GB of memory, and what SGLang asks about the platform, beyond what is true of all of them."""

NVIDIA = {"is_cuda": True, "is_cpu": False, "is_hip": False, "has_flashinfer": True}
NVIDIA |= dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3", "is_sm100"), False)
NVIDIA |= dict.fromkeys(("is_blackwell", "is_sm120"), False)

SHOWN = (
    *("speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens"),
    *("attention_backend", "page_size", "max_running_requests", "disable_overlap_schedule"),
)


def resolved_on(machine: str, starts: list[Launch]) -> list[dict[str, Any]]:
    """Return what the arguments of servers come to, or ``{"refused": reason}``."""
    given = json.dumps([[s.command[len(LAUNCHER) :], s.environment] for s in starts])
    path = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": path}
    done = process(sys.executable, "-m", __spec__.name, machine, input=given, env=environment)
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _resolved(options: list[str]) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server_args = ServerArgs.from_cli_args(parser.parse_args([*options, "--device", "cuda"]))
    try:
        server_args.resolve_once()
    except Exception as error:  # noqa: BLE001 - whatever it is, the server would not start
        return {"refused": f"{type(error).__name__}: {error}"}
    view = resolved_view(server_args)
    return {name: getattr(view, name) for name in SHOWN}


def main(machine: str) -> None:
    """Resolve what standard input asks for."""
    import sglang.srt.arg_groups.memory_hook  # noqa: F401
    from sglang.srt import runtime_context
    from sglang.srt.plugins import load_plugins

    load_plugins()
    memory, facts = MACHINES[machine]
    asked = {*runtime_context._PLATFORM_PROBES, *runtime_context._PLATFORM_VALUES}
    known = {name: value for name, value in (NVIDIA | facts).items() if name in asked}
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang") and "get_device_memory_capacity" in vars(module):
            vars(module)["get_device_memory_capacity"] = lambda *_, **__: memory * 1024
    answers = []
    with runtime_context.override_platform(**known):
        for options, environment in json.load(sys.stdin):
            with patch.dict(os.environ, environment):
                answers.append(_resolved(options))
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
