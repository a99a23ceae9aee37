"""Tries what an optimizer does to a sharded matrix, and refuses parameters that would differ from rank to rank.

An optimizer that treats each element for itself does the same to shards as to the whole, one that looks at a whole
matrix may do so by DTensor's operations, or take a shard for the whole, or fail. Which, depends on torch's version
and on code of others. So it is tried; and since that code may fail on one rank alone, ranks meet before each of its
collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.errors import ConfigError, PlacementError
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.collectives import in_agreed_collectives
from shardwise.execution.ranks.world import World
from shardwise.layout import TensorKind
from shardwise.models.optimizers.rebind import look_at
from shardwise.models.optimizers.reduced import why_whole
from shardwise.models.replicated import is_averaged
from shardwise.models.view import Held, Slot, canonical
from shardwise.report.names import collapse
from shardwise.training.optimizing.optimizers import OptimizerRecipe, optimizers_of
from shardwise.training.options import TrainOptions

_WIDTH = 64
_STEPS = 2

_TOLERANCE = 0.1
"""Of what the steps change: Muon computes in bfloat16, and in another order on shards."""


def require_optimizer(options: TrainOptions) -> None:
    """Refuse an optimizer that there is none of, or that cannot step, or that does something else to shards.

    Or that keeps what no checkpoint can hold: state that is neither of the shape of its parameter, nor one number,
    nor known to be reduced (:mod:`~shardwise.models.optimizers.reduced`).

    Collective: yes, over the default process group; two steps of a matrix of two rows for each rank.

    Raises:
        ConfigError: naming the optimizer.
        DisagreementError: it asks for other collectives on some ranks than on the others.

    Every error is the same on every rank, and none waits for one that has failed.
    """
    world = World.current()
    device = this_device()
    recipes = world.together(lambda: optimizers_of(options))
    mesh = init_device_mesh(device.type, (world.size,)) if world.size > 1 else None
    for recipe in recipes.values():
        in_agreed_collectives(world, partial(_try, recipe, world, mesh, device))


def _try(recipe: OptimizerRecipe, world: World, mesh: DeviceMesh | None, device: torch.device) -> None:
    told = f"optimizer.name={recipe.name!r}"
    if mesh is not None and (why := why_whole(recipe.kind)):
        raise ConfigError(why)
    # Of several ranks the last one has a shard of another size; of one rank it is a matrix that is worth packing.
    rows, width = 2 * world.size - 1 if world.size > 1 else _WIDTH + 1, _WIDTH
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(rows, width, generator=draw)
    gradients = [torch.randn(rows, width, generator=draw) for _ in range(_STEPS)]
    whole = nn.Parameter(before.to(device, copy=True))
    _step(recipe, told, whole, [each.to(device) for each in gradients], "a matrix")
    if mesh is None:
        return
    part = nn.Parameter(_sharded(before.to(device), mesh))
    _step(recipe, told, part, [_sharded(each.to(device), mesh) for each in gradients], "a sharded matrix")
    ours = _rows_of(whole.detach(), world)
    assert isinstance(part, DTensor)
    found = part.to_local().detach()
    change = float((whole.detach().cpu() - before).abs().max())
    off = float((found - ours).abs().max()) if found.numel() else 0.0
    if not off <= _TOLERANCE * change:
        raise ConfigError(
            f"{told}: what it does to a matrix that is sharded over {world.size} ranks is something else than what "
            f"it does to the whole one (off by {off:.2g} of {change:.2g}); take another optimizer, such as adamw"
        )


def _step(
    recipe: OptimizerRecipe, told: str, parameter: nn.Parameter, gradients: list[torch.Tensor], what: str
) -> None:
    optimizer = recipe.of({"matrix": parameter})
    try:
        with torch.compiler.set_stance("force_eager"):  # some compile their steps, shape by shape
            for gradient in gradients:
                parameter.grad = gradient
                optimizer.step()
    except Exception as error:  # whatever an optimizer raises: there is one step that it cannot take
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{told}: it cannot take a step with {what} ({type(error).__name__}: {first}); take another optimizer, "
            "such as adamw"
        ) from error
    _require_kept(told, optimizer, parameter)


def _require_kept(told: str, optimizer: Optimizer, parameter: nn.Parameter) -> None:
    held = [Held(parameter, TensorKind.PARAMETER, [Slot(nn.Module(), "matrix", "a matrix")])]
    try:
        look_at([optimizer], held, "take another optimizer, such as adamw", by_rank=True)
    except PlacementError as error:
        why = str(error).partition("\n")[2].strip()
        raise ConfigError(f"{told}: it keeps what checkpoints cannot hold: {why}") from error


def _sharded(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        _rows_of(whole, World.current()).contiguous(),
        mesh,
        (Shard(0),),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _rows_of(whole: torch.Tensor, world: World) -> torch.Tensor:
    """This rank's part, as FSDP2 deals rows."""
    chunks = whole.chunk(world.size)
    return chunks[world.rank] if world.rank < len(chunks) else whole[:0]


_SHOWN = 8


def require_synchronised(model: nn.Module, world: World) -> None:
    """Refuse trained parameters whose gradients the ranks would keep to themselves.

    Right are those that ``fully_shard`` (or another user of DTensors) has spread over all ranks, whole ones that
    :func:`~shardwise.models.replicated.average_replicated_gradients` looks after, and those in torch's
    DistributedDataParallel.

    Collective: no; the same on every rank where models are.

    Raises:
        ConfigError: naming them.
    """
    if world.size == 1:
        return
    cared_for = {
        parameter
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
        for parameter in module.parameters()
    }
    alone: list[str] = []
    elsewhere: list[str] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.numel() or parameter in cared_for:
            continue
        if isinstance(parameter, DTensor):
            if parameter.device_mesh.size() < world.size:
                elsewhere.append(canonical(name))
        elif not is_averaged(parameter):
            alone.append(canonical(name))
    if alone:
        raise ConfigError(
            f"{_in_words(alone)} trained, but neither sharded nor averaged over the {world.size} ranks, so that "
            "each rank would train its own; have them there before the model is sharded (from_pretrained, shard), "
            "call shardwise.models.replicated.average_replicated_gradients(model, mesh) after adding them, or "
            "freeze them"
        )
    if elsewhere:
        raise ConfigError(
            f"{_in_words(elsewhere)} trained, but on a mesh that has not all of the {world.size} ranks, so that "
            "the others would train their own; shard the model on a mesh of all ranks, with an axis for replicas"
        )


def _in_words(names: list[str]) -> str:
    return f"{few(names)} {'is' if len(names) == 1 else 'are'}"


def few(names: Sequence[str]) -> str:
    """Names of parameters, what is alike in one; the first of them."""
    patterns = [pattern for pattern, _ in collapse(names)]
    more = f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else ""
    return ", ".join(patterns[:_SHOWN]) + more
