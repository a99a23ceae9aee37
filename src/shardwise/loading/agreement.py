"""Checks that ranks have the same plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardwise.core import machine
from shardwise.core.errors import RankMismatchError
from shardwise.core.formatting import few_names
from shardwise.core.reports import Available, RankEstimate
from shardwise.loading.memory_estimate import require_fits
from shardwise.loading.plan import LoadPlan
from shardwise.ranks.call_arguments import comparing_arguments, find_differences
from shardwise.ranks.world import MismatchedRanks, World, repr_digest


@dataclass(frozen=True)
class RankPlan:
    """What a rank tells the others of its plan.

    Attributes:
        digests: of the plan and of the config.
        container: equal on ranks whose memory one control group limits.
        estimate: memory that the rank needs.
        available: free memory of its device and of its container.
    """

    digests: tuple[str, bytes]
    container: str
    estimate: RankEstimate
    available: Available


def compare_plans(
    world: World,
    plan: LoadPlan,
    settings: Mapping[str, str],
    estimate: RankEstimate,
    available: Available,
    *,
    check_memory: bool,
) -> int:
    """Require that all ranks have the same config and plan (but for the boxes), and enough memory for the load.

    Return the largest number of ranks in one container. Collective: yes.

    Raises:
        RankMismatchError: naming the settings in which configs differ, or the tensors that ranks plan differently.
        ShardingError: a rank has too little memory. The message has the rank, its need, and its free memory.
    """
    # The same text on ranks that one control group limits. The namespace has the machine's boot ID in it.
    container = machine.namespace_id("cgroup") + machine.read_text(machine.OWN_GROUP)
    local = RankPlan((plan.digest, repr_digest(settings)), container, estimate, available)
    result = world.all_reduce_object(local, partial(_check_plans, world, check_memory=check_memory))
    if isinstance(result, int):
        return result
    # Only digests have been exchanged so far. The details are exchanged only to describe a difference, the config
    # first: plans differ because of it.
    with comparing_arguments(world, "the config") as exchange:
        exchange.local = settings
    differing = find_differences(world, result, plan.fingerprints)
    raise RankMismatchError(
        f"ranks plan {len(differing)} tensors differently: {few_names(differing)}. Give every rank the same "
        "model, config, arguments, and versions of torch and transformers"
    )


def _check_plans(world: World, plans: Sequence[RankPlan], *, check_memory: bool) -> MismatchedRanks | int:
    """Compare plans, and require enough memory. The ranks of a container share its free memory."""
    if mismatched := world.find_mismatched([plan.digests for plan in plans]):
        return mismatched
    # Host memory is added up by container: each rank alone might fit, and all of them together might not.
    sharers = Counter(plan.container for plan in plans)
    needed: Counter[str] = Counter()
    for plan in plans:
        needed[plan.container] += plan.estimate.host_bytes
    if check_memory:
        for plan in plans:
            # Each rank needs its device for itself, but all ranks of its container allocate from one host memory.
            rank = world.global_ranks[plan.estimate.rank]
            needs = replace(plan.estimate, rank=rank, host_bytes=needed[plan.container])
            require_fits(needs, plan.available, sharers[plan.container])
    return max(sharers.values())
