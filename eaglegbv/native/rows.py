"""Passes over rows of logits by the native library, where tensor operations take one each."""

import torch
from torch import Tensor

from eaglegbv.native.library import native_library
from eaglegbv.sampling import WarpSettings


def takes(logits: Tensor, settings: WarpSettings) -> bool:
    """Return whether the library warps such rows: float32 of the host, by temperatures alone."""
    fits = logits.device.type == "cpu" and logits.dtype is torch.float32
    return fits and settings.only_tempered and native_library() is not None


def warped_rows(logits: Tensor, settings: WarpSettings) -> tuple[Tensor, Tensor]:
    """Return what :func:`eaglegbv.sampling.warped_rows` does, in one pass."""
    library = native_library()
    assert library is not None  # by `takes`
    logits = logits.contiguous()
    warped = torch.empty_like(logits)
    normalisers = torch.empty(len(logits), dtype=torch.float64)
    library.rows_warp(
        *(logits.data_ptr(), *logits.shape, settings.temperature.data_ptr()),
        *(warped.data_ptr(), normalisers.data_ptr(), torch.get_num_threads()),
    )
    return warped, normalisers


def candidates(logits: Tensor, settings: WarpSettings, width: int) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens' places ``[rows, width]``, ascending, and probabilities.

    The probabilities are float64, at the rows' temperatures, of those tokens alone.
    """
    library = native_library()
    assert library is not None  # by `takes`
    logits = logits.contiguous()
    places = torch.empty((len(logits), width), dtype=torch.int64)
    probs = torch.empty((len(logits), width), dtype=torch.float64)
    library.rows_candidates(
        *(logits.data_ptr(), *logits.shape, width, settings.temperature.data_ptr()),
        *(places.data_ptr(), probs.data_ptr(), torch.get_num_threads()),
    )
    return places, probs
