"""Attention kernels of our own on a CPU, as torch ops: what they take, checked, and what they cannot do.

Shape letters: T packed query tokens, H heads, C kv_heads, S slots, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flexdecode.kernels import build
from flexdecode.kernels.build import KernelsUnavailableError

FEW_QUERIES = 16  # of one sequence: up to here the work is reading keys, beyond it is multiplying
ALIKE_SPLIT = 16  # blocks to a piece where rows are to be alike
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Pass = Literal["all", "score", "weigh"]
Result = tuple[Tensor, Tensor | None]  # out [T, H, D], lse [T, H]
_PASSES: tuple[Pass, ...] = ("all", "score", "weigh")
_KINDS = ("softcap", "scale", "alibi", "relative", "log_scale")


@dataclass(frozen=True)
class PackedTiles:
    """A plan in arrays. tiles int64 [n, 12], one row a tile:

    first row of q, rows, keys of the sequence, kv head (-1: all), slot of position 0, offset into `table` (-1: none, a
    position's slot is that slot plus it), blocks, offset into `blocks` and `bits_at`, offset into `bits`, rows of bits,
    offset into `q_idx`, offset of its kept scores.

    table int32: page numbers by logical page. blocks int32: visible blocks of 64 keys, ascending; bits_at int32: for
    each its row of bits, -1 where every row sees every key. bits int64: words, bit i is key i of a block. q_idx int64:
    positions. `kept` is how many fp32 scores `attend_few` keeps between passes: [heads, rows, 64 · blocks] a tile.
    """

    tiles: Tensor
    table: Tensor
    blocks: Tensor
    bits_at: Tensor
    bits: Tensor
    q_idx: Tensor
    kept: int


@dataclass(frozen=True)
class ScoreStep:
    """A score modification that kernels know, `a` and `b` its numbers, `table` fp32 [heads] or [heads, n].

    softcap: a · tanh(s / a). scale: s · a. alibi: s - table[h] · (q - k). relative: s + table[h, clamp(q - k - a, 0,
    n - 1)]. log_scale: s · (1 + a · log(1 + floor((q + 1) / b))).
    """

    kind: Literal["softcap", "scale", "alibi", "relative", "log_scale"]
    a: float = 0.0
    b: float = 0.0
    table: Tensor | None = None


def attend_unsupported(device: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the attention kernels cannot serve, or None. The first call compiles them where they are not cached."""
    if device != "cpu":
        return f"the CPU kernels do not run on {device}"
    if dtype not in _DTYPES or kv_dtype not in (*_DTYPES, torch.int8):
        return f"the CPU kernels have no path for {dtype} queries on {kv_dtype} keys"
    try:
        build.load()
    except KernelsUnavailableError as problem:
        return str(problem)
    return None


def attend_few(
    q_THD: Tensor,
    k_CSD: Tensor,
    v_CSD: Tensor,
    k_scale_CS: Tensor | None,
    v_scale_CS: Tensor | None,
    packed: PackedTiles,
    *,
    page: int,
    scale: float,
    steps: Sequence[ScoreStep] = (),
    sinks_H: Tensor | None = None,
    return_lse: bool = False,
    into: Result | None = None,
    only: Pass = "all",
    scores: Tensor | None = None,
    split: int = 0,
    alike: bool = False,
    many: bool = False,
) -> Result:
    """Attention of few queries over paged keys: each visible key and value is read once, split over all threads.

    q_THD [tokens, heads, head_dim]; k_CSD and v_CSD [kv_heads, slots, dim] in fp32, bf16, fp16, or int8 with scales
    fp32 [kv_heads, slots]; any strides whose last is 1. sinks_H fp32. A tile is cut into pieces of `split` blocks of
    the sequence (0: by what it sees), so its result has the same bits whatever else is in the call and on any number of
    threads. `alike`: so has each query's, whatever other queries its tile has; all that the tile sees must be finite.
    Returns out [tokens, heads, v_head_dim] in q's dtype, and lse fp32 [tokens, heads] (natural log) or None; `into`
    gives the tensors to write to, where only the rows of these tiles are written.

    In passes, for a score modification that kernels do not know: `only="score"` leaves modified scores in `scores`
    (fp32 [packed.kept]) and returns nothing of use, `only="weigh"` takes them from there.
    """
    build.load()
    tokens, heads, head_dim = q_THD.shape
    assert heads % k_CSD.shape[0] == 0
    assert k_CSD.shape[2] == head_dim
    assert k_CSD.stride(2) == 1
    assert v_CSD.stride(2) == 1
    if q_THD.stride(-1) != 1:
        q_THD = q_THD.contiguous()
    if into is None:
        out_THD = q_THD.new_empty(tokens, heads, v_CSD.shape[2])
        into = out_THD, torch.empty(tokens, heads) if return_lse else None
    torch.ops.flexdecode.attend(
        q_THD,
        k_CSD,
        v_CSD,
        k_scale_CS,
        v_scale_CS,
        packed.tiles,
        packed.table,
        packed.blocks,
        packed.bits_at,
        packed.bits,
        packed.q_idx,
        page,
        scale,
        *score_arguments(steps),
        sinks_H,
        many,
        split or (ALIKE_SPLIT if alike else 0),
        alike,
        _PASSES.index(only),
        scores,
        *into,
    )
    return into


def score_arguments(steps: Sequence[ScoreStep]) -> tuple[list[int], list[float], list[Tensor | None]]:
    """Kinds, numbers and tables, as the kernels take them."""
    kinds = [_KINDS.index(step.kind) for step in steps]
    return kinds, [number for step in steps for number in (step.a, step.b)], [step.table for step in steps]


def attend_many(*tensors: Any, **options: Any) -> Result:
    """Attention of many queries, the same as `attend_few`: tiles are matrix products over blocks of keys, one thread
    each. There is no `split`."""
    return attend_few(*tensors, many=True, **options)


def use_isa(name: str | None = None) -> str:
    """The instruction set whose kernels run; a name forces one of those that this machine runs (`isas`)."""
    build.load()
    if name is not None:
        torch.ops.flexdecode.use_isa(name)
    chosen: str = torch.ops.flexdecode.isa()
    return chosen


def isas() -> list[str]:
    """Instruction sets that this machine runs, in the order of preference."""
    build.load()
    names: list[str] = torch.ops.flexdecode.isas()
    return names


def use_torch_products(yes: bool | None = None) -> bool:
    """Whether `attend_many` multiplies bf16 by torch's micro-kernels: by default where they have AMX, which ours have
    not. True or False forces it."""
    build.load()
    if yes is not None:
        torch.ops.flexdecode.use_torch_products(yes)
    chosen: bool = torch.ops.flexdecode.torch_products()
    return chosen
