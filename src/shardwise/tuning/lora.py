"""A LoRA of PEFT's in a model on meta, new or there already: what it adds, how that begins, what is offered."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from shardwise.conversion import Bindings, Expression
from shardwise.errors import ConfigError, CoverageError
from shardwise.models.additions import Additions, DrawnWhole, RowNorms
from shardwise.models.four_bits.four_bit_experts import are_experts_in_four_bits, shown_as_numbers
from shardwise.models.four_bits.four_bit_linear import is_in_four_bits
from shardwise.models.selection import AdapterOnly, names_outside
from shardwise.models.torch_words import parameters_in, walk
from shardwise.models.view import Held, look_inside
from shardwise.tuning import peft_compat
from shardwise.tuning.ready_model import Tuned
from shardwise.tuning.selecting import matches, near

if TYPE_CHECKING:
    from peft import LoraConfig


_SHOWN = 8


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder: its config, and its tensors under the keys that its file has."""

    directory: str
    config: LoraConfig
    tensors: Mapping[str, Expression]


def match_adapter(
    model: nn.Module, held: Sequence[Held], name: str, adapter: Adapter, required: Collection[str]
) -> dict[str, Expression]:
    """The values of the adapter's tensors, by name in the model, into which PEFT has put its modules.

    Args:
        model: PEFT's model.
        held: what is in it.
        name: the adapter's, in the model.
        adapter: what its folder holds.
        required: names of tensors that the folder must hold.

    Raises:
        CoverageError: naming what is missing, what leads to nothing, and what has another shape, all at once.
    """
    places = names_outside(model, held, AdapterOnly(name))
    by_name = {alias: item for item in held for alias in item.names}
    faults: list[str] = []
    missing = [key for key, fqn in places.items() if key not in adapter.tensors and fqn in required]
    unexpected = [key for key in adapter.tensors if key not in places]
    taken: dict[str, Expression] = {}
    for key, expression in adapter.tensors.items():
        if key not in places:
            continue
        item = by_name[places[key]]
        taken[item.fqn] = expression
        if tuple(item.tensor.shape) != expression.shape:
            faults.append(
                f"mismatched  {key}: stored {expression.shape}, the model wants {tuple(item.tensor.shape)}"
            )
    faults = [
        *_lines("missing", missing),
        *_lines("unexpected", unexpected),
        *faults[:_SHOWN],
        *([f"... and {len(faults) - _SHOWN} more of another shape"] if len(faults) > _SHOWN else []),
    ]
    if faults:
        config = adapter.config
        listed = "\n  ".join(faults)
        raise CoverageError(
            f"{adapter.directory}: the adapter does not fit the model\n  {listed}\nIts config says that it belongs "
            f"to {config.base_model_name_or_path or 'a base it does not name'}, with r={config.r} and "
            f"target_modules={_shown(config.target_modules)}; take that base, or the config it was trained with."
        )
    return taken


def _lines(word: str, keys: Sequence[str]) -> list[str]:
    lines = [f"{word:<11} {key}" for key in keys[:_SHOWN]]
    return [*lines, *([f"... and {len(keys) - _SHOWN} more {word}"] if len(keys) > _SHOWN else [])]


def _shown(targets: object) -> str:
    return repr(sorted(targets)) if isinstance(targets, (set, list, tuple)) else repr(targets)


def with_lora(
    base: PreTrainedModel, bindings: Bindings, config: LoraConfig, name: str, adapter: Adapter | None
) -> Tuned:
    """Inject PEFT's modules. Tensors are known again by identity: of the module, and of the name in it."""
    _require_numbers(base, config)
    before = look_inside(base)
    old_names = {(id(slot.module), slot.name): slot.fqn for item in before for slot in item.slots}
    model = _injected(base, config, name, adapter)
    held = look_inside(model)
    new_names = {(id(slot.module), slot.name): slot.fqn for item in held for slot in item.slots}
    renamed = {old: new_names[slot] for slot, old in old_names.items()}
    known_as = {new: old for old, new in renamed.items()}
    originals = _originals(model, name, new_names)
    offers: dict[str, tuple[Expression, ...]] = {
        renamed.get(old, old): found for old, found in bindings.offers.items()
    }
    additions = _additions(model, name, config, {id(item.tensor): item for item in held})
    copied = {copy: original for copy, original in originals.items() if original in known_as}
    notes: tuple[str, ...] = ()
    if adapter is not None:
        taken = match_adapter(model, held, name, adapter, additions.begun.union(copied))
        copied = {copy: original for copy, original in copied.items() if copy not in taken}
        notes = _about_base(base, adapter)
        additions = additions.begun_elsewhere()
        offers |= {fqn: (expression,) for fqn, expression in taken.items()}
    offers |= {copy: offers[original] for copy, original in _first_offers(copied, offers, held)}
    known_as |= {copy: known_as[original] for copy, original in copied.items()}
    return Tuned(
        model=model,
        base=base,
        bindings=replace(
            bindings,
            offers=offers,
            leaders={renamed.get(old, old): renamed.get(first, first) for old, first in bindings.leaders.items()},
            faults={
                sentence: [renamed.get(old, old) for old in names] for sentence, names in bindings.faults.items()
            },
        ),
        additions=replace(additions, base=base, known_as=known_as, copies=copied),
        notes=notes,
    )


def _injected(base: PreTrainedModel, config: LoraConfig, name: str, adapter: Adapter | None) -> Any:
    """PEFT's model around the base. Raises ConfigError where something that was named is not there."""
    modules = [module_name for module_name, _ in walk(base)]
    parameters = [parameter_name for parameter_name, _ in parameters_in(base)]
    try:
        with shown_as_numbers(base):
            model = peft_compat.inject(base, config, name, starts_anew=adapter is None)
    except ConfigError:
        everything = peft_compat.AdaptedNames(tuple(modules), tuple(parameters), tuple(modules))
        _require_all_matched(config, everything, modules, parameters)  # where a name is at fault, with the nearest
        raise
    found = peft_compat.targets_of(model, name)
    faults: list[str] = []
    if adapter is None:
        faults = _without_effect(config, (*found.modules, *found.parameters))
    else:  # of "all-linear" a stored config names every layer, also excluded ones; its tensors are all matched
        found = replace(found, modules=tuple(modules))
    _require_all_matched(config, found, modules, parameters, faults)
    if any(are_experts_in_four_bits(module) for _, module in walk(base)):
        from shardwise.tuning.four_bit_layers import put_on_experts  # PEFT is slow to import

        put_on_experts(layer for _, layer in peft_compat.layers(model))
    return model


@cache
def let_merge_in_four_bits() -> None:
    """Have layers of LoRA that are put around weights in four bits merge as such, whoever puts them there.

    Once in a process. Such a layer has the other as ``base_layer``, before it looks at the config.
    """
    register_module_module_registration_hook(_put_around)


def _put_around(layer: nn.Module, name: str, inside: nn.Module | None) -> None:
    if name == "base_layer" and inside is not None and is_in_four_bits(inside):
        from shardwise.tuning.four_bit_layers import let_merge  # PEFT is slow to import

        let_merge(layer)


def _require_numbers(base: PreTrainedModel, config: LoraConfig) -> None:
    """Raises ConfigError where a LoRA needs numbers of what is in four bits."""
    packed = [name for name, module in walk(base) if is_in_four_bits(module) or are_experts_in_four_bits(module)]
    if packed and config.use_dora:
        raise ConfigError(
            f"use_dora needs norms of rows of numbers, which weights in four bits are not ({packed[0]}); leave out "
            "use_dora, or quantization"
        )
    for wanted in config.modules_to_save or ():
        found = next((name for name in packed if wanted in name.split(".")), None)
        if found is not None:
            raise ConfigError(
                f"modules_to_save trains {found} whole, which is in four bits; name it in "
                f'quantization=Nf4(stay=("{wanted}",)) as well, or leave it out of modules_to_save'
            )


def _about_base(base: PreTrainedModel, adapter: Adapter) -> tuple[str, ...]:
    """That an adapter names another base: of the same shapes, or it would not fit."""
    named, here = adapter.config.base_model_name_or_path or "", str(base.config.name_or_path)
    if not named or os.path.basename(os.path.normpath(named)) == os.path.basename(os.path.normpath(here)):
        return ()
    return (f"the adapter in {adapter.directory} names {named} as its base, and goes on with {here}",)


def _originals(model: Any, adapter: str, names: Mapping[tuple[int, str], str]) -> dict[str, str]:
    """Names of parameters and buffers in copied modules, to those of what they are copies of."""
    found: dict[str, str] = {}
    for original, copy in peft_compat.copies(model, adapter):
        ours = dict(walk(original, every_name=True))
        for inner, module in walk(copy, every_name=True):
            for local in (
                *dict(module.named_parameters(recurse=False)),
                *dict(module.named_buffers(recurse=False)),
            ):
                source = names.get((id(ours[inner]), local)) if inner in ours else None
                if source is not None:
                    found[names[id(module), local]] = source
    return found


def _first_offers(
    copied: Mapping[str, str], offers: Mapping[str, object], held: Sequence[Held]
) -> Iterable[tuple[str, str]]:
    """(copy, name under which its original is offered), for those that are: a tied one under any of its names."""
    names = {name: item.names for item in held for name in item.names}
    for copy, original in copied.items():
        offered = next((name for name in names[original] if name in offers), None)
        if offered is not None:
            yield copy, offered


def _additions(model: Any, adapter: str, config: LoraConfig, held: Mapping[int, Held]) -> Additions:
    """What PEFT has put in, and how it begins.

    Raises:
        ConfigError: magnitudes of DoRA that are not norms of rows.
    """
    initialised: set[str] = set()
    drawn_whole: dict[str, DrawnWhole] = {}
    norms: dict[str, RowNorms] = {}
    found = list(peft_compat.layers(model))
    for name, layer in found:
        drawn = peft_compat.drawn_whole(layer, adapter, config.init_lora_weights)
        for module, local in peft_compat.matrices(layer, adapter):
            parameter = getattr(module, local)
            fqn = held[id(parameter)].fqn
            if draw := drawn.get(parameter):
                drawn_whole[fqn] = DrawnWhole(name, draw)
            else:
                initialised.add(fqn)
        magnitude: Any = peft_compat.magnitude(layer, adapter)
        if magnitude is not None:
            if not peft_compat.has_row_norms(layer):
                raise ConfigError(
                    f"{name}: use_dora needs norms over the dimension that is sharded, for a "
                    f"{type(layer.get_base_layer()).__name__}; leave it out of target_modules, or use_dora"
                )
            matrix = held[id(layer.get_base_layer().weight)].fqn
            norms[held[id(magnitude.weight)].fqn] = RowNorms(matrix, peft_compat.row_norms)

    def initialise() -> None:
        with torch.no_grad():
            for _, layer in found:
                peft_compat.initialise(layer, adapter, config.init_lora_weights)

    return Additions(
        initialised=frozenset(initialised), initialise=initialise, norms=norms, drawn_whole=drawn_whole
    )


def _require_all_matched(
    config: LoraConfig,
    targets: peft_compat.AdaptedNames,
    modules: Sequence[str],
    parameters: Sequence[str],
    others: Sequence[str] = (),
) -> None:
    """Every name in a config has matched something: PEFT is content when one of them has.

    Raises:
        ConfigError: naming all that match nothing, with the nearest names, and ``others``.
    """
    faults = list(others)

    def check(option: str, wanted: object, found: Sequence[str], known: Sequence[str]) -> None:
        names = sorted(wanted) if isinstance(wanted, (list, tuple, set)) else []
        for name in names:
            if any(matches(target, name) for target in found):
                continue
            if any(matches(there, name) for there in known):
                faults.append(f"{option}: {name!r} is there, and PEFT does not adapt it; leave it out")
            else:
                faults.append(f"{option}: nothing is named {name!r}{near(name, known)}")

    check("target_modules", config.target_modules, targets.modules, modules)
    check("target_parameters", config.target_parameters, targets.parameters, parameters)
    check("modules_to_save", config.modules_to_save, targets.copied, modules)
    check("exclude_modules", config.exclude_modules, modules, modules)
    if faults:
        raise ConfigError("the LoRA names what the model does not have:\n  " + "\n  ".join(faults))


def _without_effect(config: LoraConfig, adapted: Sequence[str]) -> list[str]:
    """What a config says of modules or parameters that are not adapted."""
    faults = [
        f"{option}: {pattern!r} matches nothing that is adapted; correct it, or leave it out"
        for option in ("rank_pattern", "alpha_pattern")
        for pattern in getattr(config, option) or ()
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted)
    ]
    layers = config.layers_to_transform
    return faults + [
        f"layers_to_transform: nothing is adapted in layer {index}; leave it out"
        for index in (layers if isinstance(layers, (list, tuple)) else ())
        if not any(re.search(rf"(^|\.){index}\.", name) for name in adapted)
    ]


def replicated(made: Tuned) -> Tuned:
    """The same, with what was added whole on every rank.

    Raises:
        ConfigError: it has magnitudes of DoRA, which need their rows.
    """
    if made.additions.norms:
        raise ConfigError("use_dora needs its magnitudes where the rows are; pass adapters=InBlocks()")
    return replace(made, stays_whole=dict.fromkeys(made.additions.begun, "adapters are replicated"))
