"""``save``: a model into the hub's layout, each rank writing only its own bytes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from shardwise.engines.arguments import hints_of, require_meant
from shardwise.engines.save_options import HubNames, SaveOptions, Trust, Verification, WrittenNames
from shardwise.engines.save_plan import SaveRequest
from shardwise.engines.saving import carry_out_save
from shardwise.models.view import without_compile
from shardwise.planning.loads.load_plan import OnDiffering, TakeFirst
from shardwise.report.save_report import SaveReport


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "50GB",
    names: WrittenNames = HubNames(),  # noqa: B008
    verify: Verification = Trust(),  # noqa: B008
    on_differing_buffers: OnDiffering = TakeFirst(),  # noqa: B008 - frozen
    options: SaveOptions = SaveOptions(),  # noqa: B008
) -> SaveReport:
    """Save a model as safetensors files that ``from_pretrained`` of transformers loads, with its config.

    Every rank works out the same headers, and writes its own shards to their places in the files: nothing is
    gathered. What is in the directory counts until the save is committed by one step, and is whole until then;
    afterwards its files are removed. See docs/save.md.

    Collective: yes, over ``options.process_group``.
    Memory: ``options.budget_bytes``, and that only for what is cast, strided, or on an accelerator.

    Args:
        model: any module, sharded or not, of transformers or not, brought up by shardwise or not.
        directory: a folder that all ranks see, which need not be there yet.
        tokenizer: a tokenizer or processor whose files are saved beside the weights.
        dtype: floating-point tensors of 16 bits and more are cast to it; None saves them as they are.
        max_shard_size: of one file's tensors, in bytes or as "5GB"; a larger tensor has a file of its own.
        names: as on the hub, or the model's own.
        verify: ``CompareWithMemory()`` reads tensors and headers back before the save counts.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are the first rank's, ``TakeFirst()``, or an error, ``Refuse()``.
        options: memory budget, progress, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        CoverageError: tensors that would have to be computed from whole ones.
        DisagreementError: ranks hold different models, or were called with different arguments; parameters that
            several ranks hold have different values there.
        FormatError: something that no safetensors file can hold.
        PlacementError: the model has tensors on meta, or the ranks do not hold all of one.
        StorageError: the directory cannot be written to, another save is writing to it, or bytes were lost.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. Until the save is committed, an error leaves the older save as it was.
    """
    model = without_compile(model)

    def request(token: str) -> SaveRequest:
        given = {"model": model, "names": names, "verify": verify, "options": options}
        require_meant(hints_of(save), given)
        return SaveRequest.of(
            model, directory, token, names=names, dtype=dtype, max_shard_size=max_shard_size, tokenizer=tokenizer
        )

    return carry_out_save(request, verify, on_differing_buffers, options, "save")
