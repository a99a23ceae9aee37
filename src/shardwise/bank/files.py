"""Saving of a tenant in PEFT's format with its training state, and reading it.

[Note: Lent tensors] Both work on models, not on buffers. So the adapter's outline, a PEFT model on meta, borrows
real tensors: the tenant's matrices as its own, and the base's parameters (shards) as the base's. Nothing is copied,
and the outline is thrown away afterwards. A PEFT file with adapters on embeddings also has the embeddings. When it
is read, these are read into scratch tensors, so the base is never written. The state of the training is lent in the
same way, to a module that has nothing else (see [Note: Named by the adapter]).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.bank import state as states
from shardwise.bank import tenant_facts
from shardwise.bank.tenant import Tenant, TenantOptions, TenantStart
from shardwise.engines.model_states import set_model_values, stored_values
from shardwise.engines.pretrained_loading import weights_in
from shardwise.engines.save_plan import TrainingBeside
from shardwise.engines.verifying import require_as_saved
from shardwise.errors import ConfigError, FormatError
from shardwise.execution.state_values import StateOptions
from shardwise.execution.world import Clock, World
from shardwise.formats.peft_adapter import TRAINING_KEY, training_beside
from shardwise.formats.safetensors_files import read_header
from shardwise.layout import TensorKind
from shardwise.models.build import build_on_meta
from shardwise.models.selection import AdapterOnly, names_outside
from shardwise.models.torch_api import original_class
from shardwise.models.view import collect_tensors
from shardwise.planning.matching import OnFault, Tolerance
from shardwise.storage.reading import LocalReader
from shardwise.tuning import peft_compat
from shardwise.tuning.sites import AdapterOutline, name_in_base, outline_adapter

if TYPE_CHECKING:
    from peft import LoraConfig


def outlined(model: PreTrainedModel, config: LoraConfig) -> AdapterOutline:
    """Outline the adapter that PEFT would put into a model, by another model of its class, on meta."""
    kind: Any = original_class(model)
    return outline_adapter(build_on_meta(kind, copy.deepcopy(model.config), torch.float32, Path()), config)


def config_of(folder: str | os.PathLike[str]) -> LoraConfig:
    """Return the config of an adapter in a folder.

    Raises:
        FormatError: the folder has no adapter.
        ConfigError: the adapter is not a LoRA.
    """
    weights_in(Path(folder))
    config = peft_compat.config_in(os.fspath(folder))
    config.inference_mode = False
    config.init_lora_weights = True  # how it began once plays no role
    return config


def with_lent_tensors(model: PreTrainedModel, tenant: Tenant) -> nn.Module:
    """A model of PEFT's that is the base and this tenant. See [Note: Lent tensors]."""
    outline = outlined(model, tenant.config)
    own = {matrix.fqn: tenant.matrices[matrix.key] for matrix in outline.matrices()}
    base = {name: item.tensor for item in collect_tensors(model) for name in item.names}
    for item in {id(item): item for item in outline.held.values()}.values():
        if item.fqn in own:
            item.install(nn.Parameter(own[item.fqn], requires_grad=False))
        elif item.kind is TensorKind.PARAMETER:
            item.install(base[name_in_base(item.fqn)])
    return outline.model


def names_of_peft(model: PreTrainedModel, tenant: Tenant) -> set[str]:
    """Return the names of all tensors that PEFT saves for a tenant: matrices, and embeddings that have adapters."""
    whole = with_lent_tensors(model, tenant)
    return set(names_outside(whole, collect_tensors(whole), AdapterOnly()))


# ── saving ────────────────────────────────────────────────────────────────────────────────────────


def agree(world: World, name: str, training_state: object, on_not_finite: OnFault | None = None) -> None:
    """Raises ConfigError for an invalid value, RankMismatchError if ranks differ. Collective: yes."""

    def check() -> tuple[str, str, str]:
        if not isinstance(training_state, bool):
            raise ConfigError(f"training_state={training_state!r}: pass True or False")
        if on_not_finite is not None:
            states.require_on_fault(on_not_finite)
        return name, repr(training_state), repr(on_not_finite)

    world.require_equal(world.run_all(check), "the adapter that is saved or loaded, or what of it,")


def beside(world: World, tenant: Tenant, base: Mapping[str, str], dtype: torch.dtype | None) -> TrainingBeside:
    """Return the training state to save with matrices that are cast to ``dtype``. Collective: yes.

    Raises:
        ConfigError: the optimizer or the schedule has a value that is not plain data.
    """
    gradient = world.run_all(states.window_gradient, tenant)

    def made() -> TrainingBeside:
        tensors = states.training_tensors(tenant, gradient)
        if dtype not in (None, tenant.flat.dtype):  # what is trained is not what is served
            tensors[states.MATRICES] = tenant.flat.detach()
        return TrainingBeside(
            _module_of(tensors), tenant_facts.to_text(tenant_facts.facts_of(tenant, base), repr(tenant.name))
        )

    return world.run_all(made)


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


def find_training(
    world: World, name: str, folder: str | os.PathLike[str], on_not_finite: OnFault, *, training_state: bool
) -> states.StoredTraining | TenantStart:
    """Verify a folder against the record of its save, and read the training state from it.

    Collective: yes. The first rank reads all files once.

    Raises:
        ConfigError, RankMismatchError: ``training_state`` or ``on_not_finite`` is invalid, or ranks differ.
        FormatError: a file is damaged or invalid, or the training file that the adapter names is missing or has no
            checksums.
        StorageError: it could not be read.
    """
    agree(world, name, training_state, on_not_finite)
    return world.broadcast(_found, Path(folder), training_state=training_state)


def _found(folder: Path, *, training_state: bool) -> states.StoredTraining | TenantStart:
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
        raise FormatError(f"{folder / file}: its header has no {TRAINING_KEY}. The file is corrupt. Save it again")
    tensors = {entry.key: (entry.shape, entry.dtype) for entry in header.entries}
    facts = tenant_facts.facts_in(text, f"{folder / file}: {TRAINING_KEY}")
    try:
        TenantOptions(**facts.options())
    except ConfigError as error:
        raise FormatError(f"{folder / file}: {error}. The file is corrupt. Save it again") from error
    return states.StoredTraining(str(folder / file), facts, tensors)


def read_tenant(
    world: World, model: PreTrainedModel, tenant: Tenant, folder: Path, found: states.StoredTraining | TenantStart
) -> Callable[[Mapping[str, torch.Tensor]], None]:
    """Return a function that fills a tenant's matrices, and tensors of its training, from a folder.

    Collective: yes, and so is the function.

    Raises:
        KeyMismatchError: the stored tensors do not match the config.
        FormatError, StorageError, RankMismatchError, RankLostError: as of a load.
    """

    def fill(targets: Mapping[str, torch.Tensor]) -> None:
        whole = world.run_all(lambda: _with_scratch(with_lent_tensors(model, tenant), set(tenant.shapes)))
        _read(world, whole, folder, world.run_all(weights_in, folder), AdapterOnly())
        if isinstance(found, states.StoredTraining):
            _read(world, world.run_all(_module_of, targets), folder, Path(found.what).name, None)

    return fill


def _read(world: World, module: nn.Module, folder: Path, file: str, only: AdapterOnly | None) -> None:
    """Give a module the values of a file, all of them. Collective: yes."""
    options = StateOptions()
    with torch.device("cpu"), torch.no_grad(), ExitStack() as stack:
        values = stored_values(world, str(folder), file, options, stack)
        set_model_values(world, module, values, only=only, tolerance=Tolerance(), options=options, clock=Clock())


def _with_scratch(whole: nn.Module, own: set[str]) -> nn.Module:
    """Return the same tensors with other memory for the base's tensors that PEFT saves with the adapter."""
    held = collect_tensors(whole)
    by_name = {name: item for item in held for name in item.names}
    for key, fqn in names_outside(whole, held, AdapterOnly()).items():
        if key not in own:
            item = by_name[fqn]
            item.install(nn.Parameter(torch.empty_like(item.tensor), requires_grad=False))
    return whole
