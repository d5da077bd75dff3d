"""How much memory this process has taken, in bytes. Asks the operating system, and torch for CUDA's share."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any


def peak_resident_bytes() -> int:
    """The most physical memory this process has held.

    Linux's VmHWM is preferred to getrusage: the latter starts from the size of the process that launched this one.
    """
    measured = _status("VmHWM")
    if measured is not None:
        return measured
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """The physical memory this process holds now; None where the system does not say."""
    return _status("VmRSS")


def peak_cuda_bytes() -> int | None:
    """The most memory torch has allocated on the current CUDA device; None when CUDA was not used."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.max_memory_allocated())


def _status(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024  # the file says kB and means KiB
    return None
