"""Score modifications: FlexAttention score_mods, `score_mod(score, b, h, q_idx, kv_idx) -> score`.

`score` is the scaled product, fp32; indices are absolute positions. The built-in ones are values (tables compare by
content), run one after the other by `.then`, and describe themselves to kernels as steps; a plain function is only
ever run by Python, as FlexAttention runs it. Knows no cache and no backend. Shape letters: H heads, Q queries, L keys,
N distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flexdecode.attention.functions import check_parameters, identity, name_of, score_values
from flexdecode.attention.tables import Table, abbreviated, one_line, take
from flexdecode.kernels.ops import ScoreStep

_MOST = 2**24  # of a distance that a step holds in fp32


class ScoreMod(Protocol):
    """What FlexAttention calls a score_mod."""

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor: ...


class Score:
    """Base of the score modifications."""

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """score [H, Q, L] with b 0-d, h 0-d or [H, 1, 1], q_idx [Q, 1], kv_idx [L], int64; or all 0-d, under vmap."""
        raise NotImplementedError

    def steps(self) -> tuple[ScoreStep, ...] | None:
        """What kernels do in its place; None where only Python can."""
        return None

    def check_heads(self, heads: int) -> None:
        """Raises ValueError where it was made for another number of query heads."""

    def then(self, other: ScoreMod) -> Score:
        """This one, and `other` of what it gives."""
        return Chain((*_parts(self), *_parts(as_score(other))))


@dataclass(frozen=True, repr=False)
class Chain(Score):
    """One after the other, none of them a chain."""

    parts: tuple[Score, ...]

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for part in self.parts:
            score = part(score, b, h, q_idx, kv_idx)
        return score

    def steps(self) -> tuple[ScoreStep, ...] | None:
        found = [part.steps() for part in self.parts]
        known = [steps for steps in found if steps is not None]
        return tuple(step for steps in known for step in steps) if len(known) == len(found) else None

    def check_heads(self, heads: int) -> None:
        for part in self.parts:
            part.check_heads(heads)

    def __repr__(self) -> str:
        return str(self.parts[0]) + "".join(f".then({part})" for part in self.parts[1:])


@dataclass(frozen=True, repr=False)
class Softcap(Score):
    """cap · tanh(score / cap): bounded scores (Gemma 2, Grok)."""

    cap: float

    def __post_init__(self) -> None:
        _check_positive(f"{self}: the cap", self.cap)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap

    def steps(self) -> tuple[ScoreStep, ...]:
        return (ScoreStep("softcap", self.cap),)

    def __repr__(self) -> str:
        return f"softcap({self.cap})"


@dataclass(frozen=True, repr=False)
class Temperature(Score):
    """score / value."""

    value: float

    def __post_init__(self) -> None:
        _check_positive(f"{self}: the temperature", self.value)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score / self.value

    def steps(self) -> tuple[ScoreStep, ...]:
        return (ScoreStep("scale", 1 / self.value),)

    def __repr__(self) -> str:
        return f"temperature({self.value})"


@dataclass(frozen=True, repr=False)
class SoftTemperature(Score):
    """score · (1 + scale · log(1 + floor((q + 1) / floor))): attention that stays sharp far out (Llama 4)."""

    floor: float
    scale: float

    def __post_init__(self) -> None:
        _check_positive(f"{self}: the floor", self.floor)
        _check_finite(f"{self}: the scale", self.scale)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        steps = torch.floor((q_idx + 1).float() / self.floor)
        return score * (1 + self.scale * torch.log(1 + steps)).to(score.dtype)

    def steps(self) -> tuple[ScoreStep, ...]:
        return (ScoreStep("log_scale", self.scale, self.floor),)

    def __repr__(self) -> str:
        return f"soft_temperature({self.floor}, {self.scale})"


@dataclass(frozen=True, repr=False)
class Alibi(Score):
    """score - slopes[h] · (q - k)."""

    slopes: Table

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        fault = "alibi() has {size} slopes, and query head {index} was asked: give one for each head"
        slope = take(self.slopes.tensor, h, fault=fault)
        return score - (slope * (q_idx - kv_idx)).to(score.dtype)

    def steps(self) -> tuple[ScoreStep, ...]:
        return (ScoreStep("alibi", table=self.slopes.tensor),)

    def check_heads(self, heads: int) -> None:
        _check_heads("alibi()", "slopes", len(self.slopes.tensor), heads)

    def __repr__(self) -> str:
        return f"alibi({abbreviated([f'{slope:g}' for slope in self.slopes.tensor.tolist()])})"


@dataclass(frozen=True, repr=False)
class RelativeBias(Score):
    """score + table[h, clamp(q - k - first, 0, N - 1)]."""

    table_HN: Table
    first: int = 0

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        table_HN = self.table_HN.tensor
        at = torch.clamp(q_idx - kv_idx - self.first, 0, table_HN.shape[1] - 1)
        fault = (
            "relative_bias() has a table of {size} heads, and query head {index} was asked: give a row for each head"
        )
        return score + take(table_HN, h, at, fault=fault).to(score.dtype)

    def steps(self) -> tuple[ScoreStep, ...]:
        return (ScoreStep("relative", float(self.first), table=self.table_HN.tensor),)

    def check_heads(self, heads: int) -> None:
        _check_heads("relative_bias()", "rows", len(self.table_HN.tensor), heads)

    def __repr__(self) -> str:
        heads, distances = self.table_HN.tensor.shape
        return f"relative_bias(table of {heads} heads and {distances} distances, first={self.first})"


@dataclass(frozen=True, repr=False, eq=False)
class ScoreOf(Score):
    """A plain score_mod; equal to another where the function is the same object."""

    fn: ScoreMod

    def __post_init__(self) -> None:
        check_parameters(self.fn, "score")

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_values(self.fn, score, b, h, q_idx, kv_idx)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreOf) and identity(self.fn) == identity(other.fn)

    def __hash__(self) -> int:
        return hash(identity(self.fn))

    def __repr__(self) -> str:
        return f"score({name_of(self.fn)})"


def softcap(cap: float) -> Softcap:
    """Bound every score to (-cap, cap)."""
    return Softcap(cap)


def temperature(t: float) -> Temperature:
    """Divide every score by t."""
    return Temperature(t)


def soft_temperature(floor: float, scale: float) -> SoftTemperature:
    """Llama 4's scaling of long contexts: a factor that grows by `scale` · log at each `floor` positions."""
    return SoftTemperature(floor, scale)


def alibi(slopes: Tensor | Sequence[float] | None = None, heads: int | None = None) -> Alibi:
    """Attention with linear biases (Press et al., 2022): score - slope · (q - k).

    slopes [heads], or the paper's for `heads` query heads, a power of two or not. Raises ValueError where neither or
    both are given.
    """
    if (slopes is None) == (heads is None):
        raise ValueError("alibi(): give either the slopes or the number of query heads (heads=)")
    if heads is not None:
        if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
            raise ValueError(f"alibi(heads={one_line(heads)}): wants a number of query heads, at least 1")
        slopes = _paper_slopes(heads)
    return Alibi(_table("alibi()", "slopes [heads]", slopes, 1))


def relative_bias(table_HN: Tensor, first: int = 0) -> RelativeBias:
    """score + table_HN[h, clamp(q - k - first, 0, N - 1)]: a bias for each distance back from `first` on, the ends
    repeated (T5's buckets, laid out by distance). table_HN [heads, N], computed with in fp32."""
    if isinstance(first, bool) or not isinstance(first, int) or abs(first) > _MOST:
        raise ValueError(f"relative_bias(): first is {one_line(first)}, wanted is a whole number within ±{_MOST}")
    return RelativeBias(_table("relative_bias()", "a table [heads, distances]", table_HN, 2), first)


def score(fn: ScoreMod) -> Score:
    """A FlexAttention score_mod, evaluated as torch does: on scalars, under vmap.

    `fn(score, b, h, q_idx, kv_idx)` gets an fp32 score and returns a floating 0-d tensor. Raises ValueError where it
    takes other arguments, and when it is evaluated where it does what vmap cannot or returns something else.
    """
    return as_score(fn)


def as_score(x: ScoreMod) -> Score:
    """`x` itself if it is one of these, else the plain function as one. Raises ValueError where it is neither."""
    if isinstance(x, Score):
        return x
    if not callable(x):
        raise ValueError(
            f"{one_line(x)} is no score modification: use flexdecode.scores, or a function (score, b, h, q_idx, kv_idx)"
        )
    return ScoreOf(x)


def steps(score: ScoreMod) -> tuple[ScoreStep, ...] | None:
    """What kernels do in its place, one step after the other; None for what only Python can compute."""
    return score.steps() if isinstance(score, Score) else None


def evaluate(
    score_mod: ScoreMod, score_HQL: Tensor, b: Tensor, h_H: Tensor, q_idx_Q: Tensor, kv_idx_L: Tensor
) -> Tensor:
    """score_HQL (fp32) modified, in its dtype: built-ins by broadcasting, plain functions as FlexAttention would.

    b int64 0-d, h_H, q_idx_Q and kv_idx_L int64: query heads and positions. Raises ValueError as `score` says.
    """
    return as_score(score_mod)(score_HQL, b, h_H[:, None, None], q_idx_Q[:, None], kv_idx_L)


def _parts(score: Score) -> tuple[Score, ...]:
    return score.parts if isinstance(score, Chain) else (score,)


def _paper_slopes(heads: int) -> list[float]:
    """2^(-8/p), 2^(-16/p) … for p heads, a power of two; between two powers every second one of the next is added."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]


def _table(what: str, wanted: str, values: Tensor | Sequence[float] | None, dims: int) -> Table:
    try:
        table = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what}: {one_line(values)} given, wanted are {wanted} of finite numbers") from None
    if table.dim() != dims or not table.numel() or not bool(table.isfinite().all()):
        raise ValueError(
            f"{what}: {table.dtype} of shape {tuple(table.shape)} given, wanted are {wanted} of finite numbers"
        )
    return Table(table.float())


def _check_positive(what: str, value: float) -> None:
    if not (_is_finite(value) and value > 0):
        raise ValueError(f"{what} must be finite and greater than 0")


def _check_finite(what: str, value: float) -> None:
    if not _is_finite(value):
        raise ValueError(f"{what} must be finite")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_heads(what: str, unit: str, given: int, heads: int) -> None:
    if given != heads:
        raise ValueError(f"{what} has {given} {unit}, and there are {heads} query heads: give one for each")
