"""``from_pretrained``: a transformers model built on meta, wrapped, and loaded."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Literal, Unpack, cast, overload

from transformers import PreTrainedModel

from shardwise.engines.asked import agree_on_call, world_of
from shardwise.engines.bringing_up import build_together, decide_ties, find, request_of, settle_call
from shardwise.engines.clock import Clock
from shardwise.engines.load_options import LoadOptions
from shardwise.engines.load_plan import LoadRequest
from shardwise.engines.loading import carry_out
from shardwise.engines.pretrained_options import FromFiles, Later, PretrainedOptions
from shardwise.engines.tuned import alike, made_ready
from shardwise.execution.ranks.agreement import require_same_settings
from shardwise.models import transformers_compat as compat
from shardwise.models import wrap
from shardwise.models.replicated import average_replicated_gradients
from shardwise.models.wrap import Sharding
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

    Keyword arguments: see :class:`PretrainedOptions`, :class:`~shardwise.engines.tuned.TunedOptions` and
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
    with world_of(keywords.get("options", LoadOptions()), "from_pretrained") as world, ExitStack() as stack:
        keywords = agree_on_call(
            world, lambda: settle_call(name_or_path, keywords, asks_for_report=output_loading_info)
        )
        options = keywords.get("options", LoadOptions())
        wished = keywords.get("sharding", Sharding())
        sharding = world.together(lambda: wrap.with_mesh(wished, options.process_group))
        with clock.phase("index"):
            found = find(world, name_or_path, keywords, stack)
        with clock.phase("plan"):
            world.require_equal(world.together(lambda: alike(keywords, found.adapters)), "what is tuned, and how,")
            built, pairs = build_together(world, found, keywords)
            untied, already_read_bytes = decide_ties(world, built, pairs, found.source, options)
            casts_to = None if sharding.mesh is None else sharding.mp_policy.param_dtype
            tuned = world.together(
                lambda: made_ready(built, untied, keywords, adapters=found.adapters, casts_to=casts_to)
            )

        def ask() -> LoadRequest:
            wrap.prepare_blocks(tuned.base, sharding)
            if sharding.mesh is not None:
                wrap.wrap(tuned.base, sharding, tuned.whole)
            return request_of(tuned, keywords, already_read_bytes)

        report = None
        if isinstance(keywords.get("weights", FromFiles()), Later):
            world.together(ask)
            require_same_settings(world, compat.settings_of(tuned.base))
        else:
            report = carry_out(world, tuned.model, found.source, ask, clock)
    compat.record_conversions(tuned.base, built.transforms)
    if report is not None and sharding.mesh is not None:
        average_replicated_gradients(tuned.model, sharding.mesh)
    model = cast(PreTrainedModel, tuned.model)  # PEFT's passes on what it is asked
    return (model, report) if output_loading_info and report is not None else model
