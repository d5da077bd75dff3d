"""Which tokens the next step computes. Knows requests and page counts, no tensor.

First come, first served. A request is admitted when the cache has room for all that it may ever need, so a running
request is never short of a page. Decoding requests go into every step; prompts fill what is left of the step's budget,
or come whole where a token may see later ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flexdecode.attention.cache import KVCache
from flexdecode.config import EngineConfig
from flexdecode.generation.request import Request


@dataclass(frozen=True)
class Work:
    """Tokens [start, start + count) of one request."""

    request: Request
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether the step reaches the request's last known token, so that a new one can be sampled."""
        return self.start + self.count == self.request.length


class Scheduler:
    def __init__(self, config: EngineConfig, cache: KVCache, whole_prompts: bool = False) -> None:
        self.config, self._cache, self._whole_prompts = config, cache, whole_prompts
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._reserved: dict[int, int] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def _room(self, request: Request) -> int:
        """Tokens that the request can ever hold in the cache: the last sampled one needs no slot."""
        page = self.config.page
        tokens = len(request.prompt_ids) + max(0, request.max_tokens - 1)
        return -(-tokens // page) * page

    def admit(self) -> None:
        """Move waiting requests to the running ones while there is room."""
        while self.waiting and len(self.running) < self.config.max_running:
            room = self._room(self.waiting[0])
            if sum(self._reserved.values()) + room > self.config.kv_tokens:
                break
            request = self.waiting.popleft()
            request.sequence = self._cache.new()
            request.started = request.clock()
            self._reserved[request.number] = room
            self.running.append(request)

    def schedule(self) -> list[Work]:
        """The next step's work: every decoding request, then prompts in order of arrival."""
        works = [Work(r, r.cached, 1) for r in self.running if r.length - r.cached == 1]
        budget = self.config.prefill_chunk - len(works)
        for request in self.running:
            missing = request.length - request.cached
            if missing > 1 and budget > 0:
                count = missing if self._whole_prompts else min(missing, budget)
                works.append(Work(request, request.cached, count))
                budget -= count
        return works

    def remove(self, request: Request) -> None:
        """Forget a request wherever it is, and give back its pages."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            del self._reserved[request.number]
        if request.sequence is not None:
            self._cache.free(request.sequence)
            request.sequence = None
