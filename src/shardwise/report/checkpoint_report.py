"""What saving a checkpoint did, and what restoring one did, ours or the Trainer's, on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.load_report import LoadReport
from shardwise.report.names import differing_lines, in_bytes, listing
from shardwise.report.state_report import StateReport


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The facts of one checkpoint that was saved. Sizes in bytes, times in seconds.

    Attributes:
        directory: of this checkpoint.
        is_complete: whether it counts by now; one that is written in the background does not yet.
        tensors: how many it holds, of the model and of optimizers.
        state_bytes: of these.
        written_bytes: what this rank wrote; of tensors alone as long as it is not complete.
        checkpoint_bytes: of all files with tensors; 0 as long as it is not complete.
        blocked_s: how long ``save`` kept the training waiting.
        removed: older steps that are not kept.
        differing_buffers: of the model, that have other values on some ranks than on the first, whose are stored.
        seconds: by phase, in order: wait (for the checkpoint before), look, plan, compare, stage, write.
    """

    rank: int
    world_size: int
    directory: str
    step: int
    is_complete: bool
    tensors: int
    state_bytes: int
    written_bytes: int
    checkpoint_bytes: int = 0
    blocked_s: float = 0.0
    removed: tuple[int, ...] = ()
    differing_buffers: tuple[str, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        done = "saved" if self.is_complete else "being saved"
        size = in_bytes(self.state_bytes)
        lines = [
            f"step {self.step} {done} in {self.directory}, rank {self.rank} of {self.world_size}",
            f"  {self.tensors} tensors of {size}, {in_bytes(self.written_bytes)} by this rank",
            f"  training waited {self.blocked_s:.2f} s",
            "  " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items()),
        ]
        lines += differing_lines(self.differing_buffers)
        if self.removed:
            lines.append(f"  removed: steps {', '.join(map(str, self.removed))}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The facts of one checkpoint that was restored. Sizes in bytes, times in seconds.

    Attributes:
        directory: of the checkpoint.
        step: optimizer steps that had been done.
        passed_over: later steps that are there, and of which files are gone or cut.
        saved_by: how many ranks saved it.
        user: the user's own state.
        restored: the parts that were: "model", "optimizers", "schedulers", "scaler", "data", "rng".
        model: tensors of the model that got values, tied ones once.
        optimizers: values of optimizers that were set, as in "layer.weight: exp_avg".
        not_stored: tensors of the model that the checkpoint does not hold on purpose: those of an adapter's base.
        missing: what the checkpoint lacks, and has stayed as it was.
        unexpected: what it has beside, and has been left out.
        mismatched: what it has in another form, and has stayed as it was.
        afresh: trained parameters that are without state in the optimizers, as before their first step.
        base: how the base compares with the one it was saved with, in words; "" where the checkpoint holds all.
        cast: state of optimizers to ("dtype stored", "dtype now").
        rng: what became of the generators of random numbers, in words.
        data: what became of the position in the data, in words.
        read_bytes: what this rank read.
        checked_bytes: of tensors, read by any rank, that were found to be what was written.
        unchecked: what no rank has compared, for nobody needed it; all of it, where no fingerprints were taken.
        seconds: by phase, in order: open, plan, read, finish.
    """

    rank: int
    world_size: int
    directory: str
    step: int
    saved_by: int
    passed_over: tuple[int, ...] = ()
    user: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    restored: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    not_stored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    afresh: tuple[str, ...] = ()
    base: str = ""
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    rng: str = ""
    data: str = ""
    read_bytes: int = 0
    checked_bytes: int = 0
    unchecked: tuple[str, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"step {self.step} restored from {self.directory}, rank {self.rank} of {self.world_size}",
            f"  {len(self.model)} tensors of the model, {len(self.optimizers)} values of optimizers",
            f"  saved by {self.saved_by} ranks; this rank read {in_bytes(self.read_bytes)}",
            f"  restored: {', '.join(self.restored)}",
            *([f"  {in_bytes(self.checked_bytes)} of tensors are what was written"] if self.checked_bytes else []),
            "  " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items()),
        ]
        if self.passed_over:
            lines.append(f"  passed over, as files are gone or cut: step {', '.join(map(str, self.passed_over))}")
        told = (("base", self.base), ("rng", self.rng), ("data", self.data))
        lines += [f"  {what}: {text}" for what, text in told if text]
        for pair in dict.fromkeys(self.cast.values()):
            lines += listing(f"{pair[0]}→{pair[1]}", [name for name, cast in self.cast.items() if cast == pair])
        if self.not_stored:
            lines.append(f"  {len(self.not_stored)} tensors are not in it, on purpose: those of the base")
        lines += listing("missing", self.missing)
        lines += listing("unexpected", self.unexpected)
        lines += listing("mismatched", self.mismatched)
        lines += listing("afresh", self.afresh)
        lines += listing("not checked", self.unchecked)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """Where the training was, what was restored of it, and what was not.

    Attributes:
        checkpoint: the folder.
        step: optimizer steps done.
        epoch: done so far, in fractions.
        model: what was set of the model.
        optimizer: what was set of the optimizer; None where it was not.
        restored: what was restored: "model", "optimizer", "scheduler", "random numbers".
        not_restored: all else that the folder holds or a run needs, with the reason.
        told: the numbers and texts of ``trainer_state.json`` (best_metric, num_input_tokens_seen, max_steps, ...).
    """

    checkpoint: str
    step: int
    epoch: float
    model: StateReport | LoadReport
    optimizer: StateReport | None
    restored: tuple[str, ...]
    not_restored: Mapping[str, str]
    told: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.checkpoint}: step {self.step}, epoch {self.epoch:g}",
            f"  restored: {', '.join(self.restored)}",
            *(f"  not restored: {what}: {why}" for what, why in self.not_restored.items()),
        ]
        return "\n".join(lines)
