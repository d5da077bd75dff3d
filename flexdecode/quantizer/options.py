"""What a user may ask of the quantizer, checked before anything is read. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from flexdecode.config import QuantConfig

Method = Literal["awq", "rtn", "int8"]
Format = Literal["awq-gemm", "compressed-tensors"]
OddWidths = Literal["refuse", "leave", "smaller"]
Dtype = Literal["float32", "bfloat16", "float16"]
NextInputs = Literal["float", "quantized"]
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Options:
    """How to quantize.

    method: `awq` searches scales and clipping on calibration text (Lin et al., 2023), `rtn` rounds to nearest, `int8`
    rounds to int8 with a scale a row. group_size: inputs that share a scale, 32, 64, 128 or -1 for a whole row. format:
    `auto` is awq-gemm for int4 and compressed-tensors for int8. skip: modules to leave in float, each a name, the first
    or last parts of one (`model.layers.1`, `k_proj`), or `re:` and a pattern for the whole of it. odd_widths: what
    becomes of a matrix that the group or the format does not fit: an error, left in float, or (compressed-tensors) the
    largest of 32, 64 and 128 below the group that divides its width. clip: whether awq searches the clipping too.
    next_inputs: whether a layer is calibrated on what the float layers before it put out, or the quantized ones.
    samples, length: most calibration pieces, and tokens in one. seed: which pieces, where there are more. dtype: in
    which the calibration text runs through the layers; all else is in fp32.
    """

    method: Method = "awq"
    group_size: int = 128
    format: str = "auto"
    symmetric: bool = False
    skip: tuple[str, ...] = ()
    odd_widths: OddWidths = "refuse"
    clip: bool = True
    next_inputs: NextInputs = "float"
    samples: int = 128
    length: int = 512
    seed: int = 0
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        for name, kind in (
            ("method", Method),
            ("odd_widths", OddWidths),
            ("next_inputs", NextInputs),
            ("dtype", Dtype),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{_flag(name)} {getattr(self, name)!r} is not known: {', '.join(get_args(kind))}")
        if self.format not in ("auto", *get_args(Format)):
            raise ValueError(f"--format {self.format!r} is not known: auto, {', '.join(get_args(Format))}")
        if self.group_size != -1 and self.group_size not in GROUPS:
            raise ValueError(f"--group-size {self.group_size} is not one of 32, 64, 128, or -1 for one scale a row")
        if self.method == "int8" and self.format == "awq-gemm":
            raise ValueError("--method int8 cannot be saved as awq-gemm, which holds int4; use compressed-tensors")
        if self.method == "int8" and self.symmetric:
            raise ValueError("--symmetric goes with int4: int8 has no zero points anyway; leave it out")
        if self.odd_widths == "smaller" and self.layout == "gemm":
            raise ValueError(
                "--odd-widths smaller needs --format compressed-tensors: an awq-gemm file has one group size for all"
            )
        for name in ("samples", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        for text in self.skip:
            pattern(text)

    @property
    def layout(self) -> Literal["gemm", "pack-quantized", "int-quantized"]:
        """The layout on disk."""
        if self.method == "int8":
            return "int-quantized"
        return "pack-quantized" if self.format == "compressed-tensors" else "gemm"

    @property
    def bits(self) -> int:
        return 8 if self.method == "int8" else 4

    def quant_config(self, group_size: int | None = None) -> QuantConfig:
        """As the readers describe a file."""
        method: Literal["awq", "compressed-tensors"] = "awq" if self.layout == "gemm" else "compressed-tensors"
        size = self.group_size if group_size is None else group_size
        return QuantConfig(method, self.layout, self.bits, size, self.bits == 4 and not self.symmetric)

    def as_dict(self) -> Mapping[str, Any]:
        """What was asked for, in plain values; without what the method does not use."""
        told = asdict(self) | {"skip": list(self.skip), "format": self.quant_config().method, "layout": self.layout}
        if self.method != "awq":
            for name in ("clip", "next_inputs", "samples", "length", "seed", "dtype"):
                del told[name]
        if self.method == "int8":
            for name in ("group_size", "symmetric"):
                del told[name]
        return told


def pattern(text: str) -> re.Pattern[str]:
    """Matches the module names that an entry of `skip` means: its whole name, or whole parts of it from the start or
    the end; after `re:` a regular expression for the whole name. Raises ValueError for one that is none."""
    if not text.startswith("re:"):
        name = re.escape(text.strip("."))
        return re.compile(rf"(?:.*\.)?{name}|{name}\..*")
    try:
        return re.compile(text.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"--skip {text!r} is not a regular expression ({error})") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
