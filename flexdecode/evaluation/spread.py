"""Standard errors of means over tokens that are not independent of their neighbours."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def block_length(count: int) -> int:
    """Values a block: the square root of their number, so that blocks grow in length and in number alike."""
    return math.isqrt(max(count - 1, 0)) + 1


def mean_and_error(values_T: Tensor) -> tuple[float, float | None]:
    """Mean of fp64 values in their order, and its standard error; None where there is no second block.

    Neighbouring tokens are predicted well or badly together, so values are not taken as independent, but the sums of
    consecutive blocks are (non-overlapping batch means). With N values in K blocks, of sums s and sizes n:
    error = sqrt(K / (K - 1) * sum((s - n * mean)^2)) / N.
    """
    values_T = values_T.double()
    count = len(values_T)
    mean = float(values_T.sum() / count)
    blocks = (values_T - mean).split(block_length(count))
    if len(blocks) < 2:
        return mean, None
    squares = torch.stack([block.sum() for block in blocks]).square().sum()
    return mean, math.sqrt(len(blocks) / (len(blocks) - 1) * float(squares)) / count
