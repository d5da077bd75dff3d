"""A model of flexdecode for lm-eval (the extra `lm-eval`): `lm_eval.simple_evaluate(HarnessLM(llm), tasks=[...])`.

Text is cut into tokens, contexts are shortened and documents are rolled over as lm-eval's own class for transformers
does it, so that its figures compare. Nothing else imports this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from flexdecode.evaluation.reading import branch_likelihoods, needed_tokenizer
from flexdecode.generation.params import SamplingParams
from flexdecode.llm import LLM

Scored = tuple[tuple[str, str] | None, list[int], list[int]]  # the texts (for lm-eval's cache), context, continuation
_PASSED_ON = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
_UNDERSTOOD = {"until", "max_gen_toks", "do_sample", "temperature", *_PASSED_ON}


class HarnessLM(TemplateLM):  # type: ignore[misc]
    """lm-eval's three kinds of requests on an LLM. `max_gen_toks` is for tasks that name no number of tokens.

    Raises ValueError where the LLM has no tokenizer, and for an option of a task that it does not know.
    """

    def __init__(self, llm: LLM, max_gen_toks: int = 256) -> None:
        super().__init__()
        self._llm, self._text = llm, needed_tokenizer(llm)
        self.tokenizer = self._text.hf  # lm-eval takes the chat template from it
        self.max_length, self.max_gen_toks = llm.max_context, max_gen_toks

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        bos = self._text.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._text.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A text that begins with the prefix token, as a chat template writes it, gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._text.decode([self.prefix_token_id], False))
        return self._text.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Natural-log probability of each text, in windows side by side."""
        found = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            scored = self._loglikelihood_tokens([(None, *make_disjoint_window(window)) for window in windows])
            found.append(sum(logprob for logprob, _ in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """A continuation's log-probability, and whether each of its tokens is the likeliest. Requests with the same
        context share its reading; a context that is too long loses its beginning."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (_texts, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            if not continuation or not context or room < 1:
                raise ValueError(
                    f"a request has {len(context)} tokens of context and {len(continuation)} of continuation; each "
                    f"needs at least 1, and a continuation at most {self.max_length}"
                )
            by_context.setdefault(tuple(context[-room:]), []).append(index)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for start, indices in by_context.items():
            scores = branch_likelihoods(self._llm, start, [requests[index][2] for index in indices])
            for index, (logprobs_T, likeliest_T) in zip(indices, scores, strict=True):
                found[index] = (float(logprobs_T.sum()), bool(likeliest_T.all()))
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers, without the text at which they were to stop."""
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            wanted = self._params(options)
            assert wanted.max_tokens is not None
            room = self.max_length - wanted.max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={wanted.max_tokens} leaves no room for a prompt: the context ends at "
                    f"{self.max_length}"
                )
            prompts.append(self.tok_encode(context)[-room:])
            params.append(wanted)
        answers = [completion.text for completion in self._llm.generate_batch(prompts, params)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        told = dict(normalize_gen_kwargs(dict(options), self.max_gen_toks))
        unknown = sorted(set(told) - _UNDERSTOOD)
        if unknown:
            raise ValueError(f"generation option {unknown[0]!r} is not known (known: {', '.join(sorted(_UNDERSTOOD))})")
        return SamplingParams(
            max_tokens=told["max_gen_toks"],
            temperature=told.get("temperature", 1.0) if told["do_sample"] else 0.0,
            stop=tuple(text for text in told["until"] if text),
            **{key: told[key] for key in _PASSED_ON if key in told},
        )
