"""Settings by name; sweeps; what is not lossless is left out and named."""

import pytest
from msgspec.structs import replace

from eaglegbv.config import EAGLE1_SHAPE, Plan
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.eval.settings import Setting, by_name, lossless, nodes, sweep
from eaglegbv.tree import DraftSampling


def names(pattern: str, *temperatures: float, **fields: object) -> list[str]:
    return [setting.name for setting in sweep(pattern, temperatures or (1.0,), **fields)]


def test_every_combination_stands_once() -> None:
    assert names("none") == ["none"]
    assert names("{token,gbv} {1,2}x{3,4}") == [
        *("token 1x3", "token 1x4", "gbv 1x3", "gbv 1x4", "gbv 2x3", "gbv 2x4")
    ]
    assert names("{none,otbv 2x4}", 0.0, 1.0) == ["none T0", "otbv 2x4 T0", "none", "otbv 2x4"]
    assert names("otbv 2x4 fixed at 2", draft_width=16) == ["otbv 2x4 fixed at 2 W16"]


def test_names_say_what_differs_from_the_defaults() -> None:
    plan = Plan(verifier="target_only", draft_sampling=DraftSampling.FIXED, beam=8, nodes=6)
    assert Setting(plan=plan).name == "target_only 3x4 fixed B8 N6"
    shaped = Plan(depth=5, draft_sampling=DraftSampling.FIXED, shape=EAGLE1_SHAPE)
    assert " S0,1,2,3,00," in Setting(plan=shaped).name
    assert Setting(who="lookup:2", temperature=0.5).name == "lookup:2 T0.5"
    assert Setting(plan=Plan(), who="eagle3").name == "eagle3 otbv 3x4"
    assert Setting(batch=4, context=512).name == "none batch 4 prompt 512"
    assert [one.name for one in nodes(("RRS",), ((10, 2), (100, 3)), (0.7,))] == [
        *("RRS 2x1 W10 T0.7", "RRS 3x1 W100 T0.7")
    ]
    with pytest.raises(InvalidArgument, match="temperature"):
        Setting(temperature=-1.0)


def test_settings_move_along_axes() -> None:
    setting = Setting(plan=Plan(verifier="gbv", paths=2, depth=8))
    assert (setting.at("paths"), setting.at("temperature")) == (2, 1)
    assert setting.moved("paths", 4).name == "gbv 4x8"
    assert setting.moved("temperature", 0.5).name == "gbv 2x8 T0.5"
    assert (Setting().plain, Setting(who="x").plain, setting.plain) == (True, False, False)


def test_what_is_not_lossless_is_left_out_and_named() -> None:
    samplings = (DraftSampling.IID, DraftSampling.FIXED, DraftSampling.HUB)
    wanted = [
        Setting(plan=Plan(verifier=rule, paths=k, depth=3, draft_sampling=sampling))
        for rule in ("block", "otbv", "spechub")
        for sampling in samplings
        for k in (1, 2)
    ]
    kept, left_out = lossless(wanted)
    assert [one.name for one in kept] == [
        *("block 1x3 iid", "otbv 1x3 iid", "otbv 2x3 iid", "otbv 1x3 fixed"),
        *("otbv 2x3 fixed", "spechub 2x3 hub"),
    ]
    assert {"block 1x3 fixed", "otbv 2x3 hub", "spechub 1x3 hub"} < set(left_out)
    with pytest.raises(SamplingMismatch, match="draft_sampling"):
        lossless([wanted[2]])


def test_names_are_unique_in_a_run() -> None:
    setting = Setting(plan=Plan())
    assert list(by_name([setting, replace(setting, temperature=0.5)])) == [
        *("otbv 3x4", "otbv 3x4 T0.5")
    ]
    for wrong in ([], [setting, setting]):
        with pytest.raises(InvalidArgument, match="each once"):
            by_name(wrong)
