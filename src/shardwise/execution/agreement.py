"""Checks that ranks call with the same settings and have the same plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.errors import RankMismatchError
from shardwise.execution.world import MismatchedRanks, World, digest_of
from shardwise.planning.load_memory import Available, require_fits
from shardwise.planning.load_plan import LoadPlan
from shardwise.report.names import few_names
from shardwise.report.reports import RankEstimate
from shardwise.storage import machine

if TYPE_CHECKING:
    pass


def agree_on(
    world: World,
    plan: LoadPlan,
    settings: Mapping[str, str],
    estimate: RankEstimate,
    available: Available,
    *,
    check_memory: bool,
) -> tuple[int, int]:
    """Agree that all ranks have the same plan, but for the boxes, and the same config, and that it fits.

    Return the bytes of all ranks together, and the number of ranks of a machine. Collective: yes.

    Raises:
        RankMismatchError: naming the tensors that ranks plan differently, or the settings in which configs differ.
        ShardingError: a rank has too little memory. The message has the rank, its need, and its free memory.
    """
    place = machine.group_space() + machine.text_of(machine.OWN_GROUP)
    told = plan.digest, digest_of(settings), (plan.layout.local_nbytes, place, estimate, available)
    found = world.all_reduce_object(
        told,
        lambda all_told: (
            MismatchedRanks.among([item[:2] for item in all_told])
            or _total([item[2] for item in all_told], check_memory=check_memory)
        ),
    )
    if not isinstance(found, MismatchedRanks):
        return found
    if differing := _differing(world, found, plan.fingerprints):
        raise RankMismatchError(
            f"ranks plan {len(differing)} tensors differently: {few_names(differing)}. Give every rank the same "
            "model, config, arguments, and versions of torch and transformers"
        )
    raise _other_settings(world, found, settings)


def _total(told: Sequence[tuple[int, str, RankEstimate, Available]], *, check_memory: bool) -> tuple[int, int]:
    """Sum bytes, and count the ranks of the fullest place (machine, container), which share its free memory.

    Raises:
        ShardingError: there is too little memory.
    """
    needed: Counter[str] = Counter()
    for _, place, estimate, _ in told:
        needed[place] += estimate.host_bytes
    for _, place, estimate, available in told if check_memory else ():
        require_fits(replace(estimate, host_bytes=needed[place]), available)
    ranks = Counter(place for _, place, *_ in told)
    return sum(nbytes for nbytes, *_ in told), max(ranks.values())


def require_same_settings(world: World, settings: Mapping[str, str]) -> None:
    """Require one config of all ranks: it may change values without changing a shape. Collective: yes.

    Raises:
        RankMismatchError: naming the settings that differ.
    """
    if odd := world.map_reduce(digest_of, MismatchedRanks.among, settings):
        raise _other_settings(world, odd, settings)


def _other_settings(world: World, odd: MismatchedRanks, settings: Mapping[str, str]) -> RankMismatchError:
    differing = _differing(world, odd, settings)
    shown = ", ".join(f"{name} ({other} against {first})" for name, (first, other) in differing.items())
    return RankMismatchError(
        f"the config on rank {odd.shown} is not that of rank 0: {shown}. Give every rank the same"
    )


def _differing(world: World, odd: MismatchedRanks, own: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return by name the values of rank 0 and of the first odd rank, if they differ. Collective: yes."""

    def compare(told: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, str]]:
        first, other = told[0], told[odd.first]
        pairs = {name: (first.get(name, "absent"), other.get(name, "absent")) for name in sorted({*first, *other})}
        return {name: values for name, values in pairs.items() if values[0] != values[1]}

    return world.map_reduce(lambda: own if world.rank in (0, odd.first) else {}, compare)
