"""From a checkpoint to a decoder: each tensor is read, reshaped as its rule says, packed for the device, and let go.

At no time is more than one weight held twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdecode.checkpoints.source import Source
from flexdecode.config import FlexdecodeWarning, ModelConfig
from flexdecode.families.names import Names
from flexdecode.families.rules import Part, Rule, check, file_names, rules
from flexdecode.kernels import ops
from flexdecode.models.linear import Linear, linear
from flexdecode.models.norm import RMSNorm
from flexdecode.quantization.weights import Fp4Weight, Int4Weight, Int8Weight, Weight

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class WeightLoader:
    """Builds layers by the target names of `families.rules`. Construction reads headers and refuses what does not
    fit; `finish` asserts that all was used."""

    def __init__(
        self,
        source: Source,
        config: ModelConfig,
        names: Names,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.dtype, self.device, self.batch_invariant = dtype, device, batch_invariant
        self._source, self._names, self._progress = source, names, progress
        self._present = frozenset(source.names())
        self._rules = rules(config, names, self._present)
        check(self._rules, names, source)
        self._total = sum(
            source.nbytes(n) for n in {n for r in self._rules.values() for p in r.all() for n in self._files(p)}
        )
        self._done = 0
        self._counted: set[str] = set()
        self._last: tuple[str, Weight] | None = None

    def linear(self, target: str) -> Linear:
        rule = self._rules[target]
        bias = self._bias(rule)
        parts = [self._finite(self._part(p), p) for p in rule.parts]
        return linear(parts, bias, self.dtype, self.device, alike=self.batch_invariant)

    def matrix(self, target: str) -> Weight:
        """A matrix of one part, as the file holds it (embeddings)."""
        (part,) = self._rules[target].parts
        weight = self._finite(self._part(part), part)
        if isinstance(weight, Tensor):
            return ops.held(weight, self.dtype, self.device)
        return weight.to(self.device)

    def vector(self, target: str) -> Tensor:
        """fp32, on the device."""
        (part,) = self._rules[target].parts
        value = self._part(part)
        assert isinstance(value, Tensor)
        return ops.held(value, torch.float32, self.device)

    def norm(self, target: str, eps: float) -> RMSNorm | None:
        """None where the family has no such norm."""
        if target not in self._rules:
            return None
        return RMSNorm(self.vector(target) + self._names.norm_offset, eps)

    def _files(self, part: Part) -> list[str]:
        return file_names(part, self._present)

    def _bias(self, rule: Rule) -> Tensor | None:
        if not rule.bias:
            return None
        values = [self._part(p) for p in rule.bias]
        return torch.cat([v.float() for v in values if isinstance(v, Tensor)])

    def _read(self, name: str, keep: bool) -> Weight:
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        self._last = None  # let go before the next is read
        weight = self._source.read(name)
        if keep:
            self._last = (name, weight)
        if name not in self._counted:
            self._counted.add(name)
            self._done += self._source.nbytes(name)
            if self._progress is not None:
                self._progress(self._done, self._total)
        return weight

    def _part(self, part: Part) -> Weight:
        files = self._files(part)
        if len(files) == 2:
            codes, exponents = (self._source.read(name) for name in files)
            assert isinstance(codes, Tensor)
            assert isinstance(exponents, Tensor)
            e, (rows, columns) = part.expert, part.shape
            fp4 = Fp4Weight(codes[e].reshape(rows, columns // 2).clone(), exponents[e].reshape(rows, -1).clone())
            return fp4.rows(_deinterleave(rows)) if part.change == "packed_gate_up" else fp4
        weight = self._read(files[0], keep=part.expert >= 0)
        if part.change == "unpermute":
            return _rows(weight, _unpermute(part.shape[0], part.heads))
        if part.change in ("packed_gate_up", "packed_down"):
            assert isinstance(weight, Tensor)
            matrix = weight[part.expert].T
            return matrix[_deinterleave(matrix.shape[0])] if part.change == "packed_gate_up" else matrix
        if part.change == "packed_bias":
            assert isinstance(weight, Tensor)
            return weight[part.expert][_deinterleave(part.shape[0])]
        if part.change == "stacked":
            if isinstance(weight, Tensor):
                return weight[part.expert]
            rows = part.shape[0]
            return weight.rows(slice(part.expert * rows, (part.expert + 1) * rows))
        return weight

    def _finite(self, weight: Weight, part: Part) -> Weight:
        """fp16 holds no more than 65504: a bf16 weight beyond it would become infinite without a word."""
        if self.dtype == torch.float16 and isinstance(weight, Tensor) and weight.dtype != torch.float16:
            largest = float(weight.abs().max())
            if largest > torch.finfo(torch.float16).max:
                raise ValueError(
                    f"{self._source.path}: tensor {part.name!r} has a value of {largest:g}, and float16 ends at 65504; "
                    "use dtype bfloat16 or float32"
                )
        return weight

    def head_is_tied(self) -> bool:
        """Whether the file leaves the head to the embedding. A tied model whose file holds another head keeps that
        one, as transformers does."""
        return "head" not in self._rules

    def same_head(self, tied_by_config: bool, embed: Weight, head: Weight) -> bool:
        """Whether the head that a tied model's file holds is the embedding once more; warns where it is another."""
        if not tied_by_config or not (isinstance(embed, Tensor) and isinstance(head, Tensor)):
            return False
        if torch.equal(embed, head):
            return True
        warnings.warn(
            f"{self._source.path}: the config ties the head to the embedding, but the file holds a different "
            f"{self._names.head}.weight, which is used",
            FlexdecodeWarning,
            stacklevel=2,
        )
        return False


def _unpermute(rows: int, heads: int) -> Tensor:
    """Row numbers that turn rows stored for interleaved rotation into split halves."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def _deinterleave(rows: int) -> Tensor:
    """Row numbers that turn g0, u0, g1, u1, … into g0, g1, …, u0, u1, …"""
    return torch.arange(rows).view(rows // 2, 2).T.flatten()


def _rows(weight: Weight, index: Tensor) -> Weight:
    if isinstance(weight, Int4Weight | Int8Weight | Fp4Weight):
        return weight.rows(index)
    result: Any = weight[index]
    assert isinstance(result, Tensor)
    return result
