"""OpenAI's two completion endpoints as data: a request's body to a Job, and what came of it to a response's body.

Knows JSON values, no HTTP, no files and no model. The format is that of OpenAI's API reference ("Create chat
completion" and the legacy "Create completion"), with the sampling parameters that it lacks under our own names. Nothing
is dropped: a field that cannot be served is a FieldError, unless it is null or says only that something is off.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexdecode.generation.params import MAX_LOGPROBS, SamplingParams
from flexdecode.jobs import Job
from flexdecode.serving.logprobs import chat_logprobs, completion_logprobs

if TYPE_CHECKING:
    from flexdecode.generation.results import Completion
    from flexdecode.text.tokenizer import Tokenizer

MOST_CHOICES = 128  # the format's own bound on n

# Fields whose name and meaning are ours; the budget and log-probabilities have several spellings, and are read apart.
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {"max_tokens", "logprobs"}
_BUDGET = ("max_tokens", "max_completion_tokens")
_INERT = frozenset(  # of the caller's books, not of the answer
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# What is not served, and the values beside null that do not ask for it.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}


class FieldError(ValueError):
    """A request that cannot be served because of one of its fields, which the message names; None where of several."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


def sampling(given: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what JSON gives: fields of SamplingParams, where null means not given and the ids in logit_bias
    are texts. Raises FieldError."""
    values = {name: value for name, value in given.items() if value is not None}
    choices = values.get("n")
    if isinstance(choices, int) and choices > MOST_CHOICES:
        raise FieldError("n", f"n must be at most {MOST_CHOICES}, not {choices}")
    bias = values.get("logit_bias")
    if isinstance(bias, Mapping):
        values["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    try:
        return dataclasses.replace(defaults, **values)
    except ValueError as error:
        first = str(error).split(" ", 1)[0]
        raise FieldError(first if first in values else None, str(error)) from None


def prompts(value: object) -> tuple[str | list[int], ...]:
    """A text, a list of texts, a list of token ids, or a list of such lists; FieldError for anything else."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if _are_integers(value):
            return (value,)
        if all(isinstance(item, list) and _are_integers(item) for item in value):
            return tuple(value)
    raise FieldError("prompt", "prompt must be a text, a list of texts, a list of token ids, or a list of such lists")


def messages(value: object) -> list[Mapping[str, Any]]:
    """A list of objects; whether they make a conversation, the model's chat template judges."""
    if not isinstance(value, list) or not value:
        raise FieldError("messages", "messages must be a list of objects with a role and a content, at least one")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise FieldError("messages", f"message {index} of messages must be an object with a role and a content")
    return value


def chat_job(body: Mapping[str, Any], defaults: SamplingParams) -> Job:
    """The job of a body for /v1/chat/completions. Raises FieldError."""
    given = _given(body, {"messages", "logprobs", "top_logprobs"})
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise FieldError("logprobs", f"logprobs must be true or false in a chat, not {_shown(wanted)}")
    if top is not None:
        if not _are_integers([top]) or not 0 <= top <= MAX_LOGPROBS:
            raise FieldError("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {_shown(top)}")
        if not wanted:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs: true beside it")
    if wanted:
        given["logprobs"] = 0 if top is None else top
    return Job(sampling(given, defaults), messages=messages(body.get("messages")))


def completion_job(body: Mapping[str, Any], defaults: SamplingParams) -> Job:
    """The job of a body for /v1/completions, with as many prompts as it has. Raises as `chat_job` does."""
    given = _given(body, {"prompt", "logprobs"})
    given["logprobs"] = body.get("logprobs")
    return Job(sampling(given, defaults), prompts(body.get("prompt")))


def chat_body(
    completions: Sequence[Completion], job: Job, tokenizer: Tokenizer | None, *, id: str, model: str, created: int
) -> dict[str, Any]:
    """The `chat.completion` object of a job; `created` in seconds since 1970."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": chat_logprobs(completion, tokenizer),
            "finish_reason": completion.finish_reason,
        }
        for index, completion in enumerate(completions)
    ]
    return {
        "id": f"chatcmpl-{id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(completions, job),
    }


def completion_body(
    completions: Sequence[Completion], job: Job, tokenizer: Tokenizer | None, *, id: str, model: str, created: int
) -> dict[str, Any]:
    """The `text_completion` object of a job: choices in the order of its prompts, `n` for each."""
    choices = [
        {
            "index": index,
            "text": completion.text,
            "logprobs": completion_logprobs(completion, tokenizer),
            "finish_reason": completion.finish_reason,
        }
        for index, completion in enumerate(completions)
    ]
    return {
        "id": f"cmpl-{id}",
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(completions, job),
    }


def usage(completions: Sequence[Completion], job: Job) -> dict[str, int]:
    """Tokens of each prompt once, however many answers it has, and of every answer the stopping one included."""
    read = sum(completion.prompt_tokens for completion in completions[:: job.params.n])
    made = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def error_body(error: ValueError) -> dict[str, Any]:
    """What a refused request is answered with."""
    field = error.field if isinstance(error, FieldError) else None
    return {"error": {"message": str(error), "type": "invalid_request_error", "param": field, "code": None}}


@dataclass(frozen=True)
class Endpoint:
    """How the bodies of one endpoint are read, and how its answers are written."""

    job: Callable[[Mapping[str, Any], SamplingParams], Job]
    body: Callable[..., dict[str, Any]]


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(chat_job, chat_body),
    "/v1/completions": Endpoint(completion_job, completion_body),
}


def refuse_unknown(given: Collection[str], known: Collection[str]) -> None:
    """FieldError for the first name that is not known, with the nearest one that is."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise FieldError(name, f"there is no field {name!a}" + (f" (did you mean {near[0]}?)" if near else ""))


def _given(body: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The sampling parameters of a body, under our names, once every field of it is known to be served or off."""
    refuse_unknown(body, {*own, *_SAMPLING, *_BUDGET, *_INERT, *_OFF})
    for name, harmless in _OFF.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise FieldError(name, f"{name}={_shown(value)} cannot be served here; leave it out")
    given = {name: body[name] for name in _SAMPLING if name in body}
    budgets = [name for name in _BUDGET if body.get(name) is not None]
    if len(budgets) > 1:
        raise FieldError(budgets[1], "max_tokens and max_completion_tokens mean the same; leave one of them out")
    if budgets:
        given["max_tokens"] = body[budgets[0]]
    return given


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _token_id(key: object) -> object:
    """A key of logit_bias as a number where it spells one; SamplingParams refuses the others."""
    return int(key) if isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdecimal() else key


def _are_integers(value: Sequence[object]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)
