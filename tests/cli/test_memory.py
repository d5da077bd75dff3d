"""Memory figures are bytes, and a peak is a peak."""

from __future__ import annotations

import pytest

from flexdecode.cli import memory


def test_the_peak_is_no_less_than_what_is_held_and_grows_with_an_allocation() -> None:
    before = memory.peak_resident_bytes()
    held = memory.resident_bytes()
    assert held is None or before >= held // 2  # counters are gathered per thread and may lag
    block = bytearray(256 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert memory.peak_resident_bytes() >= len(block)


def test_without_proc_the_peak_comes_from_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_status", lambda key: None)
    assert memory.peak_resident_bytes() > 1 << 20
    assert memory.resident_bytes() is None
