"""Saves a tenant as PEFT does, and reads one that PEFT has saved: by the house's own save and reading.

[Note: Lent tensors] Both know models, not buffers. So the adapter's outline, a model of PEFT's on meta, is lent
what is real: the tenant's matrices in place of its own, and the base's parameters, shards as they are, in place of
the base's. Nothing is copied, and the outline is thrown away afterwards. A file of PEFT's has the embeddings beside
adapters on them; where such a file is read, these go into scratch tensors: nothing writes to the base.
"""

from __future__ import annotations

import copy
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.bank.tenant import Tenant
from shardwise.engines.adapters import weights_in
from shardwise.engines.clock import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import StateOptions
from shardwise.interchange.accelerate_reading import set_from_files, stored_values
from shardwise.layout import TensorKind
from shardwise.models.build import build_on_meta
from shardwise.models.modules import original_class
from shardwise.models.selection import AdapterOnly, names_outside
from shardwise.models.view import look_inside
from shardwise.planning.states.matching import Tolerance
from shardwise.tuning import configs
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
    config = configs.config_in(os.fspath(folder))
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


def read_tenant(world: World, model: PreTrainedModel, tenant: Tenant, folder: str | os.PathLike[str]) -> None:
    """Give a tenant the matrices that are in a folder, all of them. Collective: yes.

    Raises:
        CoverageError: what is stored and what the config wants do not fit; nothing is changed then.
        FormatError, StorageError, DisagreementError, RankLostError: as of a load.
    """
    options, path = StateOptions(), Path(folder)
    whole = world.together(lambda: _with_scratch(lent(model, tenant), set(tenant.shapes)))
    with torch.device("cpu"), torch.no_grad(), ExitStack() as stack:
        values = stored_values(world, str(path), world.together(lambda: weights_in(path)), options, stack)
        set_from_files(world, whole, values, AdapterOnly(), Tolerance(), options, Clock())


def _with_scratch(whole: nn.Module, own: set[str]) -> nn.Module:
    """The same, with other memory for what PEFT takes for the adapter's and is the base's."""
    held = look_inside(whole)
    by_name = {name: item for item in held for name in item.names}
    for key, fqn in names_outside(whole, held, AdapterOnly()).items():
        if key not in own:
            item = by_name[fqn]
            item.install(nn.Parameter(torch.empty_like(item.tensor), requires_grad=False))
    return whole
