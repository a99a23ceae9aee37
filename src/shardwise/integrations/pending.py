"""Leaves models on meta in ``from_pretrained``, and fills them shard by shard once accelerate has sharded them.

[Note: Pending] Under FSDP a script calls ``from_pretrained`` on every rank, perhaps adds PEFT, creates an
optimizer, and only then calls ``prepare``, which determines the sharding. So nothing is read before that.
``from_pretrained`` leaves the model on meta, ties the tensors that the files tie, initializes missing ones, and
records the expression of each parameter over the files. Parameters are recognized by identity, because PEFT renames
them. A replaced parameter (a resized vocabulary, a merge) has no values, which is an error of ``prepare``. None of
this is collective, because a rank may reach it before the others (``with main_process_first()``).

[Note: Filling] accelerate has the first rank read a model whole, and broadcast each tensor whole. Tensors that
``from_pretrained`` has left on meta (see [Note: Pending]) are read by every rank for itself. Those with values on
the first rank (an adapter, a new head, a model from elsewhere) are sent in shards.
"""

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.conversion.expression import Expression
from shardwise.engines.arguments import read_index
from shardwise.engines.load_plan import LoadOptions
from shardwise.engines.model_states import set_model_values
from shardwise.engines.outline import Outline, outline_of
from shardwise.engines.pretrained_loading import decide_ties
from shardwise.errors import ConfigError, KeyMismatchError, ShardingError
from shardwise.execution.state_values import BroughtValues, StateOptions, StoredValues, Values, by_canonical_names
from shardwise.execution.world import Clock, World
from shardwise.formats.contract import CheckpointIndex
from shardwise.integrations import accelerate_compat as compat
from shardwise.models import build, pretrained
from shardwise.models.rebind import Bound, bind_optimizers, plain_optimizer, require_steps_shards
from shardwise.models.torch_api import buffers_of, parameters_of, writes_to
from shardwise.models.view import collect_tensors, without_compile
from shardwise.planning.load_plan import Ignore
from shardwise.planning.matching import Tolerance
from shardwise.storage.reading import LocalReader, OpenStorage
from shardwise.tuning import peft_compat


@dataclass(frozen=True)
class Pending:
    """Files and expressions that a model on meta is to be filled with.

    Attributes:
        folder: of the files, on this machine.
        index: index of their headers.
        tensors: parameters and persistent buffers by identity: the expression of each, and its version counter.
        transforms: the conversions of keys.
    """

    folder: Path
    index: CheckpointIndex
    tensors: dict[int, tuple[torch.Tensor, Expression, int]]
    transforms: list[Any]

    def expression_of(self, tensor: torch.Tensor) -> Expression | None:
        """Return the expression of a tensor, or None if it is not an unchanged pending one."""
        left, expression, writes = self.tensors.get(id(tensor), (None, None, 0))
        if left is not tensor or expression is None or not tensor.is_meta:
            return None
        is_as_left = expression.shape == tuple(tensor.shape) and writes == writes_to(tensor)
        return expression if is_as_left else None


_pending: weakref.WeakKeyDictionary[nn.Module, Pending] = weakref.WeakKeyDictionary()


Awaited: TypeAlias = tuple[Pending, dict[str, Expression]]
"""Of a model, or what was made of it: where its tensors are read from, and the expressions of these by name."""


def awaited_in(model: nn.Module) -> list[Awaited]:
    """All that is pending in a model and the models inside of it, by the names that tensors have now."""
    held = collect_tensors(model)
    on_meta = {name for item in held for name in item.names if item.tensor.is_meta}
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
            name: by_name[original] for name, original in copies.items() if original in by_name and name in on_meta
        }
        found.append((pending, {**by_name, **of_copies}))
    return found


def settle(model: nn.Module) -> None:
    """Record that a model has got its values, and facts that saves need."""
    for module in model.modules():
        pending = _pending.pop(module, None)
        if pending is not None:
            pretrained.record_conversions(module, pending.transforms)


def load_later(
    original: compat.Original,
    model: Any,
    state_dict: Any,
    checkpoint_files: list[str] | None,
    load_config: Any,
    *others: Any,
    **keywords: Any,
) -> Any:
    """Replace transformers' reading: under FSDP a model is left on meta, and its files noted."""
    is_ours = (
        build.loads_for_fsdp()
        and state_dict is None
        and checkpoint_files
        and len({Path(file).parent for file in checkpoint_files}) == 1
        and build.is_plain_load(load_config)
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
        drawn = outline_of(model, source.index, build.dtype_of_load(load_config), transforms)
        for sentence in drawn.bindings.faults:
            raise KeyMismatchError(f"{folder}: {sentence}")
        # Both names of a tie may be stored, and what transformers compares is on meta.
        untied, _ = decide_ties(world, drawn, drawn.ties_stored_twice(), source, options)
        for name in untied:
            drawn.model.all_tied_weights_keys.pop(name, None)
    return _left(model, folder, drawn, source.index), None


def place_missing(original: compat.Original, model: nn.Module, *given: Any, **keywords: Any) -> Any:
    """Replace the function that gives memory to missing tensors: for pending models the same on every rank."""
    with _set_to({EFFICIENT: "False"}) if model in _pending else nullcontext():
        return original(model, *given, **keywords)


def keep_adapter(original: compat.Original, *given: Any, **keywords: Any) -> Any:
    """Replace PEFT's move of a new adapter to its layer: the adapter of a pending layer stays in place.

    (Its values are the first rank's, which on meta it would lose.)
    """
    layer = peft_compat.layer_among(given)
    base: Any = layer
    if layer is None or not any(
        one.expression_of(tensor) is not None
        for one in _pending.values()
        for tensor in base.get_base_layer().parameters()
    ):
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
    """Yield each module in a model with the name and the tensor of its registered tensors."""
    for module in model.modules():
        for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
            if tensor is not None:
                yield module, name, tensor


def _left(model: Any, folder: Path, drawn: Outline, index: CheckpointIndex) -> Any:
    """Record the pending tensors. Return the loading info for transformers."""
    offers = drawn.bindings_less_ties().offers
    held = collect_tensors(model)
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
                raise KeyMismatchError(f"{folder}: {name} is stored more than once")
            elif claims[0].shape != tuple(item.tensor.shape):
                mismatched.add((name, torch.Size(claims[0].shape), item.tensor.shape))
            else:
                tensors[id(item.tensor)] = (item.tensor, claims[0], writes_to(item.tensor))
                pretrained.mark_initialized(item.tensor)
    _pending[model] = Pending(folder, index, tensors, drawn.transforms)
    return build.load_outcome(missing, set(drawn.bindings.unmatched.values()), mismatched)


USE = "ACCELERATE_USE_FSDP"
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_set_here: set[str] = set()


def enable_fsdp_ram_efficient_loading() -> None:
    """Have transformers and accelerate load for FSDP. The user's own ``ACCELERATE_USE_FSDP`` is kept."""
    if USE not in os.environ:
        os.environ[USE] = "True"
        _set_here.add(USE)
    os.environ[EFFICIENT] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Undo :func:`enable_fsdp_ram_efficient_loading`, including the ``ACCELERATE_USE_FSDP`` that it set."""
    if USE in _set_here:
        _set_here.discard(USE)
        os.environ.pop(USE, None)
    os.environ[EFFICIENT] = "False"


@contextmanager
def fsdp_ram_efficient_loading() -> Iterator[None]:
    """Turn both on within the block, and restore them afterwards, also if it raises or is nested."""
    was_set_here = set(_set_here)
    with _set_to({USE: "True", EFFICIENT: "True"}):
        try:
            yield
        finally:
            _set_here.clear()
            _set_here.update(was_set_here)


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
    """Return the number of ranks of the launcher that started this process, or 0 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 0


_awaited: weakref.WeakKeyDictionary[nn.Module, list[Awaited]] = weakref.WeakKeyDictionary()
"""What models wait for that are being prepared: once they are wrapped, their parameters are other objects."""

_FILLING_BUDGET_BYTES = 256 << 20


def prepare_fsdp2(original: compat.Original, accelerator: Any, *objects: Any) -> Any:
    """Replace accelerate's sharding: its own, around which the optimizers are bound by identity.

    (accelerate identifies parameters by their data pointer, which meta tensors do not have.)

    Collective: yes, over all ranks.

    Raises:
        ShardingError: an optimizer holds tensors that are not parameters of the model, or has stepped already.
        ConfigError: the model is on meta, and the plugin does not load it.
        RankMismatchError: it is so on some ranks only.
    """
    models = [item for item in objects if isinstance(item, nn.Module)]
    if len(models) != 1:
        return original(accelerator, *objects)
    model = without_compile(models[0])
    optimizers = [plain_optimizer(item) for item in objects if isinstance(item, Optimizer)]
    with World.current(call="prepare") as world:
        bounds, found = world.run_all(_look, accelerator, model, optimizers)
        left = [sorted(expressions) for _, expressions in found]
        world.require_equal(left, "the list of tensors that from_pretrained has left on meta")
    if found:
        _awaited[model] = found
    try:
        result = original(accelerator, *objects)
    finally:
        _awaited.pop(model, None)
    _rebind(model, bounds)
    return result


def load_full_state_dict(
    original: compat.Original,  # noqa: ARG001 - nothing of it is done
    accelerator: Any,  # noqa: ARG001
    model: nn.Module,
    full_sd: Mapping[str, torch.Tensor],
    *others: Any,  # noqa: ARG001 - where shards are to lie is asked of FSDP2
    **keywords: Any,  # noqa: ARG001
) -> nn.Module:
    """Replace the broadcast of a whole state dict to a model that is sharded on meta.

    Collective: yes, over all ranks.
    Memory: this rank's shards, and 256 MiB of staging.

    Raises:
        ShardingError: tensors have values neither on the first rank nor in files.
        KeyMismatchError, RankMismatchError, StorageError: as of :func:`~shardwise.engines.loading.load`.
    """
    plain = without_compile(model)
    awaited = _awaited.get(plain, [])
    options = StateOptions(budget_bytes=_FILLING_BUDGET_BYTES)
    in_files = {name for _, expressions in awaited for name in expressions}
    with World.current(call="prepare") as world, torch.no_grad(), torch.device("cpu"), ExitStack() as stack:
        live = world.run_all(_live, full_sd, in_files)
        has_live = world.broadcast(_refuse_lost, full_sd, live, in_files)
        for pending, expressions in awaited:
            reader = stack.enter_context(world.run_all(partial(LocalReader, pending.folder)))
            _set(world, plain, StoredValues(reader, pending.index, expressions, options.budget_bytes), options)
        if has_live:
            _set(world, plain, BroughtValues(live if world.rank == 0 else {}), options)
    settle(plain)
    return model


def _look(accelerator: Any, model: nn.Module, optimizers: list[Optimizer]) -> tuple[list[Bound], list[Awaited]]:
    held = collect_tensors(model)
    require_steps_shards(optimizers)
    bounds = bind_optimizers(optimizers, held)
    for bound in bounds:
        if bound.tensors or bound.scalars:
            raise ShardingError(
                f"optimizer {bound.index} ({type(bound.optimizer).__name__}) has stepped already, and accelerate "
                "would lose its state. Prepare it before its first step, and load its state afterwards"
            )
    found = awaited_in(model)
    plugin = compat.plugin_of(accelerator)
    if found and not plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            f"{type(model).__name__} was left on meta by from_pretrained, since FSDP_CPU_RAM_EFFICIENT_LOADING was "
            "set, but the plugin has cpu_ram_efficient_loading=False. Set both, or neither"
        )
    return bounds, found


def _rebind(model: nn.Module, bounds: list[Bound]) -> None:
    """Give optimizers the parameters that have taken the places of theirs."""
    now = {name: item.tensor for item in collect_tensors(model) for name in item.names}
    for bound in bounds:
        for names, group in zip(bound.groups, bound.optimizer.param_groups, strict=True):
            group["params"] = [now[name] for name in names]


def _live(full_sd: Mapping[str, torch.Tensor], in_files: set[str]) -> dict[str, torch.Tensor]:
    """Return tensors that have values here and are in no file, by canonical names."""
    named = by_canonical_names({name: value for name, value in full_sd.items() if not value.is_meta}, "the model")
    return {name: value for name, value in named.items() if name not in in_files}


def _refuse_lost(full_sd: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], in_files: set[str]) -> bool:
    """Raise for tensors without values anywhere. Return whether some have values here."""
    on_meta = {name: value for name, value in full_sd.items() if value.is_meta}
    lost = [name for name in by_canonical_names(on_meta, "the model") if name not in in_files and name not in live]
    if lost:
        raise ShardingError(
            f"{', '.join(lost[:5])}{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}: on meta, in no file, "
            "made or changed from weights that from_pretrained had not read yet (a vocabulary that was resized, "
            "an adapter that begins with the base's weights, a copy of the model). Do that by "
            "shardwise.from_pretrained(resize_vocab=, tuning=), or set cpu_ram_efficient_loading=False"
        )
    return bool(live)


def _set(world: World, model: nn.Module, values: Values, options: StateOptions) -> None:
    """Give those tensors their values that there are some for, and leave all others."""
    tolerance = Tolerance(Ignore(), "error", "error")
    set_model_values(world, model, values, only=None, tolerance=tolerance, options=options, clock=Clock())
