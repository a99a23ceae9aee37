"""Saves a tenant as PEFT does, with its training beside it, and reads one: by the house's own save and reading.

[Note: Lent tensors] Both know models, not buffers. So the adapter's outline, a model of PEFT's on meta, is lent
what is real: the tenant's matrices in place of its own, and the base's parameters, shards as they are, in place of
the base's. Nothing is copied, and the outline is thrown away afterwards. A file of PEFT's has the embeddings beside
adapters on them; where such a file is read, these go into scratch tensors: nothing writes to the base. The state of
the training is lent in the same way, to a module that has nothing else (see [Note: Named by the adapter]).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.bank import state
from shardwise.bank.facts import TenantFacts, differences, facts_in, facts_of, match_bases, to_text
from shardwise.bank.tenant import Tenant, TenantStart
from shardwise.engines.bringing_up import weights_in
from shardwise.engines.model_states import set_model_values, stored_values
from shardwise.engines.save_plan import PeftNames, SaveOptions, SaveRequest, TrainingBeside, resolved_dtype
from shardwise.engines.saving import carry_out_save
from shardwise.engines.verifying import require_as_saved
from shardwise.errors import ConfigError, FormatError
from shardwise.execution.agreed import StateOptions
from shardwise.execution.progress import Clock
from shardwise.execution.world import World
from shardwise.formats.peft_adapter import TRAINING_KEY, training_beside
from shardwise.formats.safetensors_header import read_header
from shardwise.layout import TensorKind
from shardwise.models.build import build_on_meta
from shardwise.models.selection import AdapterOnly, names_outside
from shardwise.models.torch_words import in_memory, original_class
from shardwise.models.view import look_inside
from shardwise.planning.matching import OnFault, Tolerance
from shardwise.report.save_reports import SaveReport
from shardwise.storage.names import shown
from shardwise.storage.reading.local import LocalReader
from shardwise.tensors import DType
from shardwise.tuning import peft_compat
from shardwise.tuning.sites import AdapterOutline, name_in_base, outline_adapter

if TYPE_CHECKING:
    from peft import LoraConfig


def outlined(model: PreTrainedModel, config: LoraConfig) -> AdapterOutline:
    """What PEFT would put into a model, found out on another of its kind, on meta."""
    kind: Any = original_class(model)
    return outline_adapter(build_on_meta(kind, copy.deepcopy(model.config), torch.float32, Path()), config)


def config_of(folder: str | os.PathLike[str]) -> LoraConfig:
    """The config of an adapter in a folder, to go on from.

    Raises:
        FormatError: it is no folder of an adapter.
        ConfigError: it is that of something else.
    """
    weights_in(Path(folder))
    config = peft_compat.config_in(os.fspath(folder))
    config.inference_mode = False
    config.init_lora_weights = True  # how it began once plays no role
    return config


def lent(model: PreTrainedModel, tenant: Tenant) -> nn.Module:
    """A model of PEFT's that is the base and this tenant. See [Note: Lent tensors]."""
    outline = outlined(model, tenant.config)
    own = {matrix.fqn: tenant.matrices[matrix.key] for matrix in outline.matrices()}
    base = {name: item.tensor for item in look_inside(model) for name in item.names}
    for item in {id(item): item for item in outline.held.values()}.values():
        if item.fqn in own:
            item.install(nn.Parameter(own[item.fqn], requires_grad=False))
        elif item.kind is TensorKind.PARAMETER:
            item.install(base[name_in_base(item.fqn)])
    return outline.model


def names_of_peft(model: PreTrainedModel, tenant: Tenant) -> set[str]:
    """The names of all tensors that PEFT saves of a tenant: matrices, and embeddings beside adapters on them."""
    whole = lent(model, tenant)
    return set(names_outside(whole, look_inside(whole), AdapterOnly()))


# ── saving ────────────────────────────────────────────────────────────────────────────────────────


def save_tenant(
    world: World,
    model: PreTrainedModel,
    tenant: Tenant,
    directory: str | os.PathLike[str],
    base: Mapping[str, str],
    *,
    training_state: bool,
    tokenizer: Any,
    dtype: torch.dtype | str | None,
    verify: bool,
    options: SaveOptions,
) -> SaveReport:
    """Save a tenant's matrices and, unless only these are asked for, the state of its training beside them.

    Collective: yes. Memory: as of a save; where a window is open, a copy of its gradient.

    Raises:
        ConfigError: the optimizer or the schedule has what is no plain data.
        ShardwiseError: as of :func:`~shardwise.engines.saving.save_adapter`.
    """
    _agree(world, tenant.name, training_state)
    whole = world.together(lambda: lent(model, tenant))
    training = None
    if training_state:
        gradient = world.together(lambda: state.window_gradient(tenant))
        training = world.together(lambda: _beside(tenant, base, gradient, resolved_dtype(dtype)))

    def ask() -> SaveRequest:
        return SaveRequest(
            whole, directory, PeftNames(), resolved_dtype(dtype), tokenizer=tokenizer, training=training
        )

    return carry_out_save(ask, "first_rank", options, "AdapterBank.save", verify=verify)


def _agree(world: World, name: str, training_state: object, on_not_finite: OnFault | None = None) -> None:
    """Raises ConfigError for what is no such mode, DisagreementError where ranks differ. Collective: yes."""

    def check() -> tuple[str, str, str]:
        if not isinstance(training_state, bool):
            raise ConfigError(f"training_state={training_state!r}: pass True or False")
        if on_not_finite is not None:
            state.require_on_fault(on_not_finite)
        return name, repr(training_state), repr(on_not_finite)

    world.require_equal(world.together(check), "the adapter that is saved or loaded, or what of it,")


def _beside(
    tenant: Tenant,
    base: Mapping[str, str],
    gradient: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> TrainingBeside:
    tensors = {_label(key): values for key, values in state.moments_of(tenant).items()}
    if gradient is not None:
        tensors[_GRADIENT] = gradient
    if dtype not in (None, tenant.flat.dtype):  # what is trained is not what is served
        tensors[_MATRICES] = tenant.flat.detach()
    text = to_text(facts_of(tenant, base), repr(tenant.name))
    return TrainingBeside(_module_of(tensors), text)


_GRADIENT, _MATRICES = "gradient", "matrices"
"""Flat, in the order of the matrices: of an open window; and what the adapter's file has in another dtype."""


def _label(entry: str) -> str:
    """Name a value of the optimizer's state in a file."""
    return f"optimizer.{entry}"


def _module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have these names."""
    root = nn.Module()
    for name, values in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(values, requires_grad=False))
    return root


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StoredTenant:
    """The state of a training beside an adapter, as its header tells."""

    file: str
    facts: TenantFacts
    tensors: Mapping[str, tuple[tuple[int, ...], DType]]


def find_training(
    world: World, name: str, folder: str | os.PathLike[str], on_not_finite: OnFault, *, training_state: bool
) -> StoredTenant | TenantStart:
    """Compare a folder with what was recorded when it was saved; what a tenant goes on from that is read from it.

    Collective: yes; the first rank reads all files once.

    Raises:
        ConfigError, DisagreementError: the mode is none, or ranks differ.
        FormatError: a file is not what was saved, or not what it claims to be; the file that the adapter names is
            not there, or has no checksums.
        StorageError: it could not be read.
    """
    _agree(world, name, training_state, on_not_finite)
    return world.from_first(lambda: _found(Path(folder), training_state=training_state))


def _found(folder: Path, *, training_state: bool) -> StoredTenant | TenantStart:
    adapter = weights_in(folder)
    with LocalReader(folder) as reader:
        file = training_beside(reader, adapter) if training_state else None
        require_as_saved(reader, adapter, file)
        if not training_state:
            return TenantStart(reason="the matrices alone were asked for")
        if file is None:
            return TenantStart(reason=f"{adapter} in {folder} names no state of its training")
        header = read_header(reader, file)
    text = header.metadata.get(TRAINING_KEY)
    if text is None:
        raise FormatError(f"{folder / file}: its header has no {TRAINING_KEY}; the file is damaged or forged")
    tensors = {entry.key: (entry.shape, entry.dtype) for entry in header.entries}
    facts = facts_in(text, f"{folder / file}: {TRAINING_KEY}")
    try:
        facts.require_optimizer()
    except ConfigError as error:
        raise FormatError(f"{folder / file}: {error}; the file is damaged or forged") from error
    return StoredTenant(file, facts, tensors)


def read_tenant(
    world: World,
    model: PreTrainedModel,
    tenant: Tenant,
    folder: str | os.PathLike[str],
    found: StoredTenant | TenantStart,
    base: Mapping[str, str],
    allowed: state.AllowedFaults,
) -> TenantStart:
    """Give a tenant, of which nobody knows yet, what is in a folder, all of it. Collective: yes.

    Raises:
        ConfigError: the training is of something else, naming what differs.
        CoverageError: what is stored and what the config wants do not fit.
        FormatError: values are not finite, and that is not allowed.
        FormatError, StorageError, DisagreementError, RankLostError: as of a load.
    """
    path = Path(folder)
    room: dict[str, torch.Tensor] = {}
    if isinstance(found, StoredTenant):
        room = world.together(lambda: _room(tenant, path, found, base, allowed.other_base))
    whole = world.together(lambda: _with_scratch(lent(model, tenant), set(tenant.shapes)))
    _read(world, whole, path, world.together(lambda: weights_in(path)), AdapterOnly())
    if isinstance(found, TenantStart):
        world.together(lambda: _require_finite(path, tenant.matrices, allowed.not_finite))
        return found
    tensors = {_label(key): values for key, values in room.items()}
    if _GRADIENT in found.tensors:  # see [Note: An open window]
        tensors[_GRADIENT] = tenant.gradient
    if _MATRICES in found.tensors:
        tensors[_MATRICES] = tenant.flat.detach()
    _read(world, world.together(lambda: _module_of(tensors)), path, found.file, None)
    if world.rank:
        tenant.gradient.zero_()
    read = {**tenant.matrices, **{_label(key): values for key, values in room.items()}}
    world.together(lambda: _require_finite(path, read, allowed.not_finite))
    world.together(lambda: state.take_facts(tenant, found.facts))
    state.take_moments(tenant, room)
    return state.went_on(tenant, match_bases(found.facts.base, base, allowed.other_base).told)


def _require_finite(folder: Path, values: Mapping[str, torch.Tensor], allowed: OnFault) -> None:
    """Raises FormatError."""
    if faults := state.not_finite(values, allowed):
        raise FormatError(f"{folder}: is no sound state:\n  " + "\n  ".join(faults[:20]))


def _room(
    tenant: Tenant, folder: Path, found: StoredTenant, base: Mapping[str, str], on_other_base: OnFault
) -> dict[str, torch.Tensor]:
    """Memory for what the optimizer is to keep, once all is known to fit.

    Raises:
        ConfigError: naming what does not.
    """
    faults = differences(tenant, found.facts, base, on_other_base)
    room = {} if faults else state.room_for_moments(tenant, found.facts)
    if not faults:
        faults = _misfits(tenant, room, found)
    if faults:
        raise ConfigError(
            f"{folder / found.file}: is no state of {tenant.name!r} as it is here:\n  "
            + "\n  ".join(faults[:20])
            + "\nCreate it as it was, or take the matrices alone, with training_state=False."
        )
    return room


def _misfits(tenant: Tenant, room: Mapping[str, torch.Tensor], found: StoredTenant) -> list[str]:
    flat = (tenant.trained_count,), DType.F32
    wanted = {_label(key): (tuple(own.shape), in_memory(own.dtype)) for key, own in room.items()}
    if found.facts.micro_batches:
        wanted[_GRADIENT] = flat
    if _MATRICES in found.tensors:
        wanted[_MATRICES] = flat
    return [
        f"{shown(key)}: {_in_words(found.tensors.get(key))} in the file, {_in_words(wanted.get(key))} here"
        for key in sorted({*wanted, *found.tensors})
        if wanted.get(key) != found.tensors.get(key)
    ]


def _in_words(tensor: tuple[tuple[int, ...], DType] | None) -> str:
    return "not there" if tensor is None else f"{tensor[0]} {tensor[1].label}"


def _read(world: World, module: nn.Module, folder: Path, file: str, only: AdapterOnly | None) -> None:
    """Give a module the values of a file, all of them. Collective: yes."""
    options = StateOptions()
    with torch.device("cpu"), torch.no_grad(), ExitStack() as stack:
        values = stored_values(world, str(folder), file, options, stack)
        set_model_values(world, module, values, only=only, tolerance=Tolerance(), options=options, clock=Clock())


def _with_scratch(whole: nn.Module, own: set[str]) -> nn.Module:
    """The same, with other memory for what PEFT takes for the adapter's and is the base's."""
    held = look_inside(whole)
    by_name = {name: item for item in held for name in item.names}
    for key, fqn in names_outside(whole, held, AdapterOnly()).items():
        if key not in own:
            item = by_name[fqn]
            item.install(nn.Parameter(torch.empty_like(item.tensor), requires_grad=False))
    return whole
