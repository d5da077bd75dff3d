"""Random matrices of weights as a model holds them, in as many copies as no cache holds, and their exact product.

Knows no clock. Shape letters: M rows of activations, N outputs, K inputs, G groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.benchmark.ceilings import copies
from flexdecode.kernels import int4_torch
from flexdecode.models.linear import Linear, linear
from flexdecode.quantization.weights import Int4Weight, Int8Weight, Weight

TOLERANCE = 1e-2  # of the largest value: results, and the weights of many rows, are rounded to bf16
_MOST_CHECKED = 2048  # outputs: of 128256 x 2048 weights an fp64 copy would take 2 GB
_INT8_VECTOR = 16  # torch's int8 product reads whole vectors of inputs
_CPU = torch.device("cpu")

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Matrix:
    """`kind` is int4 (with `group_size`: whole zeros, fp16 scales, as AWQ has them), int8 (a scale a row) or dense
    (bf16). `layers` are equal ones that lie apart in memory."""

    kind: str
    weight: Weight
    layers: tuple[Linear, ...]

    @property
    def nbytes(self) -> int:
        """What one product must read."""
        return self.layers[0].nbytes

    def ours(self) -> Call:
        """The product as a model runs it, with other memory at each call."""
        return _in_turn(self.layers)

    def torchs(self) -> Call | None:
        """torch's own product with the same integers, or of the same floats; None where it has none."""
        w = self.weight
        n, k = w.shape
        if isinstance(w, Int4Weight):
            if not int4_torch.packable(n, k, w.group_size, torch.bfloat16, _CPU):
                return None
            packed = [int4_torch.pack(w.codes_NB, w.scales_NG, w.zeros_NG) for _ in self.layers]
            return _in_turn([lambda x, one=one: int4_torch.linear(x, one) for one in packed])  # type: ignore[misc]
        if isinstance(w, Int8Weight):
            if k % _INT8_VECTOR:
                return None
            scales = w.scales_N.bfloat16()
            codes = [w.codes_NK.clone() for _ in self.layers]
            product = torch.ops.aten._weight_int8pack_mm
            return _in_turn([lambda x, one=one: product(x, one, scales) for one in codes])  # type: ignore[misc]
        assert isinstance(w, Tensor)
        dense = [w.clone() for _ in self.layers]
        return _in_turn([lambda x, one=one: F.linear(x, one) for one in dense])  # type: ignore[misc]

    def error(self, x_MK: Tensor, y_MN: Tensor) -> tuple[float, int]:
        """The largest difference from the product in fp64 over its largest value, infinite where some value is no
        number, and how many outputs were compared: all of few, of many the first, the last and others at random."""
        n = self.weight.shape[0]
        index_R = torch.arange(n)
        if n > _MOST_CHECKED:
            between = torch.randperm(n - 2, generator=torch.Generator().manual_seed(n))[: _MOST_CHECKED - 2] + 1
            index_R = torch.cat([torch.tensor([0, n - 1]), between]).sort().values
        exact_MR = x_MK.double() @ exact(self.weight, index_R).T
        error = float((y_MN[:, index_R].double() - exact_MR).abs().max() / exact_MR.abs().max())
        return error if math.isfinite(error) else math.inf, len(index_R)


def exact(weight: Weight, index_R: Tensor) -> Tensor:
    """These rows of a weight in fp64 [R, K], straight from its integers and scales."""
    if isinstance(weight, Tensor):
        return weight[index_R].double()
    rows = weight.rows(index_R)
    if isinstance(rows, Int4Weight):
        codes_RGg = rows.codes_NK().double().view(len(index_R), rows.scales_NG.shape[1], -1)
        return ((codes_RGg - rows.zeros_NG.double()[..., None]) * rows.scales_NG.double()[..., None]).flatten(1)
    assert isinstance(rows, Int8Weight)
    return rows.codes_NK.double() * rows.scales_N.double()[:, None]


def build(kind: str, outputs: int, inputs: int, group_size: int | None) -> Matrix:
    """Weights of a trained model's size (a standard deviation of about 1/sqrt(K)), the same ones at each call."""
    generator = torch.Generator().manual_seed(0)
    weight = _weight(kind, outputs, inputs, group_size, generator)
    first = linear([weight], None, torch.bfloat16, _CPU)
    others = [linear([weight], None, torch.bfloat16, _CPU) for _ in range(copies(first.nbytes) - 1)]
    return Matrix(kind, weight, (first, *others))


def _weight(kind: str, n: int, k: int, group_size: int | None, generator: torch.Generator) -> Weight:
    size = 1 / math.sqrt(k)
    if kind == "int4":
        assert group_size is not None
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
        scales = (torch.rand(n, k // group_size, generator=generator) + 0.5) * (size / 5)
        zeros = torch.randint(6, 11, scales.shape, dtype=torch.uint8, generator=generator)
        return Int4Weight(codes, scales.half(), zeros)
    if kind == "int8":
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
        return Int8Weight(codes, (torch.rand(n, generator=generator) + 0.5) * (size / 73))
    return torch.empty(n, k, dtype=torch.bfloat16).normal_(std=size, generator=generator)


def needed_bytes(kind: str, outputs: int, inputs: int, group_size: int | None) -> int:
    """About what it takes to build and check one: the weight, the copies of ours and of torch's, and fp64 rows."""
    elements = outputs * inputs
    held = {"int4": elements // 2 + 3 * elements // (group_size or inputs), "int8": elements + 4 * outputs}
    nbytes = held.get(kind, 2 * elements)
    return nbytes * (1 + 2 * copies(nbytes)) + 3 * 8 * min(outputs, _MOST_CHECKED) * inputs


def _in_turn(calls: Sequence[Call]) -> Call:
    following = itertools.cycle(calls)
    return lambda x_MK: next(following)(x_MK)
