"""LLM: text in, text out. Joins a checkpoint, a tokenizer and an engine; holds no arithmetic of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexdecode.answer import Answer
from flexdecode.arguments import check_context, device_named, dtype_named
from flexdecode.attention.algebra import MaskMod
from flexdecode.attention.expressions import load_mask
from flexdecode.attention.masks import Mask, as_mask
from flexdecode.attention.mods import Mods
from flexdecode.attention.scores import ScoreMod, as_score
from flexdecode.checkpoints.open import open_source
from flexdecode.config import FlexdecodeWarning
from flexdecode.describe import describe_checkpoint, describe_decoder, describe_needs
from flexdecode.families import resolve
from flexdecode.families.rules import rules
from flexdecode.generation.draft import Draft
from flexdecode.generation.engine import Engine
from flexdecode.generation.explain import Explanation, explain_step
from flexdecode.generation.ngram import PromptLookup
from flexdecode.generation.params import SamplingParams
from flexdecode.generation.request import Request
from flexdecode.generation.results import Chunk, Completion
from flexdecode.generation.speculative import Proposer
from flexdecode.generation.speculator import refuse_looking_ahead
from flexdecode.jobs import Finished, Job, UnderWay
from flexdecode.memory import available_bytes
from flexdecode.models.decoder import Decoder
from flexdecode.models.load import WeightLoader
from flexdecode.needs import settle, sizing, weights_held
from flexdecode.text.chat_template import render
from flexdecode.text.eos import eos_token_ids
from flexdecode.text.overflow import fit
from flexdecode.text.tokenizer import MissingTokenizerError, Tokenizer
from flexdecode.text.vocabulary import check_same_vocabulary

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Progress = Callable[[str, int, int], None]  # ("load", bytes, of) and ("prefill", tokens, of)


class LLM:
    """A model, ready to generate.

    model: a directory, a .gguf file, a hub id, `demo`, or `random:SHAPE[@int4|int8]`.
    dtype: of activations and dense weights; auto is bfloat16. kv_dtype: of the cache; auto is dtype, int8 halves it.
    device: auto is CUDA where there is one. attention: a backend's name, or auto. mask: a mask of flexdecode.masks, a
    FlexAttention mask_mod, or a text as for `--mask`; every layer shows what both it and the model's own mask show, or
    with `replace_mask` what it shows alone. score: a score_mod, applied after the model's own. Mods are called with
    b = 0. max_context: tokens of prompt and answer together; by default what the model was made for, or less where
    memory ends before (`describe` tells). kv_memory: what the cache may take over all sequences, in bytes or as a text
    (`2GiB`, `512MB`, `40%` of what the weights leave free); by default room for four sequences of max_context, or half
    of what the weights leave free. ignore_memory: load also what does not fit into free memory. prefix_reuse: prompts
    that begin alike, as the turns of a chat do, find the keys of their beginning in the cache; a mod must then answer
    alike for as long as the LLM lives. speculate: "lookup" proposes tokens from the text itself, a model's name lets
    that one propose (a smaller one of the same vocabulary), and several are verified in one step where that is quicker;
    the answer stays what it is. batch_invariant: the logits of a token have the same bits whatever else its steps
    compute (other requests, chunks of the prompt, guessed tokens, a reused prefix), at the cost of a slower prefill.
    ignore_config: config keys to pass over. progress: called with ("load" | "prefill", done, total).

    Raises ValueError, one line with the remedy, for a checkpoint or an option that cannot be served.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        device: str = "auto",
        attention: str = "auto",
        mask: str | Mask | MaskMod | None = None,
        replace_mask: bool = False,
        score: ScoreMod | None = None,
        max_context: int | None = None,
        kv_memory: int | str | None = None,
        ignore_memory: bool = False,
        prefix_reuse: bool = True,
        speculate: str | Path = "off",
        batch_invariant: bool = False,
        revision: str | None = None,
        offline: bool = False,
        threads: int | None = None,
        ignore_config: Collection[str] = (),
        progress: Progress | None = None,
    ) -> None:
        compute = dtype_named("dtype", dtype, torch.bfloat16)
        cached = dtype_named("kv_dtype", kv_dtype, compute, {"int8": torch.int8})
        place = device_named(device)
        if threads is not None:
            if threads < 1:
                raise ValueError(f"threads must be at least 1, got {threads}")
            torch.set_num_threads(threads)
        mods = Mods(
            load_mask(mask) if isinstance(mask, str) else None if mask is None else as_mask(mask),
            None if score is None else as_score(score),
            replace_mask,
        )
        self._progress = progress
        self.source = open_source(str(model), revision=revision, offline=offline, dense_dtype=compute)
        self.config, self._names = resolve(self.source, ignore_config)
        check_context(max_context, self.config)
        self.generation_config: Mapping[str, Any] = dict(self.source.generation_config)
        self.tokenizer = _tokenizer(self.source)
        self.eos_token_ids = eos_token_ids(self.config.eos_token_ids, self.generation_config, self.tokenizer)
        self.speculate = str(speculate)
        if self.speculate != "off":
            refuse_looking_ahead(mods.mask_of(layer.attention) for layer in self.config.layers)
        proposer = self._proposer(dtype=dtype, device=device, offline=offline, progress=progress)
        loader = WeightLoader(self.source, self.config, self._names, compute, place, self._loading, batch_invariant)
        held = weights_held(self.source, rules(self.config, self._names, frozenset(self.source.names())), compute)
        config = settle(
            str(self.source.path),
            sizing(self.config, cached, mods),
            held,
            available_bytes(place),
            self.config.max_position,
            max_context,
            kv_memory,
            ignore_memory,
        )
        with torch.inference_mode():
            decoder = Decoder(self.config, loader, attention, cached, mods)
        self.engine = Engine(decoder, replace(config, prefix_reuse=prefix_reuse), proposer=proposer)

    def _proposer(self, **options: Any) -> Callable[[], Proposer] | None:
        """What proposes for a request; a draft is loaded with these options."""
        if self.speculate in ("off", "lookup"):
            return None if self.speculate == "off" else PromptLookup
        draft = LLM(self.speculate, **options)
        if self.tokenizer is not None and draft.tokenizer is not None:
            check_same_vocabulary(self.tokenizer, draft.tokenizer)
        elif draft.config.vocab_size != self.config.vocab_size:
            raise ValueError(
                f"{self.speculate} has a vocabulary of {draft.config.vocab_size} and {self.source.path} one of "
                f"{self.config.vocab_size}: a draft needs the same; take a smaller model of the same family"
            )
        return Draft(draft.engine, self.config.vocab_size).proposer

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.engine.config.max_context

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Complete one prompt: a text, or token ids. `params.n` must be 1."""
        _one(params)
        return self.generate_batch([prompt], params)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete many prompts together: `n` completions each, in order. `params` is one for all, or one a prompt.

        A request whose logits are not finite raises ValueError after the others have ended.
        """
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} sampling params; give one for all or one each")
        answers: list[Answer] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                answers += self._submit_choices(self._ids(prompt), own or SamplingParams())
            for answer in answers:
                answer.poll()
            going = {answer.request: answer for answer in answers if not answer.done}
            while going:
                for request in self._step(going.values()):
                    mine = going.get(request)
                    if mine is not None and request.error is None:
                        mine.poll()
                    if mine is not None and (mine.done or request.error is not None):
                        del going[request]
        finally:
            for answer in answers:
                answer.close()
        return [answer.completion() for answer in answers]

    def complete(self, jobs: Iterable[Job]) -> Iterator[Finished]:
        """Answer many jobs together and give each back as it ends, so not in the order of `jobs`.

        `jobs` may be of any length: one is taken only when there is room for it, and twice as many requests as the
        engine runs at once are held. A job that cannot be served comes back with its error and disturbs no other.
        Closing the iterator aborts what is under way.
        """
        limit = 2 * self.engine.config.max_running
        crowd: list[UnderWay] = []
        feed = self._feed(jobs, crowd)
        try:
            while True:
                while sum(max(1, len(one.running)) for one in crowd) < limit and next(feed, None) is not None:
                    pass
                if not crowd:
                    return
                self._step([answer for one in crowd for answer in one.running])
                for one in list(crowd):
                    one.poll()
                    if one.done:
                        crowd.remove(one)
                        yield one.finished()
        finally:
            for one in crowd:
                one.close()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt piece by piece. The joined texts are `generate`'s. Closing the iterator aborts."""
        _one(params)
        return self._stream(self._submit(self._ids(prompt), params or SamplingParams()))

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, overflow: str = "error"
    ) -> Completion:
        """Answer a conversation of {"role", "content"} messages through the model's chat template.

        One that is longer than the context is an error, or under `overflow="sinks"` loses its oldest turns, never its
        system text: see text/overflow.py. A warning tells how many messages are no longer read.
        """
        return self.generate(self._conversation_ids(messages, params, overflow), params)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, overflow: str = "error"
    ) -> Iterator[Chunk]:
        """`chat`, piece by piece."""
        return self.stream(self._conversation_ids(messages, params, overflow), params)

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """fp32 [tokens, vocab]: the logits at every position, computed `chunk` tokens a step."""
        return self.engine.logits(token_ids, chunk)

    def describe(self) -> dict[str, Any]:
        """Layers, attention kinds, quantization, bytes, backends: what was loaded and what was chosen."""
        report = describe_checkpoint(self.source, self.config, self._names, self.engine.model.kv_dtype)
        report |= describe_decoder(self.engine.model)
        room = {"kv_tokens": self.engine.config.kv_tokens, "kv_memory_bytes": self.engine.cache.nbytes}
        return report | {"max_context": self.max_context} | room | {"speculate": self.speculate}

    def explain(self, context: int, *, measure: bool = False) -> Explanation:
        """What a decode step at `context` tokens reads, what masks spare it, and the least time that it can take at the
        rate at which memory is read now; with `measure` also the time of real steps there, after a prefill."""
        return explain_step(self.engine, context, measure)

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            where = self.source.path
            raise ValueError(
                f"{where}: there is no tokenizer; give token ids to LLM.generate, or use `flexdecode bench`"
            )
        return self.tokenizer.encode(prompt)

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{self.source.path}: there is no tokenizer, so no chat template; give token ids")
        return render(self.tokenizer, messages)

    def _conversation_ids(
        self, messages: Sequence[Message], params: SamplingParams | None, overflow: str
    ) -> Sequence[int]:
        asked = None if params is None else params.max_tokens
        fitted = fit(messages, self._chat_ids, self.max_context, asked, overflow)
        if fitted.dropped:
            warnings.warn(
                f"the conversation is longer than the context of {self.max_context} tokens: its oldest "
                f"{fitted.dropped} messages are no longer read",
                FlexdecodeWarning,
                stacklevel=3,
            )
        return fitted.token_ids

    def _submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Answer:
        """One answer. `params.n` is 1."""
        request = self.engine.add(prompt_ids, self._resolved(prompt_ids, params), self.eos_token_ids)
        return Answer(request, self.engine, self.tokenizer)

    def _submit_choices(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Answer]:
        """`n` answers to one prompt, which is computed once."""
        resolved = self._resolved(prompt_ids, params)
        choices = [resolved.choice(i) for i in range(resolved.n)]
        requests = self.engine.add_choices(prompt_ids, choices, self.eos_token_ids)
        return [Answer(request, self.engine, self.tokenizer) for request in requests]

    def _resolved(self, prompt_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        resolved = params.resolve(self.generation_config)
        if resolved.max_tokens is not None and params.max_tokens is None:
            # A budget from the model's files is a default, not a demand: it ends where the context ends.
            budget = max(0, self.max_context - len(prompt_ids))
            resolved = replace(resolved, max_tokens=min(resolved.max_tokens, budget))
        if resolved.stop and self.tokenizer is None:
            raise ValueError(f"{self.source.path}: there is no tokenizer, so stop strings cannot be found")
        return resolved

    def _feed(self, jobs: Iterable[Job], crowd: list[UnderWay]) -> Iterator[UnderWay]:
        """Submits one request each time it is asked; ends with `jobs`."""
        for job in jobs:
            one = UnderWay(job)
            crowd.append(one)
            try:
                prompts = job.prompts if job.messages is None else [self._chat_ids(job.messages)]
                for prompt_ids, index in product(map(self._ids, prompts), range(job.params.n)):
                    if one.error is not None:
                        break
                    one.begin(self._submit(prompt_ids, job.params.choice(index)))
                    yield one
            except ValueError as error:
                one.fail(error)
                yield one

    def _stream(self, answer: Answer) -> Iterator[Chunk]:
        try:
            while True:
                chunk = answer.poll()
                if chunk is not None:
                    yield chunk
                if answer.done:
                    return
                self._step([answer])
        finally:
            answer.close()

    def _step(self, answers: Iterable[Answer]) -> list[Request]:
        """Run a step of the engine; the requests that it brought on, of whomever they are."""
        advanced = self.engine.step()
        if self._progress is not None:
            pending = [a.request for a in answers if not a.request.output_ids]
            total = sum(len(r.prompt_ids) for r in pending)
            if total > self.engine.config.prefill_chunk:
                self._progress("prefill", sum(r.cached for r in pending), total)
        return advanced

    def _loading(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress("load", done, total)


def describe_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    max_context: int | None = None,
    revision: str | None = None,
    offline: bool = False,
    ignore_config: Collection[str] = (),
) -> dict[str, Any]:
    """What `LLM.describe` tells of a checkpoint, from its headers alone, and under `needs` what it takes in memory once
    loaded, with one sequence of `max_context` tokens, by default the model's own limit."""
    compute = dtype_named("dtype", dtype, torch.bfloat16)
    cached = dtype_named("kv_dtype", kv_dtype, compute, {"int8": torch.int8})
    source = open_source(str(model), revision=revision, offline=offline, dense_dtype=compute)
    config, names = resolve(source, ignore_config)
    check_context(max_context, config)
    context = config.max_position if max_context is None else max_context
    report = describe_checkpoint(source, config, names, cached)
    free = available_bytes(device_named("auto"))
    return report | {"needs": describe_needs(source, config, names, context, compute, cached, free)}


def _one(params: SamplingParams | None) -> None:
    if params is not None and params.n != 1:
        raise ValueError(f"n={params.n} answers come from generate_batch; this call gives one")


def _tokenizer(source: Any) -> Tokenizer | None:
    """None where the checkpoint has none: token ids still work."""
    try:
        return Tokenizer.load(source)
    except MissingTokenizerError:
        return None
