"""How far a call is: one progress bar, on the first rank, for what all ranks do, and the times of its phases."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

from tqdm import tqdm

from shardwise.errors import DisagreementError
from shardwise.execution.world import OddRanks, World, digest_of
from shardwise.models import pretrained
from shardwise.observing import phase
from shardwise.planning.load_memory import Available, require_fits
from shardwise.planning.load_plan import LoadPlan
from shardwise.report.names import few_names
from shardwise.report.reports import RankForecast
from shardwise.storage import machine


class Progress(Protocol):
    """Told of bytes as they arrive."""

    def advance(self, nbytes: int) -> None: ...


class ProgressBar:
    """A bar of bytes with rate and time left; silent where there is no terminal or transformers' bars are off.

    Every rank has one and tells it what it has done itself; the first rank's shows what all have done, as far as it
    has heard.
    """

    def __init__(self, label: str, world: World, total_bytes: int, *, enabled: bool) -> None:
        shown = enabled and world.rank == 0 and pretrained.progress_bars_enabled()
        self._world = world
        self._own = 0
        self._bar = tqdm(
            total=total_bytes,
            desc=label,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=None if shown else True,  # None: only when stderr is a terminal
            leave=False,
            dynamic_ncols=True,
            mininterval=0.2,
        )

    def advance(self, nbytes: int) -> None:
        self._own += nbytes
        self._world.tell_progress(self._own)
        self._show()

    def _show(self) -> None:
        self._bar.update(max(0, self._world.heard_progress(self._own) - self._bar.n))

    def __enter__(self) -> Self:
        self._world.while_waiting = self._show
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._world.while_waiting = None
        self._world.tell_progress(0)
        self._bar.close()


@dataclass
class Clock:
    """Seconds by phase, in order. Those of a phase within another count for the inner one only."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, before, self._inner = time.perf_counter(), self._inner, 0.0
        with phase(name):
            yield
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inner
        self._inner = before + elapsed


def agree_on(
    world: World,
    plan: LoadPlan,
    settings: Mapping[str, str],
    forecast: RankForecast,
    available: Available,
    *,
    check_memory: bool,
) -> tuple[int, int]:
    """Agree that all ranks have the same plan, but for the boxes, and the same config, and that it fits.

    Return the bytes of all ranks together, and the number of ranks of a machine. Collective: yes.

    Raises:
        DisagreementError: naming the tensors that ranks plan differently, or the settings in which configs differ.
        PlacementError: naming a rank that has too little memory, what it needs and what there is.
    """
    place = machine.group_space() + machine.text_of(machine.OWN_GROUP)
    told = plan.digest, digest_of(settings), (plan.layout.local_nbytes, place, forecast, available)
    found = world.all_reduce(
        lambda: told,
        lambda all_told: (
            OddRanks.among([item[:2] for item in all_told])
            or _total([item[2] for item in all_told], check_memory=check_memory)
        ),
    )
    if not isinstance(found, OddRanks):
        return found
    if differing := _differing(world, found, plan.fingerprints):
        raise DisagreementError(
            f"ranks plan {len(differing)} tensors differently: {few_names(differing)}; give every rank the same "
            "model, config, arguments, and versions of torch and transformers"
        )
    raise _other_settings(world, found, settings)


def _total(told: Sequence[tuple[int, str, RankForecast, Available]], *, check_memory: bool) -> tuple[int, int]:
    """Sum bytes, and count the ranks of the fullest place (machine, container), which share its free memory.

    Raises:
        PlacementError: there is too little memory.
    """
    needed: Counter[str] = Counter()
    for _, place, forecast, _ in told:
        needed[place] += forecast.host_bytes
    for _, place, forecast, available in told if check_memory else ():
        require_fits(replace(forecast, host_bytes=needed[place]), available)
    ranks = Counter(place for _, place, *_ in told)
    return sum(nbytes for nbytes, *_ in told), max(ranks.values())


def require_same_settings(world: World, settings: Mapping[str, str]) -> None:
    """Require one config of all ranks: it may change values without changing a shape. Collective: yes.

    Raises:
        DisagreementError: naming the settings that differ.
    """
    if odd := world.all_reduce(lambda: digest_of(settings), OddRanks.among):
        raise _other_settings(world, odd, settings)


def _other_settings(world: World, odd: OddRanks, settings: Mapping[str, str]) -> DisagreementError:
    differing = _differing(world, odd, settings)
    shown = ", ".join(f"{name} ({other} against {first})" for name, (first, other) in differing.items())
    return DisagreementError(
        f"the config on rank {odd.shown} is not that of rank 0: {shown}; give every rank the same"
    )


def _differing(world: World, odd: OddRanks, own: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return by name the values of rank 0 and of the first odd rank, if they differ. Collective: yes."""

    def compare(told: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, str]]:
        first, other = told[0], told[odd.first]
        pairs = {name: (first.get(name, "absent"), other.get(name, "absent")) for name in sorted({*first, *other})}
        return {name: values for name, values in pairs.items() if values[0] != values[1]}

    return world.all_reduce(lambda: own if world.rank in (0, odd.first) else {}, compare)
