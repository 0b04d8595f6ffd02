"""An OpenAI-compatible server of this engine, for ``eaglegbv serve``."""

import socket
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from eaglegbv.cli.options import Models
from eaglegbv.config import EngineConfig, Planning
from eaglegbv.errors import InvalidArgument, NotInstalled

SHUTDOWN_SECONDS = 10
"""How long answers may go on after a signal to stop; those that have not ended then break off."""


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
        log_level: What is logged at least.
        chat_template: File with a chat template, or the template, instead of the model's.
        revision: Revision of a hub model.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    log_level: LogLevel = LogLevel.INFO
    chat_template: str | None = None
    revision: str | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """What this package's own server has besides.

    Attributes:
        max_waiting: Most answers that wait; more are refused (429).
        allowed_origins: Sites whose pages may ask, separated by commas; '*' for all.
        keep_alive: Seconds that an idle connection stays open.
        tokenizer: Folder or hub name of another tokenizer than the model's.
        max_model_len: Most tokens of a prompt and its answer.
        per_request_spec_decode_metrics: Add a record of speculation to each answer, as vLLM does:
            summary, or detailed with every step.
    """

    max_waiting: int = 256
    allowed_origins: str = "*"
    keep_alive: int = 60
    tokenizer: str | None = None
    max_model_len: int | None = None
    per_request_spec_decode_metrics: SpecRecord | None = None


def serve_local(
    model: str,
    endpoint: Endpoint,
    key: str | None,
    local: LocalServer,
    planning: Planning,
    models: Models,
    engine: EngineConfig,
) -> None:
    """Serve a model until a signal stops it; clients must give ``key``, if there is one.

    Raises:
        NotInstalled: The extra for servers is not installed.
    """
    try:
        import uvicorn
    except ImportError as missing:
        raise NotInstalled("uvicorn", "serve") from missing
    template = endpoint.template()
    with endpoint.bind() as bound:
        from eaglegbv.server import Server  # the address is had before minutes go by

        llm = replace(models, model=model).load(
            planning,
            engine,
            tokenizer=local.tokenizer,
            revision=endpoint.revision,
            max_model_len=local.max_model_len,
        )
        llm.tokenizer.chat_template = template or llm.tokenizer.chat_template
        server = Server(
            llm,
            endpoint.served_model_name or model,
            key,
            limit=engine.max_batch + local.max_waiting,
            origins=local.allowed_origins.split(","),
            spec_metrics=local.per_request_spec_decode_metrics,
        )
        config = uvicorn.Config(
            server.app(),
            log_level=str(endpoint.log_level),
            timeout_keep_alive=local.keep_alive,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[bound])
