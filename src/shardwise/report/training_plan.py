"""What a whole training will take, before it: memory by phase on every rank, time to load, time of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.forecast import Forecast
from shardwise.report.names import in_bytes


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The greatest moment of a phase on the rank that needs most: bytes by term, on the device and on the host.

    On CPUs all is on the host.
    """

    phase: str
    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    def bytes_on(self, device: str) -> int:
        """Where the shards are: of the accelerator, or of the host."""
        return self.host_bytes if device == "cpu" else self.device_bytes


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The most that a rank needs of where its shards are, and the phase in which it does."""

    rank: int
    nbytes: int
    phase: str


@dataclass(frozen=True, slots=True)
class Room:
    """What fits into so many bytes for each rank, of its accelerator, else of the host.

    ``largest_batch`` is 0 where no batch fits. ``lacking_bytes`` are what the batch that was asked for has not;
    ``lacking_least_bytes`` the same of a batch of one row. ``term`` is the largest in the peak.
    """

    memory_bytes: int
    largest_batch: int
    lacking_bytes: int
    lacking_least_bytes: int
    term: str
    term_bytes: int

    @property
    def refusal(self) -> str:
        """Why the training does not fit; nothing where it does."""
        if not self.lacking_bytes:
            return ""
        largest = f"most of it are {self.term} ({in_bytes(self.term_bytes)})"
        if not self.largest_batch:
            return (
                f"no batch fits into {in_bytes(self.memory_bytes)}: one row lacks "
                f"{in_bytes(self.lacking_least_bytes)}; {largest}. "
                "Take more ranks, activation checkpointing, shorter rows, or train less of the model"
            )
        return (
            f"the training does not fit into {in_bytes(self.memory_bytes)}: {in_bytes(self.lacking_bytes)} are "
            f"lacking; {largest}. training.batch_size={self.largest_batch} fits"
        )


@dataclass(frozen=True)
class TrainingPlan:
    """What a training will take. Made without ranks, and before a tensor is read.

    ``load`` is the forecast of bringing the model up. ``phases`` are those of the rank that needs most, ``peaks``
    of every rank. Of each rank and step: ``tokens`` (padding included), ``flops`` (products of matrices, what is
    computed again among them), ``step_s`` (None where nobody has said how fast it computes). ``load_s`` is at
    ``read_bytes_per_s`` of each machine. ``optimizer`` is its name.
    """

    load: Forecast
    rows: int
    row_tokens: int
    micro_batches: int
    precision: str
    recomputed: str
    optimizer: str
    phases: tuple[PhaseMemory, ...]
    peaks: tuple[RankPeak, ...]
    tokens: int
    flops: float
    step_s: float | None
    load_s: float
    read_bytes_per_s: float
    room: Room | None = None
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> PhaseMemory:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.bytes_on(self.load.device))

    @property
    def peak_bytes(self) -> int:
        """The most that any rank needs, of its accelerator, else of the host."""
        return self.worst.bytes_on(self.load.device)

    @property
    def host_bytes(self) -> int:
        """The most host memory that any rank needs."""
        return max(phase.host_bytes for phase in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "load"}
        return {
            "load": self.load.to_dict(),
            **values,
            "phases": [
                {**dataclasses.asdict(phase), "device_bytes": phase.device_bytes, "host_bytes": phase.host_bytes}
                for phase in self.phases
            ],
            "peaks": [dataclasses.asdict(peak) for peak in self.peaks],
            "room": None if self.room is None else {**dataclasses.asdict(self.room), "refusal": self.room.refusal},
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.worst.phase,
            "host_bytes": self.host_bytes,
        }

    def __str__(self) -> str:
        return "\n".join([self.load.told(with_training=False), "", *self.lines()])

    def lines(self) -> list[str]:
        """What is told of the training itself."""
        times = f" x {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        most, least = max(self.peaks, key=lambda peak: peak.nbytes), min(self.peaks, key=lambda peak: peak.nbytes)
        range_of = "" if most.nbytes == least.nbytes else f", {in_bytes(least.nbytes)} on rank {least.rank}"
        step = f"{self.rows} x {self.row_tokens:,} tokens{times} on each rank, in {self.precision}"
        lines = [
            "training",
            f"  step        {step}, {self.recomputed}, {self.optimizer}",
            f"  peak        {in_bytes(most.nbytes)} on rank {most.rank}, in {self._in_words(most.phase)}{range_of}",
        ]
        for phase in self.phases:
            parts = [f"{in_bytes(phase.bytes_on(self.load.device)):>11}  {_terms(self._there(phase))}"]
            if self.load.device != "cpu" and phase.host_bytes:
                parts.append(f"host {in_bytes(phase.host_bytes)} ({_terms(phase.host)})")
            lines.append(f"  {phase.phase:<11} {'; '.join(parts)}")
        if self.room is not None:
            fits = (
                self.room.refusal
                or f"the largest batch for {in_bytes(self.room.memory_bytes)} is {self.room.largest_batch}"
            )
            lines.append(f"  memory      {fits}")
        lines.append(f"  load        {self.load_s:.1f} s at {self.read_bytes_per_s / 1e9:.3g} GB/s of each machine")
        how = "say --tflops to know its time" if self.step_s is None else f"{self.step_s:.3g} s"
        lines.append(f"  time        a step is {self.flops / 1e12:,.3g} TFLOP on each rank: {how}")
        return [*lines, *(f"  note        {note}" for note in self.notes)]

    def _there(self, phase: PhaseMemory) -> Mapping[str, int]:
        return phase.host if self.load.device == "cpu" else phase.device

    @staticmethod
    def _in_words(phase: str) -> str:
        return {"optimizer": "the optimizer's step", "load": "the load", "checkpoint": "a checkpoint"}.get(
            phase, f"the {phase}" if phase == "loss" else f"the {phase} pass"
        )


def _terms(terms: Mapping[str, int]) -> str:
    """The largest first; nothing of what takes nothing."""
    found = sorted(((nbytes, term) for term, nbytes in terms.items() if nbytes), reverse=True)
    return ", ".join(f"{term} {in_bytes(nbytes)}" for nbytes, term in found)
