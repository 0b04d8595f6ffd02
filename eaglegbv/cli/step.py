"""``eaglegbv bench step``: step time by phase at any model shape, and the machine's limits."""

from pathlib import Path
from typing import Annotated

import typer

from eaglegbv.cli.options import (
    CompileBackend,
    CudaGraphs,
    Device,
    Dtype,
    check_out,
    check_verifier,
    graph_mode,
)
from eaglegbv.errors import InvalidArgument, one_of


def step(
    shape: Annotated[
        str, typer.Option(help="tiny or llama-3.1-8b; the sizes below replace those of the shape.")
    ] = ("tiny"),
    hidden: Annotated[int | None, typer.Option(help="Width of a hidden state.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of decoder layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Number of key and value heads.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of feed-forward layers.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Number of tokens.")] = None,
    draft_vocab: Annotated[int | None, typer.Option(help="Tokens that the head can draft.")] = None,
    verifier: Annotated[str, typer.Option(help="Verifier, as in generate.")] = "otbv",
    paths: Annotated[int, typer.Option(help="Drafted paths, K.")] = 4,
    depth: Annotated[int, typer.Option(help="Drafted tokens per path, L.")] = 6,
    batch: Annotated[int, typer.Option(help="Number of requests.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of steps to time.")] = 30,
    device: Device = None,
    dtype: Dtype = None,
    compile_backend: CompileBackend = None,
    cuda_graphs: CudaGraphs = "auto",
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Time the phases of a step with random weights, for a target and an EAGLE-3 head.

    The floor is the time to read weights, keys and values once, or to multiply, at the bandwidth
    and the rate measured on this machine. Random weights accept little, but times do not depend on
    that.
    """
    import msgspec

    from eaglegbv.config import Plan
    from eaglegbv.devices import place_of
    from eaglegbv.eval.machine import measure_machine
    from eaglegbv.eval.random_models import SHAPES, StepSetting, build_rig
    from eaglegbv.eval.report import plain_text
    from eaglegbv.eval.step_bench import step_table, time_steps

    if shape not in SHAPES:
        raise InvalidArgument("shape", shape, one_of(SHAPES, shape))
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "intermediate": intermediate,
        "vocab": vocab,
        "draft_vocab": draft_vocab,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    model = msgspec.structs.replace(SHAPES[shape], **given)
    check_verifier(verifier)
    check_out(out)
    setting = StepSetting(
        plan=Plan(verifier=verifier, paths=paths, depth=depth),
        batch=batch,
        context=context,
        temperature=temperature,
        steps=steps,
    )
    where, precision = place_of(device, dtype)
    rig = build_rig(
        model,
        setting,
        dtype=precision,
        device=where,
        compile_backend=compile_backend,
        graphs=graph_mode(cuda_graphs),
    )
    report = time_steps(rig, setting, measure_machine(precision, where))
    machine = report.machine
    typer.echo(plain_text(step_table(report)))
    launched = "" if report.launches is None else f", {report.launches} launches"
    typer.echo(
        f"{report.operations} operations a step{launched}; "
        f"{report.weights / 1e9:.2f} GB of weights; "
        f"{machine.bandwidth / 1e9:.0f} GB/s, {machine.flops / 1e12:.2f} TFLOP/s measured; "
        f"{report.block_efficiency:.2f} tokens a step and request"
    )
    if out is not None:
        facts = {"shape": model, "setting": setting, "report": report}
        out.write_bytes(msgspec.json.encode(facts))
        typer.echo(f"wrote {out}", err=True)
