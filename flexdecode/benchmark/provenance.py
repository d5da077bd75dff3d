"""Where a figure comes from: the versions, the processor, the threads and the commit that every row of results carries.

Knows no benchmark. What cannot be found out is None.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from flexdecode import __version__
from flexdecode.kernels import ops
from flexdecode.kernels.build import KernelsUnavailableError

_CHECKOUT = Path(__file__).parents[2]
_CPUINFO = Path("/proc/cpuinfo")


def provenance(repetitions: int, warm_up: int) -> dict[str, Any]:
    """The fields that make a row comparable with one of another day: to be asked for where its work has been timed."""
    return {
        "warm_up": warm_up,
        "repetitions": repetitions,
        "threads": torch.get_num_threads(),
        "isa": isa(),
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "flexdecode": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **commit(),
        "load_average": _load_average(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def isa() -> str | None:
    """The instruction set of the kernels in use, None where there are no kernels."""
    try:
        return ops.use_isa()
    except KernelsUnavailableError:
        return None


def _load_average() -> float | None:
    """Of the last minute, this process's own threads among it: on a busy machine figures mean little."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


@functools.cache
def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """What the processor calls itself, else its architecture."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


@functools.cache
def commit(checkout: Path = _CHECKOUT) -> dict[str, Any]:
    """The commit of a git checkout, and whether its files differ from it. Both None outside of one, or without git."""
    nothing = {"commit": None, "dirty": None}
    if not (checkout / ".git").exists():
        return nothing
    # Results that are being written make no other program of it.
    status = ("status", "--porcelain", "--", ".", ":!benchmarks/results")
    head, changed = _git(checkout, "rev-parse", "HEAD"), _git(checkout, *status)
    return nothing if head is None or changed is None else {"commit": head, "dirty": bool(changed)}


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        told = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(checkout), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() if told.returncode == 0 else None
