"""All formats, and which one a folder is in."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eaglegbv.drafters.formats.base import Format, FormatName
from eaglegbv.drafters.formats.eagle import EagleFormat
from eaglegbv.drafters.formats.names import NamedTensors
from eaglegbv.drafters.formats.section import Section
from eaglegbv.drafters.formats.sglang import SGLangFormat
from eaglegbv.drafters.formats.speculators import LAYER_SECTION, SpeculatorsFormat
from eaglegbv.errors import InvalidArgument, one_of

FORMATS: Mapping[FormatName, Format] = MappingProxyType(
    {f.name: f for f in (EagleFormat(), SGLangFormat(), SpeculatorsFormat())}
)


def find_format(name: str) -> Format:
    """Return the format called ``name``.

    Raises:
        InvalidArgument: There is none.
    """
    if name not in set(FormatName):
        raise InvalidArgument("format", name, one_of(FormatName, name))
    return FORMATS[FormatName(name)]


def detect_format(stored: Mapping[str, Any], named: NamedTensors) -> Format:
    """Tell the format of a config.json and its tensors.

    The formats of SGLang and of the EAGLE repository share tensors and keys, and engines read
    either. They differ in what a layer id means where nothing else tells; the ``architectures``
    matter only for that.
    """
    if LAYER_SECTION in stored:
        return FORMATS[FormatName.SPECULATORS]
    architectures = Section(stored).texts("architectures")
    made_for_sglang = any(
        a.endswith(("ForCausalLMEagle", "ForCausalLMEagle3")) for a in architectures
    )
    own_names = any(
        name.removeprefix("model.").startswith("aux_norm_") for name in named.stored.values()
    )
    if made_for_sglang or own_names:
        return FORMATS[FormatName.SGLANG]
    return FORMATS[FormatName.EAGLE]
