"""Rotary position embedding: cos and sin of a step's positions, and their application.

Frequencies in fp32 as the checkpoints' authors computed them, angles in fp64, so that long positions lose nothing.
Types as transformers names them: linear (interpolation), dynamic (NTK by length), yarn (Peng et al., 2023), longrope
(Ding et al., 2024), llama3 (Meta, 2024), proportional. Under `dynamic` and `longrope` the frequencies depend on the
length of the whole sequence, so a sequence that grows past a border needs all its keys anew: `regime` tells when.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdecode.config import RopeConfig

_AHEAD = 64  # positions whose angles are computed together: a decoding sequence needs one after the other


def regime(rope: RopeConfig, length: int) -> int:
    """Two lengths with equal regimes share all frequencies; a change makes every cached key stale."""
    if rope.type == "longrope":
        return int(length > rope.original_max_position)
    if rope.type == "dynamic":
        return max(0, length - rope.max_position)
    return 0


def attention_scaling(rope: RopeConfig) -> float:
    """The factor on cos and sin."""
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        if rope.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))

    def mscale(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale()


def inverse_frequencies(rope: RopeConfig, length: int) -> Tensor:
    """fp32 [rotary_dim / 2], for a sequence of `length` tokens."""
    dim, theta = rope.rotary_dim, rope.theta
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.type == "dynamic":
        grown = max(length, rope.max_position) / rope.max_position
        theta = theta * (rope.factor * grown - (rope.factor - 1)) ** (dim / (dim - 2))
    inv = 1.0 / theta**exponents
    if rope.type == "linear":
        return inv / rope.factor
    if rope.type == "yarn":
        return _yarn(rope, inv)
    if rope.type == "longrope":
        factors = rope.long_factor if length > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
    if rope.type == "llama3":
        return _llama3(rope, inv)
    if rope.type == "proportional":
        turning = int(rope.proportion * dim // 2)
        return torch.where(torch.arange(dim // 2) < turning, inv, 0.0) / rope.factor
    return inv


def _yarn(rope: RopeConfig, inv: Tensor) -> Tensor:
    """Frequencies that turn often in the original length stay, slow ones are interpolated, a ramp between."""
    dim = rope.rotary_dim

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv / rope.factor * ramp + inv * (1 - ramp)


def _llama3(rope: RopeConfig, inv: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones stay, a smooth passage between."""
    wavelength = 2 * math.pi / inv
    old = rope.original_max_position
    smooth = (old / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * inv / rope.factor + smooth * inv
    scaled = torch.where(wavelength > old / rope.low_freq_factor, inv / rope.factor, inv)
    is_between = (wavelength <= old / rope.low_freq_factor) & (wavelength >= old / rope.high_freq_factor)
    return torch.where(is_between, between, scaled)


class Rope:
    """cos and sin for the steps of one RopeConfig; frequencies are computed once for each regime."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.scaling = attention_scaling(config)
        self._inv: dict[int, NDArray[np.float64]] = {}
        # From which position on, in which regime, cos and sin.
        self._ahead: tuple[int, int, Tensor, Tensor] = (0, -1, torch.empty(0), torch.empty(0))

    def _frequencies(self, length: int) -> NDArray[np.float64]:
        key = regime(self.config, length)
        if key not in self._inv:
            if len(self._inv) > 8:  # dynamic: every length is a regime of its own
                self._inv.clear()
            self._inv[key] = inverse_frequencies(self.config, length).double().numpy()
        return self._inv[key]

    def tables(self, positions_T: Tensor, lengths: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin [T, 1, rotary_dim / 2] for packed positions; sequence i has `counts[i]` of them and is
        `lengths[i]` tokens long in all."""
        positions = positions_T.cpu().numpy()
        regimes = {regime(self.config, length) for length in lengths}
        if len(regimes) == 1:
            run = len(positions) <= _AHEAD and bool((np.diff(positions) == 1).all())
            if run and self.config.type != "dynamic":  # there every length has angles of its own
                return self._near(int(positions[0]), len(positions), lengths[0], regimes.pop())
            return self._turns(positions[:, None] * self._frequencies(lengths[0]))
        each = [self._frequencies(n) for n in lengths]
        return self._turns(positions[:, None] * np.repeat(np.stack(each), counts, axis=0))

    def _near(self, first: int, count: int, length: int, key: int) -> tuple[Tensor, Tensor]:
        """Of a run of positions, from a table that holds those of the next steps, too."""
        at, of, cos, sin = self._ahead
        if key != of or not at <= first <= first + count <= at + _AHEAD:
            cos, sin = self._turns(np.arange(first, first + _AHEAD)[:, None] * self._frequencies(length))
            at, *_ = self._ahead = first, key, cos, sin
        rows = slice(first - at, first - at + count)
        return cos[rows], sin[rows]

    def _turns(self, angles: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.from_numpy((x * self.scaling).astype(np.float32)) for x in (np.cos(angles), np.sin(angles)))
        return cos[:, None].to(self.device), sin[:, None].to(self.device)


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 · cos.shape[-1] dimensions of every head, halves split; computed in fp32."""
    half = cos.shape[-1]
    x = x_THD.float()
    a, b = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x_THD)
    out[..., :half] = a * cos - b * sin
    out[..., half : 2 * half] = b * cos + a * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x_THD[..., 2 * half :]
    return out
