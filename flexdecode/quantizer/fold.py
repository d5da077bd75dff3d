"""Moving a scale from the columns of the matrices that read an input into what makes that input.

The numbers that a file can hold decide: a norm is rounded to its dtype first, and the columns are multiplied by exactly
what it lost, so that moving a scale changes no output beyond fp32's rounding. Knows no search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.models.linear import DenseLinear
from flexdecode.quantizer.groups import Group


def into_norm(weight_D: Tensor, scale_D: Tensor, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(new weight, scales that remain exact) for a norm weight that contains `offset` and is stored without it.

    A channel whose weight the dtype cannot divide so (it is 0, or rounds to 0 or to something else altogether) keeps
    its weight and has the scale 1.
    """
    new_D = (weight_D / scale_D - offset).to(dtype).float() + offset
    exact_D = weight_D / new_D
    sound = torch.isfinite(exact_D) & (exact_D / scale_D > 0.5) & (exact_D / scale_D < 2)
    return torch.where(sound, new_D, weight_D), torch.where(sound, exact_D, torch.ones_like(exact_D))


def into_linear(linear: DenseLinear, group: Group, scale_K: Tensor, dtype: torch.dtype) -> None:
    """Divide the last rows of `linear`, and of its bias (kept to what `dtype` holds), in place."""
    scale = scale_K.view(-1, group.repeat, group.head_dim)[:, 0].reshape(-1) if group.repeat > 1 else scale_K
    rows = len(scale)
    linear.weight_NK[-rows:] /= scale[:, None]
    if linear.bias is not None:
        linear.bias[-rows:] = (linear.bias[-rows:] / scale).to(dtype).float()
