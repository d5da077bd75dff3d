"""Linear layers over any kind of weight: dense, int8, int4, fp4, or several kinds one below the other.

A weight is packed once, here, for the device and dtype in which it will be used. Shapes: x [T, K], result [T, N].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flexdecode.kernels import ops
from flexdecode.quantization.weights import Fp4Weight, Int4Weight, Int8Weight, Weight


class Linear(nn.Module):
    """x @ w.T + bias, bias fp32. `alike`: a row's bits are to be the same whatever rows stand beside it."""

    alike = False

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, nbytes: int, kind: str) -> None:
        super().__init__()
        self.shape, self.nbytes, self.kind = shape, nbytes + (bias.nbytes if bias is not None else 0), kind
        self.bias = None if bias is None else bias.float()

    def operands(self) -> list[ops.Operand] | None:
        """The weight as the CPU kernels read it, parts one below the other; None where they cannot."""
        return None

    def forward(self, x_TK: Tensor, out: torch.dtype | None = None) -> Tensor:
        """In `out`, or the dtype of x."""
        raise NotImplementedError


class DenseLinear(Linear):
    def __init__(self, weight_NK: Tensor, bias: Tensor | None) -> None:
        super().__init__((weight_NK.shape[0], weight_NK.shape[1]), bias, weight_NK.nbytes, str(weight_NK.dtype)[6:])
        self.weight_NK = weight_NK

    def operands(self) -> list[ops.Operand] | None:
        return [self.weight_NK] if self.weight_NK.device.type == "cpu" else None

    def forward(self, x_TK: Tensor, out: torch.dtype | None = None) -> Tensor:
        return ops.linear_dense(x_TK, self.weight_NK, self.bias, out, self.alike)


class Int4Linear(Linear):
    def __init__(self, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        operand = ops.pack_int4(weight.codes_NB, weight.scales_NG, weight.zeros_NG, dtype)
        super().__init__(weight.shape, bias, operand.nbytes, f"int4 g{weight.group_size} ({operand.path})")
        self.operand = operand

    def operands(self) -> list[ops.Operand] | None:
        return None if self.operand.tiles is None else [self.operand.tiles]

    def forward(self, x_TK: Tensor, out: torch.dtype | None = None) -> Tensor:
        return ops.linear_int4(x_TK, self.operand, self.bias, out, self.alike)


class Int8Linear(Linear):
    def __init__(self, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        operand = ops.pack_int8(weight.codes_NK, weight.scales_N, dtype)
        super().__init__(weight.shape, bias, operand.nbytes, f"int8 ({operand.path})")
        self.operand = operand

    def operands(self) -> list[ops.Operand] | None:
        return None if self.operand.tiles is None else [self.operand.tiles]

    def forward(self, x_TK: Tensor, out: torch.dtype | None = None) -> Tensor:
        return ops.linear_int8(x_TK, self.operand, self.bias, out, self.alike)


class Fp4Linear(Linear):
    """Held as MXFP4, dequantized slab by slab at each use: slow, and a quarter of bf16's memory."""

    def __init__(self, weight: Fp4Weight, bias: Tensor | None) -> None:
        super().__init__(weight.shape, bias, weight.nbytes, "mxfp4 (dequantize)")
        self.weight = weight

    def forward(self, x_TK: Tensor, out: torch.dtype | None = None) -> Tensor:
        return ops.linear_fp4(x_TK, self.weight.codes_NB, self.weight.exponents_NG, self.bias, out)


class StackedLinear(Linear):
    """Parts of different kinds (a q in int4 beside a k left in float), whose outputs stand side by side."""

    def __init__(self, parts: Sequence[Linear], bias: Tensor | None) -> None:
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        kind = " + ".join(dict.fromkeys(part.kind for part in parts))
        super().__init__(shape, bias, sum(part.nbytes for part in parts), kind)
        self.parts = nn.ModuleList(parts)

    def operands(self) -> list[ops.Operand] | None:
        found: list[ops.Operand] = []
        for part in self.parts:
            assert isinstance(part, Linear)
            own = part.operands()
            if own is None:
                return None
            found += own
        return found

    def forward(self, x_TK: Tensor, out: torch.dtype | None = None) -> Tensor:
        y_TN = torch.cat([part(x_TK, out) for part in self.parts], dim=-1)
        return y_TN if self.bias is None else y_TN.add_(self.bias)


def linear(
    parts: Sequence[Weight],
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    copy: bool = True,
    alike: bool = False,
) -> Linear:
    """The layer whose weight is `parts` one below the other; neighbours of one kind become one product.

    `copy=False` lets a dense weight be used where it lies (a head tied to the embedding). Raises ValueError where rows
    are to be `alike` and no kernel of ours multiplies the weight.
    """
    runs: list[list[Weight]] = []
    for part in parts:
        if runs and _alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    bias = None if bias is None else ops.held(bias, torch.float32, device)
    layer: Linear
    if len(runs) == 1:
        layer = _single(runs[0], bias, dtype, device, copy)
    else:
        layer = StackedLinear([_single(run, None, dtype, device, copy) for run in runs], bias)
    if alike:
        if layer.operands() is None:
            raise ValueError(
                f"batch_invariant: weights held as {layer.kind} are multiplied by torch, whose sums change with the "
                "number of rows; take a checkpoint in bf16, int8 or int4, on a CPU with a C++ compiler"
            )
        for module in layer.modules():
            if isinstance(module, Linear):
                module.alike = True
    return layer


def _single(run: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, device: torch.device, copy: bool) -> Linear:
    dense = [part for part in run if isinstance(part, Tensor)]
    if dense:
        if copy or len(dense) > 1:
            return DenseLinear(ops.held(dense, dtype, device), bias)
        return DenseLinear(dense[0].to(device=device, dtype=dtype), bias)
    weight = run[0] if len(run) == 1 else _concat(run)
    if isinstance(weight, Int4Weight):
        return Int4Linear(weight.to(device), bias, dtype)
    if isinstance(weight, Int8Weight):
        return Int8Linear(weight.to(device), bias, dtype)
    assert isinstance(weight, Fp4Weight)
    return Fp4Linear(weight.to(device), bias)


def _alike(a: Weight, b: Weight) -> bool:
    if isinstance(a, Int4Weight) and isinstance(b, Int4Weight):
        return a.group_size == b.group_size
    return type(a) is type(b)


def _concat(run: Sequence[Weight]) -> Weight:
    """Rows below one another."""
    if isinstance(run[0], Int4Weight):
        return Int4Weight.concat([part for part in run if isinstance(part, Int4Weight)])
    if isinstance(run[0], Int8Weight):
        return Int8Weight.concat([part for part in run if isinstance(part, Int8Weight)])
    return Fp4Weight.concat([part for part in run if isinstance(part, Fp4Weight)])
