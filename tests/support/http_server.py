"""Servers at loopback addresses: of this process, or of another."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serve an application on another thread; yield its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    [socket] = server.servers[0].sockets
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def wait_for(url: str, server: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            httpx.get(url).raise_for_status()
        except httpx.HTTPError:
            assert server.poll() is None, server.stderr
            assert time.monotonic() < deadline
            time.sleep(0.2)
        else:
            return
