"""A server of SGLang in a separate process, for as long as it is needed."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eaglegbv.backends.sglang.serving import Launch
from eaglegbv.errors import EagleGBVError

STARTS_WITHIN = 1800.0
ENDS_WITHIN = 60.0
LAST_WORDS = 2000


class ServerFailed(EagleGBVError):
    """A server ended by itself, or did not answer in time."""

    def __init__(self, happened: str, log: Path) -> None:
        text = log.read_text(encoding="utf-8", errors="replace")
        super().__init__(f"the server {happened}; the end of {log}:\n{text[-LAST_WORDS:]}")
        self.happened = happened
        self.log = log

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.happened, self.log)


@contextmanager
def running(launch: Launch, log: Path, *, starts_within: float = STARTS_WITHIN) -> Iterator[str]:
    """Start a server on a free port of this machine, and stop it at the end.

    Args:
        launch: The command that starts it, without its port.
        log: File for its output.
        starts_within: Seconds within which it must answer.

    Yields:
        Its address, once it answers.

    Raises:
        ServerFailed: The server ended, or did not answer in time.
    """
    port = _free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            [*launch.command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | launch.environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log, starts_within)
        yield url
        if process.poll() is not None:
            raise ServerFailed(f"ended with code {process.returncode}", log)
    finally:
        process.terminate()
        try:
            process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, starts_within: float) -> None:
    deadline = time.monotonic() + starts_within
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"ended with code {process.returncode}", log)
        try:
            with urllib.request.urlopen(f"{url}/health_generate", timeout=60):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise ServerFailed(f"did not answer within {starts_within:.0f} s", log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
