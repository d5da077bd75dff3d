"""How much memory is free, how much this process holds and has held, and how amounts of it are written. In bytes.

Asks the operating system, and torch for CUDA's share; imports no torch. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MEMINFO, _CGROUP, _CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_M_MMAP_THRESHOLD = -3  # malloc.h
_UNITS = {"": 1, "B": 1} | {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_FORMS = "bytes, or a number with KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024) or %"


def size(count: int) -> str:
    """Bytes in the binary unit that leaves one to four digits before the point: 98 KiB, 1.25 GiB."""
    value, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} {units[-1]}"


def read_size(text: str, whole: int, name: str) -> int:
    """Bytes of `2GiB`, `512MB`, `1073741824` or `40%`, which is of `whole`. Raises ValueError under the name `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or (match[2] != "%" and match[2].lower() not in units):
        raise ValueError(f"{name} {text!r} is no amount of memory; give {_FORMS}")
    if match[2] != "%":
        return int(float(match[1]) * units[match[2].lower()])
    if float(match[1]) > 100:
        raise ValueError(f"{name} {text!r} is more than 100% of what is free")
    return int(whole * float(match[1]) / 100)


def available_bytes(device: torch.device) -> int:
    """Memory that could be taken on `device` without pushing anything out: on a CPU what the kernel says is
    available, page cache included, and no more than the process's control groups leave it; half of all memory where the
    kernel does not say."""
    if device.type == "cuda":
        free: int = sys.modules["torch"].cuda.mem_get_info(device)[0]
        return free
    told = _entries(_MEMINFO, ":").get("MemAvailable")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if told is None else told * 1024
    return max(0, min([machine, *_left_by_groups()]))


def _left_by_groups() -> Iterator[int]:
    """What each limit over this process leaves, in control groups of both versions: the limit less what is used, of
    which files that were read (the page cache) can be let go."""
    for line in _text(_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, used, files = _CGROUPS, "memory.max", "memory.current", ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            root, limit, used = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            files = ("total_inactive_file", "total_active_file")
        else:
            continue
        # A container may see its own group as the root, under another path than it has outside.
        group = root / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            most, taken = _text(folder / limit).strip(), _text(folder / used).strip()
            if most.isdecimal() and taken.isdecimal():  # there is none where it says "max"
                stat = _entries(folder / "memory.stat", " ")
                yield int(most) - int(taken) + sum(stat.get(name, 0) for name in files)


def held_bytes(device: torch.device) -> int | None:
    """What this process holds: on CUDA torch's memory there, else physical memory; None where the system does not
    say."""
    if device.type == "cuda":
        held: int = sys.modules["torch"].cuda.memory_allocated(device)
        return held
    return resident_bytes()


def resident_bytes() -> int | None:
    """The physical memory this process holds now; None where the system does not say."""
    return _kilobytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most that `held_bytes` has been since `forget_peak`, or since the process began where the system cannot
    forget."""
    if device.type == "cuda":
        most: int = sys.modules["torch"].cuda.max_memory_allocated(device)
        return most
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most physical memory this process has held, since `forget_peak` where the system can forget.

    Linux's VmHWM is preferred to getrusage: the latter starts from the size of the process that launched this one.
    """
    measured = _kilobytes("VmHWM")
    if measured is not None:
        return measured
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_cuda_bytes() -> int | None:
    """The most memory torch has allocated on the current CUDA device; None when CUDA was not used."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.max_memory_allocated())


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        sys.modules["torch"].cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _FORGET.write_text("5")  # proc(5): the peak becomes what is held now


def map_large_blocks() -> None:
    """Have malloc give back what is freed, from 128 KiB on, for as long as this process lives.

    glibc maps large blocks to begin with, but takes the size of each one freed as a hint that such blocks belong in its
    heap, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD); the holes between them stay with the process, differently in
    each run. Does nothing under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 << 10)


def _kilobytes(key: str) -> int | None:
    kib = _entries(_STATUS, ":").get(key)  # the file says kB and means KiB
    return None if kib is None else kib * 1024


def _entries(path: Path, mark: str) -> dict[str, int]:
    """`key: number …` by line, those without a number left out; nothing where the file cannot be read."""
    found = {}
    for line in _text(path).splitlines():
        key, _, rest = line.partition(mark)
        words = rest.split()
        if words and words[0].isdecimal():
            found[key] = int(words[0])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
