"""``merge_adapter``: a LoRA folded into its base, in bounded memory."""

from __future__ import annotations

import os
from typing import Unpack

from shardwise.engines.merging_adapter import AdapterMergeCall, carry_out_adapter_merge
from shardwise.engines.outline import ModelOptions
from shardwise.engines.save_options import MAX_SHARD_SIZE
from shardwise.models.four_bits.quantization import FourBit
from shardwise.report.save_report import MergeAdapterReport
from shardwise.tensors.byte_sizes import in_bytes_of


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    adapter_name: str = "default",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    quantization: FourBit | str | None = None,
    **options: Unpack[ModelOptions],
) -> MergeAdapterReport:
    """Fold a LoRA adapter of PEFT into its base and write the outcome as the hub has it.

    Block by block: a box of the base is read, ``scaling * B @ A`` added in float32 to what of it the adapter
    changes, and the sum rounded once ([Note: One rounding]).

    Args:
        base: a folder, or a hub id in the cache.
        adapter: a folder of PEFT's with ``adapter_config.json``, or a hub id in the cache.
        out: a folder, made where it is not there. A model in it is replaced once all is written.
        adapter_name: of an adapter in a folder of its own inside ``adapter``, or in the names of its tensors.
        max_shard_size: as in ``"5GB"``: of one file's tensors.
        quantization: ``Nf4(...)`` or ``Fp4(...)``, or ``"nf4"``, ``"fp4"``: linear layers come out in four bits, in
            files of bitsandbytes, as if the outcome were brought up so and saved. None writes numbers, also of a
            base in four bits.

    Keyword arguments: see :class:`~shardwise.engines.outline.ModelOptions`; the outcome has their ``dtype``.

    Collective: no.
    Memory: about half a GiB beyond what importing torch and transformers takes, however large the model is.

    Raises:
        ConfigError: an argument cannot be honoured, or an adapter of this kind cannot be merged.
        CoverageError: adapter and base do not fit, naming each tensor; or merging would change nothing.
        FormatError, StorageError: a file contradicts its format, or cannot be read or written.

    Where it raises, a model that was in ``out`` before is there still.
    """
    max_shard_bytes = in_bytes_of(max_shard_size)
    return carry_out_adapter_merge(
        AdapterMergeCall.of(base, adapter, out, adapter_name, max_shard_bytes, options, quantization)
    )
