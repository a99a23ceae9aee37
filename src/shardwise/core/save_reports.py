"""Reports of saves, of written states, and of merges."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.formatting import in_bytes
from shardwise.core.reports import LoadReport, RankReport, Report, StateReport, hidden, row


@dataclass(frozen=True, kw_only=True)
class SaveReport(RankReport):
    """Facts of one save, as seen by one rank. Sizes in bytes, times in seconds.

    Attributes:
        directory: that was saved to.
        files: of weights, in order, as they are named now.
        tensors: in the files.
        parameters: elements of the model's parameters, tied ones once.
        checkpoint_bytes: of all tensors in the files.
        written_bytes: by this rank, headers not counted.
        dtypes: that were saved, with the number of tensors of each.
        cast: name of a tensor in the files to ("dtype in the model", "dtype saved").
        tied: names that are not saved, with the name under which their tensor is.
        differing_buffers: names of buffers with different values on some ranks. The first rank's values were saved.
        removed: files of the older save that are gone.
        is_verified: everything was read back and compared with memory.
        seconds: by phase, in order: plan, create, write, sync, verify, commit.
    """

    directory: str
    files: tuple[str, ...]
    tensors: int
    parameters: int
    checkpoint_bytes: int
    written_bytes: int
    dtypes: Mapping[str, int] = hidden()
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    differing_buffers: tuple[str, ...] = row("differing", default=())
    removed: tuple[str, ...] = ()
    is_verified: bool = False

    def headline(self) -> Iterator[str]:
        kinds = ", ".join(f"{count} {label}" for label, count in self.dtypes.items())
        yield f"saved {self.tensors} tensors ({kinds}; {in_bytes(self.checkpoint_bytes)}) to {self.directory}"
        yield f"  {self.place} wrote {in_bytes(self.written_bytes)}"
        if self.is_verified:
            yield "  read back and compared with memory: equal"


@dataclass(frozen=True)
class FilesReport(Report):
    """Facts of one state that was written, as seen by one rank.

    Attributes:
        path: the file or the folder. For per-rank files, this rank's.
        tensors: those written, tied ones once.
        nbytes: size of ``path``.
        seconds: in all.
        differing_buffers: that have other values on some ranks than on the first, whose values were written.
    """

    path: str
    tensors: int
    nbytes: int
    seconds: float
    differing_buffers: tuple[str, ...] = row("differing", default=())

    def headline(self) -> Iterator[str]:
        yield f"{self.path}: {self.tensors} tensors, {in_bytes(self.nbytes)}, {self.seconds:.2f} s"


@dataclass(frozen=True, kw_only=True)
class MergeReport(Report):
    """Files that a merge has written into ``out``."""

    out: str
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    companions: tuple[str, ...]
    notes: tuple[str, ...] = row("note", default=())
    seconds: float = 0.0

    @property
    def written(self) -> str:
        return f"{self.tensors} tensors, {in_bytes(self.nbytes)} in {self.out}, {self.seconds:.1f} s"


@dataclass(frozen=True, kw_only=True)
class MergeAdapterReport(MergeReport):
    """An adapter folded into its base. ``unchanged`` are modules of it whose tensors came out as they were."""

    base: str
    adapter: str
    model_class: str
    dtype: str
    modules: int
    unchanged: tuple[str, ...]

    def headline(self) -> Iterator[str]:
        yield f"merged {self.modules - len(self.unchanged)} of {self.modules} modules of {self.adapter}"
        yield f"  into        {self.model_class} {self.dtype} of {self.base}"
        yield f"  written     {self.written}"


@dataclass(frozen=True, kw_only=True)
class MergeWeightsReport(MergeReport):
    """A checkpoint written as one. ``names`` is the kind of names that its tensors have now."""

    checkpoint: str
    layout: str
    names: str
    verified: int
    removed: str = ""

    def headline(self) -> Iterator[str]:
        yield f"merged {self.checkpoint} ({self.layout})"
        yield f"  written     {self.written}"
        yield f"  names       {self.names}"
        if self.removed:
            yield f"  verified    {self.verified} tensors, read back from {self.out}"
            yield f"  removed     {self.removed}"


@dataclass(frozen=True, kw_only=True)
class CheckpointReport(RankReport):
    """Facts of one checkpoint that was saved. Sizes in bytes, times in seconds.

    Attributes:
        directory: of this checkpoint.
        is_complete: whether it is committed. A background save is not yet.
        tensors: how many it holds, of the model and of optimizers.
        state_bytes: of these.
        written_bytes: bytes written by this rank. Those of tensors only until it is complete.
        checkpoint_bytes: of all files with tensors, or 0 until it is complete.
        blocked_s: how long ``save`` kept the training waiting.
        removed: older steps that are not kept.
        differing_buffers: of the model, that have other values on some ranks than on the first, whose are stored.
        seconds: by phase, in order: wait (for the checkpoint before), look, plan, compare, stage, write.
    """

    directory: str
    step: int
    is_complete: bool
    tensors: int
    state_bytes: int
    written_bytes: int
    checkpoint_bytes: int = 0
    blocked_s: float = 0.0
    removed: tuple[int, ...] = row("removed steps", default=())
    differing_buffers: tuple[str, ...] = row("differing", default=())

    def headline(self) -> Iterator[str]:
        done = "saved" if self.is_complete else "being saved"
        yield f"step {self.step} {done} in {self.directory}, {self.place}"
        written = in_bytes(self.written_bytes)
        yield f"  {self.tensors} tensors of {in_bytes(self.state_bytes)}, {written} by this rank"
        yield f"  training waited {self.blocked_s:.2f} s"


@dataclass(frozen=True, kw_only=True)
class RestoreReport(RankReport):
    """Facts of one checkpoint that was restored. Sizes in bytes, times in seconds.

    Attributes:
        directory: of the checkpoint.
        step: number of completed optimizer steps.
        skipped_steps: later steps of which files are missing or truncated, or that may not be entered.
        saved_by: how many ranks saved it.
        user: the user's own state.
        restored: the components that were: "model", "optimizers", "schedulers", "scaler", "data", "rng".
        model: tensors of the model that got values, tied ones once.
        optimizers: values of optimizers that were set, as in "layer.weight: exp_avg".
        not_stored: tensors of the model that the checkpoint does not hold on purpose: those of an adapter's base.
        missing: entries that the checkpoint does not have, which are unchanged.
        unexpected: additional entries of the checkpoint, which were left out.
        mismatched: entries in another form, which are unchanged.
        without_state: trained parameters that have no state in the optimizers, as before their first step.
        base: comparison of the base with that of the checkpoint, as a sentence. "" if the checkpoint has all
            weights.
        cast: state of optimizers to ("dtype stored", "dtype now").
        rng: outcome for the random generators, as a sentence.
        data: outcome for the data position, as a sentence.
        read_bytes: bytes read by this rank.
        checked_bytes: bytes that this rank compared with checksums, or 0 if the files have none.
        seconds: by phase, in order: open, plan, read, finish.
    """

    directory: str
    step: int
    saved_by: int
    skipped_steps: tuple[int, ...] = hidden(default=())
    user: Mapping[str, Any] = hidden(default_factory=dict)
    restored: tuple[str, ...] = hidden(default=())
    model: tuple[str, ...] = hidden(default=())
    optimizers: tuple[str, ...] = hidden(default=())
    not_stored: tuple[str, ...] = hidden(default=())
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()
    base: str = ""
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    rng: str = ""
    data: str = ""
    read_bytes: int = 0
    checked_bytes: int = 0

    def headline(self) -> Iterator[str]:
        yield f"step {self.step} restored from {self.directory}, {self.place}"
        yield f"  {len(self.model)} tensors of the model, {len(self.optimizers)} values of optimizers"
        yield f"  saved by {self.saved_by} ranks; this rank read {in_bytes(self.read_bytes)}"
        yield f"  restored: {', '.join(self.restored)}"
        yield f"  {in_bytes(self.checked_bytes)} are what was written" if self.checked_bytes else "  not checked"
        if self.skipped_steps:
            steps = ", ".join(map(str, self.skipped_steps))
            yield f"  skipped, because files are missing or truncated, or may not be read: step {steps}"
        for name, text in (("base", self.base), ("rng", self.rng), ("data", self.data)):
            if text:
                yield f"  {name}: {text}"
        if self.not_stored:
            yield f"  {len(self.not_stored)} tensors are not in it, on purpose: those of the base"


@dataclass(frozen=True)
class TrainerReport(Report):
    """Report of a checkpoint of the Trainer: its model, its step, and the components that are not restored.

    Attributes:
        checkpoint: the folder.
        step: optimizer steps done.
        epoch: done so far, in fractions.
        model: report of the model's state.
        not_restored: all else that the folder holds or a run needs, with the reason.
        trainer_state: numbers and texts in ``trainer_state.json`` (best_metric, max_steps, ...).
    """

    checkpoint: str
    step: int
    epoch: float
    model: StateReport | LoadReport
    not_restored: Mapping[str, str] = hidden()
    trainer_state: Mapping[str, Any] = hidden()

    def headline(self) -> Iterator[str]:
        yield f"{self.checkpoint}: step {self.step}, epoch {self.epoch:g}"
        for name, reason in self.not_restored.items():
            yield f"  not restored: {name}: {reason}"


@dataclass(frozen=True)
class ReopenReport(Report):
    """Facts of one look at a checkpoint on disk. Sizes in bytes, times in seconds.

    Attributes:
        checkpoint: the folder.
        files: of weights.
        tensors: in them.
        nbytes: of these tensors.
        model_class: class whose tensors are all present, or "" if it is not known.
        unknown: the reason why it is not.
        unexpected: keys of tensors that this class does not have.
        compared: number of tensors with a recorded fingerprint. For a training checkpoint, runs of bytes: chunks of
            tensors, values, and the bytes between them.
        damaged: those with another fingerprint now.
        seconds: all of it took.
        holds: what it holds that is not a model: the state of a training, or an adapter.
        changed: small files (configs, tokenizers) that differ from the record: edited or damaged. Weights are not
            affected.
        damaged_files: headers of files, records of fingerprints, and configs of adapters that differ from the
            record.
    """

    checkpoint: str
    files: int
    tensors: int
    nbytes: int
    model_class: str
    compared: int
    damaged: tuple[str, ...]
    seconds: float
    holds: str = ""
    changed: tuple[str, ...] = hidden(default=())
    damaged_files: tuple[str, ...] = row("damaged", default=())
    unknown: str = hidden(default="")
    unexpected: tuple[str, ...] = hidden(default=())

    @property
    def is_sound(self) -> bool:
        """True if no damage was found. Small files may have been edited, and count for nothing here."""
        return not self.damaged and not self.damaged_files

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "is_sound": self.is_sound}

    def headline(self) -> Iterator[str]:
        size = f"{in_bytes(self.nbytes)} in {self.files} file{'' if self.files == 1 else 's'}"
        yield f"{self.checkpoint}: {self.tensors} tensors, {size}, {self.seconds:.1f} s"
        yield "  structure   sound: headers, index and sizes agree"
        if self.holds:
            yield f"  holds       {self.holds}"
        if self.model_class:
            count = len(self.unexpected)
            others = f"{count} more, such as {self.unexpected[0]}" if count else "nothing else"
            yield f"  coverage    all that {self.model_class} needs, and {others}"
        elif self.unknown:
            yield f"  coverage    not known: {self.unknown}"
        if self.compared:
            verdict = "DAMAGED" if self.damaged else "equal to what was saved"
            equal = self.compared - len(self.damaged)
            yield f"  values      {equal} of {self.compared} fingerprints {verdict}"
        elif self.damaged_files:
            yield "  values      not compared: what was recorded is damaged"
        else:
            yield "  values      not compared: no fingerprints were recorded for these files"
        for name in self.changed:
            yield f"  changed     {name}: edited since it was saved, or damaged"
