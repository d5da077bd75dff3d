"""What this machine and this Python offer a decoder, asked of the operating system and of the installed packages.

Knows no model and loads none. Everything is plain data; what cannot be found out is None, never a guess.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "gguf",
    "numpy",
    "typer",
    "rich",
    "prompt-toolkit",
)
# /proc/cpuinfo's names of the instructions that matter to matrix products and attention, x86-64 and aarch64.
ISA = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_tile": "amx_tile",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "asimdhp": "neon_fp16",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
}


def versions() -> dict[str, str | None]:
    """Installed version of each package that flexdecode uses, None for one that is absent."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu(cpuinfo: str | None = None) -> dict[str, Any]:
    """Model, logical processors usable by this process, and those ISA extensions of `ISA` that it has.

    `cpuinfo` is the text of /proc/cpuinfo, read from the machine by default.
    """
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "processors": usable_processors(),
        "isa": [name for flag, name in ISA.items() if flag in flags],
    }


def usable_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> dict[str, int | None]:
    """Physical memory in bytes, in all and available."""
    found: dict[str, int | None] = {"total_bytes": None, "available_bytes": None}
    for line in _read("/proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        if key in ("MemTotal", "MemAvailable"):
            found["total_bytes" if key == "MemTotal" else "available_bytes"] = int(rest.split()[0]) * 1024
    if found["total_bytes"] is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["total_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found


def compiler() -> dict[str, str | None]:
    """The C++ compiler that the kernels are built with: the first of g++, c++ and clang++ on the path."""
    path = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)
    if path is None:
        return {"path": None, "version": None}
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {"path": path, "version": None}
    lines = told.stdout.splitlines()
    return {"path": path, "version": lines[0] if lines else None}


def kernels() -> dict[str, Any]:
    """The CPU kernels: which instruction sets run here, or why there are none. Imports torch; builds nothing."""
    try:
        from flexdecode.kernels import build, ops
    except ImportError as error:
        return {"state": "torch cannot be imported", "reason": str(error)}
    try:
        if build.find(build.default_cache()) is None:
            return {"state": "not compiled yet; the first use compiles them"}
        return {"state": "compiled", "in_use": ops.use_isa(), "runnable": ops.isas()}
    except build.KernelsUnavailableError as error:
        return {"state": "unavailable", "reason": str(error)}


def demo_model() -> dict[str, Any]:
    """Where the demo model's GGUF lies, or how to get it."""
    from flexdecode.checkpoints.demo import demo_path

    try:
        path = demo_path()
    except ValueError as error:
        return {"present": False, "remedy": str(error)}
    return {"present": True, "path": str(path), "file_bytes": path.stat().st_size}


def torch_state() -> dict[str, Any]:
    """What torch found: its threads, its CPU capability and the CUDA devices. Imports torch."""
    try:
        import torch
    except ImportError as error:
        return {"importable": False, "reason": str(error)}
    return {
        "importable": True,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "built_for_cuda": torch.version.cuda,
    }


def cuda_devices() -> list[dict[str, Any]]:
    """One row a CUDA device. Imports torch."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    rows = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        rows.append(
            {
                "index": index,
                "name": device.name,
                "capability": f"{device.major}.{device.minor}",
                "memory_bytes": device.total_memory,
            }
        )
    return rows


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
