"""Statistics of inputs against the inputs themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexdecode.quantization import statistics
from flexdecode.quantization.statistics import Inputs, band_width


def gathered(x_TK: Tensor, group: int, chunks: int = 3) -> Inputs:
    inputs = Inputs(x_TK.shape[1], group)
    for chunk in x_TK.chunk(chunks):
        inputs.add(chunk)
    inputs.finish()
    return inputs


@pytest.fixture
def x_TK() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3000, 96, generator=generator) @ torch.randn(96, 96, generator=generator)


def test_errors_are_those_of_outputs(x_TK: Tensor) -> None:
    e_NK = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    inputs = gathered(x_TK, 32)
    assert inputs.tokens == 3000
    assert torch.allclose(inputs.row_errors(e_NK), (x_TK @ e_NK.T).square().mean(0), rtol=0.02)
    by_group = torch.stack([(x_TK[:, a : a + 32] @ e_NK[:, a : a + 32].T).square().mean(0) for a in (0, 32, 64)], dim=1)
    assert torch.allclose(inputs.group_errors(e_NK.view(5, 3, 32)), by_group, rtol=0.02)
    assert torch.allclose(inputs.mean_size(), x_TK.abs().mean(0), rtol=1e-5)


def test_chunks_change_nothing(x_TK: Tensor) -> None:
    """Every token counts once, however they come."""
    e_NK = torch.randn(5, 96)
    one, many = gathered(x_TK, 32, 1), gathered(x_TK, 32, 50)
    assert torch.allclose(one.row_errors(e_NK), many.row_errors(e_NK), rtol=1e-4)


@pytest.mark.parametrize("group", [32, 96])
def test_bands(x_TK: Tensor, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide inputs are held in bands of whole groups: the parts of a row count by themselves. A group that is wider than
    a band is the sum of its bands."""
    monkeypatch.setattr(statistics, "WIDEST", 70)
    inputs = gathered(x_TK, group)
    assert inputs.band == (64 if group == 32 else 70)
    e_NK = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    parts = [(x_TK[:, a:b] @ e_NK[:, a:b].T).square().mean(0) for a, b in ((0, inputs.band), (inputs.band, 96))]
    assert torch.allclose(inputs.row_errors(e_NK), sum(parts), rtol=0.02)
    errors = inputs.group_errors(e_NK.view(5, -1, group))
    assert torch.allclose(errors.sum(1), inputs.row_errors(e_NK), rtol=1e-4) == (group == 96)
    assert errors.shape == (5, 96 // group)


def test_widths_of_bands() -> None:
    assert [band_width(k, g) for k, g in ((576, 64), (4096, 128), (14336, 128), (11008, -1 % 11008), (5000, 96))] == [
        576, 4096, 4096, 4096, 4032,
    ]  # fmt: skip


def test_scaled_inputs(x_TK: Tensor) -> None:
    inverse_K = torch.rand(96) + 0.5
    e_NK = torch.randn(5, 96)
    wanted = gathered(x_TK, 32).row_errors(e_NK * inverse_K)
    other = gathered(x_TK, 32).scaled(inverse_K)
    assert torch.allclose(other.row_errors(e_NK), wanted, rtol=1e-4)
    assert torch.allclose(other.mean_size(), x_TK.abs().mean(0) * inverse_K, rtol=1e-4)


def test_without_a_token_every_input_counts_alike() -> None:
    """An expert that nobody chose."""
    inputs = Inputs(8, 4)
    inputs.finish()
    e_NK = torch.randn(3, 8)
    assert torch.allclose(inputs.row_errors(e_NK), e_NK.square().sum(1))
    assert torch.equal(inputs.mean_size(), torch.ones(8))


def test_a_few_tokens_do_not_make_an_input_free() -> None:
    """One token leaves all but one direction unseen; a change in those must still cost something."""
    x_TK = torch.ones(1, 8)
    e_NK = torch.tensor([[1.0, -1, 0, 0, 0, 0, 0, 0]])
    assert float(gathered(x_TK, 4, 1).row_errors(e_NK)) > 0.5


def test_inputs_that_are_no_numbers_are_refused() -> None:
    inputs = Inputs(4, 4)
    inputs.add(torch.tensor([[1.0, float("nan"), 0, 0]]))
    with pytest.raises(ValueError, match="not finite"):
        inputs.finish()
