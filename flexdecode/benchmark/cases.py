"""What `bench kernels` measures of attention: shapes, masks, scores, and what each runs beside. Times nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexdecode.attention.masks import Mask, causal, mask, window
from flexdecode.attention.scores import Score, score, softcap

SECTIONS = ("decode", "int8", "masks", "plan", "prefill", "verify")
PRODUCTS = ("int4", "int8-weights", "dense")  # sections of another file, products.py
_MIDDLE = 32768
_LONGEST_PREFILL = 16384
_WINDOW, _WIDE_WINDOW = 1024, 4096


@dataclass(frozen=True)
class Case:
    """One layer's attention of the last `queries` tokens of a sequence of `keys`.

    `kernel` is what the row is about, the attention or its plan. `beside` names other implementations that get the same
    inputs, `twins` other cases of ours; with `planned` each is also timed with its plan.
    """

    section: str
    keys: int
    head_dim: int
    group: int
    queries: int = 1
    kv_heads: int = 8
    kv_dtype: torch.dtype = torch.bfloat16
    mask: Mask = field(default_factory=causal)
    score: Score | None = None
    kernel: str = "attention"
    beside: tuple[str, ...] = ()
    twins: tuple[tuple[str, Case], ...] = ()
    planned: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def multiplies(self) -> bool:
        """Whether multiplying is the work, and not reading."""
        return self.section == "prefill"

    def columns(self) -> dict[str, Any]:
        """What tells this case's row from others."""
        return {
            "section": self.section,
            "kernel": self.kernel,
            "keys": self.keys,
            "queries": self.queries,
            "head_dim": self.head_dim,
            "group": self.group,
            "kv_heads": self.kv_heads,
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "mask": str(self.mask),
            "score": None if self.score is None else str(self.score),
        }

    def with_twin(self, name: str, **changes: Any) -> Case:
        """This case, to be run beside itself with these fields changed."""
        return replace(self, twins=((name, replace(self, **changes)),))


def causal_in_python(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """What `causal()` shows, as a function of which nothing is known."""
    return kv_idx <= q_idx


def distance_in_python(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A penalty on distance that no built-in score modification is."""
    return score - 0.1 * torch.log1p((q_idx - kv_idx).to(score.dtype))


def cases(only: Sequence[str], lengths: Sequence[int], head_dims: Sequence[int], groups: Sequence[int]) -> list[Case]:
    """The cases of these sections, in the order of SECTIONS; those of PRODUCTS are left to products.py.

    Fixed lengths follow `lengths`: what the full run does at 128k is done at the longest, what it does at 32k at the
    longest up to 32k, prefill at those up to 16k, or at 16k. Raises ValueError for a section that is not known.
    """
    for name in only:
        if name not in (*SECTIONS, *PRODUCTS):
            raise ValueError(f"section {name!r} is not known (known: {', '.join((*SECTIONS, *PRODUCTS))})")
    shortest, longest = min(lengths), max(lengths)
    middle = max((n for n in lengths if n <= _MIDDLE), default=shortest)
    dim = 128 if 128 in head_dims else max(head_dims)
    group = 4 if 4 in groups else groups[0]
    plain = {name: Case(name, longest, dim, group) for name in SECTIONS}
    found = {
        "decode": _decode(plain["decode"], lengths, head_dims, groups, middle),
        "int8": _int8(plain["int8"], middle, head_dims),
        "masks": _masks(plain["masks"], middle),
        "plan": _plan(plain["plan"]),
        "prefill": _prefill(plain["prefill"], lengths, head_dims, middle),
        "verify": _verify(replace(plain["verify"], keys=middle)),
    }
    return [case for name in SECTIONS if name in only for case in dict.fromkeys(found[name])]


def _decode(
    plain: Case, lengths: Sequence[int], head_dims: Sequence[int], groups: Sequence[int], middle: int
) -> list[Case]:
    """Every length; every head_dim and every group at the longest and at the shortest."""
    plain = replace(plain, beside=("sdpa", "sdpa_folded"))
    found = [replace(plain, keys=n) for n in lengths]
    for keys in (min(lengths), max(lengths)):
        found += [replace(plain, keys=keys, head_dim=dim) for dim in head_dims]
        found += [replace(plain, keys=keys, group=group) for group in groups]
    shape = (middle, plain.head_dim, plain.group)
    return [
        replace(case, beside=(*case.beside, "flex")) if (case.keys, case.head_dim, case.group) == shape else case
        for case in found
    ]


def _int8(plain: Case, middle: int, head_dims: Sequence[int]) -> list[Case]:
    shapes = [(plain.keys, plain.head_dim), (middle, plain.head_dim), *((middle, dim) for dim in head_dims)]
    int8 = [replace(plain, keys=keys, head_dim=dim, kv_dtype=torch.int8) for keys, dim in shapes]
    return [case.with_twin("bf16", kv_dtype=torch.bfloat16) for case in int8]


def _masks(plain: Case, middle: int) -> list[Case]:
    size = _window(_WINDOW, plain.keys)
    plain = replace(plain, planned=True)
    at_middle = replace(plain, keys=middle)
    scores = (softcap(30.0), score(distance_in_python))
    return [
        replace(plain, mask=causal() & window(size)).with_twin("outright", keys=size, mask=causal()),
        replace(at_middle, mask=mask(causal_in_python)).with_twin("causal", mask=causal()),
        *(replace(at_middle, score=mod).with_twin("no_score", score=None) for mod in scores),
    ]


def _plan(plain: Case) -> list[Case]:
    every = causal(), causal() & window(_window(_WINDOW, plain.keys)), mask(causal_in_python)
    return [replace(plain, kernel="plan", mask=one) for one in every]


def _verify(plain: Case) -> list[Case]:
    return [replace(plain, queries=count).with_twin("one_query", queries=1) for count in (4, 16)]


def _prefill(plain: Case, lengths: Sequence[int], head_dims: Sequence[int], middle: int) -> list[Case]:
    keys = [n for n in lengths if n <= _LONGEST_PREFILL] or [_LONGEST_PREFILL]
    dims = [dim for dim in (64, 128) if dim in head_dims] or [plain.head_dim]
    found = [replace(plain, keys=n, queries=n, head_dim=dim, beside=("sdpa",)) for n in keys for dim in dims]
    # Fewer heads: the time is in proportion to them, and the whole of this length takes long enough.
    wide = replace(
        plain, keys=middle, queries=middle, kv_heads=2, mask=causal() & window(_window(_WIDE_WINDOW, middle))
    )
    return [*found, wide.with_twin("causal", mask=causal())]


def _window(size: int, keys: int) -> int:
    """The window, and in a small run one that still hides something."""
    return min(size, max(1, keys // 2))
