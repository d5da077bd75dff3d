"""KVCache: paged keys and values of many sequences. Knows no query and no arithmetic beyond int8 scales.

A layer's storage is pages `[kv_heads, pages, page, head_dim]`, so that one page of one head is one contiguous run.
Layers with the same mask form a group and share a page table; pages that no later query can see under the group's
mask are given back while a sequence grows. Shape letters: C kv_heads, P pages, S slots (P·page), T packed tokens,
L keys of one sequence, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.attention.masks import Mask
from flexdecode.attention.pages import OutOfPagesError, PageGroup

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


@dataclass
class _Storage:
    """One of K or V of one layer: data [C, S, D] and, for int8, scales [C, S] fp32."""

    data_CSD: Tensor
    scale_CS: Tensor | None

    def write(self, slots_T: Tensor, x_TCD: Tensor) -> None:
        x_CTD = x_TCD.transpose(0, 1)
        if self.scale_CS is None:
            self.data_CSD.index_copy_(1, slots_T, x_CTD.to(self.data_CSD.dtype))
            return
        scale_CT = x_CTD.float().abs().amax(-1) / 127
        smallest = torch.finfo(torch.float32).tiny  # a row of zeros has the scale 0
        codes = torch.round(x_CTD.float() / scale_CT.clamp(min=smallest)[..., None]).to(torch.int8)
        self.data_CSD.index_copy_(1, slots_T, codes)
        self.scale_CS.index_copy_(1, slots_T, scale_CT)

    def read(self, run: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """[C, L, D]; a view where the run is one slice and no conversion is needed."""
        data = self.data_CSD[:, run] if isinstance(run, slice) else self.data_CSD.index_select(1, run)
        if self.scale_CS is None:
            return data.to(dtype)
        scale = self.scale_CS[:, run] if isinstance(run, slice) else self.scale_CS.index_select(1, run)
        return (data.float() * scale[..., None]).to(dtype)


class KVCache:
    """`tokens` is the room, over all sequences, for a group that forgets nothing.

    dtype: bf16, fp16, fp32, or int8 (symmetric, one fp32 scale per token and head).
    """

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        tokens: int,
        *,
        page: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in KV_DTYPES:
            raise ValueError(f"a cache of {dtype} is not supported (known: {', '.join(map(str, KV_DTYPES))})")
        if tokens < 1 or page < 1:
            raise ValueError(f"a cache needs room: got tokens={tokens}, page={page}")
        self.page, self.dtype, self.device = page, dtype, torch.device(device)
        masks = list(dict.fromkeys(layer.mask for layer in layers))
        pages = -(-tokens // page)
        self.layers = tuple(layers)
        self.groups = tuple(PageGroup(mask, page, pages) for mask in masks)
        self.group_of = tuple(masks.index(layer.mask) for layer in layers)
        self._k = [self._storage(layer.kv_heads, pages * page, layer.head_dim) for layer in layers]
        self._v = [self._storage(x.kv_heads, pages * page, x.v_head_dim or x.head_dim) for x in layers]
        self._lengths: dict[int, int] = {}
        self._next = 0

    def _storage(self, heads: int, slots: int, dim: int) -> _Storage:
        # Memory that is never touched is never resident: a large pool costs only what its sequences fill.
        scale = torch.empty(heads, slots, device=self.device) if self.dtype == torch.int8 else None
        return _Storage(torch.empty(heads, slots, dim, dtype=self.dtype, device=self.device), scale)

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

    def new(self) -> int:
        """An empty sequence's number."""
        sequence, self._next = self._next, self._next + 1
        self._lengths[sequence] = 0
        for group in self.groups:
            group.new(sequence)
        return sequence

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
            slots = [slot for s, length, n in jobs for slot in self._grow(group, s, length, n)]
            by_group.append(torch.tensor(slots, dtype=torch.long).to(self.device))
        for s, length, n in jobs:
            self._lengths[s] = length + n
        return Slots(tuple(by_group))

    def _grow(self, group: PageGroup, sequence: int, length: int, count: int) -> list[int]:
        if count:
            for source, target in group.own_last(sequence, length):
                self._copy_page(group, source, target)
        return group.grow(sequence, length, count)

    def write(self, layer: int, slots: Slots, k_TCD: Tensor, v_TCD: Tensor) -> None:
        """Store a step's keys and values of one layer in the slots that `append` gave."""
        slots_T = slots.by_group[self.group_of[layer]]
        self._k[layer].write(slots_T, k_TCD)
        self._v[layer].write(slots_T, v_TCD)

    def locate(self, group: int, sequence: int, start: int, stop: int) -> slice | Tensor:
        """Slots of positions [start, stop): a slice where they lie in one run, else a tensor [L]."""
        run = self.groups[group].locate(sequence, start, stop)
        return run if isinstance(run, slice) else run.to(self.device)

    def read(self, layer: int, run: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [C, L, D] and values of one layer at slots given by `locate`, in `dtype`."""
        return self._k[layer].read(run, dtype), self._v[layer].read(run, dtype)

    def storage(self, layer: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """A layer's keys [C, S, D] and their scales [C, S], values and theirs, as they lie; scales only for int8."""
        k, v = self._k[layer], self._v[layer]
        return k.data_CSD, k.scale_CS, v.data_CSD, v.scale_CS

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens. Pages are shared until one of the two writes."""
        twin = self.new()
        self._lengths[twin] = self._lengths[sequence]
        for group in self.groups:
            group.fork(sequence, twin)
        return twin

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on. Raises ValueError where a mask has given back pages that the next
        token would need: such a sequence starts anew at 0."""
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(f"cannot truncate a sequence of {self._lengths[sequence]} tokens to {length}")
        for group in self.groups:
            group.check_truncate(sequence, length)
        for group in self.groups:
            group.truncate(sequence, length)
        self._lengths[sequence] = length

    def free(self, sequence: int) -> None:
        """Give back everything that the sequence holds."""
        for group in self.groups:
            group.free(sequence)
        del self._lengths[sequence]

    def _copy_page(self, group: PageGroup, source: int, target: int) -> None:
        a, b = source * self.page, target * self.page
        for layer, index in enumerate(self.group_of):
            if self.groups[index] is not group:
                continue
            for storage in (self._k[layer], self._v[layer]):
                storage.data_CSD[:, b : b + self.page] = storage.data_CSD[:, a : a + self.page]
                if storage.scale_CS is not None:
                    storage.scale_CS[:, b : b + self.page] = storage.scale_CS[:, a : a + self.page]
