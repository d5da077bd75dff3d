"""Many requests at once: what is asked (Job), what is on its way (UnderWay), what came of it (Finished).

Knows neither tokenizer nor model; `LLM.complete` moves jobs along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexdecode.generation.params import SamplingParams
from flexdecode.generation.results import Completion

if TYPE_CHECKING:
    from flexdecode.answer import Answer


@dataclass(frozen=True)
class Job:
    """Prompts that are answered as one, `params.n` times each: texts or token ids, or one conversation of
    {"role", "content"} messages. `key` is the caller's, and comes back with the answer.

    Raises ValueError where there are both prompts and messages, or neither.
    """

    params: SamplingParams
    prompts: tuple[str | Sequence[int], ...] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    key: Any = None

    def __post_init__(self) -> None:
        if bool(self.prompts) == (self.messages is not None):
            raise ValueError("a job needs prompts or messages, and not both")

    @property
    def answers(self) -> int:
        """How many completions it asks for."""
        return max(1, len(self.prompts)) * self.params.n


@dataclass(frozen=True)
class Finished:
    """A job at its end: all its completions, those of a prompt side by side, or the error that kept it from them."""

    job: Job
    completions: tuple[Completion, ...] = ()
    error: ValueError | None = None


@dataclass(eq=False)
class UnderWay:
    """A job between the two: the answers begun so far. One that fails takes the job's others with it."""

    job: Job
    answers: list[Answer] = field(default_factory=list)
    running: list[Answer] = field(default_factory=list)
    error: ValueError | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or (len(self.answers) == self.job.answers and not self.running)

    def begin(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.running.append(answer)

    def poll(self) -> None:
        try:
            for answer in self.running:
                answer.poll()
        except ValueError as error:
            self.fail(error)
        self.running = [answer for answer in self.running if not answer.done]

    def fail(self, error: ValueError) -> None:
        self.error = error
        self.close()
        self.running = []

    def close(self) -> None:
        for answer in self.answers:
            answer.close()

    def finished(self) -> Finished:
        if self.error is not None:
            return Finished(self.job, error=self.error)
        return Finished(self.job, tuple(answer.completion() for answer in self.answers))
