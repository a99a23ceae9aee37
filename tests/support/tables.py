"""Entries of tables by name, checked by mypy against the types that the tables promise.

``tests/test_code_rules.py`` finds a line of a table that is not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.files import coded, quantized
    from shardwise.files.checkpoint_index import CheckpointFormat
    from shardwise.files.dequantize_expressions import dequantize_four_bits, dequantize_scaled
    from shardwise.files.distributed import FORMAT as FOLDERS
    from shardwise.files.open_checkpoint import FormOf
    from shardwise.files.safetensors_files import FORMAT as SAFETENSORS
    from shardwise.files.stored_tensors import MakeNode
    from shardwise.files.torch_files import FORMAT as TORCH

    _formats: tuple[CheckpointFormat, ...] = (SAFETENSORS, TORCH, FOLDERS)
    _quantized: tuple[FormOf, ...] = (
        quantized.parse_form,
        coded.bitsandbytes,
    )
    _nodes: tuple[MakeNode, ...] = (dequantize_scaled, dequantize_four_bits)
