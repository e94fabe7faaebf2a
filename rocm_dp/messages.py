"""How several tensors of mixed dtypes and widths travel as one: a byte row for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.errors import TensorError
from rocm_dp.transports.collectives import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_ALIGN = 16  # bytes: every field starts where a 16-byte access may


class MessageLayout:
    """Where each field ``(width, dtype)`` lies in a byte row of ``row_bytes``; ``name`` tells layouts apart.

    >>> MessageLayout([(3, torch.bfloat16), (2, torch.int64)]).row_bytes
    32
    """

    def __init__(self, fields: Sequence[tuple[int, torch.dtype]]) -> None:
        if not fields:
            raise TensorError("gather_many needs at least one tensor, got none")
        self.fields = tuple(fields)
        self._spans: list[slice] = []
        offset = 0
        for width, dtype in self.fields:
            nbytes = width * dtype.itemsize
            if nbytes < 1:
                raise TensorError(f"every tensor of gather_many needs a width of at least 1, got {width}")
            self._spans.append(slice(offset, offset + nbytes))
            offset += _rounded(nbytes)
        self.row_bytes = offset
        self.name = "+".join(f"{width}x{str(dtype).removeprefix('torch.')}" for width, dtype in self.fields)

    @property
    def verb(self) -> str:
        """What the slots of these messages are called."""
        return f"gather_many({self.name})"

    def nbytes(self, local_rows: int, rows: int) -> int:
        """Return the room that a message of ``local_rows`` to ``rows`` takes, unpacked tensors included."""
        outs = sum(_rounded(rows * width * dtype.itemsize) for width, dtype in self.fields)
        return (local_rows + rows) * self.row_bytes + outs

    def carve(
        self, buffer: torch.Tensor, local_rows: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Cut ``buffer`` into the packed rows, the message as it arrives (both uint8), and a tensor a field."""
        at = (local_rows + rows) * self.row_bytes
        message = buffer[:at].view(local_rows + rows, self.row_bytes)
        packed, arrived = message[:local_rows], message[local_rows:]
        outs = []
        for width, dtype in self.fields:
            size = rows * width * dtype.itemsize
            outs.append(buffer[at : at + size].view(dtype).view(rows, width))
            at += _rounded(size)
        return packed, arrived, outs

    def pack(self, packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy ``tensors`` [L, width] into ``packed`` uint8 [L, row_bytes]."""
        for span, tensor in zip(self._spans, tensors, strict=True):
            packed[:, span].copy_(as_bytes(tensor))

    def unpack(self, tensors: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
        """Copy ``packed`` uint8 [G, row_bytes] into ``tensors`` [G, width]."""
        for span, tensor in zip(self._spans, tensors, strict=True):
            as_bytes(tensor).copy_(packed[:, span])


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
