"""Score modifications against their formulas, and against torch's FlexAttention, whose functions they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from flexdecode.attention.scores import softcap

ZERO = torch.tensor(0)


@given(st.floats(0.1, 200.0), st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_softcap_is_its_formula(cap: float, scores: list[float]) -> None:
    got = softcap(cap)(torch.tensor(scores), ZERO, ZERO, ZERO, ZERO)
    wanted = torch.tensor([cap * math.tanh(s / cap) for s in scores], dtype=torch.float64)
    assert (got.double() - wanted).abs().max() <= 1e-6 * cap
    assert got.abs().max() <= cap * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softcap_at_the_ends(dtype: torch.dtype) -> None:
    """B63: tanh by exponentials overflowed. What is infinite is capped, what is no number stays none."""
    ends = torch.tensor([0.0, 6e4, -6e4, math.inf, -math.inf, math.nan], dtype=dtype)
    got = softcap(50.0)(ends, ZERO, ZERO, ZERO, ZERO)
    assert got[:5].tolist() == [0.0, 50.0, -50.0, 50.0, -50.0]
    assert bool(got[5].isnan())


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_cap_that_is_not_positive_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match=rf"softcap\({cap}\).*greater than 0"):
        softcap(cap)


def test_equal_caps_are_equal() -> None:
    assert softcap(30.0) == softcap(30.0)
    assert softcap(30.0) != softcap(50.0)
    assert len({softcap(30.0), softcap(30.0), softcap(50.0)}) == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torch_takes_ours_as_score_mods() -> None:
    q, k, v = (torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(i)) * 5 for i in range(3))
    scores = torch.tanh(q @ k.mT * 0.25 / 3.0) * 3.0
    got = flex_attention(q, k, v, score_mod=softcap(3.0), scale=0.25)
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
