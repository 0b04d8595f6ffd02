"""Ctrl-C while a command imports and loads: it ends quietly, with the status of a shell."""

import subprocess
import sys

import pytest

AT_THE_IMPORT_OF = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)
_, moment, *sys.argv[1:] = sys.argv
sys.meta_path.insert(0, Interrupting())
from eaglegbv.__main__ import run
run()
"""
GENERATE = ("generate", "Hello", "--model", "tiny", "-n", "3")
SERVE = ("serve", "tiny", "--backend", "local", "--port", "0")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("eaglegbv.cli", GENERATE),
        ("typer", GENERATE),
        ("eaglegbv.cli.options", GENERATE),
        ("torch", GENERATE),
        ("transformers.models.llama.modeling_llama", GENERATE),  # the model is loaded
        ("uvicorn", SERVE),
        ("eaglegbv.server", SERVE),
    ],
)
def test_it_ends_quietly(module, words):
    command = (sys.executable, "-c", AT_THE_IMPORT_OF, module, *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


def test_the_package_alone_imports_nothing():
    """Python's own start is all that stands before the command's code."""
    code = "import sys; before = {*sys.modules}; import eaglegbv.__main__\n"
    code += "print(*{*sys.modules} - before)"
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == {"eaglegbv", "eaglegbv.__main__"}
