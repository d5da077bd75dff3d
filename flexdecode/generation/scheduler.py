"""Which tokens the next step computes, and who holds pages for them. Knows requests and page counts, no tensor.

Requests are served by priority and then as they came. Decoding requests go into every step; prompts fill what is left
of the step's budget, or come whole where a token may see later ones. A waiting request is admitted when there is room
for its tokens and for a page more of every running one. Where a running one is short of a page all the same, the last
of them gives up what it holds, waits, and is computed anew. The first of all never does, so all of them end. Proposed
tokens take what is left when all that is planned.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from flexdecode.attention.cache import KVCache
from flexdecode.config import EngineConfig
from flexdecode.generation.request import Request

Regime = Callable[[int], tuple[int, ...]]


@dataclass(frozen=True)
class Work:
    """Tokens [start, start + count) of one request; the last of them may be no more than proposed."""

    request: Request
    start: int
    count: int
    proposed: tuple[int, ...] = ()

    @property
    def completes(self) -> bool:
        """Whether the step reaches the request's last known token, so that a new one can be sampled."""
        return self.start + self.count - len(self.proposed) == self.request.length

    @property
    def decodes(self) -> bool:
        """Whether it goes on from the last token of an answer."""
        return self.completes and self.count == len(self.proposed) + 1 and bool(self.request.output_ids)

    @property
    def rows(self) -> int:
        """How many of its last tokens' logits are wanted."""
        return len(self.proposed) + 1 if self.completes else 0

    @property
    def tokens(self) -> list[int]:
        known = self.start + self.count - len(self.proposed)
        return [*self.request.tokens(self.start, known), *self.proposed]


class Scheduler:
    """`regime` tells by a sequence's length under which rope regime its keys are made. `waiting` and `running` are in
    order."""

    def __init__(self, config: EngineConfig, cache: KVCache, regime: Regime, whole_prompts: bool = False) -> None:
        self.config, self._cache, self._regime, self._whole_prompts = config, cache, regime, whole_prompts
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._works: dict[int, tuple[Work, list[int]]] = {}  # the step's, by request, and the pages that each takes
        self._promised = [0] * len(cache.groups)  # pages that all of them take
        # Who was refused last, beside how many, and the free pages for which it waits.
        self._refused = (-1, 0, self._promised)

    def check(self, request: Request) -> None:
        """Raises ValueError where the cache can never hold a request, whoever else runs."""
        page, tokens = self.config.page, request.most_cached
        step = len(request.prompt_ids) if self._whole_prompts else 1
        for group in self._cache.groups:
            wanted = -(-tokens // page)
            if wanted > group.pages:  # the mask may let it hold less than that
                wanted = group.most_held(wanted, step)
            if wanted > group.pages:
                raise ValueError(
                    f"{len(request.prompt_ids)} prompt tokens and max_tokens={request.max_tokens} take {wanted} pages "
                    f"of {page} tokens, and the cache has {group.pages}; ask for fewer tokens or enlarge the cache "
                    "(kv_tokens, or kv_memory)"
                )

    def add(self, request: Request) -> None:
        """Queue a request that was checked."""
        insort(self.waiting, request, key=_order)

    def schedule(self) -> list[Work]:
        """The next step's work: every decoding request, then prompts, or what is proposed where there is none. Admits,
        preempts, and starts sequences."""
        self._works, self._promised = {}, [0] * len(self._promised)
        for request in list(self.running):
            if self._regime(request.length) != request.regime:  # every cached key is of the wrong angle
                self._suspend(request)
        for request in list(self.running):
            if request.sequence is not None and request.length - request.cached == 1:
                self._plan(request, 1)
        self._fill(max(1, self.config.prefill_chunk - len(self._works)))
        if all(work.decodes for work, _ in self._works.values()):
            self._speculate()
        return [work for work, _ in self._works.values()]

    def _speculate(self) -> None:
        """Let requests propose tokens, as many as the pages that are left, the budget and their ends allow. Nobody
        gives up anything for them: what each request needs has been planned."""
        rows = len(self._works)
        for work, need in list(self._works.values()):
            request = work.request
            if request.speculator is None:
                continue
            assert request.sequence is not None
            others = [a - b for a, b in zip(self._promised, need, strict=True)]
            most = min(
                request.speculator.most,
                self._cache.room(request.sequence, others) - 1,
                self.config.prefill_chunk - rows,
                request.max_tokens - len(request.output_ids) - 1,  # the step gives a token beside them
            )
            while most > 0 and self._regime(request.length + most) != request.regime:
                most -= 1
            proposed = request.speculator.propose(partial(request.tokens, 0, request.length), most, rows - 1)
            if proposed:
                rows += len(proposed)
                need = self._cache.need(request.sequence, 1 + len(proposed))
                self._works[request.number] = replace(work, count=1 + len(proposed), proposed=proposed), need
                self._promised = [a + b for a, b in zip(others, need, strict=True)]

    def _fill(self, budget: int) -> None:
        """Spend the budget on prompts: those under way and those that can be admitted, in order."""
        under_way = [r for r in self.running if r.length - r.cached > 1]
        admitting = True
        while budget > 0:
            admitting = admitting and bool(self.waiting) and len(self.running) < self.config.max_running
            if admitting and (not under_way or self.waiting[0].order < under_way[0].order):
                request = self.waiting[0]
                admitting = self._admit(request)
            elif under_way:
                request = under_way.pop(0)
            else:
                return
            if request.sequence is not None:  # neither refused nor preempted by one before it
                budget -= self._plan(request, self._count(request, budget))

    def _count(self, request: Request, budget: int) -> int:
        """How many tokens a request wants of a step. Where a token may see later ones, it sees those of its step: so a
        prompt comes whole and what followed it one by one, whenever they are computed."""
        if not self._whole_prompts:
            return min(request.length - request.cached, budget)
        return max(1, len(request.prompt_ids) - request.cached)

    def _plan(self, request: Request, count: int) -> int:
        """Give a request up to `count` tokens of the step, as many as there are pages for: all or none of a prompt that
        comes whole. Later requests are preempted where it could not go on otherwise. Returns the tokens."""
        assert request.sequence is not None
        least = count if self._whole_prompts else 1
        while (room := self._cache.room(request.sequence, self._promised)) < least:
            if self.running[-1] is request:
                return 0  # it keeps what it has until an earlier one needs it
            self.preempt(self.running[-1])
        count = min(count, room)
        need = self._cache.need(request.sequence, count)
        self._works[request.number] = Work(request, request.cached, count), need
        self._promised = [a + b for a, b in zip(self._promised, need, strict=True)]
        return count

    def _admit(self, request: Request) -> bool:
        """Start the first waiting request with what is known of its tokens, if there is room."""
        free = self._cache.free_pages()
        number, running, wanted = self._refused
        same = (number, running) == (request.number, len(self.running))
        if same and any(a < b for a, b in zip(free, wanted, strict=True)):
            return False
        regime = self._regime(request.length)
        if self.config.prefix_reuse:  # at least the last token is computed: its logits are wanted
            sequence = self._cache.adopt(request.tokens(0, request.length - 1), regime)
        else:
            sequence = self._cache.new(regime)
        cached = self._cache.length(sequence)
        short = self._short(request, sequence, cached) if self.running else []
        if any(short):
            self._cache.free(sequence)
            self._refused = request.number, len(self.running), [a + b for a, b in zip(free, short, strict=True)]
            return False
        request.sequence, request.cached, request.regime = sequence, cached, regime
        request.started = request.started or request.clock()
        if request.reused is None:
            request.reused = min(cached, len(request.prompt_ids))
        _take_out(self.waiting, request)
        insort(self.running, request, key=_order)
        return True

    def _short(self, newcomer: Request, sequence: int, cached: int) -> list[int]:
        """Pages by group that are missing for the newcomer's tokens and a page more of everybody."""
        page, short = self.config.page, []
        goals = [(newcomer, sequence, cached), *((r, r.sequence, r.cached) for r in self.running)]
        for group in self._cache.groups:
            jobs, missing = [], 0
            for request, s, at in goals:
                assert s is not None
                goal = max(request.length, min(request.length + page, request.most_cached))
                step = goal - at if self._whole_prompts else min(goal - at, self.config.prefill_chunk)
                jobs.append((group.need(s, at, goal - at), s, goal, step))
            if sum(need for need, *_ in jobs) > group.free_pages:  # the mask may let them hold less than that
                missing = sum(
                    min(need, max(0, group.most_held(-(-goal // page), step) - group.held(s)))
                    for need, s, goal, step in jobs
                )
            short.append(max(0, missing - group.free_pages))
        return short

    def preempt(self, request: Request) -> None:
        """Take a running request's pages. It waits in its place, and is computed anew when it is admitted again."""
        request.preemptions += 1
        self._suspend(request)

    def _suspend(self, request: Request) -> None:
        if request.number in self._works:
            _, need = self._works.pop(request.number)
            self._promised = [a - b for a, b in zip(self._promised, need, strict=True)]
        self._release(request)
        _take_out(self.running, request)
        insort(self.waiting, request, key=_order)

    def _release(self, request: Request) -> None:
        if request.sequence is not None:
            self._cache.free(request.sequence)
        request.sequence, request.cached = None, 0

    def make_room(self, sequence: int, count: int) -> bool:
        """Preempt running requests until a sequence of no request can take `count` tokens; whether it can."""
        while self._cache.room(sequence) < count:
            if not self.running:
                return False
            self.preempt(self.running[-1])
        return True

    def fork(self, request: Request, follower: Request) -> None:
        """Let a follower go on where the request's prompt ends, on the same pages; to wait where too many run."""
        assert request.sequence is not None
        follower.started = request.started
        if len(self.running) == self.config.max_running:
            insort(self.waiting, follower, key=_order)
            return
        follower.sequence, follower.cached = self._cache.fork(request.sequence), request.cached
        follower.regime, follower.reused = request.regime, request.cached
        insort(self.running, follower, key=_order)

    def remove(self, request: Request) -> None:
        """Forget a request wherever it is, and give back its pages; the first of those that still follow it takes its
        place."""
        places = [place for place in (self.waiting, self.running) if _take_out(place, request)]
        followers = [follower for follower in request.followers if follower.finish_reason is None]
        request.followers = []
        if places and followers:
            heir, heir.followers = followers[0], followers[1:]
            heir.sequence, heir.cached, heir.regime = request.sequence, request.cached, request.regime
            heir.started, heir.reused = request.started, request.reused
            request.sequence, request.cached = None, 0
            insort(places[0], heir, key=_order)
        else:
            self._release(request)
        if request.speculator is not None:
            request.speculator.close()


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _take_out(requests: list[Request], request: Request) -> bool:
    """Take a request out of a list in order; whether it was there."""
    at = bisect_left(requests, request.order, key=_order)
    found = at < len(requests) and requests[at] is request
    if found:
        del requests[at]
    return found
