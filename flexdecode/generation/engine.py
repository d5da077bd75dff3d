"""The engine: requests in, tokens out, one step at a time. Token ids only; text is `llm`'s business.

A step is schedule, run, sample. The same step serves one request and many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexdecode.attention.cache import KVCache
from flexdecode.config import EngineConfig
from flexdecode.generation.params import SamplingParams
from flexdecode.generation.request import Request
from flexdecode.generation.results import TokenLogprob
from flexdecode.generation.runner import Runner
from flexdecode.generation.sampler import Sampler
from flexdecode.generation.scheduler import Scheduler, Work
from flexdecode.models.decoder import Decoder


class Engine:
    """`clock` returns seconds; a test may supply its own."""

    def __init__(self, model: Decoder, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model, self.config, self._clock = model, config, clock
        self.cache = KVCache(
            model.cache_layers(), config.kv_tokens, page=config.page, dtype=model.kv_dtype, device=model.device
        )
        self._scheduler = Scheduler(config, self.cache, model.looks_ahead)
        self._runner = Runner(model, self.cache)
        self._next = 0

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int] = ()) -> Request:
        """Queue a request. `params` are resolved. Raises ValueError, naming both numbers, for what cannot be run."""
        prompt = self._checked(prompt_ids)
        params.validate(self.model.config.vocab_size)
        limit = self.config.max_context
        budget = limit - len(prompt)
        asked = params.max_tokens
        if asked is not None and asked > budget:
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_tokens={asked} make {len(prompt) + asked}, and the context ends "
                f"at {limit}; ask for at most {budget} tokens or raise max_context (--max-context)"
            )
        request = Request(
            number=self._next,
            prompt_ids=prompt,
            params=params,
            max_tokens=budget if asked is None else asked,
            sampler=Sampler(params, prompt, self.model.config.vocab_size, eos_token_ids, self.model.device),
            eos_token_ids=frozenset(eos_token_ids),
            clock=self._clock,
            submitted=self._clock(),
        )
        self._next += 1
        if request.max_tokens == 0:
            request.finish_reason = "length"
        else:
            self._scheduler.add(request)
        return request

    def _checked(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        prompt, vocab, limit = tuple(prompt_ids), self.model.config.vocab_size, self.config.max_context
        if not prompt:
            raise ValueError("the prompt is empty: it needs at least one token")
        for token in prompt:
            if not 0 <= token < vocab:
                raise ValueError(f"token id {token} of the prompt is outside the vocabulary of {vocab}")
        if len(prompt) > limit:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, and the context ends at {limit}; shorten it or raise "
                "max_context (--max-context)"
            )
        return prompt

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def step(self) -> list[Request]:
        """Run one step; returns the requests that got a token or ended. A request whose logits are not finite ends
        with `error` set, and only that one."""
        self._scheduler.admit()
        self._renew_stale_keys()
        works = self._scheduler.schedule()
        if not works:
            return []
        logits_RV = self._runner.run(works)
        advanced = []
        for row, work in enumerate(w for w in works if w.completes):
            self._sample(work.request, logits_RV[row])
            advanced.append(work.request)
            if work.request.finish_reason is not None:
                self._scheduler.remove(work.request)
        return advanced

    def _sample(self, request: Request, logits_V: Tensor) -> None:
        try:
            choice = request.sampler.sample(logits_V)
        except ValueError as problem:
            request.error, request.finish_reason = problem, "abort"
            return
        logprob = None
        if choice.logprob is not None:
            logprob = TokenLogprob(choice.token_id, choice.logprob, choice.top)
        request.accept(choice.token_id, logprob)

    def _renew_stale_keys(self) -> None:
        """Where a sequence has outgrown its rope regime, every cached key is of the wrong angle: start it anew."""
        for request in self._scheduler.running:
            regime = self.model.rope_regime(request.length)
            if regime != request.regime and request.cached and request.sequence is not None:
                self.cache.truncate(request.sequence, 0)
                request.cached = 0
            request.regime = regime

    def abort(self, request: Request) -> None:
        """End a request now and give back what it held. One that has ended already stays as it is."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self._scheduler.remove(request)

    def finish(self, request: Request) -> None:
        """End a request as complete: its text has met a stop string."""
        if request.finish_reason is None:
            self._scheduler.remove(request)
        request.finish_reason = "stop"

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """fp32 logits [tokens, vocab] at every position, computed `chunk` tokens a step (all of them, for None, up to
        the engine's prefill_chunk). Does not disturb running requests. Under a mask that looks ahead there is one
        step, and a smaller chunk a ValueError."""
        prompt = self._checked(token_ids)
        size = self.config.prefill_chunk if chunk is None else chunk
        if self.model.looks_ahead:
            if chunk is not None and chunk < len(prompt):
                raise ValueError(
                    f"chunk={chunk} cuts {len(prompt)} tokens, and under this mask a token may see later ones; leave "
                    "it out"
                )
            size = len(prompt)
        if size < 1:
            raise ValueError(f"chunk must be at least 1, got {size}")
        params = SamplingParams(temperature=0.0)
        sampler = Sampler(params.resolve({}), prompt, self.model.config.vocab_size, (), self.model.device)
        request = Request(-1, prompt, params, 0, sampler, frozenset())
        request.sequence = self.cache.new()
        try:
            starts = range(0, len(prompt), size)
            works = [Work(request, start, min(size, len(prompt) - start)) for start in starts]
            return torch.cat([self._runner.run_all(work) for work in works])
        finally:
            self.cache.free(request.sequence)
