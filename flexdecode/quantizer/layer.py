"""One layer quantized: scales searched and moved, ranges clipped, matrices rounded, and what is to be saved of them.

Works in place: afterwards the layer's weights are those that a reader of the file will have. Without statistics (rtn,
int8) matrices are only rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flexdecode.config import LayerConfig
from flexdecode.quantization.packing import int_quantized, pack_awq_gemm, pack_quantized
from flexdecode.quantization.rounding import Grid, limits, to_int4, to_int8
from flexdecode.quantization.search import Reader, energy, relative_errors, search_clip, search_scales
from flexdecode.quantization.statistics import Inputs
from flexdecode.quantizer.fold import into_linear, into_norm
from flexdecode.quantizer.groups import Group, groups, movable
from flexdecode.quantizer.layers import Weights
from flexdecode.quantizer.modules import Module
from flexdecode.quantizer.options import Options


@dataclass
class Record:
    """What became of one matrix. Errors are relative: with calibration those of its outputs, the root of mean squared
    change over mean square, `before` for plain rounding; without it those of its weights, and no `before`.

    `input` is what the matrix reads, named after the targets that read it. `ratio` is that of the scale search, None
    for no scale. `clipped` is the share of groups whose range was shrunk, `tokens` how many calibration tokens the
    matrix has seen.
    """

    module: str
    input: str
    kind: str
    group: int
    why: str = ""
    before: float | None = None
    after: float | None = None
    ratio: float | None = None
    clipped: float | None = None
    tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class LayerQuantizer:
    """Of one layer. `modules` are the layer's, `at` begins their targets. `dtype_of` tells in which dtype a module's
    weight is saved, or a norm, which its target inside the layer names. `inputs` are by a group's first reader."""

    def __init__(
        self,
        config: LayerConfig,
        weights: Weights,
        modules: Sequence[Module],
        at: str,
        options: Options,
        norm_offset: float,
        dtype_of: Callable[[str], torch.dtype],
        inputs: Mapping[str, Inputs],
    ) -> None:
        self._config, self._weights, self._modules, self._at = config, weights, modules, at
        self._options, self._offset, self._dtype_of = options, norm_offset, dtype_of
        self._inputs = dict(inputs)
        self._records = {m.name: Record(m.name, self._local(m), m.kind, m.group, m.why) for m in modules}

    def smooth(self) -> None:
        """Search scales and move them: changes no output."""
        for group in groups(self._config):
            if group.readers[0] in self._inputs:
                self._scale(group)

    def round(self) -> tuple[dict[str, Tensor], list[Record]]:
        """(tensors by the name that the file gives them, a record a matrix). Norms and vectors are not among them."""
        tensors: dict[str, Tensor] = {}
        for module in self._modules:
            if module.kind != "kept":
                tensors |= self._save(module)
        return tensors, list(self._records.values())

    def _scale(self, group: Group) -> None:
        inputs = self._inputs[group.readers[0]]
        readers = [m for m in self._modules if self._local(m) in group.readers and m.quantized]
        if not readers:
            return
        views = [Reader(self._matrix(m), self._grid(m)) for m in readers]
        ratio: float | None = None
        if movable(group, self._modules, self._at):
            found = search_scales(
                views, inputs, repeat=group.repeat, head_dim=group.head_dim, powers_of_two=self._exact_needed(group)
            )
            ratio, before = found.ratio, found.before
            if ratio is not None:
                scale_K = self._move(group, found.scale_K)
                self._inputs[group.readers[0]] = inputs.scaled(1 / scale_K)
        else:
            one_K = torch.ones(views[0].weight_NK.shape[1], device=views[0].weight_NK.device)
            before = relative_errors(views, [energy(v.weight_NK, inputs) for v in views], inputs, one_K)
        for module, error in zip(readers, before, strict=True):
            record = self._records[module.name]
            record.before, record.ratio, record.tokens = error, ratio, inputs.tokens

    def _exact_needed(self, group: Group) -> bool:
        """Whether a matrix that stays in float would change: a power of two changes none of its digits."""
        touched = [m for m in self._modules if self._local(m) in group.readers]
        touched += [m for m in self._modules if self._local(m) == group.linear][-1:]
        return any(m.kind == "float" for m in touched)

    def _move(self, group: Group, scale_K: Tensor) -> Tensor:
        """Move the scale; returns it as it came out."""
        if group.norm:
            norm = self._weights.norms[group.norm]
            norm.weight, scale_K = into_norm(norm.weight, scale_K, self._offset, self._dtype_of(group.norm))
        else:
            last = [m for m in self._modules if self._local(m) == group.linear][-1]
            into_linear(self._weights.linears[group.linear], group, scale_K, self._dtype_of(last.name))
        for name in group.readers:
            self._weights.linears[name].weight_NK *= scale_K
        return scale_K

    def _save(self, module: Module) -> dict[str, Tensor]:
        matrix, name, dtype = self._matrix(module), module.name, self._dtype_of(module.name)
        linear, parts = self._weights.linears[self._local(module)], dict[str, Tensor]()
        try:
            if module.kind == "float":
                parts["weight"] = matrix.to("cpu", dtype)
                matrix.copy_(parts["weight"])
            else:
                parts, back = self._round(module, matrix, dtype)
                self._tell(module, matrix, back)
                matrix.copy_(back)
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from None
        if linear.bias is not None:
            parts["bias"] = linear.bias[module.rows].to("cpu", dtype)
        return {f"{name}.{part}": tensor for part, tensor in parts.items()}

    def _round(self, module: Module, matrix: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
        """(tensors of the file, the matrix as it comes back)."""
        if module.kind == "int8":
            int8 = to_int8(matrix, dtype).to("cpu")
            return int_quantized(int8, dtype), int8.dequantize()
        grid = self._grid(module)
        int4 = to_int4(matrix, grid, self._bounds(module, matrix, grid)).to("cpu")
        if self._options.layout == "gemm":
            return pack_awq_gemm(int4), int4.dequantize()
        return pack_quantized(int4, grid.scale_dtype, self._options.symmetric), int4.dequantize()

    def _bounds(self, module: Module, matrix: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        inputs = self._inputs_of(module)
        if inputs is None or not self._options.clip:
            return None
        low, high = limits(grid.split(matrix))
        own = low.clone(), high.clone()
        rows = slice(min(self._unclipped(module), module.shape[0]), None)
        if rows.start < module.shape[0]:
            low[rows], high[rows] = search_clip(matrix[rows], inputs, grid)
        changed = (low != own[0]) | (high != own[1])
        self._records[module.name].clipped = float(changed.float().mean())
        return low, high

    def _unclipped(self, module: Module) -> int:
        """Leading rows that are queries and keys: what softmax makes of their errors, errors of outputs do not tell
        (Lin et al. leave them as they are too)."""
        if self._local(module) != "qkv":
            return 0
        a = self._config.attention
        return max(0, (a.heads + a.kv_heads) * a.head_dim - module.start)

    def _tell(self, module: Module, matrix: Tensor, back: Tensor) -> None:
        inputs, record = self._inputs_of(module), self._records[module.name]
        change = (back.to(matrix.device) - matrix).float()
        if inputs is None:
            size = float(matrix.square().sum())
            record.after = (float(change.square().sum()) / size) ** 0.5 if size else 0.0
            return
        size = energy(matrix, inputs)
        record.after = (energy(change, inputs) / size) ** 0.5 if size > 0 else 0.0

    def _inputs_of(self, module: Module) -> Inputs | None:
        local = self._local(module)
        return next((self._inputs.get(g.readers[0]) for g in groups(self._config) if local in g.readers), None)

    def _local(self, module: Module) -> str:
        return module.target.removeprefix(self._at)

    def _matrix(self, module: Module) -> Tensor:
        return self._weights.linears[self._local(module)].weight_NK[module.rows]

    def _grid(self, module: Module) -> Grid:
        held = torch.float16 if self._options.layout == "gemm" else self._dtype_of(module.name)
        return Grid(module.group, self._options.symmetric, held)
