"""A fact hidden in a long text: prompts of a wanted length, with the fact at a wanted depth.

Knows tokenizers and chat templates, no model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from flexdecode.text.chat_template import render
from flexdecode.text.tokenizer import Tokenizer

_CITIES = (
    "Lisbon", "Nairobi", "Oslo", "Quito", "Prague", "Hanoi", "Dublin", "Lima", "Cairo", "Seoul", "Vienna", "Dakar",
)  # fmt: skip
_WRONG = 9  # other answers of the same form: guessing finds the right one once in ten times
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|(?<=[。！？])\s*")
_MOST_WORDS = 32  # of a sentence; code and tables have no full stops


@dataclass(frozen=True)
class Needle:
    """A fact, the question for it, how an answer begins, the right ending and wrong ones."""

    fact: str
    question: str
    lead: str
    answer: str
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """Token ids that end where the answer begins, and the share of the text's tokens that stand before the fact."""

    ids: list[int]
    depth: float


def draw_needle(seed: int, haystack: str) -> Needle:
    """The same needle for the same seed. Its numbers do not occur in the haystack."""
    draws = random.Random(seed)
    city = draws.choice(_CITIES)
    numbers: list[str] = []
    while len(numbers) <= _WRONG:
        number = str(draws.randrange(10_000, 100_000))
        if number not in numbers and number not in haystack:
            numbers.append(number)
    lead = f"The secret number of {city} is"
    question = f"What is the secret number of {city}? It is in the text above. Answer with the number."
    return Needle(f"{lead} {numbers[0]}.", question, lead, numbers[0], tuple(numbers[1:]))


def split_sentences(text: str) -> Iterator[str]:
    """The sentences of a text, or what comes near to them; long ones in parts."""
    for part in _SENTENCE_END.split(text):
        words = part.split()
        for start in range(0, len(words), _MOST_WORDS):
            yield " ".join(words[start : start + _MOST_WORDS])


class Haystack:
    """The sentences of a text, from one of them on and round. `chat`: whether prompts take the chat template."""

    def __init__(self, tokenizer: Tokenizer, text: str, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self.chat = bool(tokenizer.hf.chat_template)
        sentences = list(split_sentences(text))
        first = start % len(sentences) if sentences else 0
        self._sentences = sentences[first:] + sentences[:first]
        self._sizes: list[int] = []  # tokens of the sentences counted so far

    def prompt(self, needle: Needle, length: int, depth: float) -> Prompt:
        """A prompt of at most `length` tokens, less than one sentence short of it, with the fact at the end of the
        sentence nearest to `depth`: 0 is before the first, 1 after the last.

        Raises ValueError where the length has no room for any text, or the text is too short for it.
        """
        alone = len(self._render(needle, [], 0))
        room = length - alone
        while room > 0:
            sentences, ends = self._take(room, length - alone)
            if not sentences:
                break
            place = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))
            ids = self._render(needle, sentences, place)
            if len(ids) <= length:
                return Prompt(ids, ends[place] / ends[-1])
            room -= len(ids) - length
        raise ValueError(
            f"a length of {length} tokens is too short: question and fact alone take {alone}, and the text's next "
            f"sentence {self._size(0)}"
        )

    def candidates(self, needle: Needle) -> list[list[int]]:
        """Token ids of the right answer and of the wrong ones, as they would go on after a prompt."""
        gap = "" if self.chat else " "
        texts = [f"{gap}{needle.lead} {number}" for number in (needle.answer, *needle.wrong)]
        return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def _take(self, room: int, wanted: int) -> tuple[list[str], list[int]]:
        """As many sentences as fit into `room` tokens, and the tokens up to each of their borders, from 0 on."""
        total = count = 0
        while count < len(self._sentences) and total + self._size(count) <= room:
            total += self._size(count)
            count += 1
        if count == len(self._sentences):
            raise ValueError(f"the text has {total} tokens, and {wanted} are wanted; give a longer --text")
        return self._sentences[:count], [0, *accumulate(self._sizes[:count])]

    def _size(self, index: int) -> int:
        while len(self._sizes) <= index:
            sentence = f" {self._sentences[len(self._sizes)]}"
            self._sizes.append(len(self._tokenizer.encode(sentence, add_special_tokens=False)))
        return self._sizes[index]

    def _render(self, needle: Needle, sentences: Sequence[str], place: int) -> list[int]:
        text = " ".join([*sentences[:place], needle.fact, *sentences[place:]])
        if self.chat:
            return render(self._tokenizer, [{"role": "user", "content": f"{text}\n\n{needle.question}"}])
        return self._tokenizer.encode(f"{text}\n\nQuestion: {needle.question}\nAnswer:")
