"""Float matrices to integer ones by rounding to the nearest level, group by group.

Knows no search and no file: where the limits of a group's range lie may be given, and the dtype in which a file will
hold the scales, so that codes are chosen for the very scales that a reader will see. N rows (outputs), K columns
(inputs), g inputs a group, G = K/g.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.quantization.weights import Int4Weight, Int8Weight

_LEVELS = 15  # of int4 above the lowest


@dataclass(frozen=True)
class Grid:
    """How int4 levels are laid: `group` inputs a scale (-1: the whole row), zero points or none, the scales' dtype.

    Without zero points (`symmetric`) every zero is 8 and the levels are -8 … 7 times the scale.
    """

    group: int
    symmetric: bool
    scale_dtype: torch.dtype

    def width(self, columns: int) -> int:
        """Inputs of a group in a matrix of so many columns."""
        return columns if self.group == -1 else self.group

    def split(self, w_NK: Tensor) -> Tensor:
        """fp32 [N, G, g], a view where it can be one."""
        return w_NK.float().reshape(w_NK.shape[0], -1, self.width(w_NK.shape[1]))


def limits(w_NGg: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest weight of every group, each [N, G], 0 always between them."""
    return w_NGg.amin(-1).clamp(max=0), w_NGg.amax(-1).clamp(min=0)


def levels(low_NG: Tensor, high_NG: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """(scales, zeros) fp32 [N, G] of levels that reach from low to high: scales as `grid.scale_dtype` holds them, zeros
    whole numbers 0 … 15. A group whose range is nothing has the scale 1, so that its weights come back as 0."""
    if grid.symmetric:
        scales = torch.maximum(high_NG / 7, -low_NG / 8)
    else:
        scales = (high_NG - low_NG) / _LEVELS
    scales = scales.to(grid.scale_dtype).float()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if grid.symmetric:
        return scales, torch.full_like(scales, 8)
    return scales, torch.round(-low_NG / scales).clamp_(0, _LEVELS)


def codes(w_NGg: Tensor, scales_NG: Tensor, zeros_NG: Tensor) -> Tensor:
    """fp32 [N, G, g] of whole numbers 0 … 15: the nearest level of each weight."""
    return (w_NGg / scales_NG[..., None]).round_().add_(zeros_NG[..., None]).clamp_(0, _LEVELS)


def rounded(w_NGg: Tensor, low_NG: Tensor, high_NG: Tensor, grid: Grid) -> Tensor:
    """The weights fp32 [N, G, g] as they would come back from int4."""
    scales, zeros = levels(low_NG, high_NG, grid)
    return codes(w_NGg, scales, zeros).sub_(zeros[..., None]).mul_(scales[..., None])


def to_int4(w_NK: Tensor, grid: Grid, bounds: tuple[Tensor, Tensor] | None = None) -> Int4Weight:
    """The matrix in int4, K even and a multiple of the group. `bounds` (low, high) [N, G] take the place of a group's
    own limits; weights beyond them are clipped.

    Raises ValueError for values that are not finite, or whose scale `grid.scale_dtype` cannot hold.
    """
    w_NGg = grid.split(w_NK)
    low, high = limits(w_NGg) if bounds is None else bounds
    scales, zeros = levels(low, high, grid)
    _check(w_NK, scales, grid.scale_dtype)
    codes_NK = codes(w_NGg, scales, zeros).to(torch.uint8).view(w_NK.shape)
    held = scales.half() if grid.scale_dtype == torch.float16 else scales
    return Int4Weight.from_codes(codes_NK, held, zeros.to(torch.uint8))


def to_int8(w_NK: Tensor, scale_dtype: torch.dtype) -> Int8Weight:
    """The matrix in int8, one symmetric scale a row. Raises ValueError as `to_int4` does."""
    w = w_NK.float()
    scales_N = (w.abs().amax(-1) / 127).to(scale_dtype).float()
    scales_N = torch.where(scales_N == 0, torch.ones_like(scales_N), scales_N)
    _check(w, scales_N, scale_dtype)
    codes_NK = (w / scales_N[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Weight(codes_NK, scales_N)


def _check(w: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    """Scales are finite where the weights are, and where the dtype that holds them reaches so far."""
    if bool(torch.isfinite(scales).all()):
        return
    if not bool(torch.isfinite(w).all()):
        raise ValueError("holds a value that is not finite (NaN or infinity); the checkpoint is damaged")
    raise ValueError(f"a group's scale lies beyond {dtype}; its largest weight is {float(w.abs().max()):g}")
