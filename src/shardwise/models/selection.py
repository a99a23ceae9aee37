"""Which tensors of a model belong to its state, and by which names they go outside."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.errors import ConfigError, PlacementError
from shardwise.models.view import Held, canonical, saved_names


@dataclass(frozen=True, slots=True)
class Everything:
    """All parameters and persistent buffers, by the names that ``state_dict()`` of the plain model has."""


@dataclass(frozen=True, slots=True)
class AdapterOnly:
    """One adapter of a PEFT model, by the names that PEFT's files have, in which the adapter's own is left out.

    What belongs to it is PEFT's decision: LoRA matrices, ``modules_to_save``, embeddings that were resized.
    """

    adapter: str = "default"


Selection: TypeAlias = Everything | AdapterOnly

_IN_PEFT_MODEL = "base_model.model."


def names_outside(model: nn.Module, held: Sequence[Held], selection: Selection) -> dict[str, str]:
    """Every name of the state, to the canonical FQN of its tensor, in order.

    ``AdapterOnly`` may have PEFT ask the hub whether the base model's vocabulary had another size.

    Raises:
        ConfigError: the model has no such adapter.
        PlacementError: PEFT changes tensors, rather than choosing and renaming them.
    """
    inside = saved_names(model, held)
    if isinstance(selection, Everything):
        return _plain({name: canonical(name) for name in inside})
    return _as_peft_names_them(model, inside, selection.adapter)


def _as_peft_names_them(model: nn.Module, inside: Mapping[str, Held], adapter: str) -> dict[str, str]:
    """PEFT is asked with stand-ins, and what it returns is known again by identity."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or adapter not in adapters:
        has = f"the model has {', '.join(adapters) or 'none'}" if isinstance(adapters, Mapping) else "it has none"
        raise ConfigError(f"AdapterOnly(adapter={adapter!r}): {type(model).__name__} has no such adapter; {has}")
    stand_ins = {
        name: torch.empty(item.tensor.shape, dtype=item.tensor.dtype, device="meta")
        for name, item in inside.items()
    }
    known = {id(stand_in): canonical(name) for name, stand_in in stand_ins.items()}
    chosen = _ask_peft(model, stand_ins, adapter)
    changed = [name for name, tensor in chosen.items() if id(tensor) not in known]
    if changed:
        raise PlacementError(
            f"PEFT computes {changed[0]} ({len(changed)} in all) when it saves adapter {adapter!r}: it is no "
            "tensor of the model; take the whole state, with only=Everything()"
        )
    # PEFT's files have names as in PEFT's model, also where transformers has added the adapter to its own.
    prefix = "" if hasattr(model, "get_base_model") else _IN_PEFT_MODEL
    return _plain({prefix + name: known[id(tensor)] for name, tensor in chosen.items()})


def _plain(names: Mapping[str, str]) -> dict[str, str]:
    """The same by canonical names.

    Raises:
        PlacementError: two names are one without what wrappers put in.
    """
    found: dict[str, str] = {}
    for name, fqn in names.items():
        plain = canonical(name)
        if plain in found:
            raise PlacementError(
                f"{name}: another tensor is named {plain} without the parts of wrappers; rename a module, since a "
                "state has one tensor for a name"
            )
        found[plain] = fqn
    return found


def _ask_peft(model: Any, state: dict[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict  # optional, and slow to import

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers` to `True`")
        # PEFT 0.20 looks for the config of a base that has no name, too.
        warnings.filterwarnings("ignore", message="Could not find a config file in  - will assume")
        chosen: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    return chosen


def has_adapters(model: nn.Module) -> bool:
    """Whether adapters of PEFT's are in a model, so that its tensors are not those of its class's checkpoints."""
    return hasattr(model, "peft_config")
