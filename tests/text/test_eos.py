"""The end of a sequence, from everything that names one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode.text.eos import eos_token_ids
from flexdecode.text.tokenizer import Tokenizer
from tests.checkpoints import EOS, EOT, byte_tokenizer


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_eos", "expected"),
    [
        (EOS, {"eos_token_id": [EOS, EOT]}, "<eos>", (EOS, EOT)),
        ([EOT, EOS], {}, "<eos>", (EOT, EOS)),
        (EOS, {}, "<eos>", (EOS,)),
        (None, {"eos_token_id": EOT}, "<eos>", (EOT, EOS)),
        (EOS, {"eos_token_id": EOS}, "<eot>", (EOS, EOT)),
        (None, {}, "<eot>", (EOT,)),
        (None, {}, None, ()),
        (-1, {"eos_token_id": None}, None, ()),
    ],
)
def test_union(
    tmp_path: Path, config: object, generation: dict[str, object], tokenizer_eos: str | None, expected: tuple[int, ...]
) -> None:
    """B81: chat models ran on past the end of turn, as only one of the three places was read."""
    hf = byte_tokenizer(tmp_path)
    hf.eos_token = tokenizer_eos
    assert eos_token_ids(config, generation, Tokenizer(hf)) == expected


def test_without_a_tokenizer() -> None:
    assert eos_token_ids([3, 5, 3], {"eos_token_id": 7}, None) == (3, 5, 7)


def test_gguf_end_of_turn(demo: Tokenizer) -> None:
    """The demo's metadata names <|im_end|> (2) alone; <|endoftext|> (0) ends a text too."""
    assert eos_token_ids(None, {}, demo) == (2, 0)


@pytest.mark.parametrize("bad", ["257", 1.0, True, [257, "258"], {"id": 1}])
def test_nonsense_is_named(bad: object) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id"):
        eos_token_ids(None, {"eos_token_id": bad}, None)
