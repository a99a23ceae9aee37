"""What is stored: what files say of their tensors, and the checkpoints that they make up. Without torch."""

from shardwise.formats.checkpoint_index import (
    CheckpointIndex,
    StoredTensor,
    holds_optimizer,
    open_checkpoint,
    open_state,
)
from shardwise.formats.safetensors import FileHeader, TensorEntry, parse_header, read_header
from shardwise.formats.safetensors_header import NewFile, lay_out

__all__ = [
    "CheckpointIndex",
    "FileHeader",
    "NewFile",
    "StoredTensor",
    "TensorEntry",
    "holds_optimizer",
    "lay_out",
    "open_checkpoint",
    "open_state",
    "parse_header",
    "read_header",
]
