"""The searches of AWQ: never worse than plain rounding, and better where they can be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexdecode.quantization.rounding import Grid, limits, rounded
from flexdecode.quantization.search import Reader, candidate, energy, relative_errors, search_clip, search_scales
from flexdecode.quantization.statistics import Inputs

GRID = Grid(32, False, torch.float16)


def seen(x_TK: Tensor) -> Inputs:
    inputs = Inputs(x_TK.shape[1], 32)
    inputs.add(x_TK)
    inputs.finish()
    return inputs


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(weight_NK: Tensor, inputs: Inputs, scale_K: Tensor) -> float:
    reader = Reader(weight_NK, GRID)
    (relative,) = relative_errors([reader], [energy(weight_NK, inputs)], inputs, scale_K)
    return relative


@pytest.fixture
def outliers() -> Tensor:
    """Inputs of which a few are thirty times larger than the others."""
    x_TK = random(400, 128)
    x_TK[:, [3, 40, 77]] *= 30
    return x_TK


def test_outliers_are_protected(outliers: Tensor) -> None:
    inputs, weight = seen(outliers), random(48, 128, seed=1)
    found = search_scales([Reader(weight, GRID)], inputs)
    assert found.ratio is not None
    assert found.before == (pytest.approx(error(weight, inputs, torch.ones(128))),)
    assert error(weight, inputs, found.scale_K) < 0.6 * found.before[0]
    assert bool((found.scale_K[[3, 40, 77]] > found.scale_K.median()).all())


def test_never_worse_than_no_scale() -> None:
    """The identity is a candidate: on weights that lie on the grid it wins."""
    grid = Grid(32, False, torch.float32)
    codes = torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = (codes - 8) / 4
    found = search_scales([Reader(weight, grid)], seen(random(200, 128)))
    assert found.ratio is None
    assert torch.equal(found.scale_K, torch.ones(128))


def test_degenerate_inputs_and_weights_leave_scales_finite(outliers: Tensor) -> None:
    """B28, B31. A dead channel, one whose mean is negative, groups and whole matrices of zeros, a huge weight."""
    x_TK = outliers.clone()
    x_TK[:, 5] = 0
    x_TK[:, 6] = -5
    zeros, weight = torch.zeros(16, 128), random(16, 128)
    weight[:, 32:64], weight[3], weight[0, 0] = 0, 0, 1e4
    for readers in ([zeros], [weight], [zeros, weight], [weight, zeros]):
        found = search_scales([Reader(w, GRID) for w in readers], seen(x_TK))
        assert bool((torch.isfinite(found.scale_K) & (found.scale_K > 0)).all())
    dead = seen(torch.zeros(10, 128))
    assert bool(torch.isfinite(search_scales([Reader(weight, GRID)], dead).scale_K).all())
    assert bool(torch.isfinite(candidate(torch.zeros(4), torch.zeros(4), 0.0)).all())


def test_heads_that_were_one_share_their_scale(outliers: Tensor) -> None:
    """Four query heads of 32 read two kv heads."""
    found = search_scales([Reader(random(64, 128), GRID)], seen(outliers), repeat=2, head_dim=32)
    assert found.ratio is not None
    heads = found.scale_K.view(2, 2, 32)
    assert torch.equal(heads[:, 0], heads[:, 1])


def test_powers_of_two(outliers: Tensor) -> None:
    found = search_scales([Reader(random(48, 128), GRID)], seen(outliers), powers_of_two=True)
    assert found.ratio is not None
    assert torch.equal(found.scale_K, torch.exp2(found.scale_K.log2().round()))


def test_clipping_pays_group_by_group(outliers: Tensor) -> None:
    inputs, weight = seen(outliers), random(48, 128, seed=1)
    weight[:, 10] *= 6
    w_NGg = GRID.split(weight)
    plain = inputs.group_errors(rounded(w_NGg, *limits(w_NGg), GRID) - w_NGg)
    low, high = search_clip(weight, inputs, GRID)
    clipped = inputs.group_errors(rounded(w_NGg, low, high, GRID) - w_NGg)
    assert bool((clipped <= plain).all())
    assert float(clipped.sum()) < float(plain.sum())
    own = limits(w_NGg)
    assert bool(((low >= own[0]) & (high <= own[1])).all())


def test_clipping_leaves_zeros_alone() -> None:
    low, high = search_clip(torch.zeros(4, 64), seen(random(20, 64)), GRID)
    assert bool((low == 0).all() and (high == 0).all())
