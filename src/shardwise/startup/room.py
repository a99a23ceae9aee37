"""Whether an arm fits into the memory there is, before it is tried: who tries anyway may have others killed."""

from __future__ import annotations

from shardwise.execution.memory.free import host_pools
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.report.names import in_bytes
from shardwise.startup.kinds import KINDS

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, of the dtypes that a model can be asked for in."""


def no_room(arm: str, index: CheckpointIndex, ranks: int, dtype: str) -> str:
    """Why an arm would not fit on this machine; "" where it does.

    Values that are wanted as they are stored stay in mapped files, which take no memory from anybody.
    """
    tensors = index.tensors()
    stored_bytes = sum(tensor.nbytes for tensor in tensors)
    wanted_bytes = sum(tensor.nbytes // max(tensor.dtype.itemsize, 1) for tensor in tensors) * SIZES.get(dtype, 0)
    if wanted_bytes in (0, stored_bytes):
        return ""
    needs = KINDS[arm].holder.at_once_bytes(wanted_bytes, ranks)
    room = min(host_pools().values(), default=needs)
    if needs <= room:
        return ""
    return (
        f"{KINDS[arm].holder.value} holds the whole model: {in_bytes(needs)} in all, and {in_bytes(room)} are free"
    )
