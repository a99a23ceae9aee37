"""Adapters that were trained with earlier versions of transformers, as adapters of today's model."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.core.errors import KeyMismatchError
from shardwise.core.expression import Expression
from shardwise.fsdp.named_tensors import build_layout, collect_tensors
from shardwise.models import pretrained
from shardwise.models.former_names import LowRankPair, fuse_experts, match_former_names
from shardwise.models.lora import peft_private
from shardwise.models.lora.inject import StoredAdapter

if TYPE_CHECKING:
    from peft import LoraConfig

_PREFIX = "base_model.model."
_SUFFIX = re.compile(r"(\.base_layer)*\.(lora_|base_layer\.|modules_to_save\.|original_module\.|[^.]*$)")
"""What follows the name of a module in an adapter's key."""

_ADAPTED_AS_MODULES = nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D


def rename_adapter(base: PreTrainedModel, adapter: StoredAdapter) -> StoredAdapter:
    """Return an adapter with the names of a model's modules today, and single experts fused as the model has them.

    Its config then names its modules in full. An adapter that has today's names is returned as it is.

    Args:
        base: the model on meta.
        adapter: the content of a folder.

    Raises:
        KeyMismatchError: matrices of single experts cannot be fused. The message has the parameters.
    """
    modules = dict(base.named_modules())
    owners = {key: _get_owner(key) for key in adapter.tensors}
    if all(owner in modules for owner in owners.values()):
        return adapter
    # transformers renames parameters, not modules. So a module is found by the name of its weight, or of a
    # parameter that the config targets.
    layout = build_layout(collect_tensors(base))
    names = {name: tensor for tensor in layout.saved() for name in tensor.names}
    transforms = pretrained.get_conversion_transforms(base, None)
    probes = {f"{owner}.{local}": owner for owner in owners.values() for local in _local_names(adapter.config)}
    matched = match_former_names(base, list(probes), names, transforms)
    renamed = {probes[old]: new.rpartition(".")[0] for old, new in matched.plain.items()}
    renamed |= {owner: owner for owner in owners.values() if owner in modules}
    # Modules whose weights go through a converter are single experts, whose matrices are fused.
    pairs = _collect_single_experts(adapter, {matched.former[key].rpartition(".")[0] for key in matched.former})
    fused = fuse_experts(base, layout, matched, pairs, what=adapter.directory)
    single = {name.rpartition(".")[0] for name in pairs}
    # The keys of all others change in the name of the module only.
    tensors: dict[str, Expression] = {}
    for key, owner in owners.items():
        if owner not in single:
            suffix = key.removeprefix(_PREFIX).removeprefix(owner)
            tensors[f"{_PREFIX}{renamed.get(owner, owner)}{suffix}"] = adapter.tensors[key]
    config = copy.deepcopy(adapter.config)
    # Patterns of the config may match other names today, so it gets each module in full, with the rank and the
    # alpha that its former name had.
    adapted = [owner for key, owner in owners.items() if ".lora_" in key and owner not in single]
    _set_targets(config, {renamed.get(owner, owner): owner for owner in adapted}, fused, modules)
    saved = {owner: renamed[owner] for owner in owners.values() if owner in renamed}
    config.modules_to_save = [saved.get(name, name) for name in config.modules_to_save or ()] or None
    # One example, for the report.
    former = next(owner for owner in owners.values() if owner not in modules)
    today = renamed.get(former) or next(iter(fused), former)
    notes = [f"the adapter has names of another version: {former} is {today} in this model"]
    if fused and config.lora_dropout:
        notes.append(f"lora_dropout is 0, not {config.lora_dropout}: PEFT has none for stacked experts")
        config.lora_dropout = 0.0
    stacked = _build_stacked_tensors(config, fused, modules)
    return replace(adapter, config=config, tensors=tensors | stacked, notes=(*adapter.notes, *notes))


def _get_owner(key: str) -> str:
    """Return the module that a tensor of an adapter belongs to."""
    name = key.removeprefix(_PREFIX)
    match = _SUFFIX.search(name)
    return name[: match.start()] if match else name


def _local_names(config: LoraConfig) -> list[str]:
    """Return local names of parameters by which modules are found."""
    return ["weight", *(name.rpartition(".")[2] for name in sorted(config.target_parameters or ()))]


def _collect_single_experts(adapter: StoredAdapter, modules: set[str]) -> dict[str, LowRankPair]:
    """Return the matrices of single experts, by name of the weight."""
    # Both halves, or the product is unknown. ``modules`` are former names, as in the file.
    pairs: dict[str, LowRankPair] = {}
    for module in modules:
        halves = (adapter.tensors.get(f"{_PREFIX}{module}.{half}.weight") for half in ("lora_A", "lora_B"))
        lora_A, lora_B = halves
        if lora_A is None or lora_B is None:
            raise KeyMismatchError(
                f"{adapter.directory}: lacks lora_A or lora_B of {module}. Save the adapter again"
            )
        r = lora_A.shape[0]
        scaling = peft_private.scaling(adapter.config, module, r)
        pairs[f"{module}.weight"] = LowRankPair(lora_A, lora_B, r, scaling)
    return pairs


def _set_targets(
    config: Any, adapted: Mapping[str, str], fused: Mapping[str, LowRankPair], modules: Mapping[str, nn.Module]
) -> None:
    """Set the targets of a config, with their ranks and alphas. ``adapted`` are former names of modules by today's.

    PEFT matches patterns of ranks and alphas with modules, and for ``target_parameters`` with the parameters.
    """
    parameters = set(config.target_parameters or ())
    ends = tuple(f".{item}" for item in parameters)
    ranks, alphas = {}, {}
    targets = set()
    formers: dict[str, str] = {}  # of modules and parameters, by the names with which PEFT will match patterns
    for name, former in adapted.items():
        module = modules.get(name)
        if isinstance(module, _ADAPTED_AS_MODULES):
            targets.add(name)
            formers[name] = former
            continue
        candidates = [] if module is None else module.named_parameters(recurse=False)
        targeted = [local for local, _ in candidates if f".{name}.{local}".endswith(ends)]
        formers |= {f"{name}.{local}": f"{former}.{local}" for local in targeted}
        if not targeted:  # a router, which is no linear layer any more
            parameters.add(f"{name}.weight")
            formers[f"{name}.weight"] = former
    for name, former in formers.items():
        rank, alpha = peft_private.rank_and_alpha(config, former)
        if (rank, alpha) != (config.r, config.lora_alpha):
            ranks[re.escape(name)], alphas[re.escape(name)] = rank, alpha
    for name, pair in fused.items():
        parameters.add(name)
        # The alpha with which PEFT computes this scaling.
        divisor = math.sqrt(pair.r) if config.use_rslora else pair.r
        ranks[re.escape(name)], alphas[re.escape(name)] = pair.r, pair.scaling * divisor
    config.target_modules, config.target_parameters = targets, sorted(parameters) or None
    config.rank_pattern, config.alpha_pattern = ranks, alphas
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None


def _build_stacked_tensors(
    config: Any, fused: Mapping[str, LowRankPair], modules: Mapping[str, nn.Module]
) -> dict[str, Expression]:
    """Return the matrices of stacked experts by PEFT's names, which nest from the last parameter to the first."""
    tensors: dict[str, Expression] = {}
    for name, pair in fused.items():
        module, _, local = name.rpartition(".")
        targeted: list[str] = []
        for other, _ in modules[module].named_parameters(recurse=False):
            if any(f".{module}.{other}".endswith(f".{parameter}") for parameter in config.target_parameters):
                targeted.append(other)
        # PEFT wraps a module once for each of its parameters. The wrapper of the last one is the outermost.
        depth = len(targeted) - 1 - targeted.index(local)
        inside = f"{_PREFIX}{module}{'.base_layer' * depth}"
        tensors[f"{inside}.lora_A.weight"], tensors[f"{inside}.lora_B.weight"] = pair.lora_A, pair.lora_B
    return tensors
