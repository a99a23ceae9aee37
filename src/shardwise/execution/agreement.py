"""Checks that ranks call with the same settings and have the same plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from shardwise.errors import RankMismatchError
from shardwise.execution.world import MismatchedRanks, World, digest_of
from shardwise.planning.load_memory import Available, require_fits
from shardwise.planning.load_plan import LoadPlan
from shardwise.report.names import few_names
from shardwise.report.reports import RankEstimate
from shardwise.storage import machine

RankMemory: TypeAlias = tuple[str, RankEstimate, Available]
"""The container of a rank, its need, and the free memory there."""


def agree_on(
    world: World,
    plan: LoadPlan,
    settings: Mapping[str, str],
    estimate: RankEstimate,
    available: Available,
    *,
    check_memory: bool,
) -> int:
    """Require that all ranks have the same plan (but for the boxes) and the same config, and that it fits.

    Return the largest number of ranks in one container. Collective: yes.

    Raises:
        RankMismatchError: naming the tensors that ranks plan differently, or the settings in which configs differ.
        ShardingError: a rank has too little memory. The message has the rank, its need, and its free memory.
    """
    memory: RankMemory = (machine.group_space() + machine.text_of(machine.OWN_GROUP), estimate, available)
    own = (plan.digest, digest_of(settings)), memory
    found = world.all_reduce_object(own, partial(_compare, check_memory=check_memory))
    if isinstance(found, int):
        return found
    if differing := _differing(world, found, plan.fingerprints):
        raise RankMismatchError(
            f"ranks plan {len(differing)} tensors differently: {few_names(differing)}. Give every rank the same "
            "model, config, arguments, and versions of torch and transformers"
        )
    raise _differing_settings(world, found, settings)


def _compare(ranks: Sequence[tuple[tuple[str, bytes], RankMemory]], *, check_memory: bool) -> MismatchedRanks | int:
    """Compare digests, and require enough memory, of which the ranks of a container share what is free."""
    memories = [memory for _, memory in ranks]
    mismatched = MismatchedRanks.among([digests for digests, _ in ranks])
    if mismatched is None and check_memory:
        needed: Counter[str] = Counter()
        for container, estimate, _ in memories:
            needed[container] += estimate.host_bytes
        for container, estimate, available in memories:
            require_fits(replace(estimate, host_bytes=needed[container]), available)
    return mismatched or max(Counter(container for container, *_ in memories).values())


def require_same_settings(world: World, settings: Mapping[str, str]) -> None:
    """Require one config of all ranks: it may change values without changing a shape. Collective: yes.

    Raises:
        RankMismatchError: naming the settings that differ.
    """
    if mismatched := world.map_reduce(digest_of, MismatchedRanks.among, settings):
        raise _differing_settings(world, mismatched, settings)


def _differing_settings(
    world: World, mismatched: MismatchedRanks, settings: Mapping[str, str]
) -> RankMismatchError:
    differing = _differing(world, mismatched, settings)
    shown = ", ".join(f"{name} ({other} against {first})" for name, (first, other) in differing.items())
    return RankMismatchError(
        f"the config on rank {mismatched.shown} is not that of rank 0: {shown}. Give every rank the same"
    )


def _differing(world: World, mismatched: MismatchedRanks, own: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return by name the values of rank 0 and of the first other rank, if they differ. Collective: yes."""
    sent = own if world.rank in (0, mismatched.first) else {}
    return world.all_reduce_object(sent, partial(_differences, rank=mismatched.first))


def _differences(values: Sequence[Mapping[str, str]], *, rank: int) -> dict[str, tuple[str, str]]:
    first, other = values[0], values[rank]
    pairs = {name: (first.get(name, "absent"), other.get(name, "absent")) for name in sorted({*first, *other})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
