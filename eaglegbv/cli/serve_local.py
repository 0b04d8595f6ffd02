"""``eaglegbv serve MODEL --backend local``: an OpenAI-compatible server of this engine."""

import secrets
import socket
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import Models, opt
from eaglegbv.cli.structs import Fields
from eaglegbv.config import EngineConfig, PlanChoices
from eaglegbv.errors import InvalidArgument, NotInstalled

try:
    import uvicorn
except ImportError as missing:
    raise NotInstalled("uvicorn", "serve") from missing

SHUTDOWN_SECONDS = 10
"""How long answers may go on after a signal to stop; those that have not ended then break off."""

app = opts.make_app()


class LogLevel(StrEnum):
    """What a server logs at least."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class SpecRecord(StrEnum):
    """How vLLM's record of speculation is written."""

    SUMMARY = "summary"
    DETAILED = "detailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where and how a model is served.

    Attributes:
        host: Address to listen at.
        port: Port to listen at; 0 for a free one.
        served_model_name: What clients call the model; by default MODEL.
        max_waiting: Most answers that wait; more are refused (429).
        allowed_origins: Sites whose pages may ask, separated by commas; '*' for all.
        keep_alive: Seconds that an idle connection stays open.
        log_level: One of debug, info, warning, error.
        chat_template: File with a chat template, or the template, instead of the model's.
        tokenizer: Folder or hub name of another tokenizer than the model's.
        revision: Revision of a hub model.
        max_model_len: Most tokens of a prompt and its answer.
        per_request_spec_decode_metrics: Add a record of speculation to each answer, as vLLM does:
            summary, or detailed with every step.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_waiting: int = 256
    allowed_origins: str = "*"
    keep_alive: int = 60
    log_level: LogLevel = LogLevel.INFO
    chat_template: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    per_request_spec_decode_metrics: SpecRecord | None = None

    def bind(self) -> socket.socket:
        """Return a socket that has the address; InvalidArgument if it cannot be had."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            bound.close()
            expected = f"one that is free, at an address of this machine: {self.host} ({error})"
            raise InvalidArgument("port", self.port, expected) from error
        return bound

    def template(self) -> str | None:
        """Return the text of the chat template, or None for the model's."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument("chat_template", given, f"a readable file ({error})") from error


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="Folder or hub name of the target; or tiny, or smollm2.")
    ],
    backend: Annotated[str, opt("local, this server; or sglang, see 'eaglegbv serve'.")] = "local",
    *,
    endpoint: Endpoint,
    plan: PlanChoices,
    engine: Annotated[EngineConfig, Fields(without=("seed",), max_batch=64)],
    models: Annotated[Models, Fields(without=("model",))],
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must give.", envvar="EAGLEGBV_API_KEY"),
    ] = None,
    seed: Annotated[
        int | None, opt("Seed of requests without one; by default another at every start.")
    ] = None,
) -> None:
    """Serve MODEL by this package's engine, with the endpoints of OpenAI's API."""
    if backend != "local":
        raise InvalidArgument("backend", backend, "local or sglang")
    template, planning = endpoint.template(), opts.planning_of(plan)
    with endpoint.bind() as bound:
        from eaglegbv.server import Server  # the address is had before minutes go by

        seed = secrets.randbits(63) if seed is None else seed
        llm = replace(models, model=model).load(
            planning,
            msgspec.structs.replace(engine, seed=seed),
            tokenizer=endpoint.tokenizer,
            revision=endpoint.revision,
            max_model_len=endpoint.max_model_len,
        )
        llm.tokenizer.chat_template = template or llm.tokenizer.chat_template
        server = Server(
            llm,
            endpoint.served_model_name or model,
            api_key,
            limit=engine.max_batch + endpoint.max_waiting,
            origins=endpoint.allowed_origins.split(","),
            spec_metrics=endpoint.per_request_spec_decode_metrics,
        )
        config = uvicorn.Config(
            server.app(),
            log_level=str(endpoint.log_level),
            timeout_keep_alive=endpoint.keep_alive,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[bound])
