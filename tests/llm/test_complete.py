"""Many jobs at once: each as if it were alone, few held at a time, and one that fails harms no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexdecode import SamplingParams
from flexdecode.generation.request import Request
from flexdecode.jobs import Finished, Job
from tests.checkpoints import byte_tokenizer, puppet, tiny
from tests.llm.asking import load
from tests.oracles import ids

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def by_key(finished: Iterator[Finished]) -> dict[object, Finished]:
    rows = list(finished)
    keyed = {one.job.key: one for one in rows}
    assert len(keyed) == len(rows)
    return keyed


def test_every_job_is_answered_as_if_alone(tmp_path: Path) -> None:
    tiny(tmp_path)
    byte_tokenizer(tmp_path, TEMPLATE)
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
    jobs = [Job(replace(params, max_tokens=1 + i % 9), (ids(1 + 7 * i % 50, seed=i),), key=i) for i in range(20)]
    jobs.append(Job(replace(params, n=3), ("ab", [5, 6, 7]), key="many"))
    jobs.append(Job(params, messages=[{"role": "user", "content": "hello"}], key="chat"))
    found = by_key(llm.complete(iter(jobs)))
    for job in jobs[:20]:
        (answer,) = found[job.key].completions
        assert answer.token_ids == llm.generate(job.prompts[0], job.params).token_ids
    many = [answer.token_ids for answer in found["many"].completions]
    assert many == [c.token_ids for c in llm.generate_batch(["ab", [5, 6, 7]], replace(params, n=3))]
    assert found["chat"].completions[0].token_ids == llm.generate("hello", params).token_ids


def test_an_answer_comes_when_it_ends_not_when_all_have(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = load(tmp_path)
    lengths = {"long": 40, "short": 2, "middle": 10}
    jobs = [Job(SamplingParams(max_tokens=n, ignore_eos=True), (ids(5),), key=key) for key, n in lengths.items()]
    assert [one.job.key for one in llm.complete(jobs)] == ["short", "middle", "long"]


@pytest.mark.parametrize(("prompts", "n"), [(1, 1), (3, 5), (1, 40)])
def test_few_are_held_at_a_time(prompts: int, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and however many answers one of them asks for."""
    tiny(tmp_path)
    llm = load(tmp_path)
    engine = llm.engine
    engine.config = replace(engine.config, max_running=4)
    requests: list[Request] = []
    add, step = engine.add, engine.step
    most = 0

    def adding(*args: Any) -> Request:
        requests.append(add(*args))
        return requests[-1]

    def stepping() -> Any:
        nonlocal most
        most = max(most, sum(request.finish_reason is None for request in requests))
        return step()

    monkeypatch.setattr(engine, "add", adding)
    monkeypatch.setattr(engine, "step", stepping)
    taken = 0

    def jobs() -> Iterator[Job]:
        nonlocal taken
        for i in range(30):
            taken += 1
            yield Job(SamplingParams(max_tokens=3, n=n, ignore_eos=True), ([1 + i],) * prompts, key=i)

    stream = llm.complete(jobs())
    next(stream)
    assert taken <= 9
    assert len(list(stream)) == 29
    assert most == 8
    assert len(requests) == 30 * prompts * n


def test_a_job_that_fails_harms_no_other(tmp_path: Path) -> None:
    puppet(tmp_path, "abc")
    llm = load(tmp_path)
    good = SamplingParams(max_tokens=8, temperature=0.0)
    jobs = [
        Job(good, ("<bos>",), key="good"),
        Job(good, ("",), key="empty"),
        Job(good, ([264],), key="no such id"),
        Job(good, ([1] * 600,), key="too long"),
        Job(good, ("<bos>", "<bos>", []), key="one of three"),
        Job(replace(good, logit_bias={999: 1.0}), ("<bos>",), key="bias"),
        Job(good, messages=[{"role": "user", "content": "a"}], key="no template"),
        Job(good, ("\ud800",), key="no Unicode"),
        Job(replace(good, max_tokens=0), ("<bos>",), key="nothing"),
        Job(good, ("xb",), key="last"),
    ]
    found = by_key(llm.complete(jobs))
    assert {key for key, one in found.items() if one.error is None} == {"good", "nothing", "last"}
    assert [found[key].completions[0].text for key in ("good", "nothing", "last")] == ["abc", "", "c"]
    assert all(found[key].completions == () for key in ("empty", "one of three"))
    assert not llm.engine.busy


def test_thousands_of_bad_jobs_are_not_gathered_first(tmp_path: Path) -> None:
    puppet(tmp_path, "abc")
    llm = load(tmp_path)
    taken = 0

    def jobs() -> Iterator[Job]:
        nonlocal taken
        while True:
            taken += 1
            yield Job(SamplingParams(), ([],))

    stream = llm.complete(jobs())
    assert next(stream).error is not None
    assert taken <= 2 * llm.engine.config.max_running
    stream.close()  # type: ignore[attr-defined]


def test_what_is_left_when_the_caller_leaves(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = load(tmp_path)
    free = llm.engine.cache.free_tokens()
    lengths = [2, 50, 50, 50]
    stream = llm.complete(Job(SamplingParams(max_tokens=n, ignore_eos=True), (ids(9),)) for n in lengths)
    next(stream)
    assert llm.engine.cache.free_tokens() < free
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.busy
    assert llm.engine.cache.free_tokens() == free


def test_an_error_of_the_source_ends_it_all(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = load(tmp_path)

    def jobs() -> Iterator[Job]:
        yield Job(SamplingParams(max_tokens=50, ignore_eos=True), (ids(9),))
        raise ValueError("the source broke")

    with pytest.raises(ValueError, match="the source broke"):
        list(llm.complete(jobs()))
    assert not llm.engine.busy


def test_a_job_asks_for_one_kind_of_thing() -> None:
    with pytest.raises(ValueError, match="prompts or messages"):
        Job(SamplingParams())
    with pytest.raises(ValueError, match="not both"):
        Job(SamplingParams(), ("a",), messages=[{"role": "user", "content": "a"}])
