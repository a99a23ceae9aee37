"""Summaries of the ranks' states, which they exchange and compare once before a checkpoint."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.core.errors import RankMismatchError
from shardwise.ranks.call_arguments import make_mismatch_error, pair_differences
from shardwise.ranks.world import World
from shardwise.state.base_identity import BaseIdentity, BaseSamples, Fingerprints
from shardwise.transfer.replicas import ReplicaGroup, find_mismatched_groups

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class StateSummary:
    """Digests of a rank's state, which the ranks compare before a checkpoint.

    Attributes:
        call: the arguments of the call by name, as text.
        random: state of each random generator, by name.
        data: position in the data, or "" without one.
        first: schedulers and scaler, of which the first rank's are saved.
        settings: settings of the optimizers (learning rates, betas, ...).
        rates: learning rates, by group.
        base: fingerprints of the samples of the base, for an adapter.
        replicas: digests of replicated tensors. None if the plan of the checkpoint before cannot be reused.
    """

    call: dict[str, str] = field(default_factory=dict)
    random: dict[str, str] = field(default_factory=dict)
    data: str = ""
    first: str = ""
    settings: str = ""
    rates: list[float] = field(default_factory=list)
    base: Fingerprints = field(default_factory=dict)
    replicas: dict[ReplicaGroup, bytes] | None = None


class Agreement(NamedTuple):
    """Result of a comparison of all ranks' states.

    Attributes:
        equal_generators: names of the random generators in the same state on all ranks.
        data: "none", "one" or "each", for data positions.
        base: identity of the base of an adapter.
        mismatched: groups of ranks whose replicas differ. None unless all ranks can reuse the plan.
    """

    equal_generators: list[str]
    data: str
    base: BaseIdentity | None
    mismatched: frozenset[ReplicaGroup] | None


def require_same_calls(world: World, summaries: Sequence[StateSummary]) -> None:
    """Raise :class:`RankMismatchError` if ranks passed different arguments."""
    if mismatched := world.find_mismatched([item.call for item in summaries]):
        pairs = pair_differences(summaries[0].call, summaries[mismatched.first].call)
        raise make_mismatch_error(world, mismatched, pairs)


def compare_summaries(world: World, samples: BaseSamples | None, summaries: Sequence[StateSummary]) -> Agreement:
    """Compare the state of all ranks.

    Raises:
        RankMismatchError: optimizers have different settings, or some ranks only have a data position.
    """
    if mismatched := world.find_mismatched([item.settings for item in summaries]):
        # Most often the learning rates differ, so the message has some of each side.
        rates, expected = (
            ", ".join(map(str, summaries[rank].rates[:4])) or "none" for rank in (mismatched.first, 0)
        )
        raise RankMismatchError(
            f"the settings of the optimizers on rank {mismatched.text} are not those of rank "
            f"{world.global_ranks[0]} (learning rates {rates} against {expected}), because their schedules differ. "
            "Give all ranks the same settings"
        )
    if mismatched := world.find_mismatched([item.first for item in summaries]):
        _log.warning(
            "The schedulers or the scaler on rank %s are not in the state of those on rank %d, which is saved and "
            "restored on all ranks. Pass what each rank has of its own as data=",
            mismatched.text,
            world.global_ranks[0],
        )
    # See [Note: Random numbers on other ranks] in ``checkpoints/train_state.py``.
    first = summaries[0].random
    equal_generators = [name for name in first if all(item.random.get(name) == first[name] for item in summaries)]
    # Equal positions are stored once. Then any number of ranks may resume from it.
    positions = {item.data for item in summaries}
    if positions == {""}:
        data = "none"
    elif "" in positions:
        raise RankMismatchError("some ranks have a position in the data and others none. Give all ranks theirs")
    else:
        data = "one" if len(positions) == 1 else "each"
    base = samples.identity([item.base for item in summaries]) if samples else None
    digests = [item.replicas for item in summaries if item.replicas is not None]
    # Without the digests of one rank nothing is known: all ranks plan anew, and compare then.
    groups = find_mismatched_groups(digests) if len(digests) == len(summaries) else None
    return Agreement(equal_generators, data, base, groups)
