"""Memory that is free and held, in bytes; a peak is a peak, and can be forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexdecode import memory

CPU = torch.device("cpu")


def test_something_is_free_and_something_is_held() -> None:
    held = memory.held_bytes(CPU)
    assert memory.available_bytes(CPU) > 1 << 20
    assert held is None or held > 1 << 20


def test_a_peak_stays_until_it_is_forgotten() -> None:
    memory.forget_peak(CPU)
    before = memory.peak_bytes(CPU)
    if before is None:
        pytest.skip("the system does not say")
    block = bytearray(256 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert memory.peak_bytes(CPU) >= before + (200 << 20)  # type: ignore[operator]
    del block
    peak = memory.peak_bytes(CPU)
    memory.forget_peak(CPU)
    assert memory.peak_bytes(CPU) <= peak  # type: ignore[operator]


def test_what_cannot_be_found_out_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(memory, "_FORGET", tmp_path / "absent" / "too")
    memory.forget_peak(CPU)
    assert memory.held_bytes(CPU) is None
    assert memory.peak_bytes(CPU) is None
