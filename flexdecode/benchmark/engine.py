"""What the engine adds to the model and takes from it: many requests at once, the step's own cost, prompts that are
known, tokens that are guessed.

Each row sets one work beside another, in rounds in which both ran: `ms` beside `beside_ms`, and `times` says how many
times as long the other took. Engines are made for the benchmark, with the room that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from flexdecode.benchmark import rounds
from flexdecode.benchmark.model import check_context, facts
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.benchmark.rows import FAILURES, Row, failure
from flexdecode.benchmark.session import GREEDY, Session
from flexdecode.config import EngineConfig
from flexdecode.generation.engine import Engine
from flexdecode.generation.ngram import PromptLookup
from flexdecode.generation.params import SamplingParams
from flexdecode.generation.runner import Runner
from flexdecode.generation.speculative import Proposer
from flexdecode.llm import LLM
from flexdecode.text.chat_template import render

_QUESTION = 16  # tokens that follow a known prompt
_STEPS = 16  # of decoding that are timed together
# Prose, for a small model asked to copy lists and signs comes to repeat a single one of them.
_COPIED = """\
The lighthouse stands at the end of the pier. It was built in 1872 by the harbour company, and its lamp can \
be seen from thirty miles away. In winter the keeper climbs the stairs twice a night, because the oil \
thickens in the cold. Fishermen say that the light has never failed, not even in the great storm of 1911, \
when the sea carried away half of the pier and three boats were lost. Since then a bell has hung beside the \
door, and the keeper's children ring it on the first day of every spring. Nobody remembers who began the \
custom, but the whole town comes to listen, and afterwards there is soup."""


@dataclass(frozen=True)
class Load:
    """`running` prompts of `prompt` tokens at once, each answered with `answer` tokens; and a prompt of `known`."""

    running: int
    prompt: int
    answer: int
    known: int


def bench(llm: LLM, model: str, load: Load, repetitions: int) -> Iterator[Row]:
    """A row for each comparison. Raises ValueError where the model's context ends too soon."""
    check_context(llm, load.prompt + load.answer, f"--input {load.prompt} and --output {load.answer}")
    check_context(llm, load.known + _QUESTION + 1, f"--known {load.known}")
    measures: tuple[Callable[[LLM, Load, int], Iterator[Row]], ...] = (_together, _step, _known, _guessed)
    for measure in measures:
        row = {"benchmark": "engine", **facts(llm, model)}
        try:
            for measured in measure(llm, load, repetitions):
                yield {**row, **measured, **provenance(repetitions, rounds.WARM_UP)}
        except FAILURES as problem:
            yield {**row, "work": measure.__name__.strip("_"), **failure(problem)}


def _engine(llm: LLM, context: int, sequences: int = 1, proposer: Callable[[], Proposer] | None = None) -> Engine:
    page = llm.engine.config.page
    room = sequences * -(-context // page) * page
    return Engine(llm.engine.model, EngineConfig(context, room, page, max_running=sequences), proposer=proposer)


def _compared(work: str, beside: str, times: Times) -> Row:
    """Of the works named "work" and "beside"."""
    return {
        "work": work,
        "beside": beside,
        **times.spread("work"),
        "beside_ms": times.ms("beside"),
        "times": times.ratio("beside", "work"),
    }


@torch.inference_mode()
def _together(llm: LLM, load: Load, repetitions: int) -> Iterator[Row]:
    """A token of many requests beside a token of one, and all of their answers beside their prefill and their decoding,
    each by itself."""
    n, prompt, answer = load.running, load.prompt, load.answer
    engine, alone = _engine(llm, prompt + answer, n), _engine(llm, prompt + answer)
    token: dict[str, dict[int, float]] = {"work": {}, "beside": {}}
    whole: dict[str, dict[int, float]] = {"work": {}, "beside": {}}
    for i in range(-rounds.WARM_UP, repetitions):
        with Session(engine, prompt, answer, n) as session:
            before = Work(session.until_first_tokens).seconds()
            steps = min(_STEPS, session.steps_left)
            if steps < 1:
                raise ValueError(
                    f"--output {answer} ends before the last of {n} prompts has its first token; ask for longer answers"
                )
            of_many = Work(session.step, calls=steps).seconds() / n
            total = before + of_many * n * steps + Work(session.until_ended).seconds()
        with Session(engine, prompt, 1, n) as session:
            prefill = Work(session.until_ended).seconds()
        with Session(alone, prompt, answer) as session:
            session.until_first_tokens()
            of_one = Work(session.step, calls=min(_STEPS, session.steps_left)).seconds()
        if i >= 0:
            token["work"][i], token["beside"][i] = of_many, of_one
            whole["work"][i], whole["beside"][i] = total, prefill + of_many * n * (answer - 1)
    yield _compared(f"a token, {n} running", "a token, one running", Times(token))
    yield _compared(f"{n} x ({prompt} + {answer}) tokens", "prefill and decoding by themselves", Times(whole))


@torch.inference_mode()
def _step(llm: LLM, load: Load, repetitions: int) -> Iterator[Row]:
    """A step of one request beside the model alone: embedding, layers, logits and the greatest of them."""
    count = _STEPS * (repetitions + rounds.WARM_UP)
    context = load.prompt + count + 2
    check_context(llm, context, f"--input {load.prompt} and --repetitions {repetitions}")
    engine, other = _engine(llm, context), _engine(llm, context)
    model, runner = llm.engine.model, Runner(llm.engine.model, other.cache)
    sequence, tokens = other.cache.new(), [1] * load.prompt

    def compute() -> None:
        hidden_TD = runner.compute(tokens, [sequence], [len(tokens)], [other.cache.length(sequence) + len(tokens)])
        tokens[:] = [int(model.logits(hidden_TD[-1:]).argmax())]

    compute()
    with Session(engine, load.prompt, count + 1) as session:
        session.until_first_tokens()
        works = {"work": Work(session.step, calls=_STEPS), "beside": Work(compute, calls=_STEPS)}
        times = rounds.run(works, repetitions)
    yield _compared("a step, one running", "the model's loop without the engine", times)


@torch.inference_mode()
def _known(llm: LLM, load: Load, repetitions: int) -> Iterator[Row]:
    """The first token after a prompt whose beginning is in the cache beside that after one that is new."""
    engine = _engine(llm, load.known + _QUESTION + 1, 2)
    seconds: dict[str, dict[int, float]] = {"work": {}, "beside": {}}
    for i in range(-rounds.WARM_UP, repetitions):
        with Session(engine, load.known, 1) as session:
            new = Work(session.until_ended).seconds()
            (request,) = session.requests
        question = [(token + 1) % llm.config.vocab_size for token in request.prompt_ids[-_QUESTION:]]
        with Session(engine, [*request.prompt_ids, *question], 1) as session:
            known = Work(session.until_ended).seconds()
        if i >= 0:
            seconds["work"][i], seconds["beside"][i] = known, new
    yield _compared(f"first token, {load.known} known and {_QUESTION} new", "first token, all new", Times(seconds))


def _guessed(llm: LLM, load: Load, repetitions: int) -> Iterator[Row]:
    """Answers with tokens looked up in the text beside the same answers without, where copying is the task and where it
    is not: there tokens are sampled, for a small model that is greedy comes to repeat itself. No row without a
    tokenizer."""
    if llm.tokenizer is None:
        return
    tasks = {
        "copying": (f"Repeat this text word for word:\n\n{_COPIED}", GREEDY),
        "telling": ("Tell me a story about a lighthouse.", SamplingParams(temperature=1.0, seed=1)),
    }
    for name, (text, params) in tasks.items():
        prompt = render(llm.tokenizer, [{"role": "user", "content": text}])
        context = len(prompt) + load.answer
        check_context(llm, context, f"--output {load.answer}")
        engines = {"work": _engine(llm, context, proposer=PromptLookup), "beside": _engine(llm, context)}
        works = {key: Work(partial(_answer, engine, prompt, load.answer, params)) for key, engine in engines.items()}
        yield _compared(f"{name}, looked up", f"{name}, not looked up", rounds.run(works, repetitions))


def _answer(engine: Engine, prompt: list[int], new_tokens: int, sampling: SamplingParams) -> None:
    with Session(engine, prompt, new_tokens, sampling=sampling) as session:
        session.until_ended()
