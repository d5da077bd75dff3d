"""Whether a kernel computes what it should: against fp32 attention in plain torch, on the inputs that are timed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.masks import Ints
from flexdecode.benchmark.inputs import Inputs, build

TOLERANCE = 2e-2  # of the largest value: bf16 probabilities and outputs, and sums in another order
_MOST_ROWS = 96


@dataclass(frozen=True)
class Checked:
    """Of `rows` queries that were compared, the largest difference over the reference's largest value."""

    error: float
    rows: int

    @property
    def failure(self) -> str | None:
        if self.error < TOLERANCE:
            return None
        return f"the kernel is off by {self.error:.3g} of the largest value, allowed is {TOLERANCE}"


def check(inputs: Inputs, out_THD: Tensor) -> Checked:
    """`out_THD` against the reference on the same keys and values."""
    rows = sample(inputs.case.queries)
    return Checked(_error(out_THD, inputs.attend_rows(Reference(), rows), rows), len(rows))


def error_of_rounding(inputs: Inputs, out_THD: Tensor) -> float:
    """`out_THD` against the reference on the keys and values from before the cache rounded them."""
    rows = sample(inputs.case.queries)
    exact = build(replace(inputs.case, kv_dtype=torch.float32))
    return _error(out_THD, exact.attend_rows(Reference(), rows), rows)


def sample(queries: int) -> Ints:
    """Rows to compare: all of few; of many the first, the last and some between, block edges among them."""
    if queries <= _MOST_ROWS:
        return np.arange(queries)
    third = _MOST_ROWS // 3
    between = np.linspace(third, queries - third - 1, third).astype(np.int64)
    return np.concatenate([np.arange(third), np.unique(between), np.arange(queries - third, queries)])


def _error(out_THD: Tensor, exact_RHD: Tensor, rows: Ints) -> float:
    out_RHD = out_THD[torch.from_numpy(rows)].float()
    error = float((out_RHD - exact_RHD).abs().max() / exact_RHD.abs().max())
    return error if math.isfinite(error) else math.inf
