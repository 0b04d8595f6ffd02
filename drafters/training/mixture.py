"""Mixtures of the sources of training text: the share of the tokens each source has."""

from collections.abc import Mapping

MIXTURE: Mapping[str, float] = {
    "dolly15k": 0.46,
    "instruct_1100": 0.005,
    "self_instruct_seed175": 0.005,
    "gsm8k_train": 0.10,
    "mbpp_train": 0.01,
    "topical_chat": 0.16,
    "sgd_dialogues": 0.12,
    "books": 0.12,
    "tinyshakespeare": 0.02,
}
"""Mostly human-written instructions, some dialogue, arithmetic and prose."""

FINAL_MIXTURE: Mapping[str, float] = {
    "dolly15k": 0.65,
    "instruct_1100": 0.02,
    "self_instruct_seed175": 0.01,
    "gsm8k_train": 0.08,
    "mbpp_train": 0.01,
    "topical_chat": 0.14,
    "sgd_dialogues": 0.08,
    "books": 0.0,
    "tinyshakespeare": 0.0,
}
"""For the end of training: short instructions and their answers."""

OTHER_SHARE = 0.1
"""Of a source that a mixture does not name."""
