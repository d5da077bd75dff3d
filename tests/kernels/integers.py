"""Random integer matrices for the tests of this folder, and what their products are in fp64.

Shape letters: M rows of activations, N outputs, K inputs, B = K/2 bytes, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Int4:
    """An int4 matrix in canonical form, and the same in fp64."""

    codes_NB: Tensor
    scales_NG: Tensor
    zeros_NG: Tensor
    codes_NK: Tensor
    weight_NK: Tensor  # fp64

    @property
    def canonical(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes_NB, self.scales_NG, self.zeros_NG

    def per_column(self, x_NG: Tensor) -> Tensor:
        """A group's number at each of its columns, fp64 [N, K]."""
        return x_NG.double().repeat_interleave(self.codes_NK.shape[1] // x_NG.shape[1], dim=1)


def int4(n: int, k: int, group: int, *, fractional: bool = False, half: bool = False, seed: int = 0) -> Int4:
    """`fractional` zeros are fp32 and lie a little outside the codes, too; else they are uint8. `half`: fp16 scales."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    codes[0, : min(16, k)] = torch.arange(min(16, k), dtype=torch.uint8)
    scales = (torch.rand(n, k // group, generator=g) + 0.05) * torch.randn(n, k // group, generator=g).sign() / 16
    scales = scales.half() if half else scales
    if fractional:
        zeros = torch.rand(n, k // group, generator=g) * 20 - 2
    else:
        zeros = torch.randint(0, 16, (n, k // group), generator=g, dtype=torch.uint8)
    weight = torch.empty(n, k, dtype=torch.float64)
    for i in range(k // group):  # by the definition, column by column
        columns = slice(i * group, (i + 1) * group)
        weight[:, columns] = (codes[:, columns].double() - zeros[:, i, None].double()) * scales[:, i, None].double()
    packed = torch.zeros(n, k // 2, dtype=torch.uint8)
    for b in range(k // 2):
        packed[:, b] = codes[:, 2 * b] + 16 * codes[:, 2 * b + 1]
    return Int4(packed, scales, zeros, codes, weight)


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ w.T, fp64."""
    return x_MK.double() @ weight_NK.double().T


def plain_limit(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """How far a product may be off that rounds each weight and the result to x's dtype and sums in fp32.

    With u the roundoff of the dtype and e that of fp32: |x| @ |w|.T * (u + K e), and u |y| for the result.
    """
    u, e = ROUNDOFF[x_MK.dtype], ROUNDOFF[torch.float32]
    terms = exact(x_MK.abs(), weight_NK.abs())
    return 1.01 * (terms * (u + x_MK.shape[1] * e) + u * exact(x_MK, weight_NK).abs()) + 1e-30
