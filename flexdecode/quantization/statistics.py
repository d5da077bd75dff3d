"""What is kept of a linear layer's inputs: the mean size of each, and how they go together, in fp32, chunk by chunk.

With x the inputs [T, K] and e a change of a weight row, the mean squared change of that row's output over all tokens is
e·H·e, H = x'x / T: so every token counts and none need be kept. H is held in bands along its diagonal where K is wide.
Knows no model. Shape letters: T tokens, K columns, N rows, G groups of g columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST = 4096  # columns of a band
# H is drawn towards the same multiple of the identity as if so many tokens with independent inputs had been seen too:
# of an expert that no token chose, every input counts alike.
_PRIOR = 8.0


def band_width(columns: int, group: int) -> int:
    """Columns of a band: whole groups, all columns where they are few. A group that is wider spans bands."""
    if columns <= WIDEST or group > WIDEST:
        return min(columns, WIDEST)
    return WIDEST // group * group


class Inputs:
    """Statistics of the inputs that one matrix (or several that share them) has seen. `group` is a divisor of K."""

    def __init__(self, columns: int, group: int, device: torch.device | None = None) -> None:
        self.columns, self.group, self.tokens = columns, group, 0
        self.band = band_width(columns, group)
        self._sum = torch.zeros(columns, dtype=torch.float64, device=device)
        widths = [min(self.band, columns - start) for start in range(0, columns, self.band)]
        self._products = [torch.zeros(width, width, device=device) for width in widths]

    def add(self, x_TK: Tensor) -> None:
        """Take in a chunk of inputs."""
        x = x_TK.float()
        self.tokens += x.shape[0]
        self._sum += x.abs().sum(0, dtype=torch.float64)
        for part, product in zip(x.split(self.band, dim=1), self._products, strict=True):
            product.addmm_(part.t(), part)

    def finish(self) -> None:
        """Turn sums into means; nothing is added afterwards. Raises ValueError where an input was not finite."""
        if not bool(torch.isfinite(self._sum).all()):
            raise ValueError("an input is not finite (NaN or infinity) on the calibration text")
        for product in self._products:
            product /= max(self.tokens, 1)
            level = float(product.diagonal().mean()) if self.tokens else 1.0
            share = _PRIOR / (self.tokens + _PRIOR)
            product.mul_(1 - share).diagonal().add_(share * (level or 1.0))

    def mean_size(self) -> Tensor:
        """Mean |x| of each input, fp32 [K]; 1 where no token was seen."""
        if not self.tokens:
            return torch.ones(self.columns, device=self._sum.device)
        return (self._sum / self.tokens).float()

    def scaled(self, inverse_K: Tensor) -> Inputs:
        """The statistics of x · inverse. These are used up."""
        other = Inputs.__new__(Inputs)
        other.columns, other.group, other.tokens, other.band = self.columns, self.group, self.tokens, self.band
        other._sum = self._sum * inverse_K
        other._products, self._products = self._products, []
        for part, product in zip(inverse_K.split(self.band), other._products, strict=True):
            product.mul_(part[:, None]).mul_(part)
        return other

    def row_errors(self, e_NK: Tensor) -> Tensor:
        """e·H·e of every row, fp32 [N]."""
        errors = torch.zeros(e_NK.shape[0], device=e_NK.device)
        for part, product in zip(e_NK.split(self.band, dim=1), self._products, strict=True):
            errors += (part @ product).mul_(part).sum(-1)
        return errors.clamp_(min=0)

    def group_errors(self, e_NGg: Tensor) -> Tensor:
        """e·H·e of every group of every row by itself, fp32 [N, G]."""
        n, count, g = e_NGg.shape
        if g > self.band:
            return self.row_errors(e_NGg.reshape(n, -1))[:, None]
        out, at = [], 0
        for product in self._products:
            many = product.shape[0] // g
            blocks = product.view(many, g, many, g).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [many, g, g]
            part = e_NGg[:, at : at + many].transpose(0, 1)  # [many, N, g]
            out.append(torch.bmm(part, blocks).mul_(part).sum(-1))
            at += many
        assert at == count
        return torch.cat(out).t().clamp_(min=0)
