"""All-gathers of a pass through a base, which a rank leaves when another one has failed.

[Note: Left in a gather] FSDP2 gathers the groups of a base in one order on every rank, and a gather waits for all
ranks. A rank that fails alone between two gathers leaves the others waiting in the next one. A gather that has
begun can neither be canceled nor completed, so ranks that leave it are out of step for good: their next collective
of this process group would meet the abandoned one. Hence each rank counts the gathers that it has begun. After a
failure ranks compare their counts. If they are equal, as where all ranks fail in one place, the pass is discarded
and the bank goes on. Otherwise the bank ends, as if the rank were lost.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.ranks.world import World

GatherCounts: TypeAlias = Counter[tuple[int, ...]]
"""Gathers that a rank has begun, by the ranks (in the default group) that take part."""

# deprecated from torch 2.13 on, under this name
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CountedGather:
    """The all-gather of the groups of a base. Implements torch's protocol ``AllGather``.

    Raises:
        Stopped: another rank has failed.
    """

    def __init__(self, world: World) -> None:
        self.counts: GatherCounts = Counter()
        self._world = world

    def install(self, model: nn.Module) -> None:
        """Have FSDP2 gather the groups of a model by this object. Collective: no."""
        comm: Any = self
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(comm)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002
    ) -> dist.Work | None:
        # Before it begins: once begun, it cannot be undone, whatever happens next on this rank.
        self.counts[tuple(dist.get_process_group_ranks(group))] += 1
        work: dist.Work = _all_gather(output_tensor, input_tensor, group=group, async_op=True)
        # On the CPU the host waits here, and leaves if another rank fails. On a device, the stream alone waits.
        if input_tensor.device.type == "cpu":
            self._world.wait_for(work, group, on_host=True)
        elif not async_op:
            work.wait()  # of the stream: the host goes on, and waits at the end of the pass
        return work if async_op else None


def are_in_step(global_ranks: Sequence[int], counts: Sequence[GatherCounts]) -> bool:
    """Return whether every gather that a rank has begun was begun by all of its ranks.

    Example: of ranks 0 to 3, ranks 0 and 1 have begun 5 gathers of group (0, 1), and ranks 2 and 3 have begun 4 of
    group (2, 3): nobody waits. If rank 1 has begun 4, rank 0 waits for it in the fifth.

    Args:
        global_ranks: the ranks in the default group.
        counts: the counts of each rank.
    """
    by_rank = dict(zip(global_ranks, counts, strict=True))
    return all(len({by_rank[rank][group] for rank in group}) == 1 for group in set().union(*counts))
