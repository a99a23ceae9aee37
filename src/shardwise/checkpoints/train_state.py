"""The state of a training run, and the part of it that a checkpoint stores, by name.

[Note: Random numbers on other ranks] With as many ranks as before, every rank's generators continue from there.
On another number of ranks they cannot: states cannot be divided, and two ranks with one state would draw the same.
A generator that was in the same state on all ranks is set to it on all. Any other is seeded on each rank from the
state that rank 0's had, the rank, and the number of ranks: the same on every run, and different on every rank.
"""

import hashlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoints.header import as_json, to_pickle
from shardwise.checkpoints.summaries import StateSummary
from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.layout import TensorKind
from shardwise.files.join_entries import KeyPath
from shardwise.files.peft_adapter import WITHOUT_EFFECT
from shardwise.fsdp.named_tensors import TensorRef, collect_tensors, unwrap
from shardwise.fsdp.optimizer_states_by_name import build_param_groups
from shardwise.fsdp.rebind import Bound, bind_optimizers, describe_sharding, inner_tensors
from shardwise.fsdp.torch_private import accelerator, accelerator_module
from shardwise.models.four_bit.config import quant_type_name
from shardwise.models.four_bit.layers import get_packings
from shardwise.models.selection import AdapterOnly, Selection, names_outside
from shardwise.state.base_identity import BaseSamples, select_base
from shardwise.state.digests import compute_digest
from shardwise.transfer.distributed_chunks import StatePath, Views, flat_key
from shardwise.transfer.replicas import Replicas

REDUCED = ("optimizer", "reduced", "layout")
"""Path to the layout of optimizer state that belongs to one rank each. Its values have ``rank_N`` as last key."""

_SAVE_IT_BY_RANK = "save what the optimizer's own state_dict() has, rank by rank"


class Stateful(Protocol):
    """Object with a plain-data state dict: a scheduler, torchdata's loader, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class TrainState:
    """State of a training run, except for the random generators, which are saved and restored with it.

    Attributes:
        model: sharded or not, in the same state on every rank. Several models are one ``nn.ModuleDict`` of them.
        optimizers: one, or several in the same order on every rank.
        schedulers: one or several. The first rank's are saved.
        data: object with the state of the data position. If the state is equal on all ranks, any number of ranks
            can resume from it. Otherwise each rank has its own, and as many ranks are needed.
        scaler: a gradient scaler. The first rank's is saved.
        user: JSON of the user. The first rank's is saved. A restore returns it as ``RestoreReport.user``, and
            leaves this one as it is.
    """

    model: nn.Module
    optimizers: Optimizer | Sequence[Optimizer] = ()
    schedulers: Stateful | Sequence[Stateful] = ()
    data: Stateful | None = None
    scaler: Stateful | None = None
    user: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        optimizers: object = self.optimizers
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"model is a {type(self.model).__name__}. Pass a module of torch, several in a torch.nn.ModuleDict"
            )
        if not isinstance(optimizers, (Optimizer, Sequence)) or not all(
            isinstance(item, Optimizer) for item in self.all_optimizers
        ):
            raise ConfigError(
                f"optimizers is a {type(optimizers).__name__}. Pass torch.optim.Optimizer, one or several"
            )

    @property
    def all_optimizers(self) -> tuple[Optimizer, ...]:
        return (self.optimizers,) if isinstance(self.optimizers, Optimizer) else tuple(self.optimizers)

    @property
    def all_schedulers(self) -> tuple[Stateful, ...]:
        return tuple(self.schedulers) if isinstance(self.schedulers, Sequence) else (self.schedulers,)


@dataclass(frozen=True)
class CollectedState:
    """The model and its optimizers as they are now on this rank.

    Attributes:
        model_tensors: all tensors of the model.
        bounds: the optimizers, with their parameters by name.
        stored: the model's tensors that a checkpoint stores, tied ones once, by FQN.
        tensors: all tensors that a checkpoint stores, the model's and the optimizers' own.
        signature: names, kind, shape and ``requires_grad`` of each tensor of the model.
    """

    model: nn.Module
    model_tensors: list[TensorRef]
    bounds: list[Bound]
    stored: dict[str, TensorRef]
    tensors: dict[KeyPath, torch.Tensor]
    signature: tuple[tuple[tuple[str, ...], TensorKind, tuple[int, ...], bool], ...]

    @cached_property
    def others(self) -> tuple[str, str]:
        """Digests of the names and shapes of the model's tensors that are not stored.

        The first is of all in the order of their names, since a pass may change the model's order: PEFT registers
        experts with an adapter again. The second, in the model's order, is in headers of earlier versions.
        """
        others: list[tuple[str, tuple[int, ...]]] = []
        for item in self.model_tensors:
            if item.kind.is_saved and item.fqn not in self.stored:
                others.append((item.fqn, tuple(item.tensor.shape)))
        sorted_digest = hashlib.sha256(repr(sorted(others)).encode()).hexdigest()[:32]
        return sorted_digest, hashlib.sha256(repr(others).encode()).hexdigest()[:32]

    @cached_property
    def base(self) -> BaseSamples:
        """Samples of the parameters that are not stored."""
        return BaseSamples.select(self.model, select_base(self.model_tensors, self.stored))

    @cached_property
    def alias_keys(self) -> dict[KeyPath, KeyPath]:
        """Further names of tied tensors, each with the first name."""
        keys: dict[KeyPath, KeyPath] = {}
        for fqn, item in self.stored.items():
            for name in item.names:
                if name != fqn:
                    keys["model", name] = "model", fqn
        return keys

    @cached_property
    def buffers(self) -> dict[str, str]:
        """FQNs of the model's buffers, by :func:`flat_key`."""
        kinds = {fqn: item.kind for fqn, item in self.stored.items()}
        return {flat_key(("model", fqn)): fqn for fqn, kind in kinds.items() if kind is not TensorKind.PARAMETER}

    @cached_property
    def numbers(self) -> dict[StatePath, object]:
        """Values of optimizer state that are not tensors."""
        numbers: dict[StatePath, object] = {}
        for bound in self.bounds:
            for key, value in bound.scalars.items():
                if not isinstance(value, torch.Tensor):
                    numbers["optimizer", "state", key.parameter, key.entry] = value
        return numbers

    @cached_property
    def layout(self) -> str:
        """Return a digest of the sharding of trained parameters and of their reduced state, equal on all ranks."""
        parameters = {item.fqn: item.tensor for item in self.model_tensors if item.tensor.requires_grad}
        blocks = [getattr(bound.optimizer, "block_size", 0) for bound in self.bounds]
        return compute_digest(
            [blocks, sorted(parameters), describe_sharding(parameters[name] for name in sorted(parameters))]
        )

    @cached_property
    def by_key(self) -> dict[str, torch.Tensor]:
        """All tensors that a checkpoint stores, by :func:`flat_key`."""
        return {flat_key(path): tensor for path, tensor in self.tensors.items()}

    def memory(self) -> list[list[object]]:
        """Return where each tensor of the checkpoint, and of its base, is on this rank.

        Equal at a later step if the same tensors are still in the same memory. As long as this state is referenced,
        no other tensor has the identity of one of its own.
        """
        # Identities show replaced tensors. The rest shows storage that was moved, and views that were changed in
        # place.
        base = select_base(self.model_tensors, self.stored)
        tensors = [*self.tensors.values(), *(item.tensor for item in base)]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return [
            [id(tensor) for tensor in tensors],
            [shard.data_ptr() for shard in local],
            [shard.shape for shard in local],
            [shard.stride() for shard in local],
            [shard.dtype for shard in local],
        ]


def collect_state(state: TrainState, only: Selection, before: CollectedState | None = None) -> CollectedState:
    """Collect the tensors of a training run. FSDP2 groups that are gathered are resharded.

    PEFT's selection for ``before``, the state of an earlier step, is reused for a model with the same tensors.

    Raises:
        ConfigError: the model has no such adapter.
        ShardingError: parameters of the optimizers are not the model's, or their state has no shards that follow.
    """
    model = unwrap(state.model)
    tensors = collect_tensors(model)
    bounds = bind_optimizers(state.all_optimizers, tensors, _SAVE_IT_BY_RANK, by_rank=True)
    signature = tuple(
        (item.names, item.kind, tuple(item.tensor.shape), item.tensor.requires_grad) for item in tensors
    )
    # The selection follows from the names and from what is trained, so it is as before.
    if before is not None and before.model is model and before.signature == signature:
        chosen = set(before.stored)
    else:
        chosen = selected_names(model, tensors, only)
    stored = {item.fqn: item for item in tensors if item.fqn in chosen}
    return CollectedState(model, tensors, bounds, stored, _tensors(stored, bounds), signature)


def _tensors(stored: Mapping[str, TensorRef], bounds: Sequence[Bound]) -> dict[KeyPath, torch.Tensor]:
    tensors: dict[KeyPath, torch.Tensor] = {("model", fqn): item.tensor for fqn, item in stored.items()}
    for bound in bounds:
        for key, value in [*bound.tensors.items(), *bound.scalars.items()]:
            if isinstance(value, torch.Tensor):
                tensors["optimizer", "state", key.parameter, key.entry] = value
    return tensors


def selected_names(model: nn.Module, tensors: Sequence[TensorRef], only: Selection) -> set[str]:
    """Return the FQNs that a checkpoint stores: all, or an adapter and all other trained parameters."""
    saved = [item for item in tensors if item.kind.is_saved]
    if only is None:
        return {item.fqn for item in saved}
    # PEFT may name a tied tensor by another one of its names than the first.
    fqns = {name: item.fqn for item in tensors for name in item.names}
    adapter = {fqns[name] for name in names_outside(model, tensors, only).values()}
    return adapter | {item.fqn for item in saved if item.tensor.requires_grad}


def describe_selection(only: Selection) -> str:
    """Return the selection as it is recorded in the header of a checkpoint."""
    return f"adapter {only.adapter}" if isinstance(only, AdapterOnly) else "everything"


_NOT_COMPARED = WITHOUT_EFFECT | {"peft_version", "auto_mapping", "init_lora_weights"}
"""Settings of an adapter that do not affect its output, apart from those that end in "dropout"."""


def adapter_settings(model: nn.Module, only: Selection) -> dict[str, Any]:
    """Return the settings of an adapter that affect its output, as JSON.

    If everything is selected: those of all adapters, each name with the adapter's before it, and the 4-bit forms
    of weights, whose codes have equal shapes.
    """
    adapters: Any = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping):
        adapters = {}
    compared: dict[str, Any] = {}
    for adapter in adapters if only is None else adapters.keys() & {only.adapter}:
        prefix = f"{adapter}." if only is None else ""
        for name, value in adapters[adapter].to_dict().items():
            if name not in _NOT_COMPARED and not name.endswith("dropout"):
                compared[f"{prefix}{name}"] = value
    packings = [packing for module in model.modules() for packing in get_packings(module).values()]
    if only is None and packings:
        compared["base.quant_types"] = sorted({quant_type_name(packing.form) for packing in packings})
    plain: dict[str, Any] = json.loads(json.dumps(compared, default=_to_plain))
    return plain


def _to_plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


@dataclass(slots=True)
class StateContents:
    """Content of a checkpoint as this rank has it.

    Attributes:
        collected: the model and its optimizers.
        user: JSON of the user.
        common: pickled values that the first rank stores for all.
        local: pickled values of this rank.
        base: samples of the base of an adapter.
        replicas: replicated tensors, of a plan.
        chunks: this rank's chunks, of a plan.
        summary: what the ranks compare.
    """

    collected: CollectedState
    user: dict[str, Any]
    common: dict[StatePath, Any] = field(default_factory=dict)
    local: dict[StatePath, Any] = field(default_factory=dict)
    base: BaseSamples | None = None
    replicas: Replicas = field(default_factory=lambda: Replicas({}))
    chunks: Views = field(default_factory=dict)
    summary: StateSummary = field(default_factory=StateSummary)

    def stored(self, data: str, rank: int) -> dict[StatePath, bytes]:
        """Return the values that this rank stores. A data position equal on all ranks is stored by the first."""
        # The first rank stores its own position whether or not all are equal. Others store theirs if they differ.
        values = {**({} if rank else self.common), **self.local}
        return {path: value for path, value in values.items() if not rank or data == "each" or path[0] != "data"}


_NAMES = frozenset({"params", "param_names"})


def collect_contents(collected: CollectedState, state: TrainState, rank: int) -> StateContents:
    """Collect the values that are not tensors.

    Raises:
        ConfigError: a component has no ``state_dict``, or the user's state is not JSON.
    """
    # The optimizers: numbers, settings, and state that no other rank can use. Tensors are written as chunks.
    contents = StateContents(collected, as_json(state.user), common={**collected.numbers})
    summary = contents.summary
    if collected.bounds:
        groups = build_param_groups(collected.bounds)
        # Each setting under a key of its own, which torch requests: ``optimizer.param_groups.0.lr``.
        for number, group in enumerate(groups):
            for name, value in group.items():
                contents.common["optimizer", "param_groups", number, name] = value
        settings = [{key: value for key, value in group.items() if key not in _NAMES} for group in groups]
        summary.settings = compute_digest(settings)
        summary.rates = [float(group["lr"]) for group in groups if "lr" in group]
    reduced: dict[str, dict[str, dict[str, torch.Tensor]]] = {}  # by FQN, entry and name
    for bound in collected.bounds:
        for key, value in bound.rank_local.items():
            reduced.setdefault(key.parameter, {})[key.entry] = inner_tensors(value)
    if reduced:
        contents.common[REDUCED] = collected.layout
        contents.local["optimizer", "reduced", f"rank_{rank}"] = reduced
    # Components that are equal on all ranks: the first rank's count.
    first: dict[StatePath, Any] = {}
    if state.all_schedulers:
        first["schedulers",] = [_get_state_dict(item, "schedulers") for item in state.all_schedulers]
    if state.scaler is not None:
        first["scaler",] = _get_state_dict(state.scaler, "scaler")
    # On all ranks, and before the digest: what cannot be written is one error, by name.
    pickled_first = _pickle_each(first)
    summary.first = compute_digest(first)
    # What each rank has of its own. Digests show whether it is equal on all.
    generators = generator_states()
    for name, words in generators.items():
        if name == "python":  # a tuple of many numbers, of which one text takes less time
            words = str(words)
        summary.random[name] = compute_digest(words)
    contents.local["rng", f"rank_{rank}"] = generators
    if state.data is not None:
        position = _get_state_dict(state.data, "data")
        summary.data = compute_digest(position)
        contents.local["data", f"rank_{rank}"] = position
    # Other ranks' common values are not written: pickling them would cost time on each rank.
    contents.common = {} if rank else {**_pickle_each(contents.common), **pickled_first}
    contents.local = _pickle_each(contents.local)
    return contents


def _pickle_each(values: Mapping[StatePath, Any]) -> dict[StatePath, bytes]:
    """Pickle values. Raises :class:`ConfigError` for one that is not plain data."""
    pickles: dict[StatePath, bytes] = {}
    # Hundreds of groups have most settings in common. By text, because 1, 1.0 and True are equal, and 0.0 and -0.0.
    by_text: dict[str, bytes] = {}
    for path, value in values.items():
        text = repr(value) if isinstance(value, (int, float, str, type(None))) else ""
        pickles[path] = by_text.get(text) or to_pickle(value, flat_key(path))
        if text:
            by_text[text] = pickles[path]
    return pickles


def _get_state_dict(component: Any, what: str) -> dict[str, Any]:
    kind = type(component).__name__
    if not all(callable(getattr(component, name, None)) for name in ("state_dict", "load_state_dict")):
        raise ConfigError(f"{what} is a {kind}, which has no state_dict and load_state_dict")
    state_dict = component.state_dict()
    if not isinstance(state_dict, dict):
        raise ConfigError(f"{what}: state_dict() of {kind} is a {type(state_dict).__name__}, not a dict")
    return state_dict


Mode: TypeAlias = Literal["sync", "async"]


def generator_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's random generators, as plain data, by name."""
    legacy: Any = np.random.get_state(legacy=True)
    name, words, position, has_gauss, gauss = legacy
    states: dict[str, Any] = {
        "python": random.getstate(),
        # As a tensor, because torch.load(weights_only=True) does not read arrays of numpy.
        "numpy": (str(name), torch.from_numpy(words.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if (device := accelerator()) is not None:
        states[device.type] = accelerator_module(device).get_rng_state().cpu()
    return states


def seed_generators(
    first: Mapping[str, Any], equal_generators: Collection[str], rank: int, world_size: int, what: str
) -> list[str]:
    """Set generators from rank 0's states, ``first``. See [Note: Random numbers on other ranks].

    Return the names of those that this machine does not have.
    """
    # Equal on all ranks before, and so again. The others must differ between ranks.
    missing = restore_generators({name: state for name, state in first.items() if name in equal_generators}, what)
    for name, state in first.items():
        if name in equal_generators:
            continue
        text = f"{compute_digest(state)} {rank} of {world_size}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])  # 56 bits, of which numpy takes 32
        if name == "python":
            random.seed(seed)
        elif name == "numpy":
            np.random.seed(seed % 2**32)
        elif name == "torch":
            torch.default_generator.manual_seed(seed)
        elif (device := accelerator()) is not None and device.type == name:
            accelerator_module(device).manual_seed(seed)
        else:
            missing.append(name)
    return missing


def restore_generators(states: Mapping[str, Any], what: str) -> list[str]:
    """Set random generators to their states. Return the names of those that this machine does not have.

    Raises:
        FormatError: a state is invalid.
    """
    missing: list[str] = []
    for name, state in states.items():
        try:
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                kind, words, *position = state
                np.random.set_state((kind, words.numpy().astype(np.uint32), *position))
            elif name == "torch":
                torch.set_rng_state(state)
            elif (device := accelerator()) is not None and device.type == name:
                accelerator_module(device).set_rng_state(state)
            else:
                missing.append(name)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise FormatError(f"{what}: the state of the generator {name} is invalid: {error}") from error
    return missing
