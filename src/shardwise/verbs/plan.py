"""``plan``: what a load will take on every rank, before a tensor is read and without any ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Unpack

import torch

from shardwise.engines.asked import hints_of, require_known, require_meant
from shardwise.engines.bringing_up import small_files
from shardwise.engines.foreseeing import PlanOptions, forecast, mesh_of
from shardwise.engines.opening import at_one_commit
from shardwise.engines.outline import config_of, settled
from shardwise.execution.ranks.world import World
from shardwise.formats.checkpoint_index import open_checkpoint
from shardwise.report.forecast import Forecast
from shardwise.storage.hub import HubOptions, resolve
from shardwise.storage.hub_files import ModelFiles
from shardwise.storage.reading.opening import open_storage
from shardwise.storage.urls import is_url


def plan(name_or_path: str | os.PathLike[str], *, ranks: int, **options: Unpack[PlanOptions]) -> Forecast:
    """What :func:`~shardwise.verbs.pretrained.from_pretrained` would take on each of ``ranks`` ranks.

    The checkpoint is a directory, a hub id in the cache, or a URL. Only its config and the headers of its files are
    read, and nothing is downloaded. Neither ranks nor a process group are needed, nor the accelerator. Tied tensors
    that are stored twice are taken to be equal.

    Keyword arguments: see :class:`PlanOptions`.

    Collective: no.
    Memory: the names and places of the checkpoint's tensors.

    Raises:
        TypeError: a keyword that is not known.
        ConfigError: the config, the mesh or an argument cannot be honoured.
        PlacementError: the wrap policy matches nothing, or the model holds what ``fully_shard`` refuses.
        CoverageError: checkpoint and model do not cover each other, as a load would say.
        FormatError, StorageError: the checkpoint's files contradict their format, or cannot be read.
    """
    require_known("plan", options, hints_of(PlanOptions))
    options = settled(options)
    require_meant(hints_of(PlanOptions), options)
    mesh = mesh_of(ranks, options)
    hub = options.get("hub", HubOptions())
    with ExitStack() as stack:
        if is_url(name_or_path):
            name_or_path, hub = at_one_commit(World(0, 1), os.fspath(name_or_path), hub)
            folder = stack.enter_context(small_files(World(0, 1), name_or_path, hub))
            opened = open_storage(name_or_path, hub)
        else:
            wanted = ModelFiles(code=options.get("trust_remote_code", False))
            folder = resolve(name_or_path, replace(hub, local_files_only=True), download=False, wanted=wanted)
            opened = open_storage(folder)
        reader = stack.enter_context(opened.reader)
        config = config_of(folder, options)
        index = open_checkpoint(
            reader,
            weights_name=opened.file or getattr(config, "transformers_weights", None),
            extra_files=getattr(type(config), "extra_files", ()),
            variant=hub.variant,
        )
        stack.enter_context(torch.device("cpu"))
        return forecast(folder, config, index, mesh, options.get("read_policy") or reader.policy, options)
