"""Which box, which bytes: the arithmetic of N-d index sets, without torch."""

from shardwise.tensors.box import Box
from shardwise.tensors.byte_range import ByteRange, coalesce
from shardwise.tensors.codes import Code, Form4
from shardwise.tensors.dtypes import DType
from shardwise.tensors.row_blocks import row_blocks
from shardwise.tensors.strided import Strided, contiguous_strides, numel

__all__ = [
    "Box",
    "ByteRange",
    "Code",
    "DType",
    "Form4",
    "Strided",
    "coalesce",
    "contiguous_strides",
    "numel",
    "row_blocks",
]
