"""``eaglegbv audit``: what it prints, and its exit status."""

import json
import re
from pathlib import Path

import pytest
from support.saved_pair import save_block_head

from eaglegbv.cli import audit
from eaglegbv.eval.tables import plain_text
from eaglegbv.verifiers.registry import ALL_VERIFIERS, REFERENCES

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_verifier.py"
QUICK = ("--vocab", "2", "--instances", "3")


def test_without_json_it_is_readable(cli):
    result = cli("audit", "--verifier", "token", *QUICK)
    headings, row = result.out.splitlines()
    assert "max error" in headings
    assert row.split()[:3] == ["token", "iid", "1"]
    assert row.endswith(" lossless")


def test_all_is_every_verifier_with_every_distribution(cli):
    result = cli("audit", "--all", "--vocab", "2", "--instances", "7", "--seed", "3", "--json")
    found = [json.loads(line) for line in result.out.splitlines()]
    assert sorted((one["verifier"], one["draft_sampling"]) for one in found) == sorted(
        (name, str(draft_sampling))
        for name, rule in ALL_VERIFIERS.items()
        for draft_sampling in rule.draft_samplings
    )
    for one in found:
        assert one["max_abs_error"] <= 1e-12
        assert 1 <= one["block_efficiency"] <= 3
        if one["verifier"] not in ("greedy_block", "spectr_gbv"):  # they borrow from later steps
            assert one["block_efficiency"] <= one["lp_optimum"] + 1e-9


def test_widths_are_audited_for_the_rules_that_take_them(cli):
    options = ("--all", "--widths", "1x2", "--vocab", "2", "--instances", "4", "--json")
    result = cli("audit", *options)
    found = [json.loads(line) for line in result.out.splitlines()]
    rules = {(one["verifier"], one["draft_sampling"]) for one in found}
    widths = {name: ALL_VERIFIERS[name].any_widths or () for name in REFERENCES}
    assert rules >= {(name, str(own)) for name, samplings in widths.items() for own in samplings}
    assert rules.isdisjoint((name, "iid") for name, samplings in widths.items() if not samplings)
    assert "gbv on iid is left out" in result.err
    assert all(one["max_abs_error"] <= 1e-12 and one["widths"] == "1x2" for one in found)
    readable = cli("audit", "--verifier", "otbv", "--widths", "1x2", *QUICK)
    headings, row = readable.out.splitlines()
    assert "widths" in headings
    assert "1x2" in row
    for wrong in (("--widths", "2x2", "--paths", "2"), ("--widths", "two")):
        assert "widths=" in cli("audit", "--verifier", "otbv", *wrong, status=2).err


def test_a_claim_too_many_is_caught(cli, tmp_path):
    """The example is not lossless where the first child of a node is not drawn."""
    module = tmp_path / "mine.py"
    text = EXAMPLE.read_text(encoding="utf-8")
    assert "DraftSampling.WOR}" in text
    module.write_text(text.replace("DraftSampling.WOR}", "DraftSampling.GREEDY}"), encoding="utf-8")
    result = cli("audit", "--module", str(module), "--draft-sampling", "greedy", *QUICK, status=1)
    assert "NOT LOSSLESS" in result.out
    cli("audit", "--module", str(module), "--draft-sampling", "iid", *QUICK)


BATCHED = """
from eaglegbv.verifiers.token import TokenVerifier

class Mine(TokenVerifier):
    name = "mine"

class Careless(TokenVerifier):
    name = "careless"

    def judge(self, tree, target, uniforms):
        ones = uniforms.acceptance * 0.5
        return super().judge(tree, target, type(uniforms)(uniforms.selection, ones,
                                                          uniforms.correction))
"""


def test_a_batched_class_is_tested_by_samples(cli, tmp_path):
    module = tmp_path / "batched.py"
    module.write_text(BATCHED, encoding="utf-8")
    arguments = ("audit", "--module", str(module), *QUICK, "--samples", "2000", "--json")
    right = cli(*arguments, "--verifier", "mine")
    assert json.loads(right.out)["samples"] == 2000
    cli(*arguments, "--verifier", "careless", status=1)
    either = cli(*arguments, status=2)
    assert "one of careless, mine" in either.err


@pytest.mark.parametrize(
    ("name", "draft_sampling"),
    [
        *(("block", "iid"), ("spectr_gbv", "iid"), ("token", "iid"), ("otbv", "iid")),
        *(("otbv", "greedy"), ("specinfer", "wor")),
    ],
)
def test_the_batched_implementation_by_samples(cli, name, draft_sampling):
    options = ("--verifier", name, "--draft-sampling", draft_sampling, "--samples", "2000")
    result = cli("audit", *options, "--vocab", "2", "--instances", "7", "--seed", "3", "--json")
    assert json.loads(result.out)["detectable_shift"] < 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "a file that imports (No module named 'no_such_module')"),
        ("def broken(:", "a file that imports ("),
        (BATCHED.replace('"mine"', "7"), "Mine.name=7"),
    ],
)
def test_a_module_that_cannot_be_used_is_named(cli, tmp_path, text, message):
    module = tmp_path / "broken.py"
    module.write_text(text, encoding="utf-8")
    result = cli("audit", "--module", str(module), status=2)
    assert message in result.err


def test_pair(cli, pair):
    options = ("--prompt", "ab", "--tokens", "2", "--top-k", "2", "--samples", "60", "--json")
    result = cli("audit", "pair", *pair, *options)
    found = json.loads(result.out)
    assert found["samples"] == 60
    assert found["cells"] > 1
    assert found["p_value"] >= found["rejects_below"]
    first, expected = result.err.splitlines()
    assert first == "60 texts of 2 tokens, against their exact distribution"
    assert re.fullmatch(r"up to 120 tokens: about [\d,]+ s at plain decoding's speed", expected)
    table = cli("audit", "pair", *pair, *options[:-1]).out
    assert "detects: how far" in table


def test_pair_in_half_precision_is_compared_with_plain_decoding(cli, pair):
    options = ("--prompt", "ab", "--prompt", "hello", "--tokens", "2", "--top-k", "2", "--samples")
    how = ("--dtype", "bfloat16", "--verifier", "otbv,block", "--json")
    result = cli("audit", "pair", *pair, *options, "100", *how)
    found = [json.loads(line) for line in result.out.splitlines()]
    assert [(one["verifier"], one["against"]) for one in found] == [
        ("otbv", "plain"),
        ("block", "plain"),
    ]
    assert "against as many of plain decoding" in result.err
    for wrong in (("--against", "exact"), ("--against", "nothing"), ("--dtype", "float8")):
        refused = cli(
            "audit", "pair", *pair, *options, "100", "--dtype", "bfloat16", *wrong, status=2
        )
        assert wrong[0].strip("-") in refused.err


@pytest.mark.parametrize("how", ["--verifier=otbv,gbv,block,target_only", "--widths=2x2x1"])
def test_pair_of_a_block_drafter(how, cli, saved_pair, tmp_path):
    target = saved_pair[0]
    head = save_block_head(target, tmp_path / "head")
    pair = ("--model", str(target), "--drafter", str(head))
    options = ("--prompt", "ab", "--tokens", "2", "--top-k", "2", "--samples", "60", "--json")
    result = cli("audit", "pair", *pair, *options, how)
    found = [json.loads(line) for line in result.out.splitlines()]
    assert len(found) == (4 if "verifier" in how else 1)
    for one in found:
        assert one["cells"] > 1
        assert one["p_value"] >= one["rejects_below"]


def test_tables_fit_a_hundred_columns():
    """Of the longest names, and what each kind of audit shows."""
    longest = {"verifier": "global_resolution", "verdict": "NOT LOSSLESS"}
    shared = {"block_efficiency": 2.25, "seconds": 3600.0}
    exact = {"draft_sampling": "greedy", "paths": 16, "max_abs_error": 1e-16, "lp_optimum": 2.3}
    sampled = {"draft_sampling": "greedy", "paths": 16, "widths": "3x2x2x1", "samples": 20_000}
    sampled |= {"min_p_value": 1e-9, "detectable_shift": 0.1}
    pair = {"samples": 20_000, "cells": 256, "statistic": 1234.5, "p_value": 1e-9}
    for kind in (exact, sampled, pair | {"detectable_shift": 0.1}):
        facts = longest | shared | kind
        shown = {head: how for head, how in audit.COLUMNS.items() if how[0] in facts}
        row = [format(facts[name], layout) for name, layout in shown.values()]
        assert max(map(len, plain_text([list(shown), row]).splitlines())) <= 100
