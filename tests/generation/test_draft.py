"""A draft goes on where requests are: it reads each token once, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flexdecode.generation.draft import Draft
from flexdecode.generation.speculative import DraftModel
from tests.checkpoints import VOCAB
from tests.generation.running import engine, idle_pages, longrope, params, run, speculating
from tests.oracles import ids

KINDS = ["llama", "mistral", "gemma3_text", "sinks"]


def watched(draft: Draft) -> list[int]:
    """How many tokens each pass of the draft reads from now on."""
    counts: list[int] = []
    compute = draft._runner.compute

    def counted(ids: Sequence[int], *more: Any) -> Any:
        counts.append(len(ids))
        return compute(ids, *more)

    draft._runner.compute = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_greedily_and_reads_each_token_once(models: Any, oracles: Any, kind: str) -> None:
    """Under windows smaller than a page too, whatever became of the last proposal."""
    prompt = ids(40)
    wanted = oracles[kind](prompt, params(60))
    draft = Draft(engine(models[kind], prefill_chunk=16), VOCAB)
    counts, proposer = watched(draft), draft.proposer()
    assert proposer.propose(prompt, 5) == wanted[:5]
    assert counts == [16, 16, 8, 1, 1, 1, 1]
    known = 0
    for more, most in ((3, 4), (1, 9), (10, 1), (20, 12)):
        known += more
        counts.clear()
        assert proposer.propose([*prompt, *wanted[:known]], most) == wanted[known : known + most]
        assert counts == [*([16] * (more // 16)), more % 16, *([1] * (most - 1))]
    counts.clear()
    assert proposer.propose([*prompt, *wanted[:known]], 2) == wanted[known : known + 2]
    assert counts == [1]
    other = [*prompt, *wanted[:known], 77, 78, 79]
    assert proposer.propose(other, 7) == oracles[kind](other, params(7))
    proposer.close()
    proposer.close()
    assert idle_pages(draft._engine) == [0] * len(draft._engine.cache.groups)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_is_the_model_itself_is_always_right(models: Any, oracles: Any, kind: str) -> None:
    draft = Draft(engine(models[kind]), VOCAB)
    e, steps = speculating(models[kind], draft.proposer)
    cases = [(ids(20 + 9 * n, seed=n), params(60)) for n in range(3)]
    requests = [e.add(*case) for case in cases]
    assert run(e, *requests) == [oracles[kind](*case) for case in cases]
    for request in requests:
        assert request.stats().accepted_tokens == request.stats().proposed_tokens > 0
    assert steps.count < 30
    assert idle_pages(draft._engine) == [0] * len(draft._engine.cache.groups)


def test_another_model_changes_no_token(models: Any, oracles: Any) -> None:
    """Preempted, aborted and sampled requests, in a cache that is too small, and a draft's that is too."""
    draft = Draft(engine(models["mistral"], kv_tokens=128), VOCAB)
    e, _ = speculating(models["llama"], draft.proposer, kv_tokens=9 * 16)
    cases = [(ids(20 + n, seed=n), params(60, temperature=1.0, seed=n)) for n in range(5)]
    requests = [e.add(*case) for case in cases]
    for _ in range(10):
        e.step()
    e.abort(requests.pop(2))
    del cases[2]
    assert run(e, *requests) == [oracles["llama"](*case) for case in cases]
    assert sum(request.stats().proposed_tokens for request in requests) > 0
    assert idle_pages(draft._engine) == [0]


def test_the_least_recently_used_gives_way(models: Any, oracles: Any) -> None:
    draft = Draft(engine(models["llama"], kv_tokens=112), VOCAB)
    first, second = draft.proposer(), draft.proposer()
    a, b = ids(40, seed=1), ids(50, seed=2)
    for tokens, proposer in ((a, first), (b, second), (a, first)):
        assert proposer.propose(tokens, 4) == oracles["llama"](tokens, params(4))
        assert len(draft._engine.cache.lengths) == 1
    assert first.propose(ids(120), 4) == []  # with the copy of a page this is more than there is


def test_it_is_silent_where_it_cannot_read_on(models: Any) -> None:
    """Ends of its context and its vocabulary, of which its own may be the smaller one."""
    draft = Draft(engine(models["llama"], max_context=50), VOCAB)
    vocab = models["llama"].config.vocab_size
    assert draft.proposer().propose([*ids(20), vocab], 3) == []
    assert len(draft.proposer().propose(ids(48), 9)) == 2
    assert draft.proposer().propose(ids(50), 9) == []
    assert draft.proposer().propose(ids(20), 0) == []


def test_a_change_of_regime_is_read_anew(tmp_path: Path) -> None:
    decoder = longrope(tmp_path)
    draft = Draft(engine(decoder), VOCAB)
    counts, proposer = watched(draft), draft.proposer()
    proposer.propose(ids(40), 8)
    assert sum(counts) == 47
    counts.clear()
    proposer.propose(ids(44), 8)
    assert sum(counts) == 51
    wanted = run(e := engine(decoder), e.add(ids(60), params(3)))[0]
    assert proposer.propose(ids(60), 3) == wanted


def test_what_breaks_off_is_read_anew(models: Any, oracles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft(engine(models["mistral"]), VOCAB)
    proposer: DraftModel = draft.proposer()
    compute = draft._runner.compute
    for fail_at in range(4):
        left = iter(range(fail_at))

        def failing(*args: Any, left: Any = left) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return compute(*args)

        monkeypatch.setattr(draft._runner, "compute", failing)
        with pytest.raises(KeyboardInterrupt):
            proposer.propose(ids(30), 5)
        assert draft._engine.cache.lengths == {}
        monkeypatch.setattr(draft._runner, "compute", compute)
        assert proposer.propose(ids(30), 5) == oracles["mistral"](ids(30), params(5))
        proposer.close()
