"""Matches parameter groups of a state with an optimizer's, by their parameters, never by order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import CoverageError
from shardwise.planning.states.matching import Tolerance, few, in_words


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
        "missing": [name for name in missing if not tolerance.missing.covers(name)],
        "unexpected": [name for name in unexpected if not tolerance.unexpected.covers(name)],
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
