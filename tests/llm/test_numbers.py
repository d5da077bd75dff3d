"""Logits that are not finite, scores that would overflow, positions that must not round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexdecode import LLM, SamplingParams
from tests.checkpoints import edit_tensors, tiny
from tests.llm.asking import GREEDY, load
from tests.oracles import expected, ids


def test_a_nan_in_the_logits_ends_that_request_only(tmp_path: Path) -> None:
    """B65: token 0 for ever, or the whole loop dead."""
    tiny(tmp_path)

    def poison(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.embed_tokens.weight"][7] = float("nan")
        return tensors

    edit_tensors(tmp_path, poison)
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logit_bias={7: -100}, **GREEDY)
    healthy = llm.generate([3, 4, 5], params).token_ids
    for options in (params, SamplingParams(max_tokens=5, temperature=1.0)):
        with pytest.raises(ValueError, match="NaN"):
            llm.generate([3, 7, 5], options)
    sick = llm.engine.add([3, 7, 5], params.resolve({}))
    well = llm.engine.add([3, 4, 5], params.resolve({}))
    while llm.engine.busy:
        llm.engine.step()
    assert sick.error is not None
    assert tuple(well.output_ids) == healthy


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_softcap_holds_scores_that_would_overflow(dtype: str, tmp_path: Path) -> None:
    """B63: scores beyond 5000 before the cap; tanh by exp overflows."""
    model = tiny(tmp_path, "gemma2", gain=1.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(60)
            layer.self_attn.k_proj.weight.mul_(60)
    model.save_pretrained(tmp_path)
    prompt = ids(40)
    got, wanted = LLM(tmp_path, dtype=dtype).logits(prompt), expected(model, prompt)
    assert torch.isfinite(got).all()
    if dtype == "fp32":
        assert (got - wanted).abs().max() < 1e-3


def test_long_prompts_in_bfloat16_keep_their_positions(tmp_path: Path) -> None:
    """B62: frequencies or positions cast to bf16 are off by whole turns at a few hundred tokens. The model's fp32
    answer is the oracle: beside it, late positions must do no worse than early ones."""
    tiny(tmp_path, num_hidden_layers=1, head_dim=128, max_position_embeddings=4096, rope_theta=5e5, gain=1.5)
    prompt = ids(2048)
    exact, rounded = (LLM(tmp_path, dtype=d).logits(prompt) for d in ("fp32", "bf16"))
    error = (exact - rounded).abs().mean(-1)
    assert error[1024:].mean() < 2 * error[64:256].mean()
