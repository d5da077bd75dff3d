"""An answer in the making: a request's tokens turned into text, piece by piece, and ended at a stop string."""

from __future__ import annotations

from flexdecode.generation.engine import Engine
from flexdecode.generation.request import Request
from flexdecode.generation.results import Chunk, Completion
from flexdecode.text.detokenize import Detokenizer
from flexdecode.text.stop import StopStrings
from flexdecode.text.tokenizer import Tokenizer


class Answer:
    """Polled after each step. Without a tokenizer the text is empty and the ids tell all."""

    def __init__(self, request: Request, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.request, self._engine = request, engine
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(request.params.stop)
        self._seen = 0  # output ids that went through the detokenizer
        self._told = 0  # output ids that a chunk has carried
        self._texts: list[str] = []
        self.done = False

    def poll(self) -> Chunk | None:
        """What is new since the last call, None for nothing. Raises the request's error where its logits failed."""
        request = self.request
        if self.done:
            return None
        if request.error is not None:
            self.done = True
            raise request.error
        text = self._advance()
        if request.finish_reason is not None:
            self.done = True
            return self._chunk(text, final=True)
        return self._chunk(text, final=False) if text else None

    def _advance(self) -> str:
        """The text that is safe to show now. Ends the request where a stop string is complete."""
        request, released = self.request, ""
        ids = request.output_ids
        by_token = request.finish_reason == "stop"  # the id that ended it is no part of the text
        while self._seen < len(ids):
            last = self._seen + 1 == len(ids)
            piece = "" if self._detokenizer is None or (last and by_token) else self._detokenizer.push(ids[self._seen])
            self._seen += 1
            if self._seen < request.params.min_tokens:
                released += self._stops.flush() + piece
                continue
            text, matched = self._stops.push(piece)
            released += text
            if matched:
                del ids[self._seen :]
                self._engine.finish(request)
                return released
        if request.finish_reason is not None:
            tail = "" if self._detokenizer is None else self._detokenizer.flush()
            text, matched = self._stops.push(tail)
            released += text
            if matched:
                self._engine.finish(request)
            else:
                released += self._stops.flush()
        return released

    def _chunk(self, text: str, final: bool) -> Chunk:
        request = self.request
        start, self._told = self._told, self._seen
        self._texts.append(text)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = tuple(request.logprobs[start : self._told])
        ids = tuple(request.output_ids[start : self._told])
        if not final:
            return Chunk(text, ids, logprobs)
        return Chunk(text, ids, logprobs, request.finish_reason, request.stats())

    def completion(self) -> Completion:
        """The whole answer, once done."""
        request = self.request
        if request.error is not None:
            raise request.error
        assert request.finish_reason is not None
        logprobs = None if request.params.logprobs is None else tuple(request.logprobs[: len(request.output_ids)])
        ids = tuple(request.output_ids)
        text = "".join(self._texts)
        return Completion(text, ids, request.finish_reason, len(request.prompt_ids), logprobs, request.stats())

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._engine.abort(self.request)
