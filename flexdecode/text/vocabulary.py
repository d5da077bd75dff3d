"""Whether two tokenizers mean the same by the same ids. Knows no model."""

from __future__ import annotations

from flexdecode.text.tokenizer import Tokenizer

_SAMPLE = 512  # ids, spread over the vocabulary, besides the special ones and the ends


def check_same_vocabulary(one: Tokenizer, other: Tokenizer) -> None:
    """Raises ValueError where the sizes differ, or one of a sample of tokens."""
    if one.vocab_size != other.vocab_size:
        raise ValueError(
            f"{other.name} has {other.vocab_size} tokens and {one.name} has {one.vocab_size}: a draft needs the same "
            "vocabulary; take a smaller model of the same family"
        )
    size = one.vocab_size
    sample = {*range(0, size, max(1, size // _SAMPLE)), size - 1, *one.special_ids, *other.special_ids}
    for token_id in sorted(sample):
        ours, theirs = one.token(token_id), other.token(token_id)
        if ours != theirs:
            raise ValueError(
                f"token {token_id} is {theirs!r} in {other.name} and {ours!r} in {one.name}: a draft needs the same "
                "vocabulary; take a smaller model of the same family"
            )
