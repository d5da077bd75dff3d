"""Compiles kernels/cpu with the local compiler, once for a machine, and loads what came out.

Each instruction set is one object file of the same source under other flags; bindings are another. The result is
cached by everything that it depends on: sources, flags, compiler, torch, machine. A failure is explained and never
hidden: without the library, callers are told what is missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
_CPUINFO = Path("/proc/cpuinfo")
_COMMON = (
    "-O3 -std=c++20 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wall -Wno-psabi "
    "-Wno-uninitialized -Wno-maybe-uninitialized"  # the compiler's own vector headers trip these two
).split()
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c".split()
# By machine, in the order of preference: name and flags.
ISAS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "amx": [*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
        "avx512bf16": [*_AVX512, "-mavx512bf16", "-mavx512vnni"],
        "avx512": _AVX512,
        "avx2": "-mavx2 -mfma -mf16c".split(),
        "portable": ["-DFLEX_PORTABLE"],
    },
    "aarch64": {"neon": [], "portable": ["-DFLEX_PORTABLE"]},
}


class KernelsUnavailableError(RuntimeError):
    """There are no compiled kernels on this machine; the message says why, and what would help."""


def default_cache() -> Path:
    """Where built libraries are kept: the user's cache folder."""
    return Path.home() / ".cache" / "flexdecode" / "kernels"


@cache
def compiler() -> str | None:
    """A C++ compiler's path, None where there is none."""
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def isas() -> dict[str, list[str]]:
    """Instruction sets to compile for this machine, with their flags; AMX only where processor and compiler have it,
    since few processors do and compilers of some years ago do not know it."""
    names = ISAS.get(platform.machine(), {"portable": ["-DFLEX_PORTABLE"]})
    return {
        name: flags for name, flags in names.items() if name != "amx" or (_has_amx() and _known(compiler(), *flags))
    }


def _has_amx() -> bool:
    try:
        return "amx_bf16" in _CPUINFO.read_text().split()
    except OSError:
        return False


@cache
def _known(cxx: str | None, *flags: str) -> bool:
    """Whether the compiler takes these flags."""
    command = [str(cxx), *flags, "-E", "-x", "c++", os.devnull]
    return cxx is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


def load() -> None:
    """Build where needed, and load. Raises KernelsUnavailableError, the same each time."""
    reason = _failure()
    if reason is not None:
        raise KernelsUnavailableError(reason)


@cache
def _failure() -> str | None:
    """Why there are no kernels, None once they are loaded. Every layer and matrix asks; a compiler that fails should do
    so once."""
    try:
        library = build(default_cache())
    except KernelsUnavailableError as problem:
        return str(problem)
    try:
        torch.ops.load_library(str(library))
    except OSError as problem:
        return f"{library} cannot be loaded: {problem}; delete it and try again"
    return None


def find(folder: Path) -> Path | None:
    """The library in `folder` that fits this source, torch, compiler and machine, None where it is not built yet.

    Raises KernelsUnavailableError where there is no compiler to build it.
    """
    target = _target(folder, _commands(_compiler()))
    return target if target.exists() else None


def build(folder: Path) -> Path:
    """The library in `folder`, compiled if it is not there. Safe beside other processes that do the same."""
    cxx = _compiler()
    commands = _commands(cxx)
    target = _target(folder, commands)
    if target.exists():
        return target
    _log.info("compiling the CPU kernels, once for this machine (under a minute)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        _run([[*command, "-o", str(Path(work) / f"{name}.o")] for name, command in commands.items()])
        objects = sorted(str(path) for path in Path(work).glob("*.o"))
        out = Path(work) / "out.so"
        # No OpenMP library is named: the symbols are those of the one that torch has loaded, so there is one pool.
        _run([[cxx, "-shared", *objects, "-o", str(out), f"-L{_torch() / 'lib'}", "-ltorch_cpu", "-lc10"]])
        os.replace(out, target)
    return target


def _compiler() -> str:
    cxx = compiler()
    if cxx is None:
        raise KernelsUnavailableError("no C++ compiler was found (g++, c++, clang++); install one, such as g++")
    return cxx


def _target(folder: Path, commands: dict[str, list[str]]) -> Path:
    return folder / _key(commands) / "libflexdecode.so"


def _torch() -> Path:
    return Path(torch.__file__).parent


def _commands(cxx: str) -> dict[str, list[str]]:
    """Object name -> command, without its output."""
    names = isas()
    commands = {
        f"{source}_{name}": [cxx, *_COMMON, f"-DFLEX_ISA={name}", *flags, "-c", str(SOURCES / f"{source}.cpp")]
        for name, flags in names.items()
        for source in ("isa", "linear_isa")
    }
    include = _torch() / "include"
    every = " ".join(f"X({name})" for name in names)
    commands["bindings"] = [
        cxx,
        *_COMMON,
        "-fopenmp",
        f"-DFLEX_ISAS(X)={every}",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        "-c",
        str(SOURCES / "bindings.cpp"),
    ]
    return commands


def _key(commands: dict[str, list[str]]) -> str:
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(f"{torch.__version__} {platform.machine()} {version} {commands}".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _run(commands: list[list[str]]) -> None:
    """Run all at once. Raises with the first lines of what the compiler said, without waiting for the rest."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    for process in running:
        output = process.communicate()[0]
        if process.returncode:
            for other in running:
                other.kill()
                other.wait()
            said = " | ".join(line for line in output.splitlines() if "error" in line)[:500] or output[:500]
            raise KernelsUnavailableError(f"compiling the CPU kernels failed: {said}")
