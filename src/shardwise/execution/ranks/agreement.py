"""Makes sure that all ranks have one plan, one config, and enough memory, before a load begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import DisagreementError
from shardwise.execution.ranks.messages import OddRanks, digest_of
from shardwise.execution.ranks.whereabouts import ProcessorSet, ProcessorShares
from shardwise.execution.ranks.world import World
from shardwise.planning.forecasts.own_forecast import Available, MemoryCheck, require_fits
from shardwise.planning.loads.load_plan import LoadPlan
from shardwise.report.forecast_parts import RankForecast
from shardwise.report.names import collapse
from shardwise.storage.machine import group_space

_TOLD_NAMES = 1000
"""The most names that a rank tells of when plans differ."""


def agree_on(
    world: World,
    plan: LoadPlan,
    settings: Mapping[str, str],
    forecast: RankForecast,
    available: Available,
    memory_check: MemoryCheck,
) -> AgreedLoad:
    """All ranks have the same plan, but for the boxes, and the same config, and it fits.

    One meeting, of which each rank reads a conclusion; details are told by ranks that differ.

    Collective: yes.

    Raises:
        DisagreementError: naming the tensors that ranks plan differently, or what configs differ in.
        PlacementError: naming a rank that has too little memory, what it needs and what there is.
    """
    mine = _LoadWords(
        plan.digest,
        digest_of(settings),
        plan.layout.local_nbytes,
        ProcessorSet.here(),
        group_space(),
        forecast,
        available,
    )
    agreed = world.all_reduce(lambda: mine, lambda told: _agreed(told, memory_check))
    if agreed.has_differing_plans:
        raise DisagreementError(_disagreement(world, plan))
    _require_settings(world, settings, agreed.odd_settings)
    return agreed


@dataclass(frozen=True, slots=True)
class _LoadWords:
    """What a rank tells of the load that it has prepared."""

    plan: str
    settings: bytes
    nbytes: int
    processors: ProcessorSet
    groups: str
    forecast: RankForecast
    available: Available


@dataclass(frozen=True, slots=True)
class AgreedLoad:
    """What the ranks' loads have in common; ``odd_settings`` are ranks with another config.

    ``total_bytes`` are what all ranks will hold.
    """

    has_differing_plans: bool
    odd_settings: OddRanks | None
    total_bytes: int
    processors: ProcessorShares


def _agreed(told: Sequence[_LoadWords], memory_check: MemoryCheck) -> AgreedLoad:
    """Raises PlacementError where there is too little memory."""
    agreed = AgreedLoad(
        len({item.plan for item in told}) > 1,
        OddRanks.among([item.settings for item in told]),
        sum(item.nbytes for item in told),
        ProcessorShares.of([item.processors for item in told]),
    )
    if agreed.has_differing_plans or agreed.odd_settings:
        return agreed
    # The ranks of one machine, or of one control group, share its memory, so what they need together counts.
    # Control groups have a name within their container only.
    needed: Counter[tuple[str, str]] = Counter()
    for item in told:
        for pool in item.available.by_pool():
            needed[item.groups if pool else item.processors.machine, pool] += item.forecast.host_bytes
    for item in told:
        for pool, free in item.available.by_pool().items():
            together = replace(
                item.forecast, host_bytes=needed[item.groups if pool else item.processors.machine, pool]
            )
            require_fits(together, Available(item.available.device_bytes, free), memory_check)
    return agreed


def require_same_settings(world: World, settings: Mapping[str, str]) -> None:
    """What configs say changes what is computed, also where no shape differs. Collective: yes.

    Raises:
        DisagreementError: naming what differs.
    """
    _require_settings(world, settings, world.all_reduce(lambda: digest_of(settings), OddRanks.among))


def _require_settings(world: World, settings: Mapping[str, str], odd: OddRanks | None) -> None:
    """Collective: yes, where there are ``odd`` ones."""
    if odd is None:
        return

    def refuse(told: Sequence[Mapping[str, str]]) -> None:
        first, other = told[0], told[odd.first]
        differing = (
            f"{name} ({other.get(name, 'absent')} against {first.get(name, 'absent')})"
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        )
        raise DisagreementError(
            f"the config on rank {odd.shown} is not that of rank 0: {', '.join(differing)}; give every rank the "
            "same"
        )

    world.all_reduce(lambda: settings if world.rank in (0, odd.first) else {}, refuse)


def _disagreement(world: World, plan: LoadPlan) -> str:
    """Which tensors are planned differently by whom. Collective: yes."""
    first, mine = world.from_first(lambda: plan.fingerprints), plan.fingerprints
    names = sorted(name for name in {*first, *mine} if first.get(name) != mine.get(name))

    def tell(told: Sequence[Sequence[str]]) -> str:
        differing = sorted({name for found in told for name in found})
        shown = ", ".join(pattern for pattern, _ in collapse(differing)[:8])
        return (
            f"ranks plan {len(differing)} tensors differently: {shown}; give every rank the same model, config, "
            "arguments, and versions of torch and transformers"
        )

    return world.all_reduce(lambda: names[:_TOLD_NAMES], tell)
