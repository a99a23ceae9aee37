"""Matches tensors and parameter groups of a state with their places, or tells every fault at once.

A rank brings all of the state or none of it. What it brings is known by name, shape, dtype and boxes: whole tensors
are one box, shards several. Pure, and the same on every rank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from shardwise.errors import ConfigError, CoverageError, DisagreementError
from shardwise.planning.load_plan import OnUnexpected, allows
from shardwise.planning.moves import covers
from shardwise.report.names import few
from shardwise.tensors import Box, DType
from shardwise.tensors.dtypes import follows

OnFault: TypeAlias = OnUnexpected


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What need not fit. What is ignored keeps the values it has.

    ``base`` is asked about "config", "shapes" and "values" of what a checkpoint takes for granted.
    """

    missing: OnFault = "error"
    unexpected: OnFault = "error"
    mismatched: OnFault = "error"
    base: OnFault = "error"


@dataclass(frozen=True, slots=True)
class Brought:
    """A tensor as one rank brings it. ``boxes`` are those of its elements that the rank has."""

    shape: tuple[int, ...]
    dtype: DType
    boxes: tuple[Box, ...]

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype.label}"


@dataclass(frozen=True, slots=True)
class StateSlot:
    """A tensor that takes values; a state may have it under any of its names, or under several."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype.label}"


@dataclass(frozen=True, slots=True)
class Taken:
    """A place that gets values, from the tensor of this name, which ranks have in these boxes."""

    place: StateSlot
    name: str
    dtype: DType
    held: tuple[tuple[Box, ...], ...]
    """By rank."""


@dataclass(frozen=True, slots=True)
class Match:
    """What goes where, and what does not, having been ignored."""

    taken: tuple[Taken, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    @property
    def cast(self) -> dict[str, tuple[str, str]]:
        """First names of places to (dtype brought, dtype of the place), where these differ."""
        return {
            item.place.names[0]: (item.dtype.label, item.place.dtype.label)
            for item in self.taken
            if item.dtype is not item.place.dtype
        }


def match(
    places: Sequence[StateSlot], brought_by_rank: Sequence[Mapping[str, Brought]], tolerance: Tolerance
) -> Match:
    """Find the tensor of every place.

    Raises:
        DisagreementError: when ranks that bring anything bring different names, or parts that are not the whole.
        CoverageError: naming all that is missing, unexpected or mismatched, and not tolerated.
    """
    bringing = [rank for rank, brought in enumerate(brought_by_rank) if brought]
    _require_same_names(brought_by_rank, bringing)
    names = list(brought_by_rank[bringing[0]]) if bringing else []
    known = {name for place in places for name in place.names}
    faults = _Mismatches(tolerance)
    unexpected = [name for name in names if name not in known]
    faults.unexpected = [name for name in unexpected if not allows(tolerance.unexpected, name)]
    taken: list[Taken] = []
    missing: list[str] = []
    mismatched: list[str] = []
    for place in places:
        present = [name for name in place.names if bringing and name in brought_by_rank[bringing[0]]]
        if not present:
            missing.append(place.names[0])
            if not any(allows(tolerance.missing, name) for name in place.names):
                faults.missing.append(place.names[0])
            continue
        wrong = _misfit(place, present, brought_by_rank, bringing)
        if wrong is not None:
            name, sentence = wrong
            mismatched.append(name)
            if not allows(tolerance.mismatched, name):
                faults.mismatched.append(sentence)
            continue
        name = present[0]
        held = tuple(brought[name].boxes if brought else () for brought in brought_by_rank)
        if not covers(place.shape, held):
            faults.parts.append(name)
        taken.append(Taken(place, name, brought_by_rank[bringing[0]][name].dtype, held))
    faults.check()
    return Match(tuple(taken), tuple(missing), tuple(unexpected), tuple(mismatched))


def _require_same_names(brought_by_rank: Sequence[Mapping[str, Brought]], bringing: Sequence[int]) -> None:
    for rank in bringing[1:]:
        first, mine = brought_by_rank[bringing[0]], brought_by_rank[rank]
        lines = [f"{name} is not on rank {rank}" for name in first if name not in mine]
        lines += [f"{name} is not on rank {bringing[0]}" for name in mine if name not in first]
        if lines:
            shown = "\n  ".join(few(lines))
            raise DisagreementError(
                f"ranks {bringing[0]} and {rank} bring different states:\n  {shown}\nBring the same on every "
                "rank, or all of it on some and nothing on the others."
            )


def _misfit(
    place: StateSlot,
    present: Sequence[str],
    brought_by_rank: Sequence[Mapping[str, Brought]],
    bringing: Sequence[int],
) -> tuple[str, str] | None:
    for name in present:
        for rank in bringing:
            found = brought_by_rank[rank][name]
            if found.shape != place.shape or not follows(found.dtype, place.dtype):
                return name, f"{name}: brought {found} by rank {rank}, wanted {place}"
    return None


@dataclass(slots=True)
class _Mismatches:
    tolerance: Tolerance
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def check(self) -> None:
        found = {"mismatched": self.mismatched, "missing": self.missing, "unexpected": self.unexpected}
        if any(found.values()):
            raise CoverageError(in_words("the state does not fit:", found))
        if self.parts:
            shown = "\n  ".join(few(self.parts))
            raise DisagreementError(
                f"what the ranks bring of these is not, together, each element once:\n  {shown}\nBring whole "
                "tensors, or on every rank its own shards of one sharding."
            )


_WAYS = {
    "mismatched": "on_mismatched=Ignore(only=...) for what may keep its values",
    "missing": "on_missing=Ignore(only=...) for what may keep its values",
    "unexpected": "on_unexpected=Ignore(only=...) for what may be left out",
}


def in_words(head: str, faults: Mapping[str, Sequence[str]]) -> str:
    """An error's text: every kind of fault with its count, its names (the first dozen, collapsed), the way out."""
    lines = [head]
    for kind, sentences in faults.items():
        for position, line in enumerate(few(sentences)):
            counted = f"{kind} {len(sentences)}" if position == 0 else ""
            lines.append(f"  {counted:<17}{line}")
    ways = [_WAYS[kind] for kind, sentences in faults.items() if sentences and kind in _WAYS]
    return "\n".join([*lines, *([f"Pass {'; '.join(ways)}."] if ways else [])])


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """For each of the present groups, the position of the one that gives its settings; None where none does.

    ``missing`` are parameters that no group of the state has, ``unexpected`` those of the state that no present
    group has.
    """

    giver_of: tuple[int | None, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match_groups(
    present: Sequence[Sequence[str]], given: Sequence[Sequence[str]], stateful: Sequence[str], tolerance: Tolerance
) -> GroupMatch:
    """Find the group of the same parameters for each present one; empty groups are paired in order.

    ``stateful`` are parameters that the state has values of, in a group or not.

    Parameters that may be missing or unexpected are left out of the comparison.

    Raises:
        CoverageError: naming parameters that are missing, unexpected or in two groups; groups without their like.
    """
    here = {name for names in present for name in names}
    there = {name for names in given for name in names}
    missing = [name for names in present for name in names if name not in there]
    unexpected = [name for name in dict.fromkeys([*itertools.chain(*given), *stateful]) if name not in here]
    faults = {
        "missing": [name for name in missing if not allows(tolerance.missing, name)],
        "unexpected": [name for name in unexpected if not allows(tolerance.unexpected, name)],
        "twice": [name for name, count in Counter(itertools.chain(*given)).items() if count > 1],
    }
    if any(faults.values()):
        raise CoverageError(in_words("the parameter groups of the state do not fit:", faults))
    positions: dict[frozenset[str], list[int]] = {}
    for position, names in enumerate(given):
        common = frozenset(names) & here
        if common or not names:
            positions.setdefault(common, []).append(position)
    giver_of: list[int | None] = []
    for number, names in enumerate(present):
        common = frozenset(names) & there
        if common in positions and (common or not names):
            found = positions[common]
            giver_of.append(found.pop(0) if len(found) > 1 else found[0])
        elif common:
            others = [position for position, group in enumerate(given) if common & frozenset(group)]
            raise CoverageError(
                f"no group of the state has the parameters of group {number} ({', '.join(few(sorted(common)))}); "
                f"there they are in group {' and '.join(map(str, others))}, with others or fewer; make the groups "
                "as they were made before"
            )
        else:
            giver_of.append(None)
    return GroupMatch(tuple(giver_of), tuple(missing), tuple(unexpected))


StateForm: TypeAlias = Literal["full", "full_on_all_ranks", "sharded"]
"""Form of a state in memory.

``"full"``: whole tensors on the CPU of the first rank, nothing on the others.
``"full_on_all_ranks"``: whole tensors on the CPU of every rank.
``"sharded"``: what each rank has, DTensors where tensors are sharded, in the model's own memory.
"""

FileForm: TypeAlias = Literal["full", "sharded", "local"]
"""Form of a state in files, named as FSDP's state dict types.

``"full"``: whole tensors in one file of ``torch.save``, which the first rank writes. ``"sharded"``: a folder of
``torch.distributed.checkpoint``, in which every rank writes its own. ``"local"``: a file for every rank with what
it holds, read by as many ranks, sharded alike, and no others.
"""


def receivers(form: StateForm, size: int) -> range:
    """Return the ranks, of ``size``, that get whole tensors."""
    return range(1 if form == "full" else size)


def require_file_form(form: object) -> None:
    """Refuse an unknown form of files.

    Raises:
        ConfigError: naming the forms there are.
    """
    _require_one_of(form, get_args(FileForm))


def require_form(form: object) -> None:
    """Refuse an unknown form in memory.

    Raises:
        ConfigError: naming the forms there are.
    """
    _require_one_of(form, get_args(StateForm))


def _require_one_of(form: object, known: tuple[str, ...]) -> None:
    if form not in known:
        raise ConfigError(f"form={form!r} is not known. Pass one of {', '.join(map(repr, known))}.")
