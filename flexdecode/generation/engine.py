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
from flexdecode.generation.sampler import Sampler, TokenChoice
from flexdecode.generation.scheduler import Scheduler, Work
from flexdecode.generation.speculative import Proposer, Speculation
from flexdecode.generation.speculator import Speculator, refuse_looking_ahead
from flexdecode.generation.step_cost import StepCost
from flexdecode.kernels.ops import FEW_QUERIES
from flexdecode.models.decoder import Decoder


class Engine:
    """`proposer` makes one for each request; None: nothing is speculated. ValueError where a token sees later ones.
    `clock` returns seconds; a test may supply its own. `computed_tokens` counts what went through the model."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        proposer: Callable[[], Proposer] | None = None,
    ) -> None:
        self.model, self.config, self._clock, self._proposer = model, config, clock, proposer
        if proposer is not None:
            refuse_looking_ahead(model.masks)
        self._cost = StepCost()
        self.cache = KVCache(
            model.cache_layers(),
            config.kv_tokens_by_group or config.kv_tokens,
            page=config.page,
            dtype=model.kv_dtype,
            device=model.device,
        )
        self._scheduler = Scheduler(config, self.cache, model.rope_regime, model.looks_ahead)
        self._runner = Runner(model, self.cache)
        self._next = 0
        self.computed_tokens = 0

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int] = (), priority: int = 0
    ) -> Request:
        """Queue a request. `params` are resolved. The lowest `priority` goes first, and of equal ones the first that
        came. Raises ValueError, naming both numbers, for what cannot be run."""
        return self.add_choices(prompt_ids, [params], eos_token_ids, priority)[0]

    def add_choices(
        self,
        prompt_ids: Sequence[int],
        params: Sequence[SamplingParams],
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
    ) -> list[Request]:
        """Queue a request for each of `params`, all with one prompt, which is computed once for as many as can run
        together (`max_running`). Their tokens are those of requests that were added one by one."""
        prompt = self._checked(prompt_ids)
        requests = [self._request(prompt, own, eos_token_ids, priority) for own in params]
        going = [request for request in requests if request.finish_reason is None]
        for request in going:
            self._scheduler.check(request)
        if going:
            going[0].followers = going[1:]
            self._scheduler.add(going[0])
        return requests

    def _request(
        self, prompt: tuple[int, ...], params: SamplingParams, eos_token_ids: Sequence[int], priority: int
    ) -> Request:
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
            priority=priority,
            clock=self._clock,
            submitted=self._clock(),
            speculator=self._speculator(),
        )
        self._next += 1
        if request.max_tokens == 0:
            request.finish_reason = "length"
        return request

    def _speculator(self) -> Speculator | None:
        if self._proposer is None:
            return None
        return Speculator(self._proposer(), Speculation(self._cost, FEW_QUERIES - 1))  # more are no decoding any more

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
        with `error` set, and only that one. Where the model raises, what was to be computed waits to be run again."""
        begun = 0.0 if self._proposer is None else self._clock()
        works = self._scheduler.schedule()
        assert works or not self.busy, "the first request can always go on"
        advanced: list[Request] = []
        if not works:
            return advanced
        timed = self._proposer is not None and all(work.decodes for work in works)
        try:
            logits_RV = self._runner.run(works)
            for work, own_RV in zip(works, logits_RV.split([work.rows for work in works]), strict=True):
                self._advance(work, own_RV, advanced)
            if timed:
                self._cost.observe(len(logits_RV), self._clock() - begun)
        except BaseException:
            for work in works:
                self._undo(work.request)
            raise
        finally:
            for request in advanced:
                if request.finish_reason is not None:
                    self._scheduler.remove(request)
        return advanced

    def _advance(self, work: Work, logits_RV: Tensor, advanced: list[Request]) -> None:
        """Sample for a request and for those that waited for the same prompt, and let its pages be found."""
        request = work.request
        self.computed_tokens += work.count
        if len(logits_RV):
            advanced.append(request)
            self._verify(work, logits_RV)
        if request.error is None and self.config.prefix_reuse:
            self._remember(request)
        if not len(logits_RV):
            return
        while request.followers:
            follower = request.followers[0]
            if follower.finish_reason is None:
                advanced.append(follower)
                self._sample(follower, logits_RV)
                if follower.finish_reason is None:
                    self._scheduler.fork(request, follower)
            del request.followers[0]

    def _undo(self, request: Request) -> None:
        """After a step that broke off: what it was to compute waits, and who would have followed goes alone."""
        if request.output_ids:
            for follower in request.followers:
                if follower.finish_reason is None:
                    self._scheduler.add(follower)
            request.followers = []
        if request.finish_reason is None:
            self._scheduler.preempt(request)

    def _remember(self, request: Request) -> None:
        """Tell the cache the tokens of pages that have become full."""
        assert request.sequence is not None
        page = self.config.page
        for start in range(self.cache.remembered(request.sequence), request.cached - page + 1, page):
            self.cache.remember(request.sequence, request.tokens(start, start + page))

    def _verify(self, work: Work, logits_RV: Tensor) -> None:
        """Sample for a request, and cut from the cache what was proposed wrongly."""
        request = work.request
        accepted = self._sample(request, logits_RV, work.proposed)
        if request.speculator is not None:
            request.speculator.record(len(work.proposed), accepted)
        if work.proposed and request.error is None:
            assert request.sequence is not None
            request.cached = request.length - 1
            self.cache.truncate(request.sequence, request.cached)

    def _sample(self, request: Request, logits_RV: Tensor, proposed: Sequence[int] = ()) -> int:
        """Give a request its next tokens; how many of the proposed are among them."""

        def take(choice: TokenChoice) -> bool:
            logprob = None
            if choice.logprob is not None:
                logprob = TokenLogprob(choice.token_id, choice.logprob, choice.top)
            request.accept(choice.token_id, logprob)
            return request.finish_reason is not None

        try:
            choices = request.sampler.verify(logits_RV, proposed, take)
        except ValueError as problem:
            request.error, request.finish_reason = problem, "abort"
            return 0
        last = len(choices) - 1
        return last + (last < len(proposed) and choices[last].token_id == proposed[last])

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
        the engine's prefill_chunk). Running requests keep their tokens; where there is no room beside them they are
        preempted. Under a mask that looks ahead there is one step, and a smaller chunk a ValueError."""
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
            return torch.cat([self._logits(request, start, size) for start in range(0, len(prompt), size)])
        finally:
            self.cache.free(request.sequence)

    def _logits(self, request: Request, start: int, size: int) -> Tensor:
        assert request.sequence is not None
        work = Work(request, start, min(size, len(request.prompt_ids) - start))
        if not self._scheduler.make_room(request.sequence, work.count):
            raise ValueError(
                f"{work.count} tokens after {start} do not fit into a cache of {self.config.kv_tokens}; give fewer or "
                "enlarge it (kv_tokens, or kv_memory)"
            )
        return self._runner.run_all(work)
