"""Which box, which bytes: the arithmetic of N-d index sets, without torch."""

from shardwise.tensors.boxes import Box, ByteRange, Strided, coalesce, contiguous_strides, numel, row_blocks
from shardwise.tensors.dtypes import Code, DType, Form4, FourBitForm

__all__ = [
    "Box",
    "ByteRange",
    "Code",
    "DType",
    "Form4",
    "FourBitForm",
    "Strided",
    "coalesce",
    "contiguous_strides",
    "numel",
    "row_blocks",
]
