"""Forecasts what a load or a training will take, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedConfig

from shardwise.conversion import stored_leaves
from shardwise.engines.adapters import beside_adapter, of_adapter, open_adapter
from shardwise.engines.bringing_up import small_files
from shardwise.engines.load_options import LoadOptions
from shardwise.engines.load_plan import foresee_initial_values, rules_of
from shardwise.engines.opening import at_one_commit
from shardwise.engines.outline import Outline, config_of, outline
from shardwise.engines.plan_options import PlanOptions, mesh_of
from shardwise.engines.pretrained_options import consent_of
from shardwise.engines.tenant_forecasts import tenant_shapes
from shardwise.engines.tuning_arguments import made_ready, resizing
from shardwise.errors import ConfigError
from shardwise.execution.memory.garbage import collected_later
from shardwise.execution.ranks.world import World
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.opening import open_checkpoint
from shardwise.formats.quantisation import as_the_model_has_it
from shardwise.layout import MeshShape, ModelLayout, Origin, TensorKind, TensorLayout, WorldLayout
from shardwise.models.initialize import Initialisers
from shardwise.models.torch_words import from_torch
from shardwise.models.view import Held, look_inside
from shardwise.models.wrapping.forecast_layout import foresee
from shardwise.models.wrapping.groups import MAX_PADDING
from shardwise.models.wrapping.policies import WrapPolicy
from shardwise.models.wrapping.wrap import Sharding
from shardwise.planning.forecasts.forecast import (
    forecast_computed,
    forecast_groups,
    forecast_ranks,
    forecast_training,
    shared_tensors,
    uneven_tensors,
)
from shardwise.planning.forecasts.own_forecast import Homes
from shardwise.planning.forecasts.tenants import forecast_bank
from shardwise.planning.loads.load_plan import Init, LoadPlan, Recompute, Tie, plan_load
from shardwise.planning.moves.sharing_choice import Weighed
from shardwise.report.forecast import Forecast
from shardwise.report.forecast_parts import BankForecast, GroupForecast, RankForecast
from shardwise.report.names import in_bytes
from shardwise.storage.contract import ReadPolicy
from shardwise.storage.hub import resolve
from shardwise.storage.names import AdapterFiles, HubOptions, ModelFiles, is_url
from shardwise.storage.reading.opening import open_storage
from shardwise.tensors import DType
from shardwise.tuning.lora import Adapter
from shardwise.tuning.modes import Full
from shardwise.tuning.ready_model import Tuned

_SHORT_READ_BYTES = 64 << 10
"""Reads that are shorter than this on average, and many, are worth a note."""


_MANY_READS = 1000


@dataclass(frozen=True)
class Foreseen:
    """What a forecast was made of: the model on meta, as it would be sharded, and the layout of all ranks."""

    forecast: Forecast
    tuned: Tuned
    world: WorldLayout
    policy: ReadPolicy


def forecast_of(name_or_path: str | os.PathLike[str], ranks: int, options: PlanOptions) -> Forecast:
    """The forecast of a checkpoint, of which configs and headers are read. Collective: no.

    Raises:
        as of :func:`foreseen_of`.
    """
    return foreseen_of(name_or_path, ranks, options).forecast


def foreseen_of(name_or_path: str | os.PathLike[str], ranks: int, options: PlanOptions) -> Foreseen:
    """The forecast of a checkpoint, and what it was made of; configs and headers are read. Collective: no.

    Raises:
        ConfigError, CoverageError, FormatError, PlacementError, StorageError: as of
            :func:`~shardwise.verbs.plan.plan`.
    """
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
        index = as_the_model_has_it(reader, index)
        return foreseen(folder, config, index, mesh, options.get("read_policy") or reader.policy, options)


def forecast(
    directory: Path,
    config: PreTrainedConfig,
    index: CheckpointIndex,
    mesh: MeshShape,
    policy: ReadPolicy,
    options: PlanOptions,
) -> Forecast:
    """The forecast of a checkpoint whose headers have been read."""
    return foreseen(directory, config, index, mesh, policy, options).forecast


@collected_later()
def foreseen(
    directory: Path,
    config: PreTrainedConfig,
    index: CheckpointIndex,
    mesh: MeshShape,
    policy: ReadPolicy,
    options: PlanOptions,
) -> Foreseen:
    """The same, with what it was made of."""
    built = outline(directory, config, index, options, resizing(options))
    twice = built.ties_stored_twice()
    built.equal_ties = frozenset(name for name, _ in twice)
    sharding = options.get("sharding", Sharding())
    index, adapters = _with_adapters(index, options)
    tuned = made_ready(built, set(), options, adapters=adapters, casts_to=sharding.mp_policy.param_dtype)
    budget_bytes = options.get("budget_bytes", LoadOptions().budget_bytes)
    world, plan = _plan(tuned, index, mesh, sharding.wrap, budget_bytes, options)
    outlook = _Outlook(
        built, tuned, index, twice, world, plan, mesh, policy, sharding, budget_bytes, directory, options
    )
    made = outlook.forecast(str(config.dtype).removeprefix("torch."))
    return Foreseen(replace(made, notes=tuple(outlook.notes(made))), tuned, world, policy)


@dataclass(frozen=True)
class _Outlook:
    """A load as it would be planned on all ranks.

    Attributes:
        index: the checkpoint, with the adapters beside it.
        twice: names declared tied that are stored twice, with the names they are tied to.
    """

    built: Outline
    tuned: Tuned
    index: CheckpointIndex
    twice: Sequence[tuple[str, str]]
    world: WorldLayout
    plan: LoadPlan
    mesh: MeshShape
    policy: ReadPolicy
    sharding: Sharding
    budget_bytes: int
    directory: Path
    options: PlanOptions

    def forecast(self, dtype: str) -> Forecast:
        """What it takes, in numbers; ``dtype`` is the model's."""
        index, world, plan, options = self.index, self.world, self.plan, self.options
        homes = self._homes()
        sharing = options.get("shared_reads", Weighed())
        shared = shared_tensors(plan, world, index, homes, self.policy, sharing)
        gathered_as, summed_in = self._precision()
        groups = forecast_groups(world, gathered_as)
        ranks = forecast_ranks(plan, world, index, homes, self.policy, shared, sharing)
        return Forecast(
            checkpoint=index.root,
            model_class=type(self.built.model).__name__,
            dtype=dtype,
            device=homes.device,
            mesh=dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            nodes=options.get("nodes", 1),
            parameters=sum(tensor.numel for tensor in world.first.tensors if tensor.kind is TensorKind.PARAMETER),
            checkpoint_bytes=index.nbytes,
            checkpoint_tensors=len(index.tensors()),
            checkpoint_files=len(index.files),
            bytes_per_dtype=_bytes_per_dtype(world.first),
            groups=groups,
            ranks=ranks,
            trainable_parameters=sum(tensor.numel for tensor in world.first.tensors if _is_trained(tensor)),
            training=forecast_training(world, groups, ranks, summed_in) if "tuning" in options else (),
            bank=_bank(self.directory, self.built, ranks, groups, options),
            read_once=tuple(shared),
            whole=world.whole,
            tied={name: fill.source for name, fill in plan.fills.items() if isinstance(fill, Tie)},
            cast=_casts(plan),
            initialized=plan.names(Init),
            recomputed=plan.names(Recompute),
            ignored_keys=plan.ignored_keys,
            computed=forecast_computed(plan),
        )

    def notes(self, made: Forecast) -> list[str]:
        """Sentences to be read before the load."""
        notes = [*self.tuned.notes, *(_about_tie(self.built, name, other) for name, other in self.twice)]
        notes += [
            f"{item.names[0]} and what is computed with it need budget_bytes={item.budget_bytes:,}; a load with "
            f"{self.budget_bytes:,} refuses them"
            for item in made.computed
            if item.budget_bytes > self.budget_bytes
        ]
        if made.held_imbalance > MAX_PADDING:
            notes += uneven_tensors(self.world, MAX_PADDING)
        return [*notes, *_about_short_reads(made)]

    def _homes(self) -> Homes:
        return Homes.of(
            self.plan,
            self.policy,
            device=self.options.get("device", "cuda"),
            budget_bytes=self.budget_bytes,
            offloads_shards=isinstance(self.sharding.offload_policy, CPUOffloadPolicy),
        )

    def _precision(self) -> tuple[DType | None, DType | None]:
        """The dtypes that groups are gathered in, and that gradients are summed in."""
        gathered_as = self.sharding.mp_policy.param_dtype
        summed_in = self.sharding.mp_policy.reduce_dtype or gathered_as
        return (
            None if gathered_as is None else from_torch(gathered_as, "param_dtype"),
            None if summed_in is None else from_torch(summed_in, "reduce_dtype"),
        )


def _bank(
    directory: Path,
    built: Outline,
    ranks: Sequence[RankForecast],
    groups: Sequence[GroupForecast],
    options: PlanOptions,
) -> tuple[BankForecast, ...]:
    if "tenants" not in options:
        return ()
    if "tuning" in options:
        raise ConfigError("tenants are on a base that is not trained itself; leave out tuning")
    tokens = options.get("tokens_per_pass", 4096)
    if tokens < 1:
        raise ConfigError(f"tokens_per_pass={tokens}: a pass has one token or more")
    computed_in: torch.dtype = options.get("sharding", Sharding()).mp_policy.param_dtype or built.model.dtype
    embeddings: Any = built.model.get_input_embeddings()
    return forecast_bank(
        tenant_shapes(built.model, options["tenants"], directory),
        ranks,
        groups,
        itemsize=computed_in.itemsize,
        words=int(embeddings.weight.shape[0]),
        tokens=tokens,
    )


def _with_adapters(index: CheckpointIndex, options: PlanOptions) -> tuple[CheckpointIndex, dict[str, Adapter]]:
    """The checkpoint, and beside it the adapters that the tuning starts from."""
    hub = replace(options.get("hub", HubOptions()), local_files_only=True)
    adapters: dict[str, Adapter] = {}
    for name, folder in options.get("tuning", Full()).folders().items():
        opened = open_adapter(resolve(folder, of_adapter(hub), download=False, wanted=AdapterFiles()))
        with opened.storage.reader as reader:
            found = open_checkpoint(reader, weights_name=opened.storage.file)
        index, adapters[name] = beside_adapter(index, found, opened, name)
    return index, adapters


def _is_trained(tensor: TensorLayout) -> bool:
    return tensor.kind is TensorKind.PARAMETER and tensor.requires_grad


def _plan(
    tuned: Tuned,
    index: CheckpointIndex,
    mesh: MeshShape,
    wrap_policy: WrapPolicy,
    budget_bytes: int,
    options: PlanOptions,
) -> tuple[WorldLayout, LoadPlan]:
    """The layout of all ranks, and the plan of a load, with all that a load finds wrong before it reads."""
    model, additions = tuned.model, tuned.additions
    held = look_inside(model)
    initialisers = Initialisers(model, held, additions)
    buffers = initialisers.buffers(options.get("buffers", {}), seed=0)

    def origin_of(item: Held) -> Origin:
        return buffers[item.fqn].origin if item.kind is TensorKind.BUFFER else initialisers.origin_of(item)

    world = foresee(model, wrap_policy, mesh, origin_of, root=tuned.base, kept_whole=tuned.whole)
    rules = rules_of(tuned.base)
    found = plan_load(index, world.first, tuned.bindings, rules, consent_of(options), additions.known_as)
    foresee_initial_values(initialisers, found, LoadOptions(budget_bytes=budget_bytes))
    return world, found


def _bytes_per_dtype(layout: ModelLayout) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in layout.saved():
        found[tensor.dtype.label] = found.get(tensor.dtype.label, 0) + tensor.numel * tensor.dtype.bits // 8
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _casts(plan: LoadPlan) -> dict[str, tuple[str, str]]:
    """Name to (stored dtype, dtype in the model) where these differ."""
    kinds = {
        name: (next(stored_leaves(read.expression)).dtype.label, plan.layout.by_name[name].dtype.label)
        for name, read in plan.reads().items()
    }
    return {name: pair for name, pair in kinds.items() if pair[0] != pair[1]}


def _about_tie(built: Outline, name: str, other: str) -> str:
    stored = [leaf for tensor in (name, other) for leaf in stored_leaves(built.bindings.offers[tensor][0])]
    nbytes = sum(torch.Size(leaf.shape).numel() * leaf.dtype.itemsize for leaf in stored)
    return (
        f"{name} is tied to {other}, and both are stored: taken to be equal. A load reads and compares both first, "
        f"{in_bytes(nbytes)} over all ranks together; where they differ, both are kept"
    )


def _about_short_reads(made: Forecast) -> list[str]:
    most = max(made.ranks, key=lambda rank: rank.reads)
    mean = most.read_bytes // max(most.reads, 1)
    if most.reads < _MANY_READS or mean >= _SHORT_READ_BYTES:
        return []
    note = (
        f"rank {most.rank} reads {most.reads:,} ranges of {in_bytes(mean)} on average; fewer ranks on the axis "
        "that shards, and several replicas (mesh replicate=..., shard=...), make them longer"
    )
    return [note]
