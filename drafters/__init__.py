"""Drafters: what proposes draft trees, and how it is trained."""

from eaglegbv.drafters.base import Drafter, DraftReplay, ReplayingDrafter, SequenceDrafter
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle import EagleDrafter, EagleFiles
from eaglegbv.drafters.files import DrafterFiles, LoadedTarget, Opening
from eaglegbv.drafters.host_drafting import DraftCall
from eaglegbv.drafters.ngram import NgramDrafter
from eaglegbv.drafters.registry import (
    DRAFTER_FILES,
    DRAFTERS,
    files_in,
    make_drafter,
    register_drafter,
    register_files,
)

__all__ = [
    "DRAFTERS",
    "DRAFTER_FILES",
    "DraftCall",
    "DraftReplay",
    "Drafter",
    "DrafterFiles",
    "EagleDrafter",
    "EagleFiles",
    "LoadedTarget",
    "NgramDrafter",
    "Opening",
    "ReplayingDrafter",
    "SequenceDrafter",
    "StandaloneDrafter",
    "files_in",
    "make_drafter",
    "register_drafter",
    "register_files",
]
