"""Models that ``from_pretrained`` has left on meta, and the files that their values are in.

[Note: Pending] Under FSDP a script calls ``from_pretrained`` on every rank, perhaps PEFT, makes an optimizer, and
only then ``prepare``, where it is settled how the model is sharded. So nothing is read before that.
``from_pretrained`` leaves the model on meta, ties what the files say is tied, initialises what they lack, and notes
for each parameter which expression over the files it is. Parameters are known again by identity: what PEFT puts in
gives them other names, and whatever replaces one (a resized vocabulary, a merge) has no values, which ``prepare``
tells. Nothing of this is collective: a rank may come to it before the others (``with main_process_first()``).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.conversion import Expression
from shardwise.engines.arguments import OpenSource, read_index
from shardwise.engines.bringing_up import decide_ties
from shardwise.engines.load_plan import LoadOptions
from shardwise.engines.outline import Outline, outline_of
from shardwise.errors import CoverageError
from shardwise.execution.world import World
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.models import pretrained
from shardwise.models.torch_words import buffers_of, parameters_of, writes_to
from shardwise.models.view import Held, look_inside
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.reading.opening import OpenStorage
from shardwise.tuning import peft_compat


@dataclass(frozen=True)
class Pending:
    """What a model on meta is to be filled with.

    Attributes:
        folder: of the files, on this machine.
        index: what their headers say.
        tensors: parameters and persistent buffers as they were left, by identity: each with what it is made of, and
            how often it had been written to.
        transforms: the conversions of keys.
    """

    folder: Path
    index: CheckpointIndex
    tensors: dict[int, tuple[torch.Tensor, Expression, int]]
    transforms: list[Any]

    def expression_of(self, tensor: torch.Tensor) -> Expression | None:
        """What a tensor is made of; None where it is not one of those that were left, as it was left."""
        left, expression, writes = self.tensors.get(id(tensor), (None, None, 0))
        if left is not tensor or expression is None or not tensor.is_meta:
            return None
        is_as_left = expression.shape == tuple(tensor.shape) and writes == writes_to(tensor)
        return expression if is_as_left else None


_pending: weakref.WeakKeyDictionary[nn.Module, Pending] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Awaited:
    """Of a model, or what was made of it: the expressions of its tensors, by name, and where they are read from."""

    pending: Pending
    expressions: dict[str, Expression]


def awaited_in(model: nn.Module) -> list[Awaited]:
    """All that is pending in a model and the models inside of it, by the names that tensors have now."""
    held = look_inside(model)
    copies = peft_compat.copied_names(model)
    found: list[Awaited] = []
    for module in model.modules():
        pending = _pending.get(module)
        if pending is None:
            continue
        by_name = {
            name: expression
            for item in held
            if (expression := pending.expression_of(item.tensor)) is not None
            for name in item.names
        }
        of_copies = {
            name: by_name[original]
            for name, original in copies.items()
            if original in by_name and _is_on_meta(held, name)
        }
        found.append(Awaited(pending, {**by_name, **of_copies}))
    return found


def settle(model: nn.Module) -> None:
    """Note that a model has got its values, and what saving has to know of how it got them."""
    for module in model.modules():
        pending = _pending.pop(module, None)
        if pending is not None:
            pretrained.record_conversions(module, pending.transforms)


def is_awaited(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of these is pending."""
    return any(pending.expression_of(tensor) is not None for pending in _pending.values() for tensor in tensors)


def load_later(
    original: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: list[str] | None,
    load_config: Any,
    *others: Any,
    **keywords: Any,
) -> Any:
    """What takes the place of transformers' reading: under FSDP a model is left on meta, and its files noted."""
    is_ours = (
        pretrained.loads_for_fsdp()
        and state_dict is None
        and checkpoint_files
        and len({Path(file).parent for file in checkpoint_files}) == 1
        and pretrained.is_plain_load(load_config)
        and pretrained.is_pretrained(model)
        and all(tensor.is_meta for tensor in model.parameters())
    )
    if not is_ours:
        return original(model, state_dict, checkpoint_files, load_config, *others, **keywords)
    assert checkpoint_files is not None
    folder = Path(checkpoint_files[0]).parent
    world, options = World(0, 1), LoadOptions(progress=False)
    names = [Path(file).name for file in checkpoint_files]
    # Files of torch's are known by their index alone, which has its usual name.
    is_named = len(names) == 1 or names[0].endswith(".safetensors")
    source = read_index(
        world,
        OpenStorage(LocalReader(folder), None),
        weights_name=names[0] if is_named else None,
        extra=names[1:] if is_named else (),
    )
    with source.closing():
        if {*source.index.files} != {*names}:
            return original(model, state_dict, checkpoint_files, load_config, *others, **keywords)
        transforms = list(load_config.weight_mapping or ())
        drawn = outline_of(model, source.index, pretrained.dtype_of_load(load_config), transforms)
        for sentence in drawn.bindings.faults:
            raise CoverageError(f"{folder}: {sentence}")
        _settle_ties(world, drawn, source, options)
    return _left(model, folder, drawn, source.index), None


def place_missing(original: Callable[..., Any], model: nn.Module, *given: Any, **keywords: Any) -> Any:
    """What takes the place of giving memory to what no file has: for what is pending the same on every rank."""
    with without_ram_efficient_loading() if model in _pending else nullcontext():
        return original(model, *given, **keywords)


def keep_adapter(original: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
    """What takes the place of PEFT's moving of a new adapter to its layer: beside one that is pending, it stays.

    (Its values are the first rank's, which on meta it would lose.)
    """
    layer = peft_compat.layer_among(given)
    if layer is None or not is_awaited(peft_compat.tensors_of_layer(layer)):
        return original(*given, **keywords)
    before = [(module, name, tensor) for module, name, tensor in _registered(layer) if not tensor.is_meta]
    outcome = original(*given, **keywords)
    now = {(module, name): tensor for module, name, tensor in _registered(layer)}
    for module, name, tensor in before:
        moved = now.get((module, name))
        if moved is not None and moved.is_meta:
            kept = tensor.detach().to(moved.dtype)
            is_parameter = isinstance(moved, nn.Parameter)
            value = nn.Parameter(kept, requires_grad=moved.requires_grad) if is_parameter else kept
            (parameters_of(module) if is_parameter else buffers_of(module))[name] = value
    return outcome


def _registered(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Each module in a model with the name and the tensor of what is registered in it."""
    for module in model.modules():
        for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
            if tensor is not None:
                yield module, name, tensor


def _settle_ties(world: World, drawn: Outline, source: OpenSource, options: LoadOptions) -> None:
    """Decide what transformers could not, with both names of a tie stored and their values on meta."""
    pairs = drawn.ties_stored_twice()
    untied, _ = decide_ties(world, drawn, pairs, source, options)
    for name in untied:
        pretrained.forget_tie(drawn.model, name)


def _left(model: Any, folder: Path, drawn: Outline, index: CheckpointIndex) -> Any:
    """Note what is pending; what transformers is to go on with."""
    offers = drawn.bindings_less_ties().offers
    held = look_inside(model)
    missing: set[str] = set()
    mismatched: set[tuple[str, Any, Any]] = set()
    tensors: dict[int, tuple[torch.Tensor, Expression, int]] = {}
    for item in held:
        if not item.kind.is_saved:
            continue
        for name in item.names:
            claims = offers.get(name, ())
            if not claims:
                missing.add(name)
            elif len(claims) > 1:
                raise CoverageError(f"{folder}: {name} is stored more than once")
            elif claims[0].shape != tuple(item.tensor.shape):
                mismatched.add((name, torch.Size(claims[0].shape), item.tensor.shape))
            else:
                tensors[id(item.tensor)] = (item.tensor, claims[0], writes_to(item.tensor))
                pretrained.mark_initialized(item.tensor)
    _pending[model] = Pending(folder, index, tensors, drawn.transforms)
    return pretrained.load_outcome(missing, set(drawn.bindings.unmatched.values()), mismatched)


def _is_on_meta(held: Sequence[Held], name: str) -> bool:
    return any(item.tensor.is_meta for item in held if name in item.names)


USE = "ACCELERATE_USE_FSDP"
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_set_here: set[str] = set()


def enable_fsdp_ram_efficient_loading() -> None:
    """Have transformers and accelerate load for FSDP; an ``ACCELERATE_USE_FSDP`` of the user's own is kept."""
    if USE not in os.environ:
        os.environ[USE] = "True"
        _set_here.add(USE)
    os.environ[EFFICIENT] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """The opposite; an ``ACCELERATE_USE_FSDP`` that was set by :func:`enable_fsdp_ram_efficient_loading` goes."""
    if USE in _set_here:
        _set_here.discard(USE)
        os.environ.pop(USE, None)
    os.environ[EFFICIENT] = "False"


@contextmanager
def fsdp_ram_efficient_loading() -> Iterator[None]:
    """For the time of the block both are on; afterwards both are as they were, also when it raises or is nested."""
    was_set_here = set(_set_here)
    with _set_to({USE: "True", EFFICIENT: "True"}):
        try:
            yield
        finally:
            _set_here.clear()
            _set_here.update(was_set_here)


def without_ram_efficient_loading() -> AbstractContextManager[None]:
    """For the time of a block it is off."""
    return _set_to({EFFICIENT: "False"})


@contextmanager
def _set_to(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def launched_ranks() -> int:
    """How many ranks a launcher has started, of which this process is one; 0 where it was started by none."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 0
