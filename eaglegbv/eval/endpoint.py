"""A server over HTTP: whether it answers, and the events of an answer."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.events import events

BUSY = (408, 409, 425, 429)
"""Statuses of requests that a server may answer later, beside those of its own errors."""


class Refused(InvalidArgument):
    """A request that a server does not answer; where it is ``busy`` it may later."""

    def __init__(self, response: httpx.Response) -> None:
        expected = f"a server that answers ({response.status_code}: {response.text[:300]})"
        super().__init__("url", str(response.url), expected)
        self.busy = response.is_server_error or response.status_code in BUSY
        seconds = response.headers.get("retry-after", "")
        self.wait = float(seconds) if seconds.isdecimal() else 0.0  # seconds


def connected(
    url: str,
    key: str,
    *,
    connections: int,
    timeout: float = 600,
    **more: Any,  # noqa: ANN401  httpx's
) -> httpx.AsyncClient:
    """Return a client of a server, for so many requests at once.

    Where a response is an error, the request raises Refused.

    Args:
        url: The server's address; that of its ``/v1`` is taken for it.
        key: The key to give.
        connections: Requests at once.
        timeout: Seconds without a sign after which a request has failed.
        more: What httpx takes beside it.
    """
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {key}"},
        timeout=timeout,
        limits=httpx.Limits(max_connections=connections),
        **more,
        event_hooks={"response": [_check]},
    )


async def _check(response: httpx.Response) -> None:
    if response.is_error:
        await response.aread()
        raise Refused(response)


async def asked(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the events of an answer; of a server that does not stream, its whole answer.

    Raises:
        Refused: The server does not answer.
        StepFailed: It breaks off with an error.
        httpx.HTTPError: It cannot be reached, or dies.
    """
    async with client.stream("POST", path, json=body) as response:
        if "json" in response.headers.get("content-type", ""):
            yield msgspec.json.decode(await response.aread(), type=dict[str, Any])
            return
        async for event in events(response.aiter_text()):
            yield event
