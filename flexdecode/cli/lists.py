"""Lists in an option: whole numbers and shapes of matrices, separated by commas."""

from __future__ import annotations

import re


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers from 1 on. Raises ValueError, naming the option, for anything else."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} {text!r} is not a list of whole numbers such as 1024,4096") from None
    if min(found) < 1:
        raise ValueError(f"--{name} {text!r} holds a number below 1")
    return found


def shapes_of(text: str) -> list[tuple[int, int]]:
    """(outputs, inputs) of matrices. Raises ValueError for anything else."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part.strip()) for part in text.split(",")]
    if None in found:
        raise ValueError(f"--shapes {text!r} is not a list of outputs x inputs such as 4096x4096,14336x4096")
    return [(int(shape[1]), int(shape[2])) for shape in found if shape is not None]
