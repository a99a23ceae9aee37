"""``save_adapter``: one adapter of a PEFT model into PEFT's layout, each rank writing only its own bytes."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from shardwise.engines.save_options import PeftNames, SaveOptions, Trust, Verification
from shardwise.engines.save_plan import SaveRequest
from shardwise.engines.saving import carry_out_save
from shardwise.models.view import without_compile
from shardwise.planning.loads.load_plan import OnDiffering, TakeFirst
from shardwise.report.save_report import SaveReport


def save_adapter(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    adapter: str = "default",
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    verify: Verification = Trust(),  # noqa: B008
    on_differing_buffers: OnDiffering = TakeFirst(),  # noqa: B008 - frozen
    options: SaveOptions = SaveOptions(),  # noqa: B008
) -> SaveReport:
    """Save one adapter of a PEFT model as ``PeftModel.from_pretrained`` loads it: its tensors and its config.

    Written as :func:`save` writes: every rank its own bytes, compared with memory where that is asked for,
    committed by one step. The base is not saved. What belongs to an adapter is PEFT's decision.

    Collective: yes, over ``options.process_group``.
    Memory: ``options.budget_bytes``, and that only for what is cast, strided, or on an accelerator.

    Args:
        model: PEFT's model, sharded or not, brought up by shardwise or not.
        directory: a folder that all ranks see, which need not be there yet.
        adapter: its name in the model; the folder does not have it.
        tokenizer: saved with it, if given.
        dtype: floating-point tensors are cast to it; None saves them as they are.
        verify: ``CompareWithMemory()`` reads tensors and headers back before the save counts.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are the first rank's, ``TakeFirst()``, or an error, ``Refuse()``.
        options: memory budget, progress, process group, patience.

    Raises:
        ConfigError: the model has no such adapter, or the directory cannot hold one.
        DisagreementError, FormatError, PlacementError, StorageError, RankLostError: as for :func:`save`.

    Every error is the same on every rank. Until the save is committed, an error leaves the older adapter as it was.
    """
    model = without_compile(model)

    def request(token: str) -> SaveRequest:
        names = PeftNames(adapter)
        return SaveRequest.of(
            model,
            directory,
            token,
            names=names,
            dtype=dtype,
            max_shard_size=sys.maxsize,
            tokenizer=tokenizer,
        )

    return carry_out_save(request, verify, on_differing_buffers, options, "save_adapter")
