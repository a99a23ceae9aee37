"""Reports of loads and states: plain data that prints itself as rows of text."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import escape_controls
from shardwise.core.formatting import describe_trainable, in_bytes, listing


@dataclass(frozen=True)
class Report:
    """The facts of one call, as seen by one rank. Sizes in bytes, times in seconds.

    A subclass states its fields, and a headline. Fields that have something are printed as rows, in order: names
    collapsed, ``cast`` by pairs of dtypes, ``tied`` by name, ``seconds`` by phase, other mappings by value.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return dataclasses.asdict(self)

    def headline(self) -> Iterator[str]:
        """Yield the first lines."""
        raise NotImplementedError

    def __str__(self) -> str:
        lines = [*self.headline()]
        for item in sorted(dataclasses.fields(self), key=lambda item: item.name == "seconds"):
            if item.metadata.get("row", True):
                lines += _rows(item.metadata.get("label", item.name.replace("_", " ")), getattr(self, item.name))
        return escape_controls("\n".join(lines))


def _rows(name: str, value: Any) -> list[str]:
    if not value:
        return []
    if name == "seconds" and isinstance(value, Mapping):
        return ["  " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in value.items())]
    if name in ("note", "tied", "resized"):
        texts = value if name == "note" else [f"{key} = {of}" for key, of in value.items()]
        return [f"  {name:<11} {text}" for text in texts]
    # By value: {"a.weight": ("F32", "BF16"), "b.weight": ("F32", "BF16")} is one row F32→BF16 with both names.
    if isinstance(value, Mapping):
        names = defaultdict(list)
        for key, of in value.items():
            names["→".join(of) if isinstance(of, tuple) else f"{name}: {of}"].append(key)
        return [line for label, keys in names.items() for line in listing(label, keys)]
    if isinstance(value, tuple):
        return listing(name, [str(each) for each in value])
    return []


def hidden(**options: Any) -> Any:
    """Return a field that is no row."""
    return dataclasses.field(metadata={"row": False}, **options)


def row(label: str, **options: Any) -> Any:
    """Return a field whose row has this label."""
    return dataclasses.field(metadata={"label": label}, **options)


@dataclass(frozen=True, kw_only=True)
class RankReport(Report):
    """The facts of one call on one rank, with seconds by phase, in order."""

    rank: int
    world_size: int
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """Forecast of a load on one rank, in bytes.

    Attributes:
        rank: its number.
        shard_bytes: elements of parameters and persistent buffers that the rank holds.
        padded_bytes: memory of these. FSDP2 pads all shards to the size of the first rank's.
        device_bytes: peak memory of the accelerator during the load.
        host_bytes: peak memory of the host during the load, staging included.
        read_bytes: stored bytes that the shards are made of, if each rank reads its own. Gaps that a request reads
            over are not included.
    """

    rank: int
    shard_bytes: int
    padded_bytes: int
    device_bytes: int
    host_bytes: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Available:
    """Free memory of a rank in bytes, or None if unknown.

    Attributes:
        device_bytes: free memory of its accelerator.
        host_bytes: free memory of its machine.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadReport(RankReport):
    """Facts of one load, as seen by one rank. Sizes in bytes, times in seconds.

    ``tied`` maps each tied name to the name that holds the values. ``cast`` maps a name to ("stored dtype", "dtype
    in the model"). ``ignored_keys`` are unused checkpoint keys, allowed by the caller or ignored by the model.
    ``read_once`` are tensors that one rank read for all. ``replicated`` are parameters that are unsharded on all
    ranks of a sharded model. ``wrapper`` is the path of the model in nested dicts, as in "model". ``not_loaded``
    are the other values of the checkpoint.
    """

    checkpoint: str
    parameters: int
    """Elements of all parameters of the model, tied ones once."""
    checkpoint_bytes: int
    read_bytes: int
    """Bytes this rank read from the checkpoint's tensors, over-read of strided boxes included."""
    placed_bytes: int
    """Bytes of parameters and persistent buffers that this rank holds."""
    files_opened: int
    reads: int
    """Read system calls (or requests) of this rank."""
    loaded: int
    """Tensors filled from the checkpoint."""
    estimate: RankEstimate
    """Estimate for this rank, made before the load."""
    files: tuple[str, ...] = hidden()
    """Names of the checkpoint's files, relative to ``checkpoint``."""
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    initialized: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    ignored_keys: tuple[str, ...] = row("ignored", default=())
    missing_keys: tuple[str, ...] = row("missing", default=())
    unexpected_keys: tuple[str, ...] = row("unexpected", default=())
    mismatched_keys: tuple[str, ...] = row("mismatched", default=())
    computed: tuple[str, ...] = ()
    read_once: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    wrapper: str = ""
    not_loaded: tuple[str, ...] = ()
    notes: tuple[str, ...] = row("note", default=())
    """Warnings."""
    resized: Mapping[str, tuple[int, int]] = hidden(default_factory=dict)
    """Tensors with more rows than the checkpoint has: (rows stored, rows)."""
    trainable_parameters: int = 0
    """Elements of the parameters that are trained, tied ones once."""
    trained: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Trained parameters with their dtypes, if a tuning was requested."""

    def headline(self) -> Iterator[str]:
        rate = self.read_bytes / max(self.seconds.get("read", 0.0), 1e-9)
        read = f"{in_bytes(self.read_bytes)} of {in_bytes(self.checkpoint_bytes)}"
        effort = f"{self.reads} reads, {self.files_opened} files"
        yield f"loaded {self.checkpoint}"
        yield f"  {self.place}: read {read} ({in_bytes(int(rate))}/s, {effort})"
        yield f"  holds {in_bytes(self.placed_bytes)}; {self.loaded} tensors, {self.parameters:,} parameters in all"
        if self.trained:
            yield f"  {describe_trainable(self.trainable_parameters, self.parameters)}"
        for name, (stored, rows) in self.resized.items():
            yield f"  resized     {name}: {stored:,} rows to {rows:,}"
        if self.wrapper:
            yield f"  taken from  {self.wrapper}"


@dataclass(frozen=True, kw_only=True)
class MovedReport(RankReport):
    """Bytes sent and received between ranks, and those of values that this rank had itself."""

    sent_bytes: int = 0
    received_bytes: int = 0
    kept_bytes: int = 0

    @property
    def moved(self) -> str:
        sent, received = in_bytes(self.sent_bytes), in_bytes(self.received_bytes)
        return f"sent {sent}, received {received}, kept {in_bytes(self.kept_bytes)}"


@dataclass(frozen=True, kw_only=True)
class StateReport(MovedReport):
    """Facts of one state that was set, as seen by one rank. Sizes in bytes, times in seconds.

    Attributes:
        set_names: tensors that got values. For an optimizer as in "layer.weight: exp_avg". Tied ones once.
        missing: tensors that the state does not have, which have kept their values. For optimizers also parameters,
            which have kept the settings of their group.
        unexpected: additional entries of the state, which were left out.
        mismatched: names in the state with another shape or kind of number. The tensors have kept their values.
        cast: name to ("dtype provided", "dtype now").
        without_state: of optimizers, parameters that are without state now, as before their first step.
        on_meta: of models, tensors that still have no values.
        recomputed: of models that were on meta, buffers and attributes that no state has, computed again.
        provided_by: the ranks that had the state.
        read_bytes: read from files by this rank.
        seconds: by phase, in order: agree, exchange, finish.
    """

    set_names: tuple[str, ...] = hidden(default=())
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    without_state: tuple[str, ...] = ()
    on_meta: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    provided_by: tuple[int, ...] = hidden(default=())
    read_bytes: int = 0

    def headline(self) -> Iterator[str]:
        yield f"set {len(self.set_names)} tensors, {self.place}"
        yield f"  read {in_bytes(self.read_bytes)}, {self.moved}"


@dataclass(frozen=True, kw_only=True)
class ShardReport(MovedReport):
    """Facts of one sharding, as seen by one rank. Sizes in bytes, times in seconds.

    Attributes:
        mesh: its axes and their sizes, as in "fsdp=8", or "" if nothing was sharded.
        was_sharded: the model was sharded before, and has been left alone.
        groups: modules that ``fully_shard`` was applied to, without the root.
        parameters: elements of all parameters, tied ones once.
        placed_bytes: of this rank's parameters and buffers that have values.
        on_meta: tensors without values on any rank, which ``load`` fills.
        awaiting_load: parameters that have memory, because an optimizer holds them, but no values (they are NaN).
        cast: name to ("dtype before", "dtype now") of upcast trained parameters, and of tensors whose source had
            another dtype than this rank's model.
        differed: name to the rank whose values were used, for values that differed between ranks.
        replicated: parameters that are whole on every rank.
        tied: further names of shared parameters, with the first name.
        rebound: for each optimizer, how many parameters and values of state it was bound to.
        seconds: by phase, in order: agree, compare, wrap, exchange, finish.
    """

    mesh: str
    was_sharded: bool
    parameters: int
    placed_bytes: int
    groups: tuple[str, ...] = hidden(default=())
    staging_bytes: int = 0
    on_meta: tuple[str, ...] = ()
    awaiting_load: tuple[str, ...] = row("to be loaded", default=())
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    differed: Mapping[str, int] = row("of rank", default_factory=dict)
    replicated: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rebound: tuple[tuple[int, int], ...] = hidden(default=())

    def headline(self) -> Iterator[str]:
        if self.was_sharded:
            yield f"left alone, {self.place}: the model was sharded before"
            return
        yield f"sharded on {self.mesh}" if self.mesh else "not sharded: there is no process group"
        yield f"  {self.place}: holds {in_bytes(self.placed_bytes)}; {self.parameters:,} parameters in all"
        yield f"  {self.moved}; staging {in_bytes(self.staging_bytes)}"
        for index, (parameters, values) in enumerate(self.rebound):
            yield f"  optimizer {index}: {parameters} parameters, {values} values of state"
