"""What the machine gives this process with its threads: bytes read from memory, and products of matrices.

A benchmark runs one of these in turn with its own work and reports the fraction reached.
"""

from __future__ import annotations

import itertools

import torch

from flexdecode.kernels import ops

_COLD_BYTES = 256 << 20  # more than caches hold
_MOST_COPIES = 64
GEMM = (512, 4096, 14336)  # rows, inner size, columns: a prefill's product in a model of 8B parameters


def copies(nbytes: int) -> int:
    """How many times something of `nbytes` must lie in memory, and be visited in turn, so that no visit finds it in a
    cache; 64 at most."""
    return min(_MOST_COPIES, max(1, -(-_COLD_BYTES // max(1, nbytes))))


class Reader:
    """Reads `nbytes` from end to end, other ones at each call; the ceiling of whatever must read as many. `as_weights`:
    out of memory of the kind in which weights lie, whose large pages are read up to a fifth quicker."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu", as_weights: bool = False) -> None:
        words = max(1, nbytes // 8)
        slabs = torch.ones(copies(nbytes), words, dtype=torch.int64, device=device)
        self._slabs = ops.held(slabs, torch.int64, slabs.device) if as_weights else slabs
        self._next = itertools.cycle(self._slabs.unbind())

    @property
    def nbytes(self) -> int:
        return self._slabs.shape[1] * 8

    @property
    def held_bytes(self) -> int:
        """What all that it reads in turn takes."""
        return self._slabs.nbytes

    def __call__(self) -> None:
        next(self._next).sum()


class Gemm:
    """One bf16 product by torch; the ceiling of whatever must multiply."""

    def __init__(self, shape: tuple[int, int, int] = GEMM, device: torch.device | str = "cpu") -> None:
        rows, inner, columns = shape
        self.flops = 2 * rows * inner * columns
        # The weight lies [outputs, inputs], as a model's: torch is quicker with it than with its transpose.
        self._x, self._w = (torch.randn(n, inner, device=device).bfloat16() for n in (rows, columns))

    def __call__(self) -> None:
        torch.mm(self._x, self._w.T)
