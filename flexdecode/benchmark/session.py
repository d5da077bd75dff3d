"""Requests of random tokens on an engine, from their prompts to their last tokens. Knows no clock.

Every session's tokens are other ones, so that an engine that keeps what it has computed of a prompt finds nothing to
reuse. Requests are greedy unless told otherwise, and go on past any end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from flexdecode.generation.engine import Engine
from flexdecode.generation.params import SamplingParams
from flexdecode.generation.request import Request
from flexdecode.models.attention import Step
from flexdecode.models.decoder import Decoder

_seeds = itertools.count()
GREEDY = SamplingParams(temperature=0.0)


class Session:
    """`batch` requests of `prompt` tokens, or of that prompt, that will make `new_tokens` each. Leaving it as a context
    manager aborts what still runs.

    Raises ValueError where the engine's context or cache ends before, and where logits are not finite.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: int | Sequence[int],
        new_tokens: int,
        batch: int = 1,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        prompt_tokens = prompt if isinstance(prompt, int) else len(prompt)
        page, config = engine.cache.page, engine.config
        room = batch * -(-(prompt_tokens + new_tokens) // page) * page
        if room > config.kv_tokens or batch > config.max_running:
            raise ValueError(
                f"{batch} sequences of {prompt_tokens} + {new_tokens} tokens need {room} tokens of cache at once, and "
                f"there is room for {config.kv_tokens} and for {config.max_running} sequences"
            )
        self._engine = engine
        params = replace(sampling, ignore_eos=True, max_tokens=new_tokens).resolve({})
        if isinstance(prompt, int):
            generator = torch.Generator().manual_seed(next(_seeds))
            vocab = engine.model.config.vocab_size
            prompts = torch.randint(0, vocab, (batch, prompt_tokens), generator=generator).tolist()
        else:
            prompts = [list(prompt)] * batch
        self.requests: list[Request] = []
        try:
            for tokens in prompts:
                self.requests.append(engine.add(tokens, params))
        except ValueError:
            self.close()
            raise

    def step(self) -> None:
        self._engine.step()
        for request in self.requests:
            if request.error is not None:
                raise request.error

    def until_first_tokens(self) -> None:
        """The prefill: until every request has a token."""
        while any(not request.output_ids for request in self.requests):
            self.step()

    def until_ended(self) -> None:
        while any(request.finish_reason is None for request in self.requests):
            self.step()

    @property
    def steps_left(self) -> int:
        """In how many more steps all of the requests take part, once they decode."""
        return min(request.max_tokens - len(request.output_ids) for request in self.requests)

    def close(self) -> None:
        for request in self.requests:
            self._engine.abort(request)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def random_keys(model: Decoder) -> Iterator[None]:
    """Meanwhile the model computes nothing: it fills the cache with keys and values drawn from a normal distribution,
    as norms leave them, and its hidden states are zeros. What a decode step costs does not depend on them."""
    generator = torch.Generator(model.device).manual_seed(next(_seeds))

    def forward(tokens_T: Tensor, step: Step) -> Tensor:
        for index, layer in enumerate(step.cache.layers):
            dims = (layer.head_dim, layer.v_head_dim or layer.head_dim)
            shapes = [(len(tokens_T), layer.kv_heads, dim) for dim in dims]
            k, v = (torch.randn(shape, generator=generator, device=model.device) for shape in shapes)
            step.cache.write(index, step.slots, k, v)
        return torch.zeros(len(tokens_T), model.config.hidden_size, dtype=model.dtype, device=model.device)

    assert "forward" not in vars(model)
    model.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward
