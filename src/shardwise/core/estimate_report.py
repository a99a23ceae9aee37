"""Forecast of a load, and of the training that follows, for all ranks."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

from shardwise.core.formatting import describe_trainable, in_bytes, table_lines
from shardwise.core.reports import RankEstimate, Report, hidden, row

_ROWS = 16
"""Number of ranks up to which each has a line of its own."""


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """A group of ``fully_shard``.

    Attributes:
        modules: names of its modules. ``""`` is the root.
        dtype: dtypes of its parameters, joined by ``+``.
        parameters: number of elements.
        gathered_bytes: output of its all-gather, padding included, in the dtype that is gathered.
        gradient_bytes: whole gradients of its trained parameters, in the dtype that is gathered.
        reduced_bytes: input of its reduce-scatter.
    """

    modules: tuple[str, ...]
    dtype: str
    parameters: int
    gathered_bytes: int
    gradient_bytes: int = 0
    reduced_bytes: int = 0

    @property
    def name(self) -> str:
        return " + ".join(module or "(root)" for module in self.modules)


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Peak memory of a phase of training, in bytes by term. On CPU ranks everything is on the host."""

    phase: str
    device: Mapping[str, int]
    host: Mapping[str, int]

    def bytes_on(self, device: str) -> int:
        """Bytes on the host if ``device`` is "cpu", else on the accelerator."""
        return sum((self.host if device == "cpu" else self.device).values())


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """Memory of training on the rank that needs the most, in bytes.

    Attributes:
        optim: name of the optimizer, as in ``TrainingArguments.optim``.
        batch_size: rows of a forward pass, or 0 if activations are not included.
        max_length: tokens of a row, or 0 if activations are not included.
        weight_bytes: parameters and buffers, padding included.
        gradient_bytes: sharded gradients of the trained parameters.
        optimizer_bytes: optimizer states, by rank.
        phases: peaks of forward, loss, backward and optimizer step.
        largest_batch: most rows of a forward pass that fit into the given memory. None if it is not given.
    """

    optim: str
    batch_size: int
    max_length: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]
    largest_batch: int | None = None

    def worst(self, device: str) -> PhaseMemory:
        """The phase with the highest peak on ``device``."""
        return max(self.phases, key=methodcaller("bytes_on", device))

    def lines(self, device: str) -> list[str]:
        size = f"{self.batch_size} x {self.max_length:,} tokens" if self.batch_size else "activations not included"
        states = (
            f"weights {in_bytes(self.weight_bytes)}, gradients {in_bytes(self.gradient_bytes)}, "
            f"{self.optim} {in_bytes(max(self.optimizer_bytes))}"
        )
        worst = self.worst(device)
        lines = [f"{size} on each rank; {states}", f"peak {in_bytes(worst.bytes_on(device))} in {worst.phase}"]
        width = max(len(phase.phase) for phase in self.phases)
        for phase in self.phases:
            host, terms = "", phase.device
            if device == "cpu":
                terms = phase.host
            elif phase.host:
                host = f"; host {in_bytes(phase.bytes_on('cpu'))}"
            lines.append(
                f"{phase.phase:<{width}} {in_bytes(phase.bytes_on(device)):>11}  {_format_terms(terms)}{host}"
            )
        return lines


@dataclass(frozen=True, kw_only=True)
class Estimate(Report):
    """Forecast of bringing up a model, made before a tensor is read and without ranks.

    Attributes:
        device: "cpu" or the kind of accelerator that holds the shards.
        parameters: number of elements, tied ones once.
        bytes_per_dtype: bytes of the whole model.
        ranks: one entry for each rank.
        whole: parameters that stay whole on every rank, with the reason.
        tied: names and the names whose storage they share.
        cast: names and their dtypes in the checkpoint and in the model.
        computed: names of tensors that are converted by computing.
        trained: names of trained parameters. A save of a LoRA writes these alone, any other save the whole model.
        training: present if ``tuning`` was given.
    """

    checkpoint: str
    model_class: str
    dtype: str
    device: str
    mesh: Mapping[str, int] = hidden()
    parameters: int
    checkpoint_bytes: int
    checkpoint_tensors: int
    bytes_per_dtype: Mapping[str, int] = hidden()
    groups: tuple[GroupEstimate, ...] = hidden()
    ranks: tuple[RankEstimate, ...] = hidden()
    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    initialized: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = hidden(default=())
    ignored_keys: tuple[str, ...] = row("ignored", default=())
    computed: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    trainable_parameters: int = 0
    notes: tuple[str, ...] = row("note", default=())
    training: TrainingEstimate | None = None

    @property
    def largest_group(self) -> GroupEstimate:
        return max(self.groups, key=attrgetter("gathered_bytes"))

    @property
    def read_bytes(self) -> int:
        """Bytes that all ranks together read."""
        return sum(rank.read_bytes for rank in self.ranks)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest rank, on the device that holds the shards, in the load and the training."""
        in_training = 0 if self.training is None else self.training.worst(self.device).bytes_on(self.device)
        return max(self._load_bytes, in_training)

    @property
    def _load_bytes(self) -> int:
        return max(rank.host_bytes if self.device == "cpu" else rank.device_bytes for rank in self.ranks)

    def verdict(self, memory_bytes: int) -> str:
        """Return whether a rank with ``memory_bytes`` suffices, as text."""
        word = "fits" if self.peak_bytes <= memory_bytes else "does not fit"
        most = None if self.training is None else self.training.largest_batch
        batch = ""
        if most is not None:
            # The load comes before the training, and takes its memory whatever the batch is.
            fits_any = most > 0 and self._load_bytes <= memory_bytes
            batch = f", largest batch {most}" if fits_any else ", no batch fits"
        return f"{word}: {in_bytes(self.peak_bytes)} of {in_bytes(memory_bytes)} on a rank{batch}"

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain JSON values, with totals in ``summary``."""
        training = self.training
        return {
            **super().to_dict(),
            "summary": {
                "read_bytes": self.read_bytes,
                "device_bytes": max(rank.device_bytes for rank in self.ranks),
                "host_bytes": max(rank.host_bytes for rank in self.ranks),
                "training_bytes": training and training.worst(self.device).bytes_on(self.device),
                "training_phase": training and training.worst(self.device).phase,
            },
        }

    def headline(self) -> Iterator[str]:
        dtypes = ", ".join(f"{dtype} ({in_bytes(nbytes)})" for dtype, nbytes in self.bytes_per_dtype.items())
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        largest = self.largest_group
        gathered = f"largest {largest.name}: {in_bytes(largest.gathered_bytes)} gathered"
        yield f"plan for {self.checkpoint}"
        yield f"  model       {self.model_class}, {self.parameters:,} parameters in {dtypes}"
        yield f"  checkpoint  {in_bytes(self.checkpoint_bytes)}, {self.checkpoint_tensors:,} tensors"
        yield f"  mesh        {mesh}, {self.device}"
        yield f"  groups      {len(self.groups)}; {gathered}"
        if self.training is not None:
            yield f"  {describe_trainable(self.trainable_parameters, self.parameters)}"

    def __str__(self) -> str:
        lines = [super().__str__(), "", *_table(self.ranks), ""]
        lines.append(f"  read        {in_bytes(self.read_bytes)} by all ranks")
        if self.training is not None:
            lines += [f"  training    {line}" for line in self.training.lines(self.device)]
        return "\n".join(lines)


def _format_terms(terms: Mapping[str, int]) -> str:
    """Terms that are not zero, the largest first."""
    nonzero = sorted(((nbytes, term) for term, nbytes in terms.items() if nbytes), reverse=True)
    return ", ".join(f"{term} {in_bytes(nbytes)}" for nbytes, term in nonzero)


def _table(ranks: Sequence[RankEstimate]) -> list[str]:
    """Return a line for each rank. For many ranks, the minimum, the mean and the maximum."""
    head = ("rank", "holds", "on device", "on host", "reads")
    values: dict[str, Sequence[int]] = {}
    for rank in ranks:
        values[str(rank.rank)] = (rank.shard_bytes, rank.device_bytes, rank.host_bytes, rank.read_bytes)
    if len(ranks) > _ROWS:
        columns = list(zip(*values.values(), strict=True))
        means = [sum(column) // len(column) for column in columns]
        values = {"least": [*map(min, columns)], "mean": means, "most": [*map(max, columns)]}
    rows = [(name, *map(in_bytes, nbytes)) for name, nbytes in values.items()]
    return [f"  {line}" for line in table_lines(head, rows, head)]
