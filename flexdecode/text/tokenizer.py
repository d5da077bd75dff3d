"""Text to token ids and back, for a Hugging Face directory or a GGUF file.

Knows where a tokenizer's files are and what ids mean, and nothing of models. Local files only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flexdecode.checkpoints.source import Source
from flexdecode.text import gguf_tokenizer
from flexdecode.text.decoders import Pipeline, byte_level_bytes, fallback_byte, pipeline
from flexdecode.text.detokenize import Detokenizer

_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model", "tekken.json")


class MissingTokenizerError(ValueError):
    """The checkpoint has no tokenizer: prompts can only be token ids."""


class Tokenizer:
    """A tokenizer, whatever it was read from. `hf` is transformers' object, for what is not covered here.

    Decoding never "cleans up" spaces: text comes back as the tokens spell it.
    """

    def __init__(self, hf: Any, eos_token_ids: tuple[int, ...] | None = None, name: str = "the tokenizer") -> None:
        self.hf = hf
        self.name = name  # for messages
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_token_ids = own if eos_token_ids is None else eos_token_ids  # the tokenizer's own, config.json apart
        self.bos_token_id: int | None = None if hf.bos_token_id is None else int(hf.bos_token_id)
        self._backend: Any = getattr(hf, "backend_tokenizer", None)  # None for a tokenizer written in Python

    @classmethod
    def load(cls, source: Source) -> Tokenizer:
        """The tokenizer that belongs to a checkpoint.

        A directory's tokenizer.json is taken as it stands: it is the whole tokenizer, while some of transformers'
        classes named in tokenizer_config.json rebuild it from the vocabulary with their own way of cutting text. Only
        a directory without that file is left to AutoTokenizer. Code that a checkpoint brings along is never run.

        Raises MissingTokenizerError when there is none, ValueError naming the path when it cannot be read.
        """
        path = Path(source.path)
        if source.format == "gguf":
            if source.config.get("tokenizer.ggml.model") is None:
                raise MissingTokenizerError(f"{path}: no tokenizer in its metadata (tokenizer.ggml.model)")
            hf, ends = gguf_tokenizer.build(source.config, str(path))
            return cls(hf, ends, str(path))
        if source.format == "random" or not path.is_dir():
            raise MissingTokenizerError(f"{path}: random weights have no tokenizer; give prompts as token ids")
        return cls(_from_directory(path), name=str(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer itself adds (as a rule one BOS) unless told otherwise.

        Special tokens spelled out in the text are read as such, so a text that already begins with "<bos>" has two
        where the tokenizer adds one: exactly what `hf(text).input_ids` gives. Raises ValueError for text that is not
        valid Unicode (a lone surrogate).
        """
        if not isinstance(text, str):
            raise ValueError(f"a prompt must be text or token ids, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half of a surrogate pair, {text[error.start]!a}, at character {error.start}: "
                "it is not valid Unicode and has no tokens"
            ) from None
        return list(self.hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; U+FFFD where bytes are not UTF-8, and "" for ids that the tokenizer does not know (a
        model's vocabulary is often padded beyond the tokenizer's)."""
        stream = Detokenizer(self, skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.flush()])

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token; ids below it may still be unused."""
        return max(self.hf.get_vocab().values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding skips: BOS, EOS and the other control tokens."""
        if self._backend is None:
            return frozenset(self.hf.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether encoding puts a BOS in front."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None for an id that it does not have."""
        if not 0 <= token_id < self.vocab_size:
            return None
        if self._backend is not None:
            token: str | None = self._backend.id_to_token(token_id)
            return token
        return str(self.hf.convert_ids_to_tokens(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for inside a text: b"" for an unknown id, a special token's own spelling.

        The bytes of a sequence joined are its text in UTF-8, but for a space that decoding takes off its start.
        """
        token = self.token(token_id)
        if token is None:
            return b""
        kinds = self._decoder_kinds
        if "ByteLevel" in kinds:
            return byte_level_bytes(token)
        byte = fallback_byte(token) if "ByteFallback" in kinds else None
        if byte is not None:
            return bytes([byte])
        # What it adds after another token, for which the token itself will do.
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :].encode()

    def new_pipeline(self) -> Pipeline | None:
        """A fresh incremental decoder; None where this tokenizer's decoder has none and `decode_window` must do."""
        return None if self._backend is None else pipeline(self._decoder)

    def decode_window(self, ids: list[int]) -> str:
        """The library's own decoding of a few ids, special tokens included."""
        return str(self.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _decoder(self) -> Any:
        decoder = self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    @cached_property
    def _decoder_kinds(self) -> frozenset[str]:
        if self._backend is None or self._decoder is None:
            return frozenset()
        return frozenset(part["type"] for part in self._decoder.get("decoders", [self._decoder]))


def _from_directory(path: Path) -> Any:
    whole = (path / "tokenizer.json").is_file()
    if not whole and not any((path / name).is_file() for name in _FILES):
        raise MissingTokenizerError(f"{path}: no tokenizer.json and no other tokenizer file; give prompts as token ids")
    kind = PreTrainedTokenizerFast if whole else AutoTokenizer
    try:
        return kind.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # whatever the libraries raise, the cause is in these files
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{path}: the tokenizer cannot be read: {reason}") from error
