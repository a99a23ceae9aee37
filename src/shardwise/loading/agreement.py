"""Checks that ranks have the same plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from shardwise.core import machine
from shardwise.core.errors import RankMismatchError
from shardwise.core.formatting import few_names
from shardwise.core.reports import Available, RankEstimate
from shardwise.loading.memory_estimate import require_fits
from shardwise.loading.plan import LoadPlan
from shardwise.ranks.call_arguments import comparing_arguments, find_differences
from shardwise.ranks.world import MismatchedRanks, World, repr_digest

RankPlan: TypeAlias = tuple[tuple[str, bytes], str, RankEstimate, Available]
"""Digests of a rank's plan and config, its container, its estimate, and the free memory of its container."""


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
    local = (plan.digest, repr_digest(settings)), container, estimate, available
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


def _check_plans(world: World, ranks: Sequence[RankPlan], *, check_memory: bool) -> MismatchedRanks | int:
    """Compare plans, and require enough memory. The ranks of a container share its free memory."""
    if mismatched := world.find_mismatched([digests for digests, *_ in ranks]):
        return mismatched
    # Host memory is added up by container: each rank alone might fit, and all of them together might not.
    sharers = Counter(container for _, container, *_ in ranks)
    needed: Counter[str] = Counter()
    for _, container, estimate, _ in ranks:
        needed[container] += estimate.host_bytes
    if check_memory:
        for _, container, estimate, available in ranks:
            # Each rank needs its device for itself, but all ranks of its container allocate from one host memory.
            rank = world.global_ranks[estimate.rank]
            needs = replace(estimate, rank=rank, host_bytes=needed[container])
            require_fits(needs, available, sharers[container])
    return max(sharers.values())
