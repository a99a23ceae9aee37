"""Injection of a PEFT LoRA into a model on meta, its initialization, and matching with stored tensors."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.consents import describe_faults
from shardwise.core.errors import ConfigError, KeyMismatchError
from shardwise.core.expert_factors import ExpertFactors, are_swapped
from shardwise.core.expression import Bindings, Expression
from shardwise.core.untrusted import require_quick_patterns
from shardwise.fsdp.named_tensors import TensorRef, collect_tensors
from shardwise.models.four_bit.layers import get_packings
from shardwise.models.initialize import Additions
from shardwise.models.lora import peft_private
from shardwise.models.selection import AdapterOnly, names_outside

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in a folder: its config, its tensors by the keys of its file, and notes for the report."""

    directory: str
    config: LoraConfig
    tensors: Mapping[str, Expression]
    notes: tuple[str, ...] = ()


def match_adapter(
    model: nn.Module, refs: Sequence[TensorRef], name: str, adapter: StoredAdapter, required: Collection[str]
) -> dict[str, Expression]:
    """Return the stored tensors of an adapter by their names in the model.

    Args:
        model: PEFT's model, with the adapter's modules.
        refs: its tensors.
        name: the adapter's name in the model.
        adapter: the content of the adapter's folder.
        required: names of tensors that the folder must contain.

    Raises:
        KeyMismatchError: tensors are missing, unexpected, or of another shape. The message has all of them.
    """
    # PEFT decides which tensors belong to the adapter, and their keys. Faults of all keys are collected.
    fqns = names_outside(model, refs, AdapterOnly(name))
    by_name = {alias: item for item in refs for alias in item.names}
    version, what = adapter.config.peft_version, adapter.directory
    stored: dict[str, Expression] = {}
    for key, item in adapter.tensors.items():
        # A plain state dict has the adapter's name in its keys: "q_proj.lora_A.default.weight".
        short = f"{key}.".replace(f".{name}.", ".").removesuffix(".")
        has_name = key not in fqns and short in fqns and short not in adapter.tensors
        stored[short if has_name else key] = item
    tensors = swap_experts(model, refs, name, stored, version, what)
    missing = [key for key, fqn in fqns.items() if key not in tensors and fqn in required]
    unexpected = [key for key in tensors if key not in fqns]
    pairs = {key: (by_name[fqns[key]], item) for key, item in tensors.items() if key in fqns}
    mismatched: list[str] = []
    for key, (ref, item) in pairs.items():
        shape = tuple(ref.tensor.shape)
        if item.shape != shape:
            mismatched.append(f"{key}: stored {item.shape}, the model has {shape}")
    if missing or unexpected or mismatched:
        config, head = adapter.config, f"{adapter.directory}: the adapter does not fit the model"
        faults = {"missing": missing, "unexpected": unexpected, "mismatched": mismatched}
        raise KeyMismatchError(
            f"{describe_faults(head, faults, {})}\nIts config has the base "
            f"{config.base_model_name_or_path or '(not named)'}, r={config.r} and "
            f"target_modules={_format_targets(config.target_modules)}. Load that base, with the config it was "
            "trained with, and resize_vocab if its vocabulary was resized. An adapter with embeddings can be "
            "merged (shardwise.merge_adapter)"
        )
    return {ref.fqn: item for ref, item in pairs.values()}


def swap_experts(
    model: Any,
    refs: Sequence[TensorRef],
    name: str,
    tensors: Mapping[str, Expression],
    peft_version: str | None,
    what: str,
) -> dict[str, Expression]:
    """Return an adapter's tensors with the factors of stacked experts in today's layout.

    See [Note: Swapped factors] in ``core/expert_factors.py``.

    Args:
        model: PEFT's model, with the adapter's modules.
        refs: its tensors.
        name: the adapter's name in the model.
        tensors: by their names in PEFT's files, or in the model.
        peft_version: of the adapter's config, or None if it has none.
        what: the adapter, for the error.

    Raises:
        ConfigError: neither the shapes nor the version tell the layout.
    """
    # Names in the model have the adapter's name in them, and keys of files do not. They are compared without it.
    fqns = {id(item.tensor): item.fqn for item in refs}
    stored = {key.replace(f".{name}.", "."): key for key in tensors}
    pairs: list[tuple[str, str]] = []
    shapes: list[ExpertFactors] = []
    for lora_A, lora_B, experts, is_transposed in peft_private.expert_layers(model, name):
        a_key, b_key = (stored.get(fqns[id(half.weight)].replace(f".{name}.", ".")) for half in (lora_A, lora_B))
        if a_key is not None and b_key is not None:
            stored_shapes = tensors[a_key].shape, tensors[b_key].shape
            model_shapes = tuple(lora_A.weight.shape), tuple(lora_B.weight.shape)
            pairs.append((a_key, b_key))
            shapes.append(ExpertFactors(stored_shapes, model_shapes, experts, is_transposed))
    swapped = dict(tensors)
    if are_swapped(shapes, peft_version, what):
        for (a_key, b_key), item in zip(pairs, shapes, strict=True):
            if item.fits_swapped:
                swapped[a_key], swapped[b_key] = item.swap(tensors[a_key], tensors[b_key])
    return swapped


def _format_targets(targets: object) -> str:
    return repr(sorted(targets)) if isinstance(targets, (set, list, tuple)) else repr(targets)


def inject_lora(
    base: PreTrainedModel,
    bindings: Bindings,
    config: LoraConfig,
    name: str,
    adapter: StoredAdapter | None,
    *,
    is_new: bool,
    is_replicated: bool = False,
) -> Tuned:
    """Inject PEFT's modules. Names in the base are mapped to those in PEFT's model by the identity of modules.

    Every name in the config of an adapter that ``is_new`` has to match something. The matrices of one that
    ``is_replicated`` stay unsharded on every rank.

    Raises:
        ConfigError: the config does not fit the model, or the adapter is a DoRA and replicated.
        KeyMismatchError: the stored adapter does not fit the model.
    """
    _require_unpacked(base, config)
    before = _group_names(collect_tensors(base))
    # PEFT moves modules (q_proj becomes q_proj.base_layer), but keeps the objects. So a tensor is identified by its
    # module and its local name: before with its old names, afterwards with its new ones, in the same order.
    model = _inject(base, config, name, is_new=is_new)
    refs = collect_tensors(model)
    after = _group_names(refs)
    renamed = {old: new for slot, names in before.items() for old, new in zip(names, after[slot], strict=True)}
    base_names = {new: old for old, new in renamed.items()}
    # From here on by names in PEFT's model: the bindings, what PEFT has added, and the copies of modules_to_save.
    originals = peft_private.map_copied_names(model)
    matched: dict[str, tuple[Expression, ...]] = {
        renamed.get(old, old): expressions for old, expressions in bindings.matched.items()
    }
    additions = _additions(model, name, config, {id(item.tensor): item for item in refs})
    if is_replicated and additions.norms:
        raise ConfigError("use_dora: magnitudes need the norms of sharded rows. Pass placement='sharded'")
    kept_whole = dict.fromkeys(additions.from_tuning, "adapters are replicated") if is_replicated else {}
    copied = {copy: original for copy, original in originals.items() if original in base_names}
    # A stored adapter has the values of its matrices and copies, so none of its matrices is initialized.
    if adapter is not None:
        of_adapter = match_adapter(model, refs, name, adapter, additions.from_tuning.union(copied))
        copied = {copy: original for copy, original in copied.items() if copy not in of_adapter}
        # Clears from_tuning: names that are needed later must be taken before.
        additions = replace(additions, initialized=frozenset(), norms={})
        matched |= {fqn: (expression,) for fqn, expression in of_adapter.items()}
    # Other copies begin with what their originals are read from, which may be stored under a tied name.
    tied = {alias: item.names for item in refs for alias in item.names}
    for copy, original in copied.items():
        stored = next((matched[alias] for alias in tied[original] if alias in matched), None)
        if stored is not None:
            matched[copy] = stored
    base_names |= {copy: base_names[original] for copy, original in copied.items()}
    return Tuned(
        model=model,
        base=base,
        bindings=replace(
            bindings,
            matched=matched,
            primary={renamed.get(old, old): renamed.get(first, first) for old, first in bindings.primary.items()},
            errors={
                sentence: [renamed.get(old, old) for old in names] for sentence, names in bindings.errors.items()
            },
        ),
        additions=replace(additions, base=base, base_names=base_names, copies=copied),
        kept_whole_names=kept_whole,
        notes=adapter.notes if adapter is not None else (),
    )


def _inject(base: PreTrainedModel, config: LoraConfig, name: str, *, is_new: bool) -> Any:
    """Return PEFT's model around the base.

    Raises:
        ConfigError: nothing matches, the config of a new adapter has a name that does not, or a pattern takes too
            long.
    """
    modules = [module_name for module_name, _ in base.named_modules()]
    parameters = [parameter_name for parameter_name, _ in base.named_parameters()]
    require_quick_patterns(peft_private.patterns(config), [*modules, *parameters])
    try:
        model = peft_private.inject(base, config, name, is_new=is_new)
    except ConfigError as error:
        if "lora_dropout" in str(error):  # of parameters, as which PEFT has found names of experts
            raise
        # If a name is wrong, suggest the nearest.
        everything = peft_private.AdaptedNames(tuple(modules), tuple(parameters), tuple(modules))
        _require_all_matched(config, config, everything, modules, parameters)
        raise
    if is_new:  # PEFT stores more names than match: both names of a head, and layers excluded of "all-linear"
        # PEFT has replaced names of single experts in this copy, if they are fused in the model.
        peft_config: Any = model.peft_config[name]
        targeting = config if isinstance(config.target_modules, str) else peft_config
        _require_all_matched(config, targeting, peft_private.get_targets(model, name), modules, parameters)
    return model


def _require_unpacked(base: PreTrainedModel, config: LoraConfig) -> None:
    """Raise ConfigError if a LoRA requires dequantized weights of layers in four bits."""
    packed = [name for name, module in base.named_modules() if get_packings(module)]
    if packed and config.use_dora:
        raise ConfigError(
            f"use_dora: needs norms of rows, but {packed[0]} is in four bits. Leave out use_dora or quantization"
        )
    for target in config.modules_to_save or ():
        packed_module = next((name for name in packed if target in name.split(".")), None)
        if packed_module is not None:
            raise ConfigError(
                f"modules_to_save trains {packed_module} whole, which is in four bits. Name it in "
                f'quantization=Nf4(skip_modules=("{target}",)) as well, or leave it out of modules_to_save'
            )


def _group_names(refs: Sequence[TensorRef]) -> dict[tuple[int, str], list[str]]:
    """Return FQNs by the ``id`` of a module and a local name. A module may be registered under several names."""
    names: dict[tuple[int, str], list[str]] = {}
    for slot in (slot for item in refs for slot in item.slots):
        names.setdefault((id(slot.module), slot.name), []).append(slot.fqn)
    return names


def _additions(model: Any, adapter_name: str, config: LoraConfig, refs: Mapping[int, TensorRef]) -> Additions:
    """Return what PEFT added to the model, and its initialization.

    Raises:
        ConfigError: magnitudes of DoRA are not norms of rows.
    """
    initialized: set[str] = set()
    norms: dict[str, str] = {}
    lora_layers = list(peft_private.layers(model))
    for name, layer in lora_layers:
        for module, local in peft_private.matrices(layer, adapter_name):
            initialized.add(refs[id(getattr(module, local))].fqn)
        magnitude: Any = peft_private.magnitude(layer, adapter_name)
        if magnitude is not None:
            if not peft_private.has_row_norms(layer):
                raise ConfigError(
                    f"{name}: use_dora of a {type(layer.get_base_layer()).__name__} needs norms over the sharded "
                    "dim. Leave it out of target_modules, or use_dora"
                )
            norms[refs[id(magnitude.weight)].fqn] = refs[id(layer.get_base_layer().weight)].fqn

    def initialize() -> None:
        with torch.no_grad():
            for _, layer in lora_layers:
                peft_private.initialize(layer, adapter_name, config.init_lora_weights)

    return Additions(initialized=frozenset(initialized), initialize=initialize, norms=norms)


def _require_all_matched(
    config: LoraConfig,
    targeting: LoraConfig,
    targets: peft_private.AdaptedNames,
    modules: Sequence[str],
    parameters: Sequence[str],
) -> None:
    """Check that every name in a config matches something. PEFT accepts a config if one name does.

    ``targeting`` is the config with the names of targets.

    Raises:
        ConfigError: names match nothing. The message has all of them, with the nearest names.
    """
    errors: list[str] = []
    # For each option: the config with its names, what PEFT has found for them, and all that there is.
    for option, source, targeted, known in (
        ("target_modules", targeting, targets.modules, modules),
        ("target_parameters", targeting, targets.parameters, parameters),
        ("modules_to_save", config, targets.copied, modules),
        ("exclude_modules", config, modules, modules),
    ):
        patterns = getattr(source, option)
        for name in sorted(patterns) if isinstance(patterns, (list, tuple, set)) else ():
            if any(matches(target, name) for target in targeted):
                continue
            if any(matches(other, name) for other in known):
                errors.append(f"{option}: {name!r} exists, but PEFT does not adapt it. Leave it out")
            else:
                errors.append(f"{option}: nothing is named {name!r}{near(name, known)}")
    if errors:
        raise ConfigError("the LoRA has names that match nothing:\n  " + "\n  ".join(errors))


def matches(name: str, ending: str) -> bool:
    """Return whether a module's name is, or ends with, the wanted one."""
    return name == ending or name.endswith(f".{ending}")


def near(unknown: str, names: Iterable[str]) -> str:
    """Return a sentence with the nearest names, to append to an error.

    Names are compared by their last parts, as many as ``unknown`` has.
    """
    depth = unknown.count(".") + 1
    ends = {".".join(name.split(".")[-depth:]) for name in names if name}
    ends = {end for end in ends if not end.isdigit()}
    closest = difflib.get_close_matches(unknown, sorted(ends), n=3, cutoff=0.4)
    nearest = f". The nearest are {', '.join(closest)}" if closest else ""
    return nearest or f". There are {', '.join(sorted(ends)[:12])}"


@dataclass(frozen=True)
class Tuned:
    """A model on meta that is ready to be sharded.

    Attributes:
        model: the model that the user receives, PEFT's if there is an adapter.
        base: the transformers model, to which ``fully_shard`` is applied.
        bindings: the checkpoint's expressions, by names in ``model``.
        additions: the added parameters.
        kept_whole_names: names of parameters that stay unsharded, with the reason.
        kept_whole: these parameters, once their dtypes are final.
        notes: sentences for the report.
    """

    model: nn.Module
    base: PreTrainedModel
    bindings: Bindings
    additions: Additions = field(default_factory=Additions)
    kept_whole_names: Mapping[str, str] = field(default_factory=dict)
    kept_whole: Mapping[nn.Parameter, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
