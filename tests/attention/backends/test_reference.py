"""The reference against formulas in fp64: sinks, log-sum-exp, score modifications, and values that are no numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.attention.attend import attend
from flexdecode.attention.backends import reference
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.attention.plan import plan_attention
from flexdecode.attention.request import Request
from flexdecode.attention.scores import Score, ScoreMod, softcap
from tests.attention.dense import (
    ByHead,
    Ends,
    Filled,
    Holes,
    Stripes,
    check,
    dense,
    filled,
    queries,
    run,
    tolerance,
    visible,
)

BACKEND = Reference()
MASKS = [
    causal(),
    causal() & window(5),
    causal() & chunked(16),
    Holes(2),
    Holes(3, exact=True),
    Stripes(3, first=30),
    ByHead((causal(), Stripes(3, first=30))),
    ByHead((Holes(2), causal() & window(5), causal()), opaque=True),
]
every_mask = pytest.mark.parametrize("mask", MASKS, ids=str)


def both(f: Filled, q_THD: Tensor, q_lens: list[int], mask: Mask, **options: Any) -> tuple[Tensor, Tensor]:
    plan = plan_attention(f.cache, f.sequences, q_lens, mask, heads=q_THD.shape[1])
    out, lse = attend(q_THD, f.cache, 0, plan, backend=BACKEND, return_lse=True, **options)
    return out, lse


@every_mask
@pytest.mark.parametrize("q_len", [1, 4, 40])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lse_is_the_natural_log_of_the_sum(mask: Mask, q_len: int, with_sinks: bool, dtype: torch.dtype) -> None:
    """Others return log2, or zeros. Ours is ln, fp32 whatever the queries are, and -inf where nothing is seen."""
    f = filled([40], mask, last=[q_len], dtype=dtype)
    q = queries([q_len], 6, 16, dtype)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1)) * 3 if with_sinks else None
    out, lse = both(f, q, [q_len], mask, sinks=sinks)
    assert lse.dtype == torch.float32
    assert lse.shape == (q_len, 6)
    seen = visible(mask, torch.arange(40 - q_len, 40), 40, heads=6)
    wanted, wanted_lse = dense(q, f.k[0], f.v[0], seen, sinks_H=sinks)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)
    weighted, _ = dense(q, f.k[0], f.v[0].abs(), seen, sinks_H=sinks)
    assert bool(((out.double() - wanted).abs() <= tolerance(dtype, weighted)).all())
    if not with_sinks:
        assert torch.equal(lse.isinf(), ~seen.any(-1).T)


def test_lse_against_torch() -> None:
    f = filled([33], causal())
    q = queries([33], 2, 16)
    _, lse = both(f, q, [33], causal(), scale=0.5)
    scores = torch.einsum("qhd,lhd->qhl", q, f.k[0]) * 0.5
    scores = scores.masked_fill(~torch.ones(33, 33).tril().bool()[:, None], -math.inf)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), atol=1e-5, rtol=1e-5)


@every_mask
def test_a_sink_is_one_more_key_without_a_value(mask: Mask) -> None:
    """gpt-oss: softmax over the scores and the sink side by side, then the sink's share is dropped."""
    f = filled([40], mask, last=[20])
    q = queries([20], 4, 16)
    sinks = torch.tensor([-4.0, 0.0, 2.0, 30.0])
    got = run(f, q, [20], mask, BACKEND, sinks=sinks)
    seen = visible(mask, torch.arange(20, 40), 40, heads=4)
    for h in range(4):
        scores = q[:, h].double() @ f.k[0][:, h // 2].double().T / 4
        scores = torch.cat([scores.masked_fill(~seen[h], -math.inf), sinks[h].double().expand(20, 1)], dim=1)
        wanted = scores.softmax(-1)[:, :-1] @ f.v[0][:, h // 2].double()
        torch.testing.assert_close(got[:, h].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sink", [-1e4, -3.0, 0.0, 88.0, 1e4, -math.inf])
@pytest.mark.parametrize("exact", [False, True])
def test_a_row_that_sees_nothing_has_its_sink(sink: float, exact: bool) -> None:
    mask = Holes(1, exact=exact)
    f = filled([9], mask, last=[4])
    out, lse = both(f, queries([4], 2, 16), [4], mask, sinks=torch.full((2,), sink))
    assert torch.equal(out, torch.zeros(4, 2, 16))
    assert torch.equal(lse, torch.full((4, 2), sink))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_softcap_of_scores_far_beyond_the_cap(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """B63: keys and queries 60 times too large put scores over 5000; tanh overflowed, fp16 scores did, too."""
    f = filled([40], causal(), last=[20], head_dim=64, dtype=kv_dtype)
    f.cache.kv(0).k_CSD.mul_(60)
    f.k[0] = f.k[0] * 60
    q = queries([20], 4, 64, dtype) * 60
    scores = torch.einsum("qhd,lhd->qhl", q.double(), f.k[0].repeat_interleave(2, 1).double()) / 8
    assert scores.abs().max() > 5e3
    score = softcap(50.0)
    out = run(f, q, [20], causal(), BACKEND, score=score)
    assert bool(out.isfinite().all())
    check(out, f, q, [20], causal(), slack=1e-4, score=score, positions_Q=torch.arange(20, 40))
    capped = 50 * torch.tanh(scores / 50)
    capped = capped.masked_fill(~visible(causal(), torch.arange(20, 40), 40)[:, None], -math.inf)
    wanted = torch.einsum("qhl,lhd->qhd", capped.softmax(-1), f.v[0].repeat_interleave(2, 1).double())
    torch.testing.assert_close(out.double(), wanted, atol=0.02 if dtype != torch.float32 else 1e-4, rtol=0.02)


class Recorder(Score):
    """A score modification that keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        self.calls.append((score, b, h, q_idx, kv_idx))
        return score


def test_score_mods_get_absolute_positions_heads_and_the_callers_index() -> None:
    """No offset code for users: at decode, in chunks and in a batch, q_idx and kv_idx are where the tokens stand; b is
    the index in the call, not a slot of some pool."""
    mask = causal() & window(6)
    f = filled([40, 9, 30], mask, last=[3, 1, 2])
    order = [2, 0, 1]
    f.sequences = [f.sequences[i] for i in order]
    recorder = Recorder()
    run(f, queries([2, 3, 1], 6, 16), [2, 3, 1], mask, BACKEND, score=recorder)
    for index, (call, length, q_len) in enumerate(zip(recorder.calls, [30, 40, 9], [2, 3, 1], strict=True)):
        score, b, h, q_idx, kv_idx = call
        assert score.dtype == torch.float32
        assert (b.item(), b.ndim) == (index, 0)
        assert q_idx.flatten().tolist() == list(range(length - q_len, length))
        keys = kv_idx.flatten().tolist()
        assert keys == list(range(keys[0], length))  # whole blocks: a score of a key that is masked is thrown away
        assert h.flatten().tolist() == list(range(6))
        assert (h + q_idx + kv_idx).shape == score.shape == (6, q_len, len(keys))


def test_b_may_be_the_callers_own() -> None:
    """A step of some of the sequences that a caller has: b is what the caller calls them."""
    f = filled([40, 9], causal(), last=[3, 1])
    recorder = Recorder()
    plan = plan_attention(f.cache, f.sequences, [3, 1], causal(), batch=[5, 2])
    attend(queries([3, 1], 6, 16), f.cache, 0, plan, backend=BACKEND, score=recorder)
    assert [b.item() for _, b, _, _, _ in recorder.calls] == [5, 2]


def alibi(slopes_H: Tensor) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes_H[h] * (kv_idx - q_idx)

    return score_mod


@pytest.mark.parametrize("q_len", [1, 5, 150])
@pytest.mark.parametrize(
    "mask", [causal(), causal() & window(9), Ends(3, 20), ByHead((causal() & window(9), Ends(3, 20)))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_score_mod_by_head_and_distance(q_len: int, mask: Mask, dtype: torch.dtype) -> None:
    """Captured tables have whatever type their author gave them; blocks that are skipped shift no position, and a kv
    head that reads blocks of its own is told its own heads."""
    f = filled([200], mask, last=[q_len])
    q = queries([q_len], 6, 16)
    score = alibi((2.0 ** -torch.arange(1, 7)).to(dtype))
    out = run(f, q, [q_len], mask, BACKEND, score=score)
    check(out, f, q, [q_len], mask, score=score, positions_Q=torch.arange(200 - q_len, 200))


def test_a_table_of_exactly_the_length_is_never_read_past_its_end() -> None:
    """Block kernels passed indices of padding to the user's function, which looked them up."""
    f = filled([37], causal(), last=[5], page=16, rest=math.nan)
    table = torch.randn(37, generator=torch.Generator().manual_seed(0))

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[kv_idx] - table[q_idx]

    q = queries([5], 4, 16)
    out = run(f, q, [5], causal(), BACKEND, score=score)
    check(out, f, q, [5], causal(), score=score, positions_Q=torch.arange(32, 37))


@every_mask
def test_slabs_change_nothing(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are taken in slabs of rows to bound the memory of the scores."""
    f = filled([40, 21], mask, last=[40, 7])
    q, sinks = queries([40, 7], 4, 16), torch.randn(4, generator=torch.Generator().manual_seed(0))
    score = alibi(torch.ones(4) / 8)
    wanted = both(f, q, [40, 7], mask, sinks=sinks, score=score)
    for size in (1, 4 * 4 * 40 * 7):
        monkeypatch.setattr(reference, "_SCORE_BYTES", size)
        got = both(f, q, [40, 7], mask, sinks=sinks, score=score)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


@every_mask
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(mask: Mask, bad: float, where: str) -> None:
    f = filled([40], mask)
    q = queries([40], 2, 16)
    before = run(f, q, [40], mask, BACKEND)
    kv = f.cache.kv(0)
    (kv.k_CSD if where == "key" else kv.v_CSD)[0, 33] = bad
    after = run(f, q, [40], mask, BACKEND)
    sees = visible(mask, torch.arange(40), 40, heads=2)[0, :, 33]
    assert torch.equal(after[:, 1], before[:, 1])
    torch.testing.assert_close(after[~sees], before[~sees], atol=1e-6, rtol=1e-6)
    if where == "value" or math.isnan(bad):
        assert not bool(after[sees, 0].isfinite().any())


def test_it_serves_everything_but_sums_that_never_vary() -> None:
    request = Request(4, 2, 32, torch.float32, torch.int8, "cpu", softcap(3.0), sinks=True, return_lse=True)
    assert BACKEND.unsupported(request) is None
    assert "how many queries" in str(BACKEND.unsupported(replace(request, batch_invariant=True)))
