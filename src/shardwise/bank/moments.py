"""Who keeps what a tenant's optimizer keeps: every rank all of it, or each a slice.

[Note: Slices] An elementwise optimizer knows nothing of matrices, so a flat buffer is cut like a string: each rank
steps its own slice, keeps the moments of that alone, and hands the result to all. Gradients are summed whole, by
the same all-reduce as without, so that norms, the clip, the verdict whether they are finite, and each element's
step are the same bits. The slices are those of a ``Shard(0)``; so files are written, and read, as of any sharded
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

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
    dist.all_gather_into_tensor(whole, padded, group=world.group)
    return whole[: slices.count]


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
