"""The search of AWQ (Lin et al., 2023): a scale for every input channel, and how far each group's range is clipped.

Works on matrices and on statistics of their inputs, in fp32, slab by slab; knows no model. Both searches measure the
mean squared change of outputs over all tokens seen, and keep what they began with where nothing is better. N rows,
K columns, G groups of g columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.quantization.rounding import Grid, limits, rounded
from flexdecode.quantization.statistics import Inputs

COARSE = tuple(i / 10 for i in range(11))
FINE = 0.05  # beside the best of those
SHRINKS = tuple(1 - i / 20 for i in range(1, 11))
_SLAB = 1 << 22  # weights at a time
MOST_ROWS = 1024  # that candidates are compared on, evenly spread over the readers' rows
_FEWEST_ROWS = 16  # of one reader
_FLOOR = 1e-4  # of a channel's size, relative to the largest


@dataclass(frozen=True)
class Reader:
    """A matrix that reads the input: fp32 [N, K], and the grid on which it will be rounded."""

    weight_NK: Tensor
    grid: Grid


@dataclass(frozen=True)
class Scales:
    """The scales found, and each reader's relative error without any: the root of its outputs' mean squared change over
    their mean square. ratio None is no scaling at all."""

    scale_K: Tensor
    ratio: float | None
    before: tuple[float, ...]


def search_scales(
    readers: Sequence[Reader], inputs: Inputs, *, repeat: int = 1, head_dim: int = 1, powers_of_two: bool = False
) -> Scales:
    """The scale by which the columns of all readers are multiplied.

    Candidates are x^r and x^r / w^(1-r) for r = 0, 0.1 … 1, then 0.05 beside the best of each, and no scale: x the mean
    size of an input, w the mean over rows of |weight| relative to its group's largest. They are compared on some of the
    rows, evenly spread. Where the input's channels are `repeat` heads of `head_dim` for one head before, those heads
    get one scale. `powers_of_two` keeps to scales by which a float can be divided exactly.
    """
    size = _shared(inputs.mean_size(), repeat, head_dim)
    weight = _shared(torch.stack([_weight_size(r) for r in readers]).mean(0), repeat, head_dim)
    rows = max(_FEWEST_ROWS, MOST_ROWS // len(readers))
    some = [Reader(r.weight_NK[:: -(-r.weight_NK.shape[0] // rows)], r.grid) for r in readers]
    energies = [energy(reader.weight_NK, inputs) for reader in some]

    def error(scale_K: Tensor) -> float:
        return sum(relative_errors(some, energies, inputs, scale_K))

    one = torch.ones_like(size)
    best: tuple[float, Tensor, float | None] = (error(one), one, None)
    for other in (None, weight):
        tried: dict[float, float] = {}
        while ratios := _next_ratios(tried):
            for ratio in ratios:
                scale = candidate(size, other, ratio)
                if powers_of_two:
                    scale = torch.exp2(scale.log2().round())
                tried[ratio] = error(scale)
                if tried[ratio] < best[0]:
                    best = (tried[ratio], scale, ratio)
    before = relative_errors(readers, [energy(r.weight_NK, inputs) for r in readers], inputs, one)
    return Scales(best[1], best[2], before)


def _next_ratios(tried: dict[float, float]) -> tuple[float, ...]:
    """All coarse ones, then those beside the best of them, then none."""
    if not tried:
        return COARSE
    if len(tried) > len(COARSE):
        return ()
    best = min(tried, key=lambda ratio: tried[ratio])
    return tuple(ratio for ratio in (best - FINE, best + FINE) if 0 < ratio < 1)


def candidate(size_K: Tensor, weight_K: Tensor | None, ratio: float) -> Tensor:
    """size^ratio, or size^ratio / weight^(1 - ratio): around 1, finite and positive."""
    scale = size_K.pow(ratio) if weight_K is None else size_K.pow(ratio) / weight_K.pow(1 - ratio)
    scale = scale / (scale.max() * scale.min()).sqrt()
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))


def _shared(values_K: Tensor, repeat: int, head_dim: int) -> Tensor:
    """Floored values, the same for all heads that were one."""
    if repeat > 1:
        values = values_K.view(-1, repeat, head_dim)
        values_K = values.mean(1, keepdim=True).expand_as(values).reshape(-1)
    largest = values_K.max()
    return values_K.clamp(min=float(largest) * _FLOOR) if largest > 0 else torch.ones_like(values_K)


def _weight_size(reader: Reader) -> Tensor:
    total = torch.zeros(reader.weight_NK.shape[1], device=reader.weight_NK.device)
    for w_NK in slabs(reader.weight_NK):
        groups = reader.grid.split(w_NK).abs()
        total += (groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)).view(w_NK.shape).sum(0)
    return total / reader.weight_NK.shape[0]


def energy(weight_NK: Tensor, inputs: Inputs) -> float:
    """Mean square of the outputs, summed over them."""
    return sum(float(inputs.row_errors(w_NK.float()).sum()) for w_NK in slabs(weight_NK))


def relative_errors(
    readers: Sequence[Reader], energies: Sequence[float], inputs: Inputs, scale_K: Tensor
) -> tuple[float, ...]:
    """Of each reader, 0 where it puts out nothing."""
    pairs = zip(readers, energies, strict=True)
    return tuple((_error(r, inputs, scale_K) / energy) ** 0.5 if energy > 0 else 0.0 for r, energy in pairs)


def _error(reader: Reader, inputs: Inputs, scale_K: Tensor) -> float:
    """Mean squared change of the outputs, summed over them, when W·s is rounded and x / s comes in."""
    error = 0.0
    for w_NK in slabs(reader.weight_NK):
        w_NGg = reader.grid.split(w_NK * scale_K)
        e_NK = rounded(w_NGg, *limits(w_NGg), reader.grid).view(w_NK.shape).div_(scale_K).sub_(w_NK)
        error += float(inputs.row_errors(e_NK).sum())
    return error


def search_clip(weight_NK: Tensor, inputs: Inputs, grid: Grid) -> tuple[Tensor, Tensor]:
    """Limits (low, high) [N, G] of every group of every row: its own, shrunk by the factor under which the group's
    share of the output changes least."""
    found = [_clip(grid.split(w_NK), inputs, grid) for w_NK in slabs(weight_NK)]
    return torch.cat([low for low, _ in found]), torch.cat([high for _, high in found])


def _clip(w_NGg: Tensor, inputs: Inputs, grid: Grid) -> tuple[Tensor, Tensor]:
    low, high = limits(w_NGg)
    best = inputs.group_errors(rounded(w_NGg, low, high, grid) - w_NGg)
    factor = torch.ones_like(low)
    for shrink in SHRINKS:
        error = inputs.group_errors(rounded(w_NGg, low * shrink, high * shrink, grid) - w_NGg)
        better = error < best
        best, factor = torch.where(better, error, best), torch.where(better, shrink, factor)
    return low * factor, high * factor


def slabs(weight_NK: Tensor) -> Sequence[Tensor]:
    """A matrix in runs of rows, small enough for several copies of each."""
    runs: tuple[Tensor, ...] = weight_NK.split(max(1, _SLAB // weight_NK.shape[1]))
    return runs
