"""Leaves models on meta in ``from_pretrained``, and fills their shards once accelerate has sharded them.

[Note: Pending] Under FSDP a script calls ``from_pretrained`` on every rank, perhaps adds PEFT, creates an
optimizer, and only then calls ``prepare``, which determines the sharding. So nothing is read before that.
``from_pretrained`` leaves the model on meta, ties the tensors that the files tie, initializes missing ones, and
records the expression of each parameter over the files. Parameters are recognized by identity, because PEFT renames
them. A replaced parameter (a resized vocabulary, a merge) has no values, which is an error of ``prepare``. None of
this is collective, because a rank may reach it before the others (``with main_process_first()``).

[Note: Filling] accelerate's first rank reads a whole model and broadcasts each whole tensor. Tensors that
``from_pretrained`` has left on meta (see [Note: Pending]) are read by every rank for itself. Those with values on
the first rank (an adapter, a new head, another model) are sent in shards.
"""

import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.consents import Consent, Ignore
from shardwise.core.errors import ConfigError, KeyMismatchError, ShardingError
from shardwise.core.expression import Expression
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.local_reader import LocalReader, OpenStorage
from shardwise.fsdp.named_tensors import abbreviate, collect_tensors, unwrap
from shardwise.fsdp.rebind import Bound, bind_optimizers, plain_optimizer, require_steps_shards
from shardwise.fsdp.torch_private import get_buffers, get_parameters, get_version
from shardwise.integrations import accelerate_compat as compat
from shardwise.loading.from_pretrained import decide_ties
from shardwise.loading.meta_model import MetaModel, bind_checkpoint
from shardwise.loading.prepare import LoadOptions
from shardwise.loading.source import read_index
from shardwise.models import build, pretrained
from shardwise.models.lora import peft_private
from shardwise.ranks.world import Clock, World
from shardwise.state.model_states import set_model_values
from shardwise.state.state_values import ProvidedValues, StateOptions, StoredValues, Values, by_canonical_names


@dataclass(frozen=True)
class Pending:
    """Files and expressions that a model on meta will be filled from.

    Attributes:
        folder: folder of the files, on this machine.
        index: index of their headers.
        tensors: parameters and persistent buffers by identity, with their expressions and version counters.
        transforms: conversions of keys.
    """

    folder: Path
    index: CheckpointIndex
    tensors: dict[int, tuple[torch.Tensor, Expression, int]]
    transforms: list[Any]

    def get_expression(self, tensor: torch.Tensor) -> Expression | None:
        """Return the expression of a tensor, or None if it is not an unchanged pending one."""
        # An id may be that of another tensor by now, so the object is compared, too. A write since then (an
        # initialization in place) has changed the version counter.
        recorded, expression, writes = self.tensors.get(id(tensor), (None, None, 0))
        if recorded is not tensor or expression is None or not tensor.is_meta:
            return None
        is_unchanged = expression.shape == tuple(tensor.shape) and writes == get_version(tensor)
        return expression if is_unchanged else None


_pending: weakref.WeakKeyDictionary[nn.Module, Pending] = weakref.WeakKeyDictionary()


PendingTensors: TypeAlias = tuple[Pending, dict[str, Expression]]
"""Files of a pending model, and the expressions of its tensors by their current names."""


def collect_pending(model: nn.Module) -> list[PendingTensors]:
    """Return the pending tensors of a model and the models inside of it."""
    tensors = collect_tensors(model)
    on_meta = {name for item in tensors for name in item.names if item.tensor.is_meta}
    copies = peft_private.map_copied_names(model)
    result: list[PendingTensors] = []
    for module in model.modules():  # the model itself, or one inside of PEFT's
        pending = _pending.get(module)
        if pending is None:
            continue
        expressions: dict[str, Expression] = {}
        for item in tensors:
            expression = pending.get_expression(item.tensor)
            if expression is not None:
                expressions |= dict.fromkeys(item.names, expression)
        # PEFT's copies of modules (modules_to_save) are other tensors, which begin with the original's values.
        for name, original in copies.items():
            if original in expressions and name in on_meta:
                expressions[name] = expressions[original]
        result.append((pending, expressions))
    return result


def record_filled(model: nn.Module) -> None:
    """Record that a model is filled, and the conversions that saves need."""
    for module in model.modules():
        pending = _pending.pop(module, None)
        if pending is not None:
            pretrained.record_conversions(module, pending.transforms)


def defer_load(
    original: compat.Original,
    model: Any,
    state_dict: Any,
    checkpoint_files: list[str] | None,
    load_config: Any,
    *others: Any,
    **keywords: Any,
) -> Any:
    """Replace transformers' reading: under FSDP a model stays on meta, and its files are recorded."""
    # transformers reads all else: a state dict in memory, files of several folders, quantized weights, a model with
    # a device map or a mesh.
    is_supported = (
        build.loads_for_fsdp()
        and state_dict is None
        and checkpoint_files
        and len({Path(file).parent for file in checkpoint_files}) == 1
        and build.is_plain_load(load_config)
        and all(tensor.is_meta for tensor in model.parameters())
    )
    if not is_supported:
        return original(model, state_dict, checkpoint_files, load_config, *others, **keywords)
    assert checkpoint_files is not None
    folder = Path(checkpoint_files[0]).parent
    # A world of this rank alone: others may get here later, or not at all ([Note: Pending]).
    world, options = World(0, 1), LoadOptions(progress=False)
    names = [Path(file).name for file in checkpoint_files]
    # Several .bin files are found by their index, which has its usual name.
    is_named = len(names) == 1 or names[0].endswith(".safetensors")
    with LocalReader(folder) as reader:
        source = read_index(
            world,
            OpenStorage(reader, None),
            weights_name=names[0] if is_named else None,
            extra=names[1:] if is_named else (),
        )
        if {*source.index.files} != {*names}:
            return original(model, state_dict, checkpoint_files, load_config, *others, **keywords)
        transforms = list(load_config.weight_mapping or ())
        outline = bind_checkpoint(model, source.index, build.get_load_dtype(load_config), transforms)
        if outline.bindings.errors:
            raise KeyMismatchError(f"{folder}: {next(iter(outline.bindings.errors))}")
        # Both names of a tie may be stored, and transformers would compare tensors on meta.
        untied, _ = decide_ties(world, outline, outline.ties_stored_twice(), source, options)
        for name in untied:
            outline.model.all_tied_weights_keys.pop(name, None)
    return _record(model, folder, outline, source.index), None


def place_missing(original: compat.Original, model: nn.Module, *others: Any, **keywords: Any) -> Any:
    """Replace the function that allocates missing tensors: for pending models the same on every rank."""
    if model not in _pending:
        return original(model, *others, **keywords)
    # With the variable, ranks other than the first of a machine would leave missing parameters on meta.
    with compat.patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="False"):
        return original(model, *others, **keywords)


def keep_adapter(original: compat.Original, *args: Any, **keywords: Any) -> Any:
    """Replace PEFT's move of a new adapter to its layer: the adapter of a pending layer keeps its values.

    They are the first rank's, and would be lost on meta.
    """
    layer: Any = peft_private.find_adapter_layer(args)
    if layer is None or not _is_pending(layer):
        return original(*args, **keywords)
    # By module and name, because the original may replace the tensors by others.
    before = _get_registered(layer)
    outcome = original(*args, **keywords)
    for (module, name), moved in _get_registered(layer).items():
        tensor = before.get((module, name))
        if tensor is not None and not tensor.is_meta and moved.is_meta:
            value = tensor.detach().to(moved.dtype)
            if isinstance(moved, nn.Parameter):
                get_parameters(module)[name] = nn.Parameter(value, requires_grad=moved.requires_grad)
            else:
                get_buffers(module)[name] = value
    return outcome


def _is_pending(layer: Any) -> bool:
    """Return whether a parameter under an adapter's layer will be read from files."""
    for pending in _pending.values():
        for tensor in layer.get_base_layer().parameters():
            if pending.get_expression(tensor) is not None:
                return True
    return False


def _get_registered(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Return the registered tensors of all modules in a model."""
    tensors: dict[tuple[nn.Module, str], torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in [*get_parameters(module).items(), *get_buffers(module).items()]:
            if tensor is not None:  # a name without a tensor, such as the bias of a Linear without one
                tensors[module, name] = tensor
    return tensors


def _record(model: Any, folder: Path, outline: MetaModel, index: CheckpointIndex) -> Any:
    """Record the pending tensors. Return the loading info for transformers."""
    # A name that will be tied counts as missing, as in transformers, which ties it after this.
    matched = outline.bindings_less_ties().matched
    missing: set[str] = set()
    mismatched: set[tuple[str, Any, Any]] = set()
    tensors: dict[int, tuple[torch.Tensor, Expression, int]] = {}
    for item in collect_tensors(model):
        if not item.kind.is_saved:
            continue
        for name in item.names:
            stored = matched.get(name, ())
            if not stored:
                missing.add(name)
            elif len(stored) > 1:
                raise KeyMismatchError(f"{folder}: {name} is stored more than once")
            elif stored[0].shape != tuple(item.tensor.shape):
                mismatched.add((name, torch.Size(stored[0].shape), item.tensor.shape))
            else:
                tensors[id(item.tensor)] = (item.tensor, stored[0], get_version(item.tensor))
                pretrained.mark_initialized(item.tensor)
    _pending[model] = Pending(folder, index, tensors, outline.transforms)
    return build.load_outcome(missing, set(outline.bindings.unmatched.values()), mismatched)


def count_launched_ranks() -> int:
    """Return the number of ranks of the launcher that started this process, or 0 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 0


_in_prepare: weakref.WeakKeyDictionary[nn.Module, list[PendingTensors]] = weakref.WeakKeyDictionary()
"""Pending tensors of models in ``prepare``. Once a model is sharded, its parameters are other objects."""

_FILLING_BUDGET_BYTES = 256 << 20


def prepare_fsdp2(original: compat.Original, accelerator: Any, *objects: Any) -> Any:
    """Replace accelerate's sharding: call it, and bind the optimizers by identity.

    accelerate identifies parameters by their data pointers, which meta tensors do not have.

    Collective: yes, over all ranks.

    Raises:
        ShardingError: an optimizer holds tensors that are not parameters of the model, or has stepped already.
        ConfigError: the model is on meta, and the plugin does not load it.
        RankMismatchError: ranks have left different tensors on meta.
    """
    models = [item for item in objects if isinstance(item, nn.Module)]
    if len(models) != 1:
        return original(accelerator, *objects)
    model = unwrap(models[0])
    optimizers = [plain_optimizer(item) for item in objects if isinstance(item, Optimizer)]
    with World.current(call="prepare") as world:
        with world.collective("bind the optimizer"):
            bounds, pending_here = _bind(accelerator, model, optimizers)
        names = [sorted(expressions) for _, expressions in pending_here]
        world.require_equal(names, "the list of tensors that from_pretrained has left on meta")
    if pending_here:
        _in_prepare[model] = pending_here  # for load_full_state_dict, which accelerate calls once it has sharded
    try:
        result = original(accelerator, *objects)
    finally:
        _in_prepare.pop(model, None)
    # Last: only now are the model's parameters those that the optimizers step.
    _rebind(model, bounds)
    return result


def load_full_state_dict(
    original: compat.Original,  # noqa: ARG001 - replaced as a whole
    accelerator: Any,  # noqa: ARG001
    model: nn.Module,
    full_sd: Mapping[str, torch.Tensor],
    *others: Any,  # noqa: ARG001 - FSDP2 determines the devices of shards
    **keywords: Any,  # noqa: ARG001
) -> nn.Module:
    """Replace the broadcast of a whole state dict to a model that is sharded on meta.

    Collective: yes, over all ranks.
    Memory: this rank's shards, and 256 MiB of staging.

    Raises:
        ShardingError: tensors have values neither on the first rank nor in files.
        KeyMismatchError, RankMismatchError, StorageError: as of :func:`~shardwise.loading.load.load`.
    """
    plain = unwrap(model)
    pending_here = _in_prepare.get(plain, [])
    options = StateOptions(budget_bytes=_FILLING_BUDGET_BYTES)
    in_files = {name for _, expressions in pending_here for name in expressions}
    with World.current(call="prepare") as world, torch.no_grad(), torch.device("cpu"), ExitStack() as stack:
        with world.collective("look up live tensors"):
            # Tensors that have values on this rank and are in no file, by canonical names.
            with_values = {name: value for name, value in full_sd.items() if not value.is_meta}
            named = by_canonical_names(with_values, "the model")
            live = {name: value for name, value in named.items() if name not in in_files}
        with world.broadcast("check for values") as exchange:
            if world.rank == 0:
                exchange.local = _require_values(full_sd, live, in_files)
        has_live: bool = exchange.result
        # First what is in files: each rank reads the bytes of its shards. Then what the first rank alone has.
        for pending, expressions in pending_here:
            with world.collective("open the folder"):
                reader = stack.enter_context(LocalReader(pending.folder))
            _set_values(
                world, plain, StoredValues(reader, pending.index, expressions, options.budget_bytes), options
            )
        if has_live:
            _set_values(world, plain, ProvidedValues(live if world.rank == 0 else {}), options)
    record_filled(plain)
    return model


def _bind(
    accelerator: Any, model: nn.Module, optimizers: list[Optimizer]
) -> tuple[list[Bound], list[PendingTensors]]:
    """Return the optimizers with their parameters by name, and the model's pending tensors."""
    require_steps_shards(optimizers)
    bounds = bind_optimizers(optimizers, collect_tensors(model))
    for bound in bounds:
        if bound.tensors or bound.scalars:
            raise ShardingError(
                f"optimizer {bound.index} ({type(bound.optimizer).__name__}) has stepped already, and accelerate "
                "would lose its state. Prepare it before its first step, and load its state afterwards"
            )
    pending_here = collect_pending(model)
    if pending_here and not compat.get_plugin(accelerator).cpu_ram_efficient_loading:
        raise ConfigError(
            f"{type(model).__name__} was left on meta by from_pretrained, since FSDP_CPU_RAM_EFFICIENT_LOADING was "
            "set, but the plugin has cpu_ram_efficient_loading=False. Set both, or neither"
        )
    return bounds, pending_here


def _rebind(model: nn.Module, bounds: list[Bound]) -> None:
    """Give the optimizers the model's new parameters."""
    # The names are those of ``bounds``, which were collected before sharding. It replaces the parameters only.
    parameters = {name: item.tensor for item in collect_tensors(model) for name in item.names}
    for bound in bounds:
        for names, group in zip(bound.groups, bound.optimizer.param_groups, strict=True):
            group["params"] = [parameters[name] for name in names]


def _require_values(
    full_sd: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], in_files: set[str]
) -> bool:
    """Raise ShardingError for tensors without values anywhere. Return whether some have values on this rank."""
    on_meta = {name: value for name, value in full_sd.items() if value.is_meta}
    lost = [name for name in by_canonical_names(on_meta, "the model") if name not in in_files and name not in live]
    if lost:
        raise ShardingError(
            f"{abbreviate(lost)}: on meta, in no file, made of weights that from_pretrained had not read yet (a "
            "resized vocabulary, an adapter initialized from the base, a copy of the model). Use "
            "shardwise.from_pretrained(resize_vocab=, tuning=), or set cpu_ram_efficient_loading=False"
        )
    return bool(live)


def _set_values(world: World, model: nn.Module, values: Values, options: StateOptions) -> None:
    """Set the tensors that there are values for. Others are unchanged."""
    consent = Consent(missing=Ignore())
    set_model_values(world, model, values, only=None, consent=consent, options=options, clock=Clock())
