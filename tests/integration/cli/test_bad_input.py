"""Input that a command cannot take is named in one line, before anything is written."""

import shlex
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_verifier.py"
SIZES = "hidden=32,layers=4,heads=2,kv_heads=1,intermediate=48,vocab=64,draft_vocab=32"
QUICK = ("--questions-set", "builtin", "--questions", "2", "--max-tokens", "6")
BAD = {
    "audit": [
        ("", "no --verifier: expected one of block, "),
        ("--verifier V", "verifier='V'"),
        ("--verifier otbv --draft-sampling nope", "--draft-sampling='nope'"),
        ("--verifier otbv --draft-sampling wor", "--draft-sampling='wor'"),
        ("--verifier token --paths 2", "paths=2"),
        ("--verifier spechub --paths 3", "paths=3"),
        ("--verifier otbv --vocab 1", "vocab=1"),
        ("--verifier otbv --vocab 9 --depth 4", "at most 20000 draft trees"),
        ("--verifier otbv --instances 0", "instances=0"),
        ("--verifier otbv --samples 0", "samples=0"),
        ("--all --verifier otbv", "neither --verifier nor --draft-sampling"),
        ("--module /no/such/file.py", "module='/no/such/file.py'"),
        (f"--module {__file__}", "a subclass of ReferenceVerifier"),
        (f"--module {EXAMPLE} --samples 10", "samples=10"),
        (f"--module {EXAMPLE} --draft-sampling fixed", "--draft-sampling='fixed'"),
        ("--verifier otbv pair", "verifier='otbv': expected no option"),
        ("pair --verifier nope", "verifier='nope'"),
        (
            "--draft-sampling hob --verifier otbv",
            "--draft-sampling='hob': expected hub, perhaps; one of iid, ",
        ),
    ],
    "generate": [
        ("", "no --prompt: expected PROMPT"),
        (
            "--prompt a --prompt-file b",
            "prompt-file='b': expected --prompt or --prompt-file, not both",
        ),
        ("--prompt hello --trace-trees", "--trace FILE"),
        ("--prompt a --trace /no/such/file", "trace='/no/such/file': expected a file in a f"),
        ("--prompt a --model /no/such/model", "/no/such/model"),
        ("--prompt a --model nobody/misspelt", "hub (the hub could not be reached)"),
        ("--prompt a --drafter /no/such/drafter", "drafter='/no/such/drafter'"),
        ("--prompt ' '", "prompt=' ': expected a text"),
        ("--prompt-file /no/such/file", "prompt-file='/no/such/file'"),
        ("--prompt a --raw --system b", "system='b'"),
        ("--prompt a --temperature -1", "temperature=-1.0"),
        ("--prompt a --top-p 0", "--top-p=0.0"),
        ("--prompt a --top-p much", "--top-p='much': expected a number"),
        ("--prompt a --max-tokens 2.5", "--max-tokens='2.5': expected an integer"),
        (f"--prompt a --max-tokens {'9x' * 999}", "9x9... (2000 characters): expected an integer"),
        ("--prompt a --top-k -2", "--top-k=-2"),
        ("--prompt a --min-p 2", "--min-p=2.0"),
        ("--prompt a --max-tokens 0", "--max-tokens=0"),
        ("--prompt a --paths 0", "paths=0"),
        ("--prompt a --paths 2 --verifier token", "paths=2"),
        ("--prompt a --verifier none --paths 3", "paths=3: expected none with verifier"),
        ("--prompt a --drafter ngram --verifier gbv", "verifier='gbv': expected one that"),
        ("--prompt a --depth 99", "depth=99"),
        ("--prompt a --verifier foo", "verifier='foo': expected one of block, gbv, "),
        ("--prompt a --verifier obtv", "expected otbv, perhaps; one of block, gbv, "),
        ("--prompt a --verifier foo", ", none, otbv, "),
        (
            "--prompt a --draft-sampling nope",
            "--draft-sampling='nope': expected one of iid, wor, greedy, hub, f",
        ),
        ("--prompt a --draft-temperature 0", "--draft-temperature=0.0"),
        ("--prompt a --dtype int3", "expected one of auto, float32, bfloat16, float16, or a"),
        ("--prompt a --device warp", "device='warp': expected cpu"),
        ("--prompt a --compile fast", "='fast': expected 'inductor', or an"),
        (f"--prompt {'a' * 300} --verifier otbv", "at most"),
    ],
    "bench mt-bench": [
        ("--questions 99", "questions=99"),
        ("--questions-set nope", "questions-set='nope'"),
        ("--data /no/such/file", "data='/no/such/file'"),
        ("--verifiers none,,otbv", "verifiers='none,,otbv'"),
        ("--verifiers nope", "verifier='nope'"),
        ("--paths 1,x", "paths='1,x'"),
        ("--paths 77", "paths=77"),
        ("--depth 0", "depth=0"),
        ("--temperature hot", "temperature='hot'"),
        ("--temperature -1", "temperature=-1"),
        ("--draft-sampling own,nope", "--draft-sampling='nope'"),
        ("--draft-sampling fixed --verifiers block", "--draft-sampling='fixed'"),
        ("--draft-temperature hot", "draft-temperature='hot'"),
        ("--repeats 0", "repeats=0"),
        ("--max-tokens 0", "--max-tokens=0"),
        ("--seed -1", "seed=-1"),
        ("--backend nope", "backend='nope'"),
        ("--baselines fast", "baselines='fast'"),
        ("--baselines lookup:2,", "baselines='lookup:2,'"),
        ("--baselines assistant:/no/such", "baselines='/no/such'"),
        ("--backend transformers --verifiers otbv", "verifiers='otbv'"),
        ("--backend sglang --baselines transformers", "baselines=['transformers']"),
        ("""--backend-arguments '{"a": 1}'""", "backend-arguments={'a': 1}"),
        ("--backend sglang --backend-arguments '[1]'", "backend-arguments='[1]'"),
        ("--backend sglang --backend-arguments '{'", "backend-arguments='{'"),
        ("--backend sglang --compile inductor", "compile='inductor': expected none"),
        ("--compile fast", "--compile='fast': expected 'inductor', or"),
    ],
    "bench solvers": [
        ("--vocab 10", "drafts"),
        ("--vocab 10 --drafts 1", "drafts"),
        ("--solver simplex", "solver"),
        ("--width wide", "width"),
        ("--width 0", "width"),
        ("--instances 0", "instances"),
        ("--time-limit 0", "time-limit"),
    ],
    "bench step": [
        ("--shape huge", "shape='huge'"),
        ("--sizes wide=3", "sizes='wide=3'"),
        ("--sizes layers=3", "layers=3"),
        ("--sizes heads=3", "heads=3"),
        ("--sizes vocab=0", "vocab=0"),
        ("--sizes kv_heads=3", "heads=4"),
        ("--steps 0", "steps=0"),
        ("--plans fast", "plans='fast'"),
        ("--plans fast:2x2", "verifier='fast'"),
        ("--cuda-graphs fast", "cuda-graphs='fast'"),
        (f"--sizes {SIZES} --device cpu --cuda-graphs on", "cuda-graphs='on'"),
    ],
    "bench batch": [
        *((f"--ways {way}", f"ways='{way}'") for way in ("fast", "3x", "lookup", "exit:3")),
        ("--ways 0x2", "paths=0"),
        ("--batches 0", "batches=[0]"),
        ("--ways none --contexts 100000", "prompt='100000 tokens'"),
    ],
    "demo": [("--questions 17", "--questions=17: expected an integer in [1, 16]")],
    "inspect": [
        ("/no/such/head", "'eagle3' or 'eagle1'"),
        (f"{EXAMPLE.parent}", f"{str(EXAMPLE.parent)!r}: expected a folder with an EAGLE head's"),
    ],
    "export": [
        ("eagle1 /no/such/out --format speculators", "holds eagle1"),
        ("eagle3 /no/such/out --format speculators", "name the target"),
        ("eagle3 /no/such/out --format foo", "--format='foo': expected one of eagle, sglang, spec"),
    ],
    "bench batch --shape tiny --questions-set builtin": [
        ("--ways none", "ways='none': expected a plan"),
        ("--ways 2x2,transformers", "ways='transformers'"),
        ("--shape huge", "shape='huge'"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *case) for command, cases in BAD.items() for case in cases],
)
def test_bad_input_is_one_clear_line(cli, pair, tmp_path, command, arguments, message):
    usual = {"generate": pair, "bench mt-bench": [*pair, *QUICK, "--out", str(tmp_path)]}
    usual["bench batch"] = [*pair, "--questions-set", "builtin", "--repeats", "1", "--prompts", "1"]
    result = cli(*command.split(), *usual.get(command, ()), *shlex.split(arguments), status=2)
    assert result.out == ""
    assert message in result.err
    assert result.err.startswith("eaglegbv: ")
    assert result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
