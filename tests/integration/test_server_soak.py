"""A server's process after tens of thousands of requests: nothing is lost, and nothing kept."""

import asyncio
import subprocess
import sys
import time

import pytest
from support.http_server import wait_for
from support.soak import Held, soak

CLIENTS = 32
FIRST, LAST = 5_000, 50_000
SHARE = 1.05  # of what the process held after the first requests


@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_fifty_thousand_short_requests_leave_the_process_as_it_was(saved_pair, free_port):
    target, head = map(str, saved_pair)
    url = f"http://127.0.0.1:{free_port}"
    command = [sys.executable, "-m", "eaglegbv", "serve", target, "--drafter", head]
    command += ["--backend", "local", "--port", str(free_port), "--kv-slots", "8192"]
    with subprocess.Popen([*command, "--log-level", "warning"]) as server:
        try:
            wait_for(f"{url}/health", server)
            held = []
            for seed, count in enumerate((FIRST, LAST - FIRST)):
                outcomes = asyncio.run(soak(url, count, CLIENTS, seed, short=True))
                assert sum(outcomes.values()) == count
                assert set(outcomes) == {"whole", "streamed"}
                time.sleep(2)  # until the server has closed the clients' connections too
                held.append(Held.by(server.pid))
                sys.stdout.write(f"{held[-1]}\n")
            outcomes = asyncio.run(soak(url, 2_000, CLIENTS))
            assert set(outcomes) == {"whole", "streamed", "left", "refused 400"}
        finally:
            server.terminate()
    for before, after in zip(*held, strict=True):
        assert after <= SHARE * before, held
