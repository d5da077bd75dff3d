"""Two ways into a file: a JSON object, and a run of bytes mapped into memory.

Knows no checkpoint layout. Every failure is a ValueError of one line that names the file.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

assert sys.byteorder == "little", "checkpoints hold little-endian numbers, which are mapped as they are"


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in `path`. Raises ValueError when it cannot be read or is not an object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); download it again or correct it") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a JSON {type(value).__name__} where an object is needed; download it again")
    return value


def map_bytes(path: Path, offset: int, nbytes: int) -> Tensor:
    """Bytes [offset, offset + nbytes) of a file as uint8 [nbytes], mapped and not copied.

    Pages are read on first touch and leave the process with the tensor: each call has a mapping of its own, so a
    tensor that is converted and dropped keeps nothing resident. The mapping is private: writing to the tensor is safe
    and never reaches the file.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    skip = offset % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), nbytes + skip, access=mmap.ACCESS_COPY, offset=offset - skip)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: bytes {offset} to {offset + nbytes} cannot be mapped ({error})") from None
    if hasattr(mmap, "MADV_WILLNEED"):
        view.madvise(mmap.MADV_WILLNEED)  # a cold file is then read ahead instead of page by page
    return torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=skip)


def as_dtype(bytes_B: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The same bytes as a tensor; copied only where they do not lie on a multiple of the element size."""
    if bytes_B.data_ptr() % dtype.itemsize:
        bytes_B = bytes_B.clone()
    return bytes_B.view(dtype).view(shape)
