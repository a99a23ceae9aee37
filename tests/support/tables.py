"""Entries of tables by name, checked by mypy against the types that the tables promise.

``tests/test_code_rules.py`` finds a line of a table that is not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.engines.load_plan import BaseForm
    from shardwise.engines.nesting import FOUR_BITS
    from shardwise.formats import coded, grouped_integers, quantized
    from shardwise.formats.contract import CheckpointFormat
    from shardwise.formats.distributed import FORMAT as FOLDERS
    from shardwise.formats.opening import FormOf
    from shardwise.formats.safetensors_files import FORMAT as SAFETENSORS
    from shardwise.formats.torch_files import FORMAT as TORCH
    from shardwise.planning.coded import four_bits, grouped, scaled
    from shardwise.planning.stored_tensors import MakeNode

    _formats: tuple[CheckpointFormat, ...] = (SAFETENSORS, TORCH, FOLDERS)
    _quantized: tuple[FormOf, ...] = (
        quantized.parse_form,
        coded.bitsandbytes,
        grouped_integers.awq,
        grouped_integers.gptq,
    )
    _nodes: tuple[MakeNode, ...] = (scaled, four_bits, grouped)
    _base_forms: tuple[BaseForm, ...] = (FOUR_BITS,)
