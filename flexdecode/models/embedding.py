"""The embedding and the head: rows of a matrix, and products with one. Where a model ties them, it is held once.

Shape letters: T tokens, D hidden_size, V vocab_size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdecode.kernels import ops
from flexdecode.models.linear import DenseLinear, Int4Linear, Int8Linear, Linear, linear
from flexdecode.quantization.weights import Weight


class Embedding(nn.Module):
    """Rows of a matrix [V, D], dense or quantized; or of a head that is held as the kernels read it."""

    def __init__(self, weight: Weight | Int4Linear | Int8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    @property
    def row_bytes(self) -> int:
        """Bytes that one token's row takes."""
        return self.weight.nbytes // int(self.weight.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes held here; a head's are the head's."""
        return 0 if isinstance(self.weight, Linear) else self.weight.nbytes

    def forward(self, tokens_T: Tensor) -> Tensor:
        """[T, D] in `dtype`."""
        if isinstance(self.weight, Linear):
            return ops.unpack_rows(self.weight.operand, tokens_T, self.dtype)
        if isinstance(self.weight, Tensor):
            return F.embedding(tokens_T, self.weight)
        return self.weight.rows(tokens_T).dequantize(self.dtype)


def embedding_and_head(
    embed: Weight, head: Weight | None, dtype: torch.dtype, device: torch.device, alike: bool = False
) -> tuple[Embedding, Linear]:
    """`head` None: the embedding's matrix is the head's, too. `alike` as in `linear`."""
    layer = linear([embed if head is None else head], None, dtype, device, copy=False, alike=alike)
    if head is None:
        if isinstance(layer, Int4Linear | Int8Linear) and ops.unpackable(layer.operand):
            return Embedding(layer, dtype), layer
        if isinstance(layer, DenseLinear):
            return Embedding(layer.weight_NK, dtype), layer
    return Embedding(embed, dtype), layer
