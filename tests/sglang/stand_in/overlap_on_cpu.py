"""SGLang's overlap of rounds and scheduling on a CPU, where SGLang has none for want of one kernel.

Where ``OVERLAP_ON_CPU`` names a file, this plug-in (found by SGLang when this folder is on
PYTHONPATH) gathers what crosses rounds by PyTorch, lets our plug-in leave overlap on, and writes a
line to the file when a scheduler enters its overlapping loop. Nothing else is replaced.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "OVERLAP_ON_CPU"


def register() -> None:
    """Register the two hooks, if they are asked for."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from eaglegbv.backends.sglang import server_args

    server_args.WITHOUT_OVERLAP = frozenset()
    kernel = "sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras"
    loop = "sglang.srt.managers.scheduler.Scheduler.event_loop_overlap"
    HookRegistry.register(kernel, gathered, HookType.REPLACE)
    HookRegistry.register(loop, noted, HookType.AROUND)


def gathered(rows: Any, *tables: Any) -> tuple[Any, ...]:
    """Return the rows of each table; None of none."""
    return tuple(None if table is None else table[rows] for table in tables)


def noted(original: Callable[..., None], *arguments: object, **named: object) -> None:
    """Run the loop, and leave a note that it was this one."""
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as out:
        out.write("overlapping\n")
    original(*arguments, **named)
