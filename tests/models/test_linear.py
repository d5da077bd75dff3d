"""Linear layers over every kind of weight and every mixture, and what memory they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexdecode.checkpoints.safetensors import SafetensorsSource
from flexdecode.kernels import ops
from flexdecode.models.linear import DenseLinear, Linear, StackedLinear, linear
from flexdecode.quantization.weights import Fp4Weight, Int4Weight, Int8Weight, Weight

CPU = torch.device("cpu")
K = 64
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def make(kind: str, n: int, seed: int = 0) -> Weight:
    g = torch.Generator().manual_seed(seed)
    if kind.startswith("int4"):
        group = int(kind.removeprefix("int4 g"))
        codes = torch.randint(0, 16, (n, K), generator=g)
        scales = torch.rand(n, K // group, generator=g) / 8 + 0.01
        return Int4Weight.from_codes(codes, scales, torch.rand(n, K // group, generator=g) * 15)
    if kind == "int8":
        return Int8Weight(
            torch.randint(-128, 128, (n, K), generator=g, dtype=torch.int8), torch.rand(n, generator=g) / 50
        )
    if kind == "fp4":
        codes = torch.randint(0, 256, (n, K // 2), generator=g, dtype=torch.uint8)
        return Fp4Weight(codes, torch.randint(122, 127, (n, K // 32), generator=g, dtype=torch.uint8))
    return torch.randn(n, K, generator=g).to(getattr(torch, kind)) / 4


KINDS = ["float32", "bfloat16", "float16", "int4 g32", "int4 g64", "int4 g16", "int8", "fp4"]


def dense(weight: Weight) -> Tensor:
    return (weight if isinstance(weight, Tensor) else weight.dequantize()).double()


def check(layer: Linear, parts: list[Weight], bias: Tensor | None, dtype: torch.dtype) -> None:
    weight = torch.cat([dense(p) for p in parts])
    assert layer.shape == tuple(weight.shape)
    for rows in (1, 5, 40):
        x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)
        got, wanted = layer(x), x.double() @ weight.T
        assert got.dtype == dtype
        assert got.shape == wanted.shape
        # Weights (int4's scale and offset of up to 16 steps), result and sum with the bias rounded to the dtype.
        steps = torch.cat([_step(p).expand(-1, K) for p in parts])
        limit = (x.double().abs() @ (weight.abs() + 24 * steps).T) * (2 * ROUNDOFF[dtype] + K * 2.0**-24)
        if bias is not None:
            wanted = wanted + bias.double()
            limit = limit + (bias.double().abs() + wanted.abs()) * ROUNDOFF[dtype]
        assert bool(((got.double() - wanted).abs() <= 1.05 * (limit + wanted.abs() * 2 * ROUNDOFF[dtype])).all())


def _step(weight: Weight) -> Tensor:
    if isinstance(weight, Int4Weight):
        return weight.scales_NG.double().repeat_interleave(weight.group_size, dim=1)
    return torch.zeros(weight.shape[0], 1, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_kind(kind: str, dtype: torch.dtype, with_bias: bool) -> None:
    weight = make(kind, 24)
    bias = torch.randn(24, generator=torch.Generator().manual_seed(9)) if with_bias else None
    check(linear([weight], bias, dtype, CPU), [weight], bias, dtype)


@pytest.mark.parametrize(
    ("kinds", "parts"),
    [
        (["bfloat16"] * 3, 1),
        (["int4 g32"] * 3, 1),
        (["int8"] * 2, 1),
        (["fp4"] * 2, 1),
        (["bfloat16", "float32", "float16"], 1),
        (["int4 g32", "int4 g64", "int4 g64"], 2),
        (["int4 g32", "bfloat16", "bfloat16"], 2),
        (["int4 g32", "bfloat16", "int4 g32"], 3),
        (["int8", "int4 g16", "fp4", "float32"], 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_parts_of_any_kinds(kinds: list[str], parts: int, dtype: torch.dtype, with_bias: bool) -> None:
    """q, k and v of a file that quantizes some of them: neighbours of one kind are one product, order stays."""
    weights = [make(kind, 8 + 8 * i, seed=i) for i, kind in enumerate(kinds)]
    rows = sum(w.shape[0] for w in weights)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(9)) if with_bias else None
    layer = linear(weights, bias, dtype, CPU)
    assert (len(layer.parts) if isinstance(layer, StackedLinear) else 1) == parts
    check(layer, weights, bias, dtype)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_dense_parts_of_different_types_lose_nothing(order: list[int]) -> None:
    """A bf16 q beside an fp32 k, read in fp32: put into the first one's type, k would be rounded. And bf16 holds what
    fp16 does not."""
    q, k = torch.tensor([[1.0]], dtype=torch.bfloat16), torch.tensor([[1 + 2.0**-20]])
    layer = linear([[q, k][i] for i in order], None, torch.float32, CPU)
    assert layer(torch.ones(1, 1)).flatten().tolist() == [[1.0, 1 + 2.0**-20][i] for i in order]
    small, large = torch.tensor([[1.0]], dtype=torch.float16), torch.tensor([[2.0**20]], dtype=torch.bfloat16)
    layer = linear([[small, large][i] for i in order], None, torch.bfloat16, CPU)
    assert layer(torch.ones(1, 1, dtype=torch.bfloat16)).flatten().tolist() == [[1.0, 2.0**20][i] for i in order]


@pytest.mark.parametrize(
    ("kinds", "dtype", "told"),
    [
        (["bfloat16"], torch.float32, "float32"),
        (["float32"], torch.bfloat16, "bfloat16"),
        (["int4 g32"], torch.bfloat16, "int4 g32 (cpu)"),
        (["int4 g32"], torch.float32, "int4 g32 (cpu)"),
        (["int4 g16"], torch.bfloat16, "int4 g16 (cpu)"),
        (["int8"], torch.bfloat16, "int8 (cpu)"),
        (["int8"], torch.float16, "int8 (cpu)"),
        (["fp4"], torch.bfloat16, "mxfp4 (dequantize)"),
        (["int4 g32", "bfloat16", "int4 g32"], torch.bfloat16, "int4 g32 (cpu) + bfloat16"),
    ],
    ids=str,
)
def test_a_layer_tells_its_kind(kinds: list[str], dtype: torch.dtype, told: str) -> None:
    assert linear([make(kind, 8) for kind in kinds], None, dtype, CPU).kind == told


# memory


def tensors(value: object, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that a layer holds, in modules and in dataclasses."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        inner = [v for name, v in vars(value).items() if not name.startswith("_")]
        return [t for v in [*inner, *value.children()] for t in tensors(v, seen)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors(v, seen)]
    return [t for v in vars(value).values() for t in tensors(v, seen)] if hasattr(value, "__dataclass_fields__") else []


COPIED = [[k] for k in KINDS if k != "fp4"] + [["bfloat16"] * 3, ["fp4"] * 2, ["int4 g32", "float32", "int8"]]


@pytest.mark.parametrize("kinds", COPIED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_nbytes_is_what_is_held_and_no_more(kinds: list[str], dtype: torch.dtype, with_bias: bool) -> None:
    """Also where a weight is a slice of something larger (one expert of many): the whole is not kept."""
    weights = [make(kind, 256, seed=i) for i, kind in enumerate(kinds)]
    parts: list[Weight] = [w[:128] if isinstance(w, Tensor) else w.rows(slice(0, 128)) for w in weights]
    bias = torch.zeros(1000)[: 128 * len(kinds)] if with_bias else None
    layer = linear(parts, bias, dtype, CPU)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(layer)}
    assert layer.nbytes == sum(held.values())
    given = [*weights, *([] if bias is None else [bias])]
    sources = {t.untyped_storage().data_ptr() for w in given for t in tensors(w)}
    assert not sources & set(held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_read_from_a_file_stays_mapped(dtype: torch.dtype, tmp_path: Path) -> None:
    """A mapped page can be taken away by the system and read again from the disk in the middle of a step."""
    (tmp_path / "config.json").write_text("{}")
    codes = torch.randint(-128, 128, (128, K), dtype=torch.int8)
    stored = {"w": torch.randn(128, K).to(dtype), "b": torch.randn(128).to(dtype), "codes": codes}
    save_file(stored, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    w, b, c = (source.read(name) for name in ("w", "b", "codes"))
    scales = torch.ones(128)
    for layer in (linear([w], b, dtype, CPU), linear([Int8Weight(c, scales)], b, dtype, CPU)):
        for tensor in tensors(layer):
            pointer, nbytes = tensor.data_ptr(), tensor.nbytes
            for mapped in (w, b, c):
                assert pointer + nbytes <= mapped.data_ptr() or mapped.data_ptr() + mapped.nbytes <= pointer


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_held(to: torch.dtype, transposed: bool) -> None:
    whole = torch.randn(64, 64)
    view = whole[:32].T if transposed else whole[:32]
    got = ops.held(view, to, CPU)
    assert torch.equal(got, view.to(to))
    assert got.is_contiguous()
    assert got.untyped_storage().nbytes() == 32 * 64 * to.itemsize
    assert got.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down which of torch's operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_holding_makes_one_copy(dtype: torch.dtype, transposed: bool) -> None:
    """Where the type changes, that is the copy: a second one would hold a weight three times at load."""
    weight = torch.empty(8, 16, dtype=torch.bfloat16)
    weight = weight.T if transposed else weight
    with Operators() as operators:
        ops.held(weight, dtype, CPU)
    assert operators.names == ["flexdecode.held.default"]


def test_merging_makes_one_copy() -> None:
    parts: list[Weight] = [torch.empty(8, 16), torch.empty(4, 16), torch.empty(4, 16)]
    with Operators() as operators:
        linear(parts, None, torch.float32, CPU)
    assert operators.names == ["flexdecode.held.default"]


def test_fp4_is_held_as_it_comes() -> None:
    """Its reader cuts each expert out of the whole already."""
    weight = make("fp4", 32)
    held = {t.data_ptr() for t in tensors(linear([weight], None, torch.bfloat16, CPU))}
    assert held == {t.data_ptr() for t in tensors(weight)}


def test_a_tied_head_is_not_copied() -> None:
    embedding = torch.randn(32, K)
    layer = linear([embedding], None, torch.float32, CPU, copy=False)
    assert isinstance(layer, DenseLinear)
    assert layer.weight_NK is embedding
