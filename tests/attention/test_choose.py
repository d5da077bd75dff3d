"""Which backend serves: the first that can, for each phase; and every reason where none can."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.attention.attend import choose, choose_phases, missing_kernels
from flexdecode.attention.request import Call, Request
from flexdecode.attention.scores import softcap
from flexdecode.kernels import build


def plain(**changes: Any) -> Request:
    base = Request(8, 2, 64, torch.bfloat16, torch.bfloat16, "cpu")
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (plain(), "cpu"),
        (plain(heads=7, kv_heads=1, head_dim=31, dtype=torch.float32, kv_dtype=torch.int8), "cpu"),
        (plain(phase="few"), "cpu"),
        (plain(score=softcap(50.0)), "cpu"),
        (plain(sinks=True), "cpu"),
        (plain(return_lse=True), "cpu"),
        (plain(score=lambda score, b, h, q, k: score), "cpu"),
        (plain(device="cuda", phase="few"), "sdpa"),
        (plain(dtype=torch.float64, kv_dtype=torch.float64), "sdpa"),
    ],
)
def test_the_first_that_can_is_chosen(request_: Request, name: str) -> None:
    assert choose(request_).name == name
    assert choose(request_, name).name == name
    assert choose(request_, "reference").name == "reference"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"score": softcap(50.0)}, r"(?i)score modification \(softcap\((cap=)?50\.0\)\)"),
        ({"sinks": True}, "no attention sinks"),
        ({"return_lse": True}, "log-sum-exp"),
    ],
)
def test_a_forced_backend_that_cannot_says_why_and_prints_the_request(changes: dict[str, Any], reason: str) -> None:
    request = plain(**changes)
    with pytest.raises(ValueError, match=reason) as caught:
        choose(request, "sdpa")
    assert str(request) in str(caught.value)
    assert "sdpa:" in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Unable:
    """Serves one phase or none."""

    name: str
    reason: str
    serves: str = ""

    def unsupported(self, request: Request) -> str | None:
        return None if request.phase == self.serves else self.reason

    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("never chosen")


def test_where_none_can_every_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = (Unable("one", "it is too old"), Unable("two", "it is too new"))
    monkeypatch.setattr("flexdecode.attention.attend.BACKENDS", backends)
    with pytest.raises(ValueError, match="one: it is too old; two: it is too new"):
        choose(plain())
    with pytest.raises(ValueError, match="'sdpa' is not known"):
        choose(plain(), "sdpa")


def test_an_unknown_backend_is_answered_with_the_known() -> None:
    with pytest.raises(ValueError, match=r"'flash' is not known \(known: auto, cpu, sdpa, reference, flex\)"):
        choose(plain(), "flash")


def test_phases_may_be_served_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(choose_phases(plain())) == "cpu"
    assert str(choose_phases(plain(sinks=True))) == "cpu"
    assert str(choose_phases(plain(), "reference")) == "reference"
    backends = (Unable("one", "it is slow", serves="many"), Unable("two", "it is small", serves="few"))
    monkeypatch.setattr("flexdecode.attention.attend.BACKENDS", backends)
    assert str(choose_phases(plain())) == "two (few queries), one (many)"
    with pytest.raises(ValueError, match=r"one: it is slow$"):
        choose_phases(plain(), "one")


def test_without_a_compiler_torch_serves_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise build.KernelsUnavailableError("no C++ compiler was found")

    monkeypatch.setattr(build, "load", load)
    assert str(choose_phases(plain())) == "sdpa"
    assert str(choose_phases(plain(sinks=True))) == "reference"
    assert missing_kernels(plain()) == "no C++ compiler was found"
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        choose(plain(phase="few"), "cpu")
