"""Injection of a PEFT LoRA into a model on meta, its initialization, and matching with stored tensors."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.computed import Bindings
from shardwise.core.errors import ConfigError, KeyMismatchError
from shardwise.core.expert_factors import ExpertFactors, are_exchanged
from shardwise.core.expression import Expression
from shardwise.core.untrusted import require_quick_patterns
from shardwise.fsdp.named_tensors import TensorRef, collect_tensors
from shardwise.models.initialize import Additions, RowNorms
from shardwise.models.lora import peft_private
from shardwise.models.selection import AdapterOnly, names_outside

if TYPE_CHECKING:
    from peft import LoraConfig


_SHOWN = 8


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder: its config, its tensors by the keys of its file, and notes for the report."""

    directory: str
    config: LoraConfig
    tensors: Mapping[str, Expression]
    notes: tuple[str, ...] = ()


def match_adapter(
    model: nn.Module, held: Sequence[TensorRef], name: str, adapter: Adapter, required: Collection[str]
) -> dict[str, Expression]:
    """Return the stored tensors of an adapter by their names in the model.

    Args:
        model: PEFT's model, with the adapter's modules.
        held: its tensors.
        name: the adapter's name in the model.
        adapter: the content of the adapter's folder.
        required: names of tensors that the folder must contain.

    Raises:
        KeyMismatchError: tensors are missing, unexpected, or of another shape. The message has all of them.
    """
    fqns = names_outside(model, held, AdapterOnly(name))
    by_name = {alias: item for item in held for alias in item.names}
    version, what = adapter.config.peft_version, adapter.directory
    tensors = exchange_experts(model, held, name, adapter.tensors, version, what)
    missing = [f"missing     {key}" for key, fqn in fqns.items() if key not in tensors and fqn in required]
    unexpected = [f"unexpected  {key}" for key in tensors if key not in fqns]
    found = {key: (by_name[fqns[key]], item) for key, item in tensors.items() if key in fqns}
    mismatched = [
        f"mismatched  {key}: stored {item.shape}, the model has {tuple(own.tensor.shape)}"
        for key, (own, item) in found.items()
        if item.shape != tuple(own.tensor.shape)
    ]
    if missing or unexpected or mismatched:
        config, shown = adapter.config, [*missing[:_SHOWN], *unexpected[:_SHOWN], *mismatched[:_SHOWN]]
        more = len(missing) + len(unexpected) + len(mismatched) - len(shown)
        listed = "\n  ".join([*shown, *([f"... and {more} more"] if more else [])])
        raise KeyMismatchError(
            f"{adapter.directory}: the adapter does not fit the model\n  {listed}\nIts config says that it belongs "
            f"to {config.base_model_name_or_path or 'a base it does not name'}, with r={config.r} and "
            f"target_modules={_format_targets(config.target_modules)}. Take that base, the config it was "
            "trained with, and resize_vocab if its vocabulary was resized. An adapter with embeddings can be "
            "merged (shardwise.merge_adapter)"
        )
    return {own.fqn: item for own, item in found.values()}


def exchange_experts(
    model: Any,
    held: Sequence[TensorRef],
    name: str,
    tensors: Mapping[str, Expression],
    peft_version: str | None,
    what: str,
) -> dict[str, Expression]:
    """Return an adapter's tensors with the factors of stacked experts in today's layout.

    See [Note: Exchanged factors].

    Args:
        model: PEFT's model, with the adapter's modules.
        held: its tensors.
        name: the adapter's name in the model.
        tensors: by their names in PEFT's files, or in the model.
        peft_version: of the adapter's config, or None if it has none.
        what: the adapter, for the error.

    Raises:
        ConfigError: neither the shapes nor the version tell the layout.
    """
    fqns = {id(item.tensor): item.fqn for item in held}
    stored = {key.replace(f".{name}.", "."): key for key in tensors}
    pairs: list[tuple[str, str]] = []
    shapes: list[ExpertFactors] = []
    for lora_A, lora_B, experts, is_transposed in peft_private.expert_layers(model, name):
        one, other = (stored.get(fqns[id(half.weight)].replace(f".{name}.", ".")) for half in (lora_A, lora_B))
        if one is not None and other is not None:
            found = tensors[one].shape, tensors[other].shape
            expected = tuple(lora_A.weight.shape), tuple(lora_B.weight.shape)
            pairs.append((one, other))
            shapes.append(ExpertFactors(found, expected, experts, is_transposed))
    exchanged = dict(tensors)
    if are_exchanged(shapes, peft_version, what):
        for (one, other), item in zip(pairs, shapes, strict=True):
            if item.fits_exchanged:
                exchanged[one], exchanged[other] = item.exchange(tensors[one], tensors[other])
    return exchanged


def _format_targets(targets: object) -> str:
    return repr(sorted(targets)) if isinstance(targets, (set, list, tuple)) else repr(targets)


def with_lora(
    base: PreTrainedModel,
    bindings: Bindings,
    config: LoraConfig,
    name: str,
    adapter: Adapter | None,
    *,
    is_new: bool,
) -> Tuned:
    """Inject PEFT's modules. Names in the base are mapped to those in PEFT's model by the identity of modules.

    Every name in the config of an adapter that ``is_new`` has to match something.
    """
    _require_unpacked(base, config)
    before = collect_tensors(base)
    old_names = {(id(slot.module), slot.name): slot.fqn for item in before for slot in item.slots}
    model = _injected(base, config, name, is_new=is_new)
    held = collect_tensors(model)
    new_names = {(id(slot.module), slot.name): slot.fqn for item in held for slot in item.slots}
    renamed = {old: new_names[slot] for slot, old in old_names.items()}
    base_names = {new: old for old, new in renamed.items()}
    originals = _originals(model, name, new_names)
    matched: dict[str, tuple[Expression, ...]] = {
        renamed.get(old, old): found for old, found in bindings.matched.items()
    }
    additions = _additions(model, name, config, {id(item.tensor): item for item in held})
    copied = {copy: original for copy, original in originals.items() if original in base_names}
    if adapter is not None:
        taken = match_adapter(model, held, name, adapter, additions.from_tuning.union(copied))
        copied = {copy: original for copy, original in copied.items() if copy not in taken}
        additions = additions.from_checkpoint()
        matched |= {fqn: (expression,) for fqn, expression in taken.items()}
    tied = {alias: item.names for item in held for alias in item.names}
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
        notes=adapter.notes if adapter is not None else (),
    )


def _injected(base: PreTrainedModel, config: LoraConfig, name: str, *, is_new: bool) -> Any:
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
        own: Any = model.peft_config[name]  # in which PEFT has replaced the names of experts that are fused by now
        targeting = config if isinstance(config.target_modules, str) else own
        _require_all_matched(config, targeting, peft_private.get_targets(model, name), modules, parameters)
    return model


def _require_unpacked(base: PreTrainedModel, config: LoraConfig) -> None:
    """Raise ConfigError if a LoRA requires dequantized weights of layers in four bits."""
    packed = [name for name, module in base.named_modules() if hasattr(module, "kept_as")]
    if packed and config.use_dora:
        raise ConfigError(
            f"use_dora: needs norms of rows, which weights in four bits do not have ({packed[0]}). Leave out "
            "use_dora, or quantization"
        )
    for wanted in config.modules_to_save or ():
        found = next((name for name in packed if wanted in name.split(".")), None)
        if found is not None:
            raise ConfigError(
                f"modules_to_save trains {found} whole, which is in four bits. Name it in "
                f'quantization=Nf4(skip_modules=("{wanted}",)) as well, or leave it out of modules_to_save'
            )


def _originals(model: Any, adapter: str, names: Mapping[tuple[int, str], str]) -> dict[str, str]:
    """Map the names of parameters and buffers of copied modules to those of their originals."""
    found: dict[str, str] = {}
    for original, copy in peft_private.copies(model, adapter):
        modules = dict(original.named_modules(remove_duplicate=False))
        for inner, module in copy.named_modules(remove_duplicate=False):
            for local in (name for (owner, name) in names if owner == id(module)):
                source = names.get((id(modules[inner]), local)) if inner in modules else None
                if source is not None:
                    found[names[id(module), local]] = source
    return found


def _additions(model: Any, adapter: str, config: LoraConfig, held: Mapping[int, TensorRef]) -> Additions:
    """Return what PEFT added to the model, and its initialization.

    Raises:
        ConfigError: magnitudes of DoRA are not norms of rows.
    """
    initialized: set[str] = set()
    norms: dict[str, RowNorms] = {}
    found = list(peft_private.layers(model))
    for name, layer in found:
        for module, local in peft_private.matrices(layer, adapter):
            initialized.add(held[id(getattr(module, local))].fqn)
        magnitude: Any = peft_private.magnitude(layer, adapter)
        if magnitude is not None:
            if not peft_private.has_row_norms(layer):
                raise ConfigError(
                    f"{name}: use_dora needs norms over the dimension that is sharded, for a "
                    f"{type(layer.get_base_layer()).__name__}. Leave it out of target_modules, or use_dora"
                )
            matrix = held[id(layer.get_base_layer().weight)].fqn
            norms[held[id(magnitude.weight)].fqn] = RowNorms(matrix, peft_private.row_norms)

    def initialize() -> None:
        with torch.no_grad():
            for _, layer in found:
                peft_private.initialize(layer, adapter, config.init_lora_weights)

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
    faults: list[str] = []
    for option, source, found, known in (
        ("target_modules", targeting, targets.modules, modules),
        ("target_parameters", targeting, targets.parameters, parameters),
        ("modules_to_save", config, targets.copied, modules),
        ("exclude_modules", config, modules, modules),
    ):
        wanted = getattr(source, option)
        for name in sorted(wanted) if isinstance(wanted, (list, tuple, set)) else ():
            if any(matches(target, name) for target in found):
                continue
            if any(matches(other, name) for other in known):
                faults.append(f"{option}: {name!r} is there, and PEFT does not adapt it. Leave it out")
            else:
                faults.append(f"{option}: nothing is named {name!r}{near(name, known)}")
    if faults:
        raise ConfigError("the LoRA names what the model does not have:\n  " + "\n  ".join(faults))


def replicated(made: Tuned) -> Tuned:
    """Return the same model with its adapter unsharded on every rank.

    Raises:
        ConfigError: there are magnitudes of DoRA, whose initialization needs the sharded rows.
    """
    if made.additions.norms:
        raise ConfigError("use_dora needs its magnitudes where the rows are. Pass placement='sharded'")
    return replace(made, stays_whole=dict.fromkeys(made.additions.from_tuning, "adapters are replicated"))


def matches(name: str, wanted: str) -> bool:
    """Return whether a module's name is, or ends with, the wanted one."""
    return name == wanted or name.endswith(f".{wanted}")


def near(wanted: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest names, to append to an error.

    Names are compared by their last parts, as many as ``wanted`` has.
    """
    depth = wanted.count(".") + 1
    ends = {".".join(name.split(".")[-depth:]) for name in known if name}
    ends = {end for end in ends if not end.isdigit()}
    found = difflib.get_close_matches(wanted, sorted(ends), n=3, cutoff=0.4)
    nearest = f". The nearest are {', '.join(found)}" if found else ""
    return nearest or f". There are {', '.join(sorted(ends)[:12])}"


@dataclass(frozen=True)
class Tuned:
    """A model on meta that is ready to be sharded.

    Attributes:
        model: the model that the user receives, PEFT's if there is an adapter.
        base: the transformers model, to which ``fully_shard`` is applied.
        bindings: the checkpoint's expressions, by names in ``model``.
        additions: the added parameters.
        stays_whole: names of parameters that stay unsharded, with the reason.
        whole: these parameters, once their dtypes are final.
        notes: sentences for the report.
    """

    model: nn.Module
    base: PreTrainedModel
    bindings: Bindings
    additions: Additions = field(default_factory=Additions)
    stays_whole: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[nn.Parameter, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
