"""The lines of `flexdecode batch`: one of the input to a Job, and what came of it to one of the output.

Two shapes, told apart line by line: OpenAI's batch lines ("custom_id", "method", "url", "body"), and plain ones
("prompt" or "messages", "id" where wanted, and fields of SamplingParams). Knows JSON; no files, no model. A line's key
is its custom_id or id, or its number where it has none. A digest of what a line asks goes into its row, so that an
answer is never taken for that of a line which has changed since.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from flexdecode.cli.answer import logprob_data

if TYPE_CHECKING:
    from flexdecode.generation.params import SamplingParams
    from flexdecode.generation.results import Completion
    from flexdecode.jobs import Job
    from flexdecode.llm import LLM

Key = str | int
BEGINNINGS = (b'{"request": "', b'{"id": "batch_req_')  # of the rows below, as JSON
OPENAI = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True)
class Line:
    """A line of the input as far as it could be read. `value` is its object, {} where `problem` says what is wrong."""

    number: int
    key: Key
    digest: str
    value: Mapping[str, Any]
    problem: str | None = None

    @property
    def openai(self) -> bool:
        return not OPENAI.isdisjoint(self.value)


@dataclass(frozen=True)
class Answered:
    """A row of the output, as a later run needs it: `digest` is that of the line it answers, "" where unknown."""

    key: Key
    digest: str
    failed: bool


def read_line(number: int, data: bytes) -> Line:
    """Line `number` of the input, counted from 1. Never raises."""
    raw = _digest(data)
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_number)
        digest = _digest(json.dumps(value, sort_keys=True).encode())  # of what it says, however it is written
    except UnicodeDecodeError as error:
        return Line(number, number, raw, {}, f"not UTF-8 at byte {error.start}")
    except ValueError as error:
        return Line(number, number, raw, {}, f"not JSON: {error}")
    except RecursionError:
        return Line(number, number, raw, {}, "not JSON that can be read: it is nested too deeply")
    if not isinstance(value, dict):
        return Line(number, number, raw, {}, f"a JSON object is needed, not {type(value).__name__}")
    name = "custom_id" if not OPENAI.isdisjoint(value) else "id"
    key = value.get(name)
    if name == "id" and key is None:
        return Line(number, number, digest, value)
    if isinstance(key, str) or (name == "id" and isinstance(key, int) and not isinstance(key, bool)):
        return Line(number, key, digest, value)
    wanted = "a text" if name == "custom_id" else "a text or a whole number"
    return Line(number, number, digest, value, f"{name} must be {wanted}, not {key!r}")


def job_of(line: Line, defaults: SamplingParams) -> Job:
    """What the line asks, with `defaults` for what it leaves open; its key is the line. Raises ValueError."""
    if line.problem is not None:
        raise ValueError(line.problem)
    return replace(_openai_job(line.value, defaults) if line.openai else _plain_job(line.value, defaults), key=line)


def _openai_job(value: Mapping[str, Any], defaults: SamplingParams) -> Job:
    from flexdecode.serving.openai import ENDPOINTS, FieldError, refuse_unknown

    refuse_unknown(value, OPENAI)
    if value.get("method", "POST") != "POST":
        raise FieldError("method", f"method must be 'POST', not {value['method']!r}")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise FieldError("url", f"url must be {' or '.join(ENDPOINTS)}, not {url!r}")
    if not isinstance(body, dict):
        raise FieldError("body", f"body must be an object, not {type(body).__name__}")
    return ENDPOINTS[url].job(body, defaults)


def _plain_job(value: Mapping[str, Any], defaults: SamplingParams) -> Job:
    from flexdecode.generation.params import SamplingParams
    from flexdecode.jobs import Job
    from flexdecode.serving.openai import FieldError, messages, prompts, refuse_unknown, sampling

    names = {field.name for field in fields(SamplingParams)}
    refuse_unknown(value, {"id", "prompt", "messages", *names})
    asked = [name for name in ("prompt", "messages") if value.get(name) is not None]
    if len(asked) != 1:
        problem = "both a prompt and messages" if asked else "neither a prompt nor messages"
        raise FieldError(None, f"the line has {problem}; give one of them")
    params = sampling({name: value[name] for name in names if name in value}, defaults)
    if asked == ["messages"]:
        return Job(params, messages=messages(value["messages"]))
    found = prompts(value["prompt"])
    if len(found) != 1:
        raise FieldError("prompt", f"prompt holds {len(found)} prompts; a plain line has one")
    return Job(params, found)


def answer_row(line: Line, job: Job, completions: Sequence[Completion], llm: LLM, model: str) -> dict[str, Any]:
    """The row of a line that was answered, in the line's own shape."""
    from flexdecode.serving.openai import ENDPOINTS, usage

    if line.openai:
        asked = line.value["body"].get("model")
        body = ENDPOINTS[line.value["url"]].body(
            completions,
            job,
            llm.tokenizer,
            id=line.digest,
            model=asked if isinstance(asked, str) else model,
            created=int(time.time()),
        )
        return _openai_row(line, 200, body, None)
    choices = [_choice(completion) for completion in completions]
    told = choices[0] if len(choices) == 1 else {"choices": choices}
    return {"request": line.digest, "id": line.key, **told, "usage": usage(completions, job)}


def error_row(line: Line, error: ValueError) -> dict[str, Any]:
    """The row of a line that could not be answered: why, and where in the input it stands."""
    from flexdecode.serving.openai import error_body

    if line.openai:
        told = {"code": "invalid_request", "message": str(error), "line": line.number}
        return _openai_row(line, 400, error_body(error), told)
    return {"request": line.digest, "id": line.key, "error": {"message": str(error), "line": line.number}}


def read_row(data: bytes) -> Answered | None:
    """A line of the output as this program writes it; None for anything else."""
    try:
        row = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    error = row.get("error")
    place = error.get("line") if isinstance(error, dict) else None
    key = row.get("id")
    digest = row.get("request")
    if "custom_id" in row:
        digest = str(key).removeprefix("batch_req_")
        key = place if row["custom_id"] is None else row["custom_id"]
    if isinstance(key, bool) or not isinstance(key, (str, int)) or not isinstance(digest, str):
        return None
    return Answered(key, digest, error is not None)


def _openai_row(line: Line, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{line.digest}", "body": body}
    custom_id = line.key if isinstance(line.key, str) else None
    return {"id": f"batch_req_{line.digest}", "custom_id": custom_id, "response": response, "error": error}


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=12).hexdigest()


def _choice(completion: Completion) -> dict[str, Any]:
    told: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        told["logprobs"] = [logprob_data(entry) for entry in completion.logprobs]
    return told


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")
