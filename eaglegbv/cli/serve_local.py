"""``eaglegbv serve MODEL --backend local``: an OpenAI-compatible server of this engine."""

from dataclasses import replace
from typing import Annotated

import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import Models, opt
from eaglegbv.cli.structs import Fields
from eaglegbv.config import EngineConfig, PlanChoices
from eaglegbv.errors import InvalidArgument, NotInstalled
from eaglegbv.server import Server

try:
    import uvicorn
except ImportError as missing:
    raise NotInstalled("uvicorn", "serve") from missing

SHUTDOWN_SECONDS = 10
"""How long answers may go on after a signal to stop; those that have not ended then break off."""

app = opts.make_app()


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="Folder or hub name of the target; or tiny, or smollm2.")
    ],
    backend: Annotated[str, opt("local, this server; or sglang, see 'eaglegbv serve'.")] = "local",
    *,
    plan: PlanChoices,
    engine: Annotated[EngineConfig, Fields(max_batch=64)],
    models: Annotated[Models, Fields(without=("model",))],
    host: Annotated[str, opt("Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, opt("Port to listen at; 0 for a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must give.", envvar="EAGLEGBV_API_KEY"),
    ] = None,
    served_model_name: Annotated[str | None, opt("What clients call it.", shown="MODEL")] = None,
    max_waiting: Annotated[int, opt("Most answers that wait; more are refused (429).")] = 256,
) -> None:
    """Serve MODEL by this package's engine, with the endpoints of OpenAI's API."""
    if backend != "local":
        raise InvalidArgument("backend", backend, "local or sglang")
    planning = opts.fitting(plan).planning()
    llm = replace(models, model=model).load(planning, engine)
    limit = engine.max_batch + max_waiting
    server = Server(llm, served_model_name or model, api_key, limit=limit)
    uvicorn.run(server.app(), host=host, port=port, timeout_graceful_shutdown=SHUTDOWN_SECONDS)
