"""KVCache: paged keys and values of many sequences. Knows no query and no arithmetic beyond int8 scales.

A layer's storage is pages `[kv_heads, pages, page, head_dim]`, so that one page of one head is one contiguous run.
Layers with the same mask form a group and share a page table; pages that no later query can see under the group's
mask are given back while a sequence grows. Full pages whose tokens were told (`remember`) are found by them (`adopt`)
until their room is needed. Shape letters: C kv_heads, P pages, S slots (P·page), T packed tokens, L keys of one
sequence, D head_dim.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flexdecode.attention.masks import Ints, Mask
from flexdecode.attention.pages import OutOfPagesError, PageGroup
from flexdecode.attention.prefix import Prefixes
from flexdecode.attention.visible import Settled

KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


@dataclass(frozen=True)
class CacheLayer:
    """The shape of one layer's keys and values, and the mask that says how long they are needed."""

    kv_heads: int
    head_dim: int
    mask: Mask
    v_head_dim: int | None = None


def bytes_per_token(layer: CacheLayer, dtype: torch.dtype = torch.bfloat16) -> int:
    """What one token takes in one layer, keys, values and int8's scales."""
    dims = layer.head_dim + (layer.v_head_dim or layer.head_dim)
    return layer.kv_heads * (dims * dtype.itemsize + (8 if dtype == torch.int8 else 0))


@dataclass(frozen=True)
class Slots:
    """Where a step's new tokens go: slot numbers [T] for each group, in the order of the packed tokens."""

    by_group: tuple[Tensor, ...]


@dataclass(frozen=True)
class KV:
    """Keys and values of one layer as they lie: [C, S, D] in slots, of any strides whose last is 1, and for int8 scales
    [C, S] fp32. A page is `page` consecutive positions in consecutive slots."""

    k_CSD: Tensor
    v_CSD: Tensor
    k_scale_CS: Tensor | None = None
    v_scale_CS: Tensor | None = None
    page: int = 64

    def read(self, slots_L: Ints, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [C, L, D] of these slots in `dtype`; views where one run needs no conversion."""
        run = _run(slots_L, self.k_CSD.device)
        return _read(self.k_CSD, self.k_scale_CS, run, dtype), _read(self.v_CSD, self.v_scale_CS, run, dtype)


def _run(slots_L: Ints, device: torch.device) -> slice | Tensor:
    if not len(slots_L):
        return slice(0, 0)
    if int(slots_L[-1]) - int(slots_L[0]) == len(slots_L) - 1 and bool((np.diff(slots_L) == 1).all()):
        return slice(int(slots_L[0]), int(slots_L[-1]) + 1)
    return torch.from_numpy(slots_L).to(device)


def _read(data_CSD: Tensor, scale_CS: Tensor | None, run: slice | Tensor, dtype: torch.dtype) -> Tensor:
    data = data_CSD[:, run] if isinstance(run, slice) else data_CSD.index_select(1, run)
    if scale_CS is None:
        return data.to(dtype)
    scale = scale_CS[:, run] if isinstance(run, slice) else scale_CS.index_select(1, run)
    return (data.float() * scale[..., None]).to(dtype)


def _write(data_CSD: Tensor, scale_CS: Tensor | None, slots_T: Tensor, x_TCD: Tensor) -> None:
    x_CTD = x_TCD.transpose(0, 1)
    if scale_CS is None:
        data_CSD.index_copy_(1, slots_T, x_CTD.to(data_CSD.dtype))
        return
    scale_CT = x_CTD.float().abs().amax(-1) / 127
    smallest = torch.finfo(torch.float32).tiny  # a row of zeros has the scale 0
    codes = torch.round(x_CTD.float() / scale_CT.clamp(min=smallest)[..., None]).to(torch.int8)
    data_CSD.index_copy_(1, slots_T, codes)
    scale_CS.index_copy_(1, slots_T, scale_CT)


def groups_of(layers: Sequence[CacheLayer]) -> list[Mask]:
    """The masks of the groups that share a page table, in the order of their first layers."""
    return list(dict.fromkeys(layer.mask for layer in layers))


class KVCache:
    """`tokens` is the room over all sequences, for every group of layers or one number for each (`groups_of`).

    dtype: bf16, fp16, fp32, or int8 (symmetric, one fp32 scale per token and head).
    """

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        tokens: int | Sequence[int],
        *,
        page: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in KV_DTYPES:
            raise ValueError(f"a cache of {dtype} is not supported (known: {', '.join(map(str, KV_DTYPES))})")
        masks = groups_of(layers)
        each = [tokens] * len(masks) if isinstance(tokens, int) else list(tokens)
        if len(each) != len(masks):
            raise ValueError(f"room for {len(each)} groups of layers was given, and the masks make {len(masks)}")
        if min(each, default=1) < 1 or page < 1:
            raise ValueError(f"a cache needs room: got tokens={tokens}, page={page}")
        self.page, self.dtype, self.device = page, dtype, torch.device(device)
        self.layers = tuple(layers)
        self.groups = tuple(PageGroup(mask, page, -(-room // page)) for mask, room in zip(masks, each, strict=True))
        self.group_of = tuple(masks.index(layer.mask) for layer in layers)
        slots = [self.groups[group].pages * page for group in self.group_of]
        self._kv = [self._storage(layer, count) for layer, count in zip(layers, slots, strict=True)]
        self.nbytes = sum(bytes_per_token(a, dtype) * n for a, n in zip(layers, slots, strict=True))
        self._lengths: dict[int, int] = {}
        self._settled: list[dict[int, Settled]] = [{} for _ in self.groups]
        self._prefixes = Prefixes(page)
        self._looks_back = all(mask.looks_back for mask in masks)
        self._next = 0

    def _storage(self, layer: CacheLayer, slots: int) -> KV:
        # Memory that is never touched is never resident: a large pool costs only what its sequences fill.
        dims = (layer.head_dim, layer.v_head_dim or layer.head_dim)
        shapes = [(layer.kv_heads, slots, dim) for dim in dims]
        k, v = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        if self.dtype != torch.int8:
            return KV(k, v, page=self.page)
        k_scale, v_scale = (torch.empty(layer.kv_heads, slots, device=self.device) for _ in dims)
        return KV(k, v, k_scale, v_scale, self.page)

    # sequences

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens held, by sequence."""
        return dict(self._lengths)

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def free_tokens(self) -> int:
        """How many more tokens one sequence could take: the tightest group decides."""
        return min(group.free_pages for group in self.groups) * self.page

    def new(self, root: Hashable = None) -> int:
        """An empty sequence's number. `root` is what decides its keys beside its tokens, for `remember`."""
        sequence = self._begin(0)
        for group in self.groups:
            group.new(sequence)
        self._prefixes.start(sequence, root)
        return sequence

    def _begin(self, length: int) -> int:
        sequence, self._next = self._next, self._next + 1
        self._lengths[sequence] = length
        for settled in self._settled:
            settled[sequence] = Settled()
        return sequence

    def remember(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Tell the tokens of the sequence's next full page that was not told yet, written already in all layers; they
        begin at `remembered`. Under a mask that looks ahead a key may hang on later tokens: nothing is remembered."""
        logical = self._prefixes.pages(sequence)
        name = self._prefixes.extend(sequence, token_ids)
        assert name.pages * self.page <= self._lengths[sequence], "only a full page can be remembered"
        if self._looks_back:
            for group in self.groups:
                group.name(sequence, logical, name)

    def remembered(self, sequence: int) -> int:
        """How many tokens of the sequence were told."""
        return self._prefixes.pages(sequence) * self.page

    def adopt(self, token_ids: Sequence[int], root: Hashable = None) -> int:
        """A new sequence that holds the longest known beginning of `token_ids`, in whole pages, under the same root;
        its `length` tells how long that is. Pages are shared with those that hold them.

        A beginning is known if each group still has those of its pages that a query after it may see: all of them under
        `causal()`, the last few under a window.
        """
        names = self._prefixes.find(root, token_ids) if self._looks_back else []
        found = [group.find(names) for group in self.groups]
        count, last = len(names), -1
        while count != last:  # what one group allows may be too little or too much for another
            last = count
            for group, found_P in zip(self.groups, found, strict=True):
                count = group.usable(found_P[:count])
        if not count:
            return self.new(root)
        sequence = self._begin(count * self.page)
        for group, found_P in zip(self.groups, found, strict=True):
            group.adopt(sequence, found_P[:count])
        self._prefixes.start(sequence, root, names[:count])
        return sequence

    def free_pages(self) -> list[int]:
        """Pages that can still be taken, by group."""
        return [group.free_pages for group in self.groups]

    def room(self, sequence: int, taken: Sequence[int] | None = None) -> int:
        """The most tokens that can be appended, where others are to take `taken` pages by group. Pages that no later
        query sees are given back first."""
        length, least = self._lengths[sequence], sys.maxsize
        for group, promised in zip(self.groups, taken or [0] * len(self.groups), strict=True):
            group.give_back(sequence, length)
            least = min(least, group.room(sequence, length, group.free_pages - promised))
        return least

    def need(self, sequence: int, count: int) -> list[int]:
        """Pages that `count` more tokens take, by group."""
        length = self._lengths[sequence]
        return [group.need(sequence, length, count) for group in self.groups]

    def append(self, sequences: Sequence[int], counts: Sequence[int]) -> Slots:
        """Make room for `counts[i]` more tokens of `sequences[i]` and count them as held; `write` fills them.

        All or nothing: raises OutOfPagesError before anything changes.
        """
        if min(counts, default=0) < 0:
            raise ValueError(f"cannot append {min(counts)} tokens; `truncate` takes tokens away")
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"a sequence may be appended to once a step, got {list(sequences)}")
        jobs = [(s, self._lengths[s], n) for s, n in zip(sequences, counts, strict=True)]
        for group in self.groups:
            need = sum(group.need(s, length, n) for s, length, n in jobs)
            if need > group.free_pages:
                raise OutOfPagesError(
                    f"the cache is full: {need} more pages of {self.page} tokens are needed, {group.free_pages} are "
                    "free; raise max_context (--max-context) or run fewer sequences at once"
                )
        by_group = []
        for group in self.groups:
            slots = [self._grow(group, s, length, n) for s, length, n in jobs]
            by_group.append(torch.from_numpy(np.concatenate(slots)).to(self.device))
        for s, length, n in jobs:
            self._lengths[s] = length + n
        return Slots(tuple(by_group))

    def _grow(self, group: PageGroup, sequence: int, length: int, count: int) -> Ints:
        if count:
            for source, target in group.own_last(sequence, length):
                self._copy_page(group, source, target)
        return group.grow(sequence, length, count)

    def write(self, layer: int, slots: Slots, k_TCD: Tensor, v_TCD: Tensor) -> None:
        """Store a step's keys and values of one layer in the slots that `append` gave."""
        slots_T, kv = slots.by_group[self.group_of[layer]], self._kv[layer]
        _write(kv.k_CSD, kv.k_scale_CS, slots_T, k_TCD)
        _write(kv.v_CSD, kv.v_scale_CS, slots_T, v_TCD)

    def kv(self, layer: int) -> KV:
        """A layer's keys and values as they lie."""
        return self._kv[layer]

    def settled(self, group: int, sequence: int) -> Settled:
        """What is known of the blocks that a sequence's later queries see."""
        return self._settled[group][sequence]

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens. Pages are shared until one of the two writes."""
        twin = self._begin(self._lengths[sequence])
        for group, settled in zip(self.groups, self._settled, strict=True):
            group.fork(sequence, twin)
            settled[twin] = settled[sequence].copy()
        self._prefixes.fork(sequence, twin)
        return twin

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on. Raises ValueError where a mask has given back pages that the next
        token would need: such a sequence starts anew at 0.

        What the last `append` added can always be cut again, in part or whole, under any mask: `append` gives back only
        what no query from the length before it on sees. That holds until `room` or the next `append`.
        """
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(f"cannot truncate a sequence of {self._lengths[sequence]} tokens to {length}")
        for group in self.groups:
            group.check_truncate(sequence, length)
        for group, settled in zip(self.groups, self._settled, strict=True):
            group.truncate(sequence, length)
            settled[sequence].truncate(length)
        self._prefixes.truncate(sequence, length // self.page)
        self._lengths[sequence] = length

    def free(self, sequence: int) -> None:
        """Give back everything that the sequence holds."""
        for group, settled in zip(self.groups, self._settled, strict=True):
            group.free(sequence)
            del settled[sequence]
        self._prefixes.free(sequence)
        del self._lengths[sequence]

    def _copy_page(self, group: PageGroup, source: int, target: int) -> None:
        a, b = source * self.page, target * self.page
        for layer, index in enumerate(self.group_of):
            if self.groups[index] is not group:
                continue
            kv = self._kv[layer]
            for data in (kv.k_CSD, kv.v_CSD, kv.k_scale_CS, kv.v_scale_CS):
                if data is not None:
                    data[:, b : b + self.page] = data[:, a : a + self.page]
