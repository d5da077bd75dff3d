"""What a step's plan takes, apart from the attention that follows it: made once a step, for all layers of its mask.

A plan is what `plan_attention` makes and its arrays for the kernels; both are timed. No key or value is stored. The
layers of a step come between one plan and the next, and leave nothing of it in the caches; here a read does so.
"""

from __future__ import annotations

from flexdecode.attention.backends.cpu import pack
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.plan import plan_attention
from flexdecode.benchmark.cases import Case
from flexdecode.benchmark.ceilings import Reader
from flexdecode.benchmark.rounds import WARM_UP, Work

_PAGE = 64
_BETWEEN = 32 << 20  # bytes


class Planner:
    """Plans the case's queries, again and again."""

    def __init__(self, case: Case, repetitions: int) -> None:
        self._case = case
        # A plan knows heads and not their size. Nothing is ever written, so nothing is resident.
        room = 2 * (case.keys + (repetitions + WARM_UP) * case.queries + 2 * _PAGE)
        self._cache = KVCache([CacheLayer(case.kv_heads, 1, case.mask)], room, page=_PAGE)
        self._growing = self._filled(case.keys)
        self._fresh: int | None = None
        self._read = Reader(_BETWEEN)

    def one_more(self) -> Work:
        """The plan of a step of a sequence that grows: it extends what the step before has found out."""
        return Work(lambda: self._plan(self._growing), before=lambda: self._append(self._growing))

    def from_nothing(self) -> Work:
        """The first plan of a sequence of this length."""
        return Work(lambda: self._plan(self._fresh), before=self._renew)

    def _filled(self, keys: int) -> int:
        sequence = self._cache.new()
        self._cache.append([sequence], [keys])
        return sequence

    def _append(self, sequence: int) -> None:
        self._cache.append([sequence], [self._case.queries])
        self._read()

    def _renew(self) -> None:
        if self._fresh is not None:
            self._cache.free(self._fresh)
        self._fresh = self._filled(self._case.keys)
        self._read()

    def _plan(self, sequence: int | None) -> None:
        assert sequence is not None
        case = self._case
        plan = plan_attention(self._cache, [sequence], [case.queries], case.mask, heads=case.heads)
        pack(plan.tiles, case.heads, case.kv_heads)
