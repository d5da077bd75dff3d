"""Log-probabilities as OpenAI's two endpoints write them.

Knows completions and a tokenizer. Listed are the tokens whose text is in the answer: neither the one that ended it nor
what a stop string cut off. A token is spelled as its text; one that is no whole UTF-8 as `bytes:\\xe2\\x82`, and one
that has no text as `token_id:7`, lest they all look alike. Only finite numbers are JSON: −9999.0 is the format's word
for a token that cannot come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexdecode.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from flexdecode.generation.results import Completion, TokenLogprob
    from flexdecode.text.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0


def chat_logprobs(completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """`logprobs` of a chat choice: a row for each token, with its bytes and its likeliest alternatives."""
    if completion.logprobs is None:
        return None
    content = [
        {
            **_row(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [_row(token_id, logprob, tokenizer) for token_id, logprob in entry.top],
        }
        for _, entry in in_text(completion, tokenizer)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """`logprobs` of a text choice: four lists side by side. The chosen token is always among the `top_logprobs`."""
    if completion.logprobs is None:
        return None
    entries = in_text(completion, tokenizer)
    return {
        "tokens": [spelled(entry.token_id, tokenizer) for _, entry in entries],
        "token_logprobs": [_finite(entry.logprob) for _, entry in entries],
        "top_logprobs": [
            {
                spelled(token_id, tokenizer): _finite(logprob)
                for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob))
            }
            for _, entry in entries
        ],
        "text_offset": [offset for offset, _ in entries],
    }


def in_text(completion: Completion, tokenizer: Tokenizer | None) -> list[tuple[int, TokenLogprob]]:
    """The entries of the tokens in the answer's text, each with the character at which its text begins. A token
    inside a character begins where that does; without a tokenizer there is no text, and all are listed at 0."""
    entries = completion.logprobs or ()
    if tokenizer is None:
        return [(0, entry) for entry in entries]
    stream, offset, found = Detokenizer(tokenizer), 0, []
    for entry in entries:
        found.append((offset, entry))
        offset += len(stream.push(entry.token_id))
    if completion.finish_reason == "stop":
        if found and found[-1][1].token_id in tokenizer.special_ids:
            found.pop()
        found = [(offset, entry) for offset, entry in found if offset < len(completion.text)]
    return found


def spelled(token_id: int, tokenizer: Tokenizer | None) -> str:
    data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    if not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _row(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    hidden = tokenizer is None or token_id in tokenizer.special_ids  # no part of a text
    data = b"" if tokenizer is None or hidden else tokenizer.token_bytes(token_id)
    return {"token": spelled(token_id, tokenizer), "logprob": _finite(logprob), "bytes": list(data) if data else None}


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
