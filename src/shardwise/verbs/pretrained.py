"""``from_pretrained``: a transformers model built on meta, wrapped, and loaded."""

from __future__ import annotations

import os
from typing import Literal, Unpack, overload

from transformers import PreTrainedModel

from shardwise.engines.arguments import agree_on_call, world_of
from shardwise.engines.bringing_up import bring_up, settle_call
from shardwise.engines.load_options import LoadOptions
from shardwise.engines.pretrained_options import PretrainedOptions
from shardwise.execution.ranks.progress import Clock
from shardwise.report.load_report import LoadReport


@overload
def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    output_loading_info: Literal[False] = False,
    **keywords: Unpack[PretrainedOptions],
) -> PreTrainedModel: ...


@overload
def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    output_loading_info: Literal[True],
    **keywords: Unpack[PretrainedOptions],
) -> tuple[PreTrainedModel, LoadReport]: ...


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    output_loading_info: bool = False,
    **keywords: Unpack[PretrainedOptions],
) -> PreTrainedModel | tuple[PreTrainedModel, LoadReport]:
    """A transformers model from a local directory, a hub id or a URL, sharded by FSDP2 and loaded.

    Every rank builds the model on meta, ties what the checkpoint says is tied, wraps blocks with ``fully_shard``
    over the mesh (all ranks of the default process group when none is given; no sharding when there is no process
    group), and reads its own bytes. Returns the model in evaluation mode, as transformers does, or the model and
    the :class:`~shardwise.report.LoadReport` with ``output_loading_info=True``.

    Keyword arguments: see :class:`PretrainedOptions`, :class:`~shardwise.engines.tuning_arguments.TunedOptions` and
    :class:`~shardwise.engines.outline.ModelOptions`.

    Collective: yes, over ``options.process_group`` (default: all ranks), whose ranks are those of the mesh.
    Memory: this rank's shards and ``options.budget_bytes``.

    Raises:
        TypeError: a keyword that is not known.
        ConfigError: the config or an argument cannot be honoured.
        PlacementError: the wrap policy matches nothing, or the model cannot be sharded on the mesh.
        CoverageError, FormatError, StorageError, DisagreementError: as for :func:`~shardwise.verbs.load.load`.
    """
    clock = Clock()
    with world_of(keywords.get("options", LoadOptions()), "from_pretrained") as world:
        keywords = agree_on_call(
            world, lambda: settle_call(name_or_path, keywords, asks_for_report=output_loading_info)
        )
        model, report = bring_up(world, name_or_path, keywords, clock)
    return (model, report) if output_loading_info and report is not None else model
