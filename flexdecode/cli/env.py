"""`flexdecode env`: what is installed and what this machine can do, for a report of a fault or of a speed."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from flexdecode import __version__
from flexdecode.cli import machine
from flexdecode.cli.options import Json
from flexdecode.cli.output import print_report, write_json
from flexdecode.cli.verb import verb

NAME = "env"
HELP = "Show versions, processor, memory, devices and compiler."

# Variables of others that change what flexdecode does.
VARIABLES = ("HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@verb
def command(json: Json = False) -> None:
    report = gather()
    if json:
        write_json(report)
    else:
        print_report(report, f"flexdecode {__version__}")


def gather() -> dict[str, Any]:
    """The whole report as plain data."""
    devices = machine.cuda_devices()
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    ours = sorted(name for name in os.environ if name.startswith("FLEXDECODE_"))
    # The report is meant to be pasted in public.
    variables |= {name: "(set, not shown)" if name.endswith(("_KEY", "_TOKEN")) else os.environ[name] for name in ours}
    return {
        "flexdecode": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cuda": f"{len(devices)} device{'' if len(devices) == 1 else 's'}" if devices else "no device",
        "versions": machine.versions(),
        "cpu": machine.cpu(),
        "memory": machine.memory(),
        "torch": machine.torch_state(),
        "compiler": machine.compiler(),
        "kernels": machine.kernels(),
        "cuda_devices": devices,
        "demo_model": machine.demo_model(),
        "variables": variables,
    }
