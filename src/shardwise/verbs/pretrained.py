"""``from_pretrained``: a transformers model built on meta, wrapped, and loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, Unpack, overload

from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.errors import ConfigError, DisagreementError, FormatError, StorageError
from shardwise.execution.place import Placer
from shardwise.execution.progress import ProgressBar
from shardwise.execution.twins import are_equal
from shardwise.execution.world import World
from shardwise.models import transformers_compat as compat
from shardwise.models import wrap
from shardwise.models.initialize import BufferRules
from shardwise.models.wrap import Sharding
from shardwise.planning import Consent, OnMissing, OnUnexpected, Refuse
from shardwise.report import LoadReport
from shardwise.storage import HubOptions, OpenStorage, StorageReader, is_url, open_storage
from shardwise.storage.urls import without_secrets
from shardwise.verbs.load import (
    Clock,
    LoadOptions,
    LoadRequest,
    OpenSource,
    carry_out,
    read_index,
    resolve_everywhere,
)
from shardwise.verbs.outline import ModelOptions, Outline, class_of, config_of, outline

_CONFIGS = ("config.json", "generation_config.json")
_MAX_CONFIG_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class FromFiles:
    """The weights are read from the files of the model."""


@dataclass(frozen=True, slots=True)
class Later:
    """No weights are read: the model is built, tied and sharded, and stays on meta.

    ``Checkpointer.restore`` brings it up; so does :func:`~shardwise.verbs.load.load`.
    """


Weights: TypeAlias = FromFiles | Later


class PretrainedOptions(ModelOptions, total=False):
    """Keyword arguments of :func:`from_pretrained`, each optional; also those of :class:`ModelOptions`.

    Attributes:
        sharding: mesh, wrap policy, mixed precision and offload; see :class:`~shardwise.models.wrap.Sharding`.
        weights: ``FromFiles()``, or ``Later()`` for a run that restores them from a checkpoint of its own.
        buffers, on_missing, on_mismatched, on_unexpected, hub, options: as for
            :func:`~shardwise.verbs.load.load`.
    """

    sharding: Sharding
    weights: Weights
    buffers: BufferRules
    on_missing: OnMissing
    on_mismatched: OnMissing
    on_unexpected: OnUnexpected
    hub: HubOptions
    options: LoadOptions


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

    Keyword arguments: see :class:`PretrainedOptions` and :class:`~shardwise.verbs.outline.ModelOptions`.

    Collective: yes, over ``options.process_group`` (default: all ranks), whose ranks are those of the mesh.
    Memory: this rank's shards and ``options.budget_bytes``.

    Raises:
        ConfigError: the config or an argument cannot be honoured.
        PlacementError: the wrap policy matches nothing, or the model cannot be sharded on the mesh.
        CoverageError, FormatError, StorageError, DisagreementError: as for :func:`~shardwise.verbs.load.load`.
    """
    options = keywords.get("options", LoadOptions())
    clock = Clock()
    hub = keywords.get("hub", HubOptions())
    with World.current(options.process_group, options.patience) as world, ExitStack() as stack:
        sharding = world.together(
            lambda: wrap.with_mesh(keywords.get("sharding", Sharding()), options.process_group)
        )
        with clock.phase("index"):
            if is_url(name_or_path):
                directory = stack.enter_context(small_files(world, os.fspath(name_or_path), hub))
            else:
                directory = resolve_everywhere(world, name_or_path, hub)

            def begin() -> tuple[PreTrainedConfig, OpenStorage]:
                config = config_of(directory, keywords)
                config.name_or_path = without_secrets(os.fspath(name_or_path))
                is_remote = is_url(name_or_path)
                return config, open_storage(name_or_path, hub) if is_remote else open_storage(directory)

            config, opened = world.together(begin)
            source = read_index(
                world,
                opened,
                weights_name=getattr(config, "transformers_weights", None),
                extra=getattr(type(config), "extra_files", ()),
            )
        with source.closing():
            with clock.phase("plan"):
                built, pairs = _build_together(world, directory, config, source, keywords)
                untied, already_read_bytes = _decide_ties(world, built, pairs, source, options)

            def ask() -> LoadRequest:
                built.tie(untied)
                wrap.prepare_blocks(built.model, sharding)
                if sharding.mesh is not None:
                    wrap.wrap(built.model, sharding)
                return LoadRequest(
                    bindings=built.bindings_less_ties(),
                    consent=Consent(
                        keywords.get("on_missing", Refuse()),
                        keywords.get("on_mismatched", Refuse()),
                        keywords.get("on_unexpected", Refuse()),
                    ),
                    buffers=keywords.get("buffers", {}),
                    options=options,
                    already_read_bytes=already_read_bytes,
                )

            if isinstance(keywords.get("weights", FromFiles()), Later):
                world.together(lambda: _refuse_report(ask, asked=output_loading_info))
                compat.record_conversions(built.model, built.transforms)
                return built.model
            report = carry_out(world, built.model, source, ask, clock)
    compat.record_conversions(built.model, built.transforms)
    if sharding.mesh is not None:
        wrap.average_replicated_gradients(built.model, sharding.mesh)
    return (built.model, report) if output_loading_info else built.model


def _refuse_report(ask: Callable[[], LoadRequest], *, asked: bool) -> None:
    """Make the model ready for a load that comes later, and of which there is no report yet."""
    if asked:
        raise ConfigError("output_loading_info=True with weights=Later(): nothing is loaded yet")
    ask()


@contextmanager
def small_files(world: World, url: str, hub: HubOptions) -> Iterator[Path]:
    """A temporary folder with the configs that lie beside the weights at a URL. Collective: yes.

    One rank reads them. The weights themselves are never on disk.
    """

    def read() -> dict[str, bytes]:
        with open_storage(url, hub).reader as reader:
            return {name: content for name in _CONFIGS if (content := _read_small(reader, name)) is not None}

    contents = world.from_first(read)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        for name, content in contents.items():
            Path(folder, name).write_bytes(content)
        yield Path(folder)


def _read_small(reader: StorageReader, name: str) -> bytes | None:
    try:
        nbytes = reader.size(name)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    if nbytes > _MAX_CONFIG_BYTES:
        raise FormatError(f"{name} in {reader.root}: has {nbytes} bytes, more than any config")
    return reader.read(name, 0, nbytes)


def _build_together(
    world: World, directory: Path, config: PreTrainedConfig, source: OpenSource, keywords: PretrainedOptions
) -> tuple[Outline, list[tuple[str, str]]]:
    """Build on every rank; also the declared ties that are stored twice. Collective: yes.

    A checkpoint's own code is first copied to the cache by one rank of each machine.
    """
    if keywords.get("trust_remote_code", False) and world.size > 1:
        first = world.is_first_on_host()
        world.together(lambda: class_of(directory, config, keywords) if first else None)
    made: list[Outline] = []

    def build() -> list[tuple[str, str]]:
        made.append(outline(directory, config, source.index, keywords))
        return sorted(made[0].ties_stored_twice())

    pairs = world.each(build)
    if others := [rank for rank, found in enumerate(pairs) if found != pairs[0]]:
        raise DisagreementError(
            f"the list of declared ties that are stored twice on rank {', '.join(map(str, others))} is not that of "
            "rank 0"
        )
    return made[0], pairs[0]


def _decide_ties(
    world: World, built: Outline, pairs: Sequence[tuple[str, str]], source: OpenSource, options: LoadOptions
) -> tuple[set[str], int]:
    """Names declared tied that stay untied, because they are stored with values of their own; bytes read for that.

    Collective: yes.
    """
    if not pairs:
        return set(), 0
    offers = built.bindings.offers
    with ProgressBar("Comparing ties", world, 0, enabled=False) as bar:
        placer = Placer(source.reader, source.index, options.budget_bytes, bar, world)

        def differing() -> set[str]:
            return {
                name
                for name, first in pairs
                if not are_equal(
                    offers[name][0],
                    offers[first][0],
                    built.layout.by_name[name].dtype,
                    placer,
                    world.rank,
                    world.size,
                )
            }

        untied = set().union(*world.each(differing))
    built.equal_ties = frozenset({name for name, _ in pairs} - untied)
    return untied, placer.read_bytes
