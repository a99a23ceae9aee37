"""What a format is: how its files are recognised in a folder, who reads them, and where faults are collected.

A format is one object that answers :class:`CheckpointFormat`, and a line in the table of
:mod:`shardwise.formats.opening`, which asks the formats one after the other. What is read goes into an
:class:`IndexSoFar`; :mod:`shardwise.formats.joining` puts there what is made of views and chunks.

A checkpoint of any format may be quantised. Which of its tensors belong together then is told by a
:class:`QuantisedForm`, and a line in the table of :mod:`shardwise.formats.quantisation`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.formats.checkpoint_index import CheckpointIndex, Composed, TensorEntry
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown

LISTED = 20
"""How many names, or faults of one kind, a message lists."""


@dataclass
class FormatFaults:
    """What is wrong with a checkpoint, by kind, so that all of it is said at once."""

    root: str
    by_kind: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unread: list[str] = field(default_factory=list)

    def add(self, kind: str, fault: str) -> None:
        self.by_kind[kind].append(fault)

    def add_error(self, kind: str, error: FormatError | StorageError) -> None:
        """A file's own error; bytes that exist but could not be read are no fault of the checkpoint."""
        if isinstance(error, StorageError) and isinstance(error.__cause__, OSError):
            if not isinstance(error.__cause__, FileNotFoundError):
                self.unread.append(str(error))
                return
            kind = "missing files"
        self.add(kind, str(error))

    def raise_if_any(self) -> None:
        kinds = dict(self.by_kind)
        if self.unread:
            kinds["files that could not be read"] = self.unread
        if not kinds:
            return
        lines = [f"the checkpoint in {shown(self.root)} cannot be used as it is"]
        for kind, faults in kinds.items():
            lines.append(f"  {kind}: {len(faults)}")
            lines += [f"    {fault}" for fault in faults[:LISTED]]
            if len(faults) > LISTED:
                lines.append(f"    ... and {len(faults) - LISTED} more")
        if not self.by_kind:
            raise StorageError("\n".join([*lines, "Make these files readable and try again."]))
        raise FormatError("\n".join([*lines, "Download or write the files named above again."]))


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    more = len(every) - LISTED
    return ", ".join(every[:LISTED]) + (f", ... and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class FileSelection:
    """The files to open, and what the index file says about them.

    Attributes:
        layout: how they are laid out, in words for whoever looks at the checkpoint.
        files: relative to the root.
        weight_map: the file of each key, where an index says so.
        metadata: of the index.
        folder: where they lie, with "/" at its end, for a format that names no files.
    """

    layout: str
    files: Sequence[str]
    weight_map: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


@dataclass
class IndexSoFar:
    """What has been found in the files so far; ``held`` are the keys of each file."""

    files: dict[str, int] = field(default_factory=dict)
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    composed: dict[str, Composed] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    held: dict[str, set[str]] = field(default_factory=dict)
    wrapper: str = ""
    ignored: list[str] = field(default_factory=list)


class CheckpointFormat(Protocol):
    """One kind of checkpoint. Files are strangers': what contradicts the format is a fault, or a FormatError."""

    @property
    def usual(self) -> tuple[str, ...]:
        """Names that mean a checkpoint wherever they are, first choice first: of a single file, of an index."""
        ...

    @property
    def probed(self) -> tuple[str, ...]:
        """Names that are tried besides, after the usual ones of all formats, where a storage does not list."""
        ...

    @property
    def endings(self) -> tuple[str, ...]:
        """How the names of files end that may be asked for by name, for messages."""
        ...

    @property
    def looked_for(self) -> tuple[str, ...]:
        """What :meth:`find` looks for, for messages."""
        ...

    def is_named(self, name: str) -> bool:
        """Whether a file of this name is of this format, or an index of its files."""
        ...

    def select(self, reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
        """The files of a checkpoint that is asked for by the name of one, which is there."""
        ...

    def find(self, reader: StorageReader, names: Sequence[str], faults: FormatFaults) -> FileSelection | None:
        """The files of a checkpoint among ``names``, where there is no usual one; None where there are none.

        Raises:
            FormatError: there are some, and they cannot be chosen from, or are only a part.
        """
        ...

    def hints(self, names: Sequence[str]) -> list[str]:
        """Sentences on files at the top of a folder in which no format has found a checkpoint."""
        ...

    def read(
        self, reader: StorageReader, selection: FileSelection, found: IndexSoFar, faults: FormatFaults
    ) -> None:
        """Add what the files say of their tensors; none of a tensor's bytes is read.

        Raises:
            FormatError: it is no model at all.
        """
        ...


class QuantisedForm(Protocol):
    """How the weights of a checkpoint are stored in few bits, as its ``quantization_config`` says."""

    @property
    def is_kept(self) -> bool:
        """Whether a model may be kept in this form, so that the config stays with whoever makes the model."""
        ...

    def as_numbers(self, reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        """The same checkpoint with numbers in place of what is stored of them: with parts that are ``Coded``.

        Raises:
            FormatError: naming what does not belong together.
            StorageError: what is small, and tells how, cannot be read.
        """
        ...


OF_ACTIVATIONS: Final = re.compile(
    r"(.+\.)?(input_scale|activation_scale|activation_scale_ub|input_scale_ub|qscale_act|input_global_scale|"
    r"[kvq]_scale|weight_shape)"
)
"""What is said of inputs while a model runs, or what the shapes tell."""

_OF_CODES: Final = re.compile(
    r".+(_scale|_scale_inv|_scale_2|_scales|\.scales?|qscale_weight|_global_scale|_packed|_blocks|_shape|_zero_point|"
    r"g_idx|qweight|qzeros|SCB|weight_format|\.(nested_)?absmax|quant_map|quant_state\..+)"
    rf"|{OF_ACTIVATIONS.pattern}"
)


def names_beside(key: str, suffixes: tuple[str, ...], of_weights: tuple[str, ...]) -> list[str]:
    """A key with each suffix; and of a ``weight``, these names in its place."""
    names = [f"{key}{suffix}" for suffix in suffixes]
    return names + [f"{key.removesuffix('weight')}{name}" for name in of_weights if key.endswith(".weight")]


def scale_names(key: str) -> list[str]:
    """The keys under which any quantiser would store the scales of codes with this key."""
    suffixes = ("_scale_inv", "_scale", "_scales", "_scale_2", ".absmax", ".SCB")
    return names_beside(key, suffixes, ("scale", "qscale_weight", "SCB"))


def packed_names(key: str) -> list[str]:
    """The keys under which any quantiser would store codes in place of a tensor with this key."""
    return names_beside(key, ("_packed", "_blocks"), ("qweight",))


def belongs_to_codes(key: str) -> bool:
    """Whether a key is one that quantisers have for codes, or for what lies beside them."""
    return _OF_CODES.fullmatch(key) is not None


def unknown_form(what: str) -> ConfigError:
    """The weights are stored in a way that nobody knows."""
    return ConfigError(
        f"the checkpoint is quantised in a way that is not known here ({what}); use one in a floating dtype, in "
        "FP8, MXFP4 or NVFP4, or of compressed-tensors, bitsandbytes (4 bits), AWQ or GPTQ"
    )


def is_there(reader: StorageReader, name: str) -> bool:
    """Whether the storage has this file."""
    try:
        reader.size(name)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True
