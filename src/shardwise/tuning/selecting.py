"""Which parameters ``Freeze`` trains, and the nearest names where something matches nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from shardwise.conversion.computed import Bindings
from shardwise.errors import ConfigError
from shardwise.models import pretrained
from shardwise.models.build import Additions
from shardwise.models.policies import listed_blocks

if TYPE_CHECKING:
    from shardwise.tuning.modes import Freeze


def freeze(model: nn.Module, mode: Freeze) -> None:
    """Set ``requires_grad`` of every parameter.

    Raises:
        ConfigError: a name that matches nothing, with the nearest that would; more layers than there are.
    """
    blocks = _layers(model) if mode.trainable_layers else []
    count = abs(mode.trainable_layers)
    if count > len(blocks):
        raise ConfigError(f"trainable_layers={mode.trainable_layers}: {type(model).__name__} has {len(blocks)}")
    chosen = blocks[-count:] if mode.trainable_layers > 0 else blocks[:count]
    modules = dict(model.named_modules())
    trained = [modules[name] for name in chosen]
    if mode.trainable_modules:
        trained = _inside(modules, chosen, mode.trainable_modules)
    everywhere = _layers(model, may_lack=True)
    trained += _outside(modules, everywhere, mode.extra_modules)
    # A parameter that the class itself keeps frozen stays so.
    wanted = {parameter for module in trained for parameter in module.parameters() if parameter.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in wanted)
    if not wanted:
        raise ConfigError(f"{mode} trains nothing of {type(model).__name__}: what it names has no parameters")


def _layers(model: nn.Module, *, may_lack: bool = False) -> list[str]:
    """Names of the model's layers, in order: of several lists, that of the text model's decoder.

    Raises:
        ConfigError: there is no such list, or several that could be meant.
    """
    decoder, wanted = pretrained.text_decoder(model), pretrained.text_layers(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is decoder), "")
    lists: dict[str, list[str]] = {}
    for name in listed_blocks(model):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:  # also one layer, or each of another class
            lists.setdefault(prefix + name, [f"{prefix}{name}.{index}" for index in range(wanted)])
    of_decoder = {name: members for name, members in lists.items() if name.startswith(prefix)}
    own = {name: members for name, members in of_decoder.items() if "." not in name.removeprefix(prefix)}
    nearest = [own, of_decoder] if pretrained.has_other_parts(model) else [own, of_decoder, lists]
    if pretrained.is_encoder_decoder(model):
        nearest = [lists]  # the last layers are the decoder's, and the first ones the encoder's
    else:
        nearest = [{name: near[name] for name in near if len(near[name]) == wanted} for near in nearest] + nearest
    for candidates in nearest:
        if len(candidates) == 1:
            return next(iter(candidates.values()))
    if may_lack:
        return [name for members in lists.values() for name in members]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers; name what is trained as extra_modules")
    raise ConfigError(
        f"{type(model).__name__} has several lists of layers ({', '.join(lists)}), and which are the language "
        "model's is not known; name what is trained of them as extra_modules"
    )


def _inside(modules: dict[str, nn.Module], blocks: Sequence[str], names: Sequence[str]) -> list[nn.Module]:
    parts = [
        (name.removeprefix(f"{block}."), module)
        for name, module in modules.items()
        for block in blocks
        if name.startswith(f"{block}.")
    ]
    return _named("trainable_modules: no module of the layers", parts, names)


def _outside(modules: dict[str, nn.Module], blocks: Sequence[str], names: Sequence[str]) -> list[nn.Module]:
    full = [name for name in names if name in modules]  # a full name is never ambiguous
    parts = [
        (name, module)
        for name, module in modules.items()
        if name and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    ]
    others = [name for name in names if name not in modules]
    return [modules[name] for name in full] + _named(
        "extra_modules: no module outside of the layers", parts, others
    )


def _named(none: str, parts: Sequence[tuple[str, nn.Module]], names: Sequence[str]) -> list[nn.Module]:
    """Return the modules with these names. Raises ConfigError for a name that matches nothing."""
    for wanted in names:
        if not any(matches(name, wanted) for name, _ in parts):
            raise ConfigError(f"{none} is named {wanted!r}{near(wanted, [name for name, _ in parts])}")
    return [module for name, module in parts if any(matches(name, wanted) for wanted in names)]


def matches(name: str, wanted: str) -> bool:
    """Whether a module's name is, or ends with, the one wanted."""
    return name == wanted or name.endswith(f".{wanted}")


def near(wanted: str, known: Iterable[str]) -> str:
    """The nearest of some names, as the end of a sentence: their last parts, or more where ``wanted`` has more."""
    parts = wanted.count(".") + 1
    ends = {".".join(name.split(".")[-parts:]) for name in known if name}
    ends = {end for end in ends if not end.isdigit()}
    found = difflib.get_close_matches(wanted, sorted(ends), n=3, cutoff=0.4)
    nearest = f"; the nearest are {', '.join(found)}" if found else ""
    return nearest or f"; there are {', '.join(sorted(ends)[:12])}"


@dataclass(frozen=True)
class Tuned:
    """A model on meta that is ready to be sharded, and what is known of how it will be filled.

    Attributes:
        model: what the user gets; PEFT's model, where there is an adapter.
        base: the model of transformers, to which ``fully_shard`` is applied.
        bindings: what the checkpoint offers, under the names that tensors have in ``model``.
        additions: what was put in.
        stays_whole: names of parameters that are to stay whole on every rank, with the reason.
        whole: these parameters themselves, once their dtypes are settled.
        notes: sentences for the report.
    """

    model: nn.Module
    base: PreTrainedModel
    bindings: Bindings
    additions: Additions = field(default_factory=Additions)
    stays_whole: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[nn.Parameter, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
