"""Memory that is free and held, in bytes; a peak is a peak, and can be forgotten; amounts as they are written."""

from __future__ import annotations

import gc
import mmap
import platform
import subprocess
import sys
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
    gc.collect()  # what other tests left must not go meanwhile
    memory.forget_peak(CPU)
    before = memory.peak_bytes(CPU)
    # Mapped, since an allocator may hand out what it already holds, which adds nothing.
    with mmap.mmap(-1, 256 << 20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert memory.peak_bytes(CPU) >= before + (200 << 20)
    peak = memory.peak_bytes(CPU)
    memory.forget_peak(CPU)
    assert memory.peak_bytes(CPU) <= peak


def test_the_peak_is_no_less_than_what_is_held() -> None:
    before = memory.peak_resident_bytes()
    held = memory.resident_bytes()
    assert held is None or before >= held // 2  # counters are gathered per thread and may lag


HOLES = """
import ctypes, sys
from flexdecode.memory import map_large_blocks, resident_bytes
if sys.argv[1] == "mapped":
    map_large_blocks()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def block(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address

libc.free(block(20 << 20))  # from here on glibc keeps blocks of up to 20 MiB in its heap
before = resident_bytes()
pairs = [(block(8 << 20), block(100 << 10)) for _ in range(10)]
for large, _ in pairs:
    libc.free(large)
print(resident_bytes() - before)
"""


def test_large_blocks_leave_no_holes() -> None:
    """Eighty megabytes, each eight with a small block behind it that stays."""
    kept = {}
    for how in ("mapped", "unmapped"):
        told = subprocess.run([sys.executable, "-c", HOLES, how], capture_output=True, text=True, check=True)
        kept[how] = int(told.stdout)
    assert kept["mapped"] < 8 << 20, kept
    if platform.libc_ver()[0] == "glibc":
        assert kept["unmapped"] > 60 << 20


def test_without_proc_the_peak_comes_from_getrusage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(memory, "_FORGET", tmp_path / "absent" / "too")
    memory.forget_peak(CPU)
    assert memory.held_bytes(CPU) is memory.resident_bytes() is None
    assert memory.peak_bytes(CPU) == memory.peak_resident_bytes() > 1 << 20


def a_machine(
    root: Path, monkeypatch: pytest.MonkeyPatch, available: int, path: str, groups: dict[str, dict[str, str]]
) -> None:
    """A machine with `available` bytes, on which this process is in the control group `path`."""
    for name, text in {"meminfo": f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n", "cgroup": path}.items():
        (root / name).write_text(text)
    for group, files in groups.items():
        folder = root / "groups" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    monkeypatch.setattr(memory, "_MEMINFO", root / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", root / "cgroup")
    monkeypatch.setattr(memory, "_CGROUPS", root / "groups")


def v2(limit: str, used: int, files: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {files - files // 4}\nactive_file {files // 4}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


V1 = {
    "memory.limit_in_bytes": "3000000\n",
    "memory.usage_in_bytes": "2500000\n",
    "memory.stat": "total_inactive_file 200000\ntotal_active_file 100000\ninactive_file 7\n",
}
NO_LIMIT = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "1\n"}


@pytest.mark.parametrize(
    ("path", "groups", "free"),
    [
        ("0::/\n", {}, 1 << 30),
        ("0::/a/b\n", {"a/b": v2("max", 5), "a": v2("max", 7)}, 1 << 30),
        ("0::/a/b\n", {"a/b": v2("5000000", 1000000)}, 4000000),
        ("0::/a/b\n", {"a/b": v2("max", 5), "a": v2("6000000", 2000000, 400)}, 4000400),  # a parent's limit holds too
        ("0::/elsewhere/b\n", {"": v2("2000000", 500000, 100)}, 1500100),  # a container's root
        ("0::/a\n", {"a": v2("1000", 5000)}, 0),
        ("4:memory:/j\n0::/\n", {"memory/j": V1, "memory": NO_LIMIT}, 800000),
        ("4:cpu,memory:/gone\n1:cpu:/\n", {"memory": V1}, 800000),
        ("4:memory:/j\n", {"memory/j": NO_LIMIT}, 1 << 30),
    ],
)
def test_control_groups_bound_what_is_free(
    path: str, groups: dict[str, dict[str, str]], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_machine(tmp_path, monkeypatch, 1 << 30, path, groups)
    assert memory.available_bytes(CPU) == free


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 << 30),
        ("512MB", 512000000),
        ("1.5 kib", 1536),
        ("100", 100),
        ("7B", 7),
        ("40%", 400),
        ("1TB", 10**12),
    ],
)
def test_amounts_are_read(text: str, count: int) -> None:
    assert memory.read_size(text, 1000, "size") == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2G", "1e9", "ten", "3 4", "101%", "nan"])
def test_what_is_no_amount_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="--kv-memory"):
        memory.read_size(text, 1000, "--kv-memory")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (98362432, "93.8 MiB"),
        (1 << 30, "1 GiB"),
        (1000 << 30, "1000 GiB"),
        (3 << 50, "3.07e+03 TiB"),
    ],
)
def test_size(count: int, shown: str) -> None:
    assert memory.size(count) == shown
