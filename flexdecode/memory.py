"""How much memory is free and how much this process holds, in bytes. Knows nothing of models."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def available_bytes(device: torch.device) -> int:
    """Memory that could be taken on `device` without pushing anything out: on a CPU what the kernel says is
    available, page cache included; half of all memory where it does not say."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def held_bytes(device: torch.device) -> int | None:
    """What this process holds: on CUDA torch's memory there, else physical memory; None where the system does not
    say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """The most that `held_bytes` has been since `forget_peak`, or since the process began where the system cannot
    forget."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _FORGET.write_text("5")  # proc(5): the peak becomes what is held now


def _status(key: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
