"""What --verbose says."""

from __future__ import annotations

import pytest

from flexdecode.cli.explain import explain, has_chat_template, settings
from flexdecode.generation.params import SamplingParams
from tests.cli.fake import Script, fake_llm_class


def test_only_settings_that_are_set_are_named() -> None:
    assert settings(SamplingParams(temperature=0.0, top_k=5, stop=("END",))) == (
        "min_tokens 0, temperature 0.0, top_k 5, presence_penalty 0.0, frequency_penalty 0.0, n 1, stop ('END',)"
    )


def test_a_model_without_tokenizer_has_no_template() -> None:
    llm = fake_llm_class(Script())("m", progress=print)
    assert has_chat_template(llm)
    llm.tokenizer = None
    assert not has_chat_template(llm)


def test_what_is_left_open_is_shown_as_the_model_decides_it(capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake_llm_class(Script(progress=False))("m")
    explain(llm, SamplingParams(), chat=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert "temperature 0.6" in err
    assert "no chat template" in err
    assert "weights_bytes: 1048576" in err
