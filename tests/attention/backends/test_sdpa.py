"""SDPA against the reference where its own ways divide: folded heads, heads apart, bits or none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.backends.sdpa import Sdpa
from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.attention.plan import plan_attention
from flexdecode.attention.request import Request
from flexdecode.attention.scores import softcap
from tests.attention.dense import ByHead, Filled, Holes, Keys, Stripes, filled, overwrite, queries, run, slots_of

BACKEND = Sdpa()
MASKS = [
    causal(),
    window(1000),
    causal() & window(7),
    causal() & chunked(16),
    Holes(3),
    Holes(3, exact=True),
    Stripes(3),
    ByHead((causal(), Stripes(4), Keys(30))),
    ByHead((causal() & window(7), Holes(2)), opaque=True),
]


def request(**changes: object) -> Request:
    base = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "kv_dtype": torch.int8, "device": "cpu"}
    return Request(**(base | changes))  # type: ignore[arg-type]


def test_what_it_serves_and_what_not() -> None:
    assert BACKEND.unsupported(request()) is None
    assert BACKEND.unsupported(request(heads=7, kv_heads=1, head_dim=31)) is None
    assert str(softcap(5.0)) in (BACKEND.unsupported(request(score=softcap(5.0))) or "")
    assert "sinks" in (BACKEND.unsupported(request(sinks=True)) or "")
    assert "log-sum-exp" in (BACKEND.unsupported(request(return_lse=True)) or "")


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_len", [1, 2, 15, 16, 17, 18, 60])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("v_head_dim", [None, 24])
def test_either_side_of_the_fold(mask: Mask, q_len: int, group: int, v_head_dim: int | None) -> None:
    """Up to 16 queries a kv head's heads are laid as rows, above torch's grouped path is taken: both the same."""
    f = filled([60], mask, last=[q_len], v_head_dim=v_head_dim)
    q = queries([q_len], 2 * group, 16)
    wanted = run(f, q, [q_len], mask, Reference())
    torch.testing.assert_close(run(f, q, [q_len], mask, BACKEND), wanted, atol=1e-5, rtol=1e-5)


def test_nothing_is_copied_for_a_lone_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """One decode step of a long context: the keys that SDPA gets are the cache's own memory."""
    f = filled([50], causal(), last=[1])
    storage = f.cache.kv(0).k_CSD.untyped_storage().data_ptr()
    inner, seen = F.scaled_dot_product_attention, []

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        seen.append(k.untyped_storage().data_ptr())
        return inner(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    run(f, queries([1], 4, 16), [1], causal(), BACKEND)
    assert seen == [storage]


def poisoned(f: Filled, position: int, value: float) -> Filled:
    overwrite(f.cache, 0, slots_of(f.cache, 0, f.sequences[0], position, position + 1), value)
    return f


@pytest.mark.parametrize("q_len", [1, 3, 16, 17, 30])
@pytest.mark.parametrize("mask", [Stripes(2), Stripes(5), Holes(2)], ids=str)
def test_a_key_inside_the_interval_that_nobody_sees_may_hold_anything(mask: Mask, q_len: int) -> None:
    """The last key is at an odd position, which no stripe shows; SDPA would multiply its NaN by zero."""
    f = filled([40], mask, last=[q_len])
    q = queries([q_len], 4, 16)
    before = run(f, q, [q_len], mask, BACKEND)
    if isinstance(mask, Stripes):
        assert torch.equal(run(poisoned(f, 39, math.nan), q, [q_len], mask, BACKEND), before)
    else:
        # Query 39 is the only one that sees key 39, and with period 2 it does.
        after = run(poisoned(f, 39, math.nan), q, [q_len], mask, BACKEND)
        assert bool(after[-1].isnan().all())


def test_what_every_query_sees_is_not_hidden() -> None:
    f = filled([40], causal(), last=[1])
    assert bool(run(poisoned(f, 7, math.nan), queries([1], 4, 16), [1], causal(), BACKEND).isnan().all())


def test_a_query_without_any_key_is_zero() -> None:
    mask = Holes(1, exact=True)
    f = filled([9], mask, last=[2], v_head_dim=5)
    assert plan_attention(f.cache, f.sequences, [2], mask).visible_keys(2) == 0
    assert torch.equal(run(f, queries([2], 4, 16), [2], mask, BACKEND), torch.zeros(2, 4, 5))
