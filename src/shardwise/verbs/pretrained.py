"""``from_pretrained``: a transformers model built on meta, wrapped, and loaded."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import TypedDict

from shardwise.conversion import Bindings
from shardwise.errors import ConfigError, FormatError, PlacementError, StorageError
from shardwise.execution.place import Placer
from shardwise.execution.progress import ProgressBar
from shardwise.execution.twins import are_equal
from shardwise.execution.world import World
from shardwise.layout import ModelLayout, Origin
from shardwise.models import build, wrap
from shardwise.models import transformers_compat as compat
from shardwise.models.dtypes import to_torch
from shardwise.models.initialize import BufferRules
from shardwise.models.rules import bind
from shardwise.models.view import layout_of, look_inside
from shardwise.models.wrap import Sharding
from shardwise.planning import Consent, OnMissing, OnUnexpected, Refuse, stored_tensors
from shardwise.report import LoadReport
from shardwise.storage import HubOptions, StorageReader, is_url, open_storage
from shardwise.storage.urls import without_secrets
from shardwise.verbs.load import (
    Clock,
    LoadOptions,
    LoadRequest,
    OpenSource,
    carry_out,
    open_source,
    resolve_everywhere,
)

_CONFIGS = ("config.json", "generation_config.json")
_MAX_CONFIG_BYTES = 10_000_000


class PretrainedOptions(TypedDict, total=False):
    """Keyword arguments of :func:`from_pretrained`, each optional.

    Attributes:
        model_class: a model class or an Auto class; by default the class named by the config.
        config: a config to use instead of the checkpoint's.
        config_overrides: attributes of the checkpoint's config to replace.
        dtype: "auto" (the config's, else the stored one), or a floating dtype or its name.
        sharding: mesh, wrap policy, mixed precision and offload; see :class:`~shardwise.models.wrap.Sharding`.
        trust_remote_code: run model code that the checkpoint brings along.
        key_mapping, buffers, on_missing, on_mismatched, on_unexpected, hub, options: as for
            :func:`~shardwise.verbs.load.load`.
    """

    model_class: Any
    config: PreTrainedConfig
    config_overrides: Mapping[str, Any]
    dtype: str | torch.dtype
    sharding: Sharding
    trust_remote_code: bool
    key_mapping: Mapping[str, str]
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

    Keyword arguments: see :class:`PretrainedOptions`.

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
        sharding = world.together(lambda: _sharding(keywords.get("sharding", Sharding()), options))
        with clock.phase("index"):
            if is_url(name_or_path):
                directory = stack.enter_context(_small_files(world, os.fspath(name_or_path), hub))
            else:
                directory = resolve_everywhere(world, name_or_path, hub)
            config = world.together(lambda: _config(directory, keywords))
            config.name_or_path = without_secrets(os.fspath(name_or_path))
            source = open_source(
                world,
                name_or_path if is_url(name_or_path) else directory,
                hub if is_url(name_or_path) else HubOptions(),
                weights_name=getattr(config, "transformers_weights", None),
                extra=getattr(type(config), "extra_files", ()),
            )
        with source.closing(), torch.device("cpu"):  # staging is on the host, whatever the user's default device
            with clock.phase("plan"):
                built = _build_together(world, directory, config, source, keywords)
                untied = _decide_ties(world, built, source, options)
                world.together(lambda: _finish(built, untied, sharding))
            request = LoadRequest(
                source=source,
                bindings=_without_ties(built),
                consent=Consent(
                    keywords.get("on_missing", Refuse()),
                    keywords.get("on_mismatched", Refuse()),
                    keywords.get("on_unexpected", Refuse()),
                ),
                buffers=keywords.get("buffers", {}),
                options=options,
            )
            report = carry_out(world, built.model, request, clock)
    compat.record_conversions(built.model, built.transforms)
    if sharding.mesh is not None:
        wrap.average_replicated_gradients(built.model, sharding.mesh)
    return (built.model, report) if output_loading_info else built.model


@contextmanager
def _small_files(world: World, url: str, hub: HubOptions) -> Iterator[Path]:
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


@dataclass
class _Built:
    """A model on meta, and what the checkpoint offers for it. ``equal_ties`` are stored twice with equal values."""

    model: PreTrainedModel
    transforms: list[Any]
    layout: ModelLayout
    bindings: Bindings
    equal_ties: frozenset[str] = frozenset()


def _config(directory: Path, keywords: PretrainedOptions) -> PreTrainedConfig:
    given = keywords.get("config")
    overrides = keywords.get("config_overrides", {})
    if given is not None:
        if overrides:
            raise ConfigError(
                "config_overrides change the checkpoint's config; with config= change that config itself"
            )
        return copy.deepcopy(given)
    folder = directory if directory.is_dir() else directory.parent
    return build.read_config(
        folder, trust_remote_code=keywords.get("trust_remote_code", False), overrides=overrides
    )


def _build_together(
    world: World, directory: Path, config: PreTrainedConfig, source: OpenSource, keywords: PretrainedOptions
) -> _Built:
    """Build on every rank; a checkpoint's own code is first copied to the cache by one rank of each machine."""
    if keywords.get("trust_remote_code", False) and world.size > 1:
        first = world.is_first_on_host()
        world.together(lambda: _class_of(directory, config, keywords) if first else None)
    return world.together(lambda: _build(directory, config, source, keywords))


def _class_of(
    directory: Path, config: PreTrainedConfig, keywords: PretrainedOptions
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    trust = keywords.get("trust_remote_code", False)
    folder = directory if directory.is_dir() else directory.parent
    return build.resolve_class(config, keywords.get("model_class"), folder, trust_remote_code=trust)


def _build(directory: Path, config: PreTrainedConfig, source: OpenSource, keywords: PretrainedOptions) -> _Built:
    folder = directory if directory.is_dir() else directory.parent
    model_class, config = _class_of(directory, config, keywords)
    stored = stored_tensors(source.index)
    dtype = build.resolve_dtype(keywords.get("dtype", "auto"), config, stored.values())
    model = build.build_on_meta(model_class, config, dtype, folder)
    transforms = compat.conversion_transforms(model, keywords.get("key_mapping"))
    layout = layout_of(look_inside(model), lambda item: Origin.NOWHERE)
    plan = compat.dtype_plan(model, dtype)

    def dtype_of(name: str) -> torch.dtype:
        return compat.planned_dtype(plan, name) or to_torch(layout.by_name[name].dtype)

    bindings = bind(model, stored, layout, transforms, dtype_of)
    build.keep_dtypes(model, dtype, bindings.leaders)
    return _Built(model, transforms, layout, bindings)


def _decide_ties(world: World, built: _Built, source: OpenSource, options: LoadOptions) -> set[str]:
    """Names declared tied that stay untied, because they are stored with values of their own. Collective: yes.

    Of all names tied to one source, the first that is stored (the source before its targets) stands for them, as in
    transformers' ``tie_weights``; every other stored one is compared with it.
    """
    pairs: list[tuple[str, str]] = []
    offers = built.bindings.offers
    families: dict[str, list[str]] = {}
    for target, origin in compat.declared_ties(built.model).items():
        families.setdefault(origin, [origin]).append(target)
    for members in families.values():
        present = [name for name in members if offers.get(name)]
        pairs += [(other, present[0]) for other in present[1:]]
    world.require_equal(sorted(pairs), "the list of declared ties that are stored twice")
    if not pairs:
        return set()

    def differing() -> set[str]:
        with ProgressBar("Comparing ties", world, 0, enabled=False) as bar:
            placer = Placer(source.reader, source.index, options.budget_bytes, bar, world)
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

    untied = set().union(*world.gather(world.together(differing)))
    built.equal_ties = frozenset({name for name, _ in pairs} - untied)
    return untied


def _without_ties(built: _Built) -> Bindings:
    """What the checkpoint offers, less the second copies of tied tensors, which have been found equal."""
    offers = {name: found for name, found in built.bindings.offers.items() if name not in built.equal_ties}
    return replace(built.bindings, offers=offers)


def _finish(built: _Built, untied: set[str], sharding: Sharding) -> None:
    """Tie and wrap, still on meta."""
    saved = {name for tensor in built.layout.saved() for name in tensor.names}
    offered = set(built.bindings.offers) - built.equal_ties
    compat.tie(built.model, saved - offered, untied)
    if sharding.mesh is not None:
        wrap.wrap(built.model, sharding)


def _sharding(given: Sharding, options: LoadOptions) -> Sharding:
    """With a mesh, if there is to be one, that has the ranks of the process group. Collective: yes.

    Raises:
        PlacementError: when it has not.
    """
    mesh = given.mesh if given.mesh is not None else wrap.default_mesh(options.process_group)
    if mesh is not None and sorted(mesh.mesh.flatten().tolist()) != wrap.ranks_of(options.process_group):
        raise PlacementError(
            f"the mesh has the ranks {mesh.mesh.flatten().tolist()}, and the process group that loads together has "
            f"{wrap.ranks_of(options.process_group)}; pass LoadOptions(process_group=...) with the mesh's ranks"
        )
    return replace(given, mesh=mesh)
