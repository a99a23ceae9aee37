"""An adapter that is there already: which of its tensors goes where, all or nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from shardwise.conversion import Expression
from shardwise.errors import CoverageError
from shardwise.models.selection import AdapterOnly, names_outside
from shardwise.models.view import Held

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
