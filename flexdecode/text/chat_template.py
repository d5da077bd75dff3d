"""Chat messages to the token ids of a prompt, by the checkpoint's own Jinja template.

Knows roles and contents only as far as a template needs them; the template is run by transformers in its sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from flexdecode.text.tokenizer import Tokenizer

# What apply_chat_template takes besides the template's own variables; here it renders text, always and only.
_RESERVED = frozenset(
    {
        "conversation",
        "chat_template",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> list[int]:
    """The prompt for the next turn, as token ids.

    Each message has a `role`, which the template judges, and a `content`: a string, or a list of parts
    {"type": "text", "text": ...} whose texts are joined with nothing between. Null or absent content is "" in an
    assistant's message and beside tool_calls, and refused elsewhere. Other keys reach the template unchanged.

    `template` is Jinja text, or the name of one of the checkpoint's templates where it has several; None takes its
    only one, "default", or "tool_use" when tools are given. `kwargs` are the template's variables (`tools`,
    `documents`, `continue_final_message`, `enable_thinking` and the like).

    The prompt begins with exactly one BOS where the template writes one or the tokenizer adds one, or both; no other
    special token is added. Raises ValueError when there is no template, when it is broken, and with the template's own
    words when it refuses the messages.
    """
    reserved = sorted(_RESERVED.intersection(kwargs))
    if reserved:
        raise ValueError(f"{reserved[0]!r} is not a variable of chat templates")
    if template is None and not tokenizer.hf.chat_template:
        raise ValueError(
            f"{tokenizer.name} has no chat template; pass one, or give the prompt as plain text instead of messages"
        )
    plain = [_plain(message, index) for index, message in enumerate(_listed(messages))]
    try:
        text = tokenizer.hf.apply_chat_template(
            plain, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
        )
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template of {tokenizer.name} is broken at line {error.lineno}: {error}") from error
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    except Exception as error:  # a template is a program, and these messages may be the first that it fails on
        raise ValueError(f"the chat template cannot render these messages: {error}") from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.adds_bos and ids[:1] != [tokenizer.bos_token_id]:
        assert tokenizer.bos_token_id is not None
        ids.insert(0, tokenizer.bos_token_id)
    return ids


def _listed(messages: object) -> list[object]:
    if not isinstance(messages, Iterable) or isinstance(messages, (str, bytes, Mapping)):
        raise ValueError(f"messages must be a list of objects with a role and a content, not {messages!r}")
    listed = list(messages)
    if not listed:
        raise ValueError("there are no messages; a chat needs at least one")
    return listed


def _plain(message: object, index: int) -> dict[str, Any]:
    """The message with its content as one string."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {index} must be an object with a role and a content, not {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {index} needs a role such as 'user', not {role!r}")
    return {**message, "content": _content(message, index)}


def _content(message: Mapping[str, Any], index: int) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant" or message.get("tool_calls"):
            return ""
        raise ValueError(f"message {index} (role {message['role']!r}) has no content")
    if not isinstance(content, Iterable) or isinstance(content, (bytes, Mapping)):
        raise ValueError(f"message {index}: content must be a string or a list of text parts, not {content!r}")
    return "".join(_part(part, index) for part in content)


def _part(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind != "text":
        raise ValueError(f"message {index}: content has a part of type {kind!r}; only 'text' can be read")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"message {index}: a text part needs a string under 'text', not {text!r}")
    return text
