"""Makes a tenant's optimizer, and says who keeps what it keeps: every rank all of it, or each a slice.

[Note: Slices] An elementwise optimizer knows nothing of matrices, so a flat buffer is cut like a string: each rank
steps its own slice, keeps the moments of that alone, and hands the result to all. Gradients are summed whole, by
the same all-reduce as without, so that norms, the clip, the verdict whether they are finite, and each element's
step are the same bits. The slices are those of a ``Shard(0)``; so files are written, and read, as of any sharded
tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shardwise.bank.backends import TenantPair
from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World


@dataclass(frozen=True, slots=True)
class WholeMoments:
    """Every rank has all that a tenant's optimizer keeps, and takes the whole of each step."""


@dataclass(frozen=True, slots=True)
class ShardedMoments:
    """Each rank has what the optimizer keeps of its own slice of a tenant's numbers, and steps that.

    To the same bits, for one all-gather of the numbers more at each step. Memory, with AdamW on n ranks: 8 + 8/n
    bytes for each number in place of 16, and 4 while it steps.
    """


Moments: TypeAlias = WholeMoments | ShardedMoments


@dataclass(frozen=True, slots=True)
class FlatSlices:
    """``count`` numbers in as many slices as there are ranks: equal ones, but for the last that has any."""

    count: int
    ranks: int

    @property
    def longest(self) -> int:
        return -(-self.count // self.ranks)

    def of(self, rank: int) -> slice:
        start, stop = (min(each * self.longest, self.count) for each in (rank, rank + 1))
        return slice(start, stop)


def gathered(own: torch.Tensor, slices: FlatSlices, world: World) -> torch.Tensor:
    """All ranks' slices as one (count,) tensor; ``own`` is this rank's. Collective: yes."""
    if world.size == 1:
        return own.clone()
    padded = own.new_zeros(slices.longest)
    padded[: len(own)] = own
    whole = own.new_empty(slices.longest * slices.ranks)
    wait_for(world, dist.all_gather_into_tensor(whole, padded, group=world.group, async_op=True))
    return whole[: slices.count]


def wait_for(world: World, work: dist.Work | None) -> None:
    """Wait for a collective begun with ``async_op=True``, unless another rank fails or is lost meanwhile.

    To be called in a phase of ``world``, at the end of which all ranks raise the same error.
    """
    assert work is not None, "this rank is in the group"
    world.wait_for(work)


def mesh_of(world: World, device: torch.device) -> DeviceMesh | None:
    """All ranks in one axis; None where there is one. Makes no process group. Collective: no."""
    if world.size == 1:
        return None
    group = world.group if world.group is not None else dist.group.WORLD
    assert group is not None, "several ranks have one"
    return DeviceMesh.from_group(group, device.type)


def as_shard(own: torch.Tensor, slices: FlatSlices, mesh: DeviceMesh | None) -> torch.Tensor:
    """This rank's slice as a part of the whole tensor; without a mesh it is the whole. Shares memory."""
    if mesh is None:
        return own
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size([slices.count]), stride=(1,))


OptimizerMaker: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta),
)
_OF_MATRICES: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in ("Muon",) if hasattr(torch.optim, name)
)

FLAT = ""
"""The name of the one parameter of an elementwise optimizer."""


@dataclass(frozen=True, slots=True)
class TenantOptimizer:
    """An optimizer, and its parameters: the flat one, or matrices by their names, which share its memory."""

    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]

    @property
    def is_flat(self) -> bool:
        return FLAT in self.parameters


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """What a tenant is trained by that asks for nothing else."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)


def maker_of(name: str, settings: Mapping[str, Any]) -> OptimizerMaker | None:
    """What makes an optimizer of torch's of this class, with these of its settings; None for any other class.

    Raises:
        ConfigError: the settings make no sense.
    """
    kind: Any = next(
        (each for each in (*_ELEMENTWISE, *_OF_MATRICES) if name == f"torch.optim.{each.__name__}"), None
    )
    if kind is None:
        return None
    known = {key: value for key, value in settings.items() if key in inspect.signature(kind).parameters}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        made: Optimizer = kind(parameters, **known)
        return made

    try:
        make([nn.Parameter(torch.zeros((1, 1) if kind in _OF_MATRICES else 1))])
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot be made with the settings that were saved: {error}") from error
    return make


def made_optimizer(
    make: OptimizerMaker, flat: nn.Parameter, pairs: Mapping[str, TenantPair], moments: Moments
) -> TenantOptimizer:
    """An optimizer of the flat buffer, or of what of it is this rank's.

    One that takes matrices only (Muon) refuses that, and is given them instead: of fused experts those of each
    expert, whose stack is no matrix of any layer.

    Raises:
        ConfigError: it is not known to treat each element, or each matrix, for itself; or has other parameters.
    """
    own: dict[str, nn.Parameter] = {FLAT: flat}
    try:
        optimizer = make([flat])
    except ValueError as error:
        own = _matrices(pairs)
        try:
            optimizer = make(list(own.values()))
        except ValueError:
            raise error from None
    kind = type(optimizer)
    if kind not in (_ELEMENTWISE if FLAT in own else _OF_MATRICES):
        known = ", ".join(sorted(each.__name__ for each in (*_ELEMENTWISE, *_OF_MATRICES)))
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is not known to treat each element for itself, and a tenant's "
            f"matrices are one flat buffer; take one of {known}"
        )
    if FLAT not in own and isinstance(moments, ShardedMoments):
        raise ConfigError(
            f"{kind.__qualname__} steps whole matrices, and ShardedMoments() cuts them anywhere; leave "
            "optimizer_state out"
        )
    has = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(optimizer.param_groups) != 1 or list(map(id, has)) != list(map(id, own.values())):
        raise ConfigError(
            f"{kind.__qualname__} must be made of the parameter it is given (or of all of the matrices), in one "
            "group, and of no other"
        )
    return TenantOptimizer(optimizer, own)


def _matrices(pairs: Mapping[str, TenantPair]) -> dict[str, nn.Parameter]:
    """By name; they and their gradients share memory with the flat buffers."""
    found: dict[str, nn.Parameter] = {}
    for site, pair in pairs.items():
        for part, values, gradient in (("lora_A", pair.A, pair.a_grad), ("lora_B", pair.B, pair.b_grad)):
            parameter = found[f"{site}.{part}"] = nn.Parameter(values.detach())
            parameter.grad = gradient
    return found
