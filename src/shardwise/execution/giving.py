"""What every rank gives of a model's tensors, so that together they give each element once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import DisagreementError, PlacementError
from shardwise.execution.supply import require_alike_models
from shardwise.execution.world import World
from shardwise.models.view import Held, local_boxes
from shardwise.planning.giving import Boxes, shares_by_rank
from shardwise.report import collapse

_SHOWN = 6


def agree_on_shares(world: World, held: Sequence[Held]) -> dict[str, tuple[Boxes, ...]]:
    """The boxes that each rank gives, by rank, of every saved tensor: by name, under all of its names.

    Every rank tells what it holds: a mesh that is a part of the world (the data-parallel axis, for what is not
    sharded by tensor parallelism) knows only the ranks that are in it. The value is the same on every rank.

    Collective: yes.

    Raises:
        PlacementError: a tensor has no values, or a placement that holds none of its own; or the ranks together do
            not hold all of it.
        DisagreementError: the ranks hold different tensors.
    """
    require_alike_models(world, held, ())
    saved = [item for item in held if item.kind.is_saved]
    told = world.each(lambda: _Told.by_this_rank(saved))
    return world.together(lambda: _dealt(saved, told))


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank holds: the dtypes of tensors, and their boxes, as numbers of the few ways in which they lie."""

    dtypes: tuple[str, ...]
    ways: tuple[Boxes, ...]
    way_of: tuple[int, ...]

    @classmethod
    def by_this_rank(cls, saved: Sequence[Held]) -> _Told:
        absent = [item.fqn for item in saved if item.tensor.is_meta]
        if absent:
            raise PlacementError(
                f"{_shown(absent)} on meta: without values, so there is nothing to take out; load the model first"
            )
        ways: dict[Boxes, int] = {}
        way_of: list[int] = []
        for item in saved:
            boxes = tuple(part.box for part in local_boxes(item.tensor, item.fqn) if part.box.numel)
            way_of.append(ways.setdefault(boxes, len(ways)))
        return cls(tuple(str(item.tensor.dtype) for item in saved), tuple(ways), tuple(way_of))


def _dealt(saved: Sequence[Held], told: Sequence[_Told]) -> dict[str, tuple[Boxes, ...]]:
    made: dict[tuple[object, ...], tuple[Boxes, ...]] = {}
    shares: dict[str, tuple[Boxes, ...]] = {}
    lacking: list[str] = []
    for number, item in enumerate(saved):
        dtypes = {found.dtypes[number] for found in told}
        if len(dtypes) > 1:
            raise DisagreementError(
                f"{item.fqn} is {' on some ranks, '.join(sorted(dtypes))} on others; bring every rank's model to "
                "one dtype"
            )
        ways = tuple(found.way_of[number] for found in told)
        turn, itemsize = number % len(told), item.tensor.element_size()
        if (ways, turn, itemsize) not in made:
            held = [found.ways[way] for found, way in zip(told, ways, strict=True)]
            made[ways, turn, itemsize] = shares_by_rank(held, turn, itemsize)
        given = made[ways, turn, itemsize]
        if sum(box.numel for boxes in given for box in boxes) != item.tensor.numel():
            lacking.append(item.fqn)
        shares |= dict.fromkeys(item.names, given)
    if lacking:
        raise PlacementError(
            f"the ranks of this call do not hold all of {_shown(lacking)}; make it on all ranks of the mesh"
        )
    return shares


def _shown(names: Sequence[str]) -> str:
    patterns = [pattern for pattern, _ in collapse(names)]
    more = f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else ""
    return f"{', '.join(patterns[:_SHOWN])}{more}"
