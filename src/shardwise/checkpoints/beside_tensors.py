"""What a checkpoint has beside tensors: schedules, a scaler, positions in the data, random numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardwise.checkpoints import randomness
from shardwise.checkpoints.fingerprint_check import Witness
from shardwise.checkpoints.opened import Opened, value_of
from shardwise.checkpoints.state import KeyPath, TrainState
from shardwise.execution.ranks.world import World
from shardwise.storage.contract import StorageReader

REDUCED = ("optimizer", "reduced", "layout")
"""Tells of which shards the state is that is each rank's alone; that lies beside it."""


@dataclass(frozen=True, slots=True)
class BesideTensors:
    """Plain data of a checkpoint, as one rank needs it.

    Attributes:
        common: what is the same for all ranks, and the first rank's generators of random numbers.
        own: this rank's position in the data ("data"), its generators ("rng"), and the reduced state of its
            optimizers ("optimizers"), where they are for it.
    """

    common: Mapping[KeyPath, Any]
    own: Mapping[str, Any]

    @classmethod
    def read(cls, world: World, reader: StorageReader, opened: Opened) -> Self:
        """Collective: yes.

        Raises:
            FormatError: one of these, or what lies around tensors in a rank's part of the files, is damaged.
        """

        def own() -> dict[str, Any]:
            _require_around(reader, opened, world)
            paths = own_paths(opened, world.rank, world.size)
            return {part: value_of(reader, opened, path) for part, path in paths.items()}

        common = world.from_first(lambda: {path: value_of(reader, opened, path) for path in common_paths(opened)})
        return cls(common, world.together(own))

    def put_back(self, opened: Opened, state: TrainState, parts: Collection[str], world: World) -> dict[str, str]:
        """Give it to the parts that are restored; what became of generators and of the position, in words."""
        if "schedulers" in parts:
            for scheduler, told in zip(state.all_schedulers, self.common["schedulers",], strict=True):
                scheduler.load_state_dict(told)
        if "scaler" in parts and state.scaler is not None:
            state.scaler.load_state_dict(self.common["scaler",])
        data = ""
        if "data" in parts and state.data is not None:
            state.data.load_state_dict(self.own["data"])
            data = "one position for all ranks" if opened.facts.data == "one" else "each rank's own position"
        return {"rng": self._put_back_generators(opened, world) if "rng" in parts else "", "data": data}

    def _put_back_generators(self, opened: Opened, world: World) -> str:
        facts, what = opened.facts, f"{opened.folder}: rng"
        if "rng" in self.own:
            lacking = randomness.put_back(self.own["rng"], what)
            rng = "every rank goes on with its own numbers"
        else:
            lacking = randomness.draw_anew(self.common["rng", "rank_0"], facts.alike, world.rank, world.size, what)
            alike = f"{', '.join(facts.alike)}: as saved, alike on all ranks; others: " if facts.alike else ""
            rng = f"{alike}seeded anew, as there were {facts.world_size} ranks, and are {world.size}"
        return rng + (f"; not on this machine: {', '.join(lacking)}" if lacking else "")


def common_paths(opened: Opened) -> list[KeyPath]:
    """Where lies what is the same for all ranks, and the first rank's generators."""
    is_wanted = {"optimizer", "schedulers", "scaler"}
    return [
        path
        for path in opened.objects
        if (path[0] in is_wanted and (path[:2] != REDUCED[:2] or path == REDUCED)) or path == ("rng", "rank_0")
    ]


def own_paths(opened: Opened, rank: int, world_size: int) -> dict[str, KeyPath]:
    """Where a rank's position in the data is, and its generators, if they are for it."""
    found: dict[str, KeyPath] = {}
    is_same_size = opened.facts.world_size == world_size
    if is_same_size:
        found["rng"] = "rng", f"rank_{rank}"
        if REDUCED in opened.objects:
            found["optimizers"] = *REDUCED[:2], f"rank_{rank}"
    if opened.facts.data == "one" or (opened.facts.data == "each" and is_same_size):
        found["data"] = "data", f"rank_{0 if opened.facts.data == 'one' else rank}"
    return found


def _require_around(reader: StorageReader, opened: Opened, world: World) -> None:
    """Each file is looked at by one rank."""
    if isinstance(reader, Witness):
        reader.require_around(sorted(opened.facts.files)[world.rank :: world.size])
