"""Step times of many settings over one model with random weights, and where the time goes.

usage: python steps.py FOLDER [--shape llama-3.1-8b] [--device cuda] [--compile inductor]
                       [--budget SECONDS] [--quick]

Every result is a line of JSON in FOLDER/steps-*.jsonl, written at once: a setting that fails loses
nothing. The first lines are the floor: all products of a forward, by rows, in one graph.
"""

import argparse
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from eaglegbv import Plan
from eaglegbv.config import PLAIN
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.eval.random_models import SHAPES, Rig, StepSetting, build_rig
from eaglegbv.eval.step_bench import measure_machine, time_steps

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--shape", default="llama-3.1-8b")
parser.add_argument("--device", default="cuda")
parser.add_argument("--compile")
parser.add_argument("--budget", type=float, default=150)
parser.add_argument("--quick", action="store_true", help="the main settings only")
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
logging.basicConfig(level=logging.WARNING)
start = time.perf_counter()
cuda = options.device == "cuda"
device, dtype = torch.device(options.device), torch.bfloat16 if cuda else torch.float32
journal = (options.out / f"steps-{options.compile or 'eager'}.jsonl").open("a")


def note(**facts: object) -> None:
    """Write a result where nothing loses it."""
    journal.write(json.dumps(facts) + "\n")
    journal.flush()
    print({k: v for k, v in facts.items() if k != "report"}, flush=True)


@contextmanager
def kept(**what: object) -> Iterator[None]:
    """Note an error and go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        note(**what, error=f"{type(error).__name__}: {error}"[:500])


def graphed(work: Callable[[], object]) -> Callable[[], object]:
    """Return work as a CUDA graph; on a CPU as it is."""
    work()
    if not cuda:
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def products() -> None:
    """Time the products of a forward over distinct weights: no forward is faster."""
    shape = SHAPES[options.shape]
    wide = shape.hidden + 2 * shape.kv_heads * shape.hidden // shape.heads
    sizes = [(wide, shape.hidden), (shape.hidden, shape.hidden)]
    sizes += [(2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)]
    sizes = sizes * shape.layers + [(shape.vocab, shape.hidden)]
    weights = [torch.empty(*size, device=device, dtype=dtype).normal_(0, 0.02) for size in sizes]
    for rows in (1, 32) if options.quick else (1, 8, 16, 32, 64, 128, 256, 512):
        inputs = {
            width: torch.randn(rows, width, device=device, dtype=dtype)
            for width in (shape.hidden, shape.intermediate)
        }
        run = graphed(
            lambda x=inputs: [torch.nn.functional.linear(x[w.shape[1]], w) for w in weights]
        )
        seconds = []
        for _ in range(8):
            begun = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        note(products_of_rows=rows, ms=1e3 * median(seconds))


def setting(
    verifier: str, paths: int, depth: int, batch: int = 1, context: int = 512, t: float = 1.0
) -> StepSetting:
    """Return a setting; verifier ``none`` drafts nothing."""
    plan = PLAIN if verifier == "none" else Plan(verifier=verifier, paths=paths, depth=depth)
    context, steps = (context, 20) if cuda else (min(context, 64), 2)
    return StepSetting(plan=plan, batch=batch, context=context, temperature=t, steps=steps)


def settings() -> Iterator[tuple[bool, StepSetting]]:
    """Yield what to time, the most wanted first, with graphs or without."""
    for graphs in (True, False):
        yield graphs, setting("otbv", 4, 6)
        yield graphs, setting("none", 1, 1)
    if options.quick:
        return
    for verifier, paths, depth in (
        *(("gbv", 4, 6), ("block", 1, 6), ("otbv", 1, 4), ("otbv", 2, 4), ("otbv", 2, 6)),
        *(("otbv", 3, 4), ("otbv", 1, 8)),
    ):
        yield True, setting(verifier, paths, depth)
    yield True, setting("otbv", 4, 6, t=0.0)
    yield True, setting("otbv", 4, 6, context=2048)
    for batch in (4, 8, 16):
        for verifier, paths, depth in (("none", 1, 1), ("otbv", 2, 4), ("block", 1, 4)):
            yield True, setting(verifier, paths, depth, batch)
    for graphs in (True, False):
        yield graphs, setting("otbv", 4, 6, 8)


@contextmanager
def without_graphs(rig: Rig) -> Iterator[None]:
    """Run steps eagerly within this context."""
    own = rig.target._static, rig.drafter._on_device
    rig.target._static = rig.drafter._on_device = None
    try:
        yield
    finally:
        rig.target._static, rig.drafter._on_device = own


def timed(rig: Rig, own: StepSetting, *, graphs: bool) -> None:
    """Time one setting, with the busy time of the device's kernels in all of its steps."""
    counted = dict(rig.target.graph_counts), dict(rig.drafter.graph_counts)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as kernels:
        report = time_steps(rig, msgspec.structs.replace(own, steps=2), machine)
    if cuda:
        busy = sum(event.self_device_time_total for event in kernels.key_averages())
        note(busy_ms_in_all=busy / 1e3, steps=2)
    report = time_steps(rig, own, machine)
    plan, step = own.plan, report.overlapping or report.phases[-1].seconds
    note(
        plan=f"{plan.verifier} {plan.paths}x{plan.depth}",
        batch=own.batch,
        context=own.context,
        temperature=own.temperature,
        graphs=graphs,
        compile=options.compile,
        step_ms=1e3 * step,
        floor_ms=1e3 * (report.phases[-1].floor or 0),
        ran_otherwise=[
            {k: v - before.get(k, 0) for k, v in now.items() if v > before.get(k, 0)}
            for now, before in zip(
                (rig.target.graph_counts, rig.drafter.graph_counts), counted, strict=True
            )
        ],
        report=msgspec.to_builtins(report),
    )
    table = kernels.key_averages().table(row_limit=60, max_name_column_width=90)
    (options.out / f"kernels-{options.compile or 'eager'}.txt").write_text(table)


name = torch.cuda.get_device_name() if cuda else "cpu"
note(torch=torch.__version__, device=name, shape=options.shape, compile=options.compile)
with kept(part="products"):
    products()
machine = measure_machine(dtype, device)
note(bandwidth_GBps=machine.bandwidth / 1e9, tflops=machine.flops / 1e12)
mode = GraphMode.ON if cuda else GraphMode.EAGER
rig = build_rig(
    SHAPES[options.shape],
    setting("otbv", 4, 6, batch=1 if options.quick else 16, context=2048),
    dtype=dtype,
    device=device,
    compile_backend=options.compile,
    graphs=mode,
)
note(built_after_s=time.perf_counter() - start, self_check=rig.target.self_check)
for graphs, own in settings():
    if time.perf_counter() - start > options.budget - 12:
        note(stopped="out of time")
        break
    with kept(setting=msgspec.to_builtins(own)):
        if graphs:
            timed(rig, own, graphs=True)
        else:
            with without_graphs(rig):
                timed(rig, own, graphs=False)
