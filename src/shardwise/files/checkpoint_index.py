"""Stored content of a checkpoint as plain data, and the interface of formats that read it.

A tensor that is stored row-major in one byte range is an entry. Any other tensor is composed of entries, by a small
tree whose leaves are entries, whole or strided views of them, and whose nodes concatenate.

A format is one object that implements :class:`CheckpointFormat`, and a line in the table of
:mod:`shardwise.files.open_checkpoint`, which tries the formats in order. Entries that are read go into an
:class:`IndexSoFar`. :mod:`shardwise.files.join_entries` adds tensors composed of views and chunks.

A checkpoint of any format may be quantized. A :class:`QuantizedForm` then groups its tensors. It is registered by a
line in the table of :mod:`shardwise.files.open_checkpoint`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any, ClassVar, Final, NoReturn, Protocol, TypeAlias, TypeVar, cast

from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.core.formatting import OF_DDP, canonical_name, plain_key
from shardwise.core.tensors import ByteRange, DType, Strided, coalesce, numel
from shardwise.files.storage import StorageReader
from shardwise.files.urls import shown

T = TypeVar("T")
R = TypeVar("R")

LISTED = 20
"""Number of names, or of faults of one kind, that a message lists."""

OF_RANKS: Final = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Names of the files of a distributed checkpoint of transformers, each with one rank's chunks."""

TRAINING_HEADER: Final = "shardwise.checkpoint.json"
"""The header of a checkpoint of a training."""

MODELOPT_CONFIG: Final = "hf_quant_config.json"
"""The name of modelopt's config of the codes beside it."""

DISTRIBUTED: Final = "torch distributed checkpoint"
DISTRIBUTED_SAFETENSORS: Final = "distributed checkpoint of transformers"
"""Descriptions of layouts, see :class:`CheckpointIndex`."""


@dataclass
class FormatFaults:
    """Faults of a checkpoint by kind, collected so that one error reports all of them.

    ``missing`` is the kind of files that do not exist.
    """

    root: str
    by_kind: dict[str, list[str]] = field(default_factory=partial(defaultdict, list))
    unread: list[str] = field(default_factory=list)
    missing: str = "missing files"

    def add(self, kind: str, fault: str) -> None:
        self.by_kind[kind].append(fault)

    def add_error(self, kind: str, error: FormatError | StorageError) -> None:
        """Add a file's error. Bytes that exist but could not be read are not a fault of the checkpoint."""
        if isinstance(error, StorageError) and isinstance(error.__cause__, OSError):
            if not isinstance(error.__cause__, FileNotFoundError):
                self.unread.append(str(error))
                return
            kind = self.missing
        self.add(kind, str(error))

    def raise_if_any(self) -> None:
        # A fault of the content is a FormatError. If files could not be read, and nothing else is wrong, it is
        # a StorageError: the same files may be readable later.
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
            raise StorageError("\n".join([*lines, "Make these files readable and try again"]))
        raise FormatError("\n".join([*lines, "Download or write the files named above again"]))


def listed(names: Iterable[str]) -> str:
    """Return the first names, and the number of further ones."""
    items = list(names)
    more = len(items) - LISTED
    return ", ".join(items[:LISTED]) + (f", ... and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class FileSelection:
    """The files to open, and the content of the index file.

    Attributes:
        layout: description of the files, for people.
        files: paths relative to the root.
        weight_map: the file of each key, from an index.
        metadata: metadata of the index.
        folder: folder of the files, ending with "/", for a format that names no files.
    """

    layout: str
    files: Sequence[str]
    weight_map: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


@dataclass
class IndexSoFar:
    """Entries found so far. ``keys`` are those of each file."""

    files: dict[str, int] = field(default_factory=dict)
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    composed: dict[str, Composed] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    keys: dict[str, set[str]] = field(default_factory=dict)
    wrapper: str = ""
    ignored: list[str] = field(default_factory=list)


class CheckpointFormat(Protocol):
    """One kind of checkpoint. Files are untrusted: contradictions to the format are faults, or a FormatError.

    Attributes:
        usual: names of a single file or an index that identify a checkpoint, first choice first.
        probed: further names to try, after the usual ones of all formats, if a storage cannot list files.
        endings: suffixes of file names that may be passed, for messages.
        looked_for: the files that :meth:`find` searches, for messages.
    """

    usual: ClassVar[tuple[str, ...]] = ()
    probed: ClassVar[tuple[str, ...]] = ()
    endings: ClassVar[tuple[str, ...]] = ()
    looked_for: ClassVar[tuple[str, ...]] = ()

    def is_named(self, name: str) -> bool:
        """Return whether a file of this name is of this format, or an index of its files."""

    def select(self, reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
        """Return the files of a checkpoint that is requested by the name of an existing one."""

    def find(self, _reader: StorageReader, _names: Sequence[str], _faults: FormatFaults) -> FileSelection | None:
        """Return the files of a checkpoint among the names, if there is no usual one, or None.

        Raises:
            FormatError: several checkpoints match, or files are missing.
        """
        return None

    def hints(self, _names: Sequence[str]) -> list[str]:
        """Return sentences on files at the top of a folder in which no format has found a checkpoint."""
        return []

    def read(
        self, reader: StorageReader, selection: FileSelection, index: IndexSoFar, faults: FormatFaults
    ) -> None:
        """Add the entries of the files, without reading bytes of tensors.

        Raises:
            FormatError: the files hold no model.
        """


class QuantizedForm(Protocol):
    """Storage form of quantized weights, from a checkpoint's ``quantization_config``."""

    @property
    def is_kept(self) -> bool:
        """True if a model may be kept in this form, so that its config keeps the ``quantization_config``."""

    def dequantize(self, reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        """Return the same checkpoint with dequantized tensors, composed of :class:`Coded` data.

        Raises:
            FormatError: entries do not belong together. The message names them.
            StorageError: small entries that determine the form cannot be read.
        """


OF_ACTIVATIONS: Final = re.compile(
    r"(.+\.)?(input_scale|activation_scale|activation_scale_ub|input_scale_ub|qscale_act|input_global_scale|"
    r"[kvq]_scale|weight_shape)"
)
"""Keys for the quantization of activations, and for shapes, which are not loaded."""

_OF_CODES: Final = re.compile(
    r".+(_scale|_scale_inv|_scale_2|_scales|\.scales?|qscale_weight|_global_scale|_packed|_blocks|_shape|_zero_point|"
    r"g_idx|qweight|qzeros|SCB|weight_format|\.(nested_)?absmax|quant_map|quant_state\..+)"
    rf"|{OF_ACTIVATIONS.pattern}"
)


def wrapper_notes(keys: Collection[str]) -> list[str]:
    """Return the sentence that reports keys that are taken without what wrappers add, if there are any."""
    if not keys:
        return []
    first = min(keys)
    example = f"{shown(first)} as {shown(plain_key(first))}"
    return [f"{len(keys)} keys have the names of wrappers, and are taken without: {example}"]


def companion_names(key: str, suffixes: tuple[str, ...], of_weights: tuple[str, ...]) -> list[str]:
    """Return a key with each suffix, and for a ``weight`` also with these names instead."""
    names = [f"{key}{suffix}" for suffix in suffixes]
    return names + [f"{key.removesuffix('weight')}{name}" for name in of_weights if key.endswith(".weight")]


def scale_names(key: str) -> list[str]:
    """Return the keys under which any quantizer would store the scales of codes with this key."""
    suffixes = ("_scale_inv", "_scale", "_scales", "_scale_2", ".absmax", ".SCB")
    return companion_names(key, suffixes, ("scale", "qscale_weight", "SCB"))


def packed_names(key: str) -> list[str]:
    """Return the keys under which any quantizer would store codes in place of a tensor with this key."""
    return companion_names(key, ("_packed", "_blocks"), ("qweight",))


def is_quantization_key(key: str) -> bool:
    """Return whether a key is one that quantizers use for codes or their companions."""
    return _OF_CODES.fullmatch(key) is not None


def unknown_form(what: str) -> ConfigError:
    """Return the error for weights that are stored in an unsupported form."""
    return ConfigError(
        f"the checkpoint is quantized in a way that is not supported ({what}). Load the original weights, or "
        "dequantize it by transformers and save it"
    )


def is_there(reader: StorageReader, name: str) -> bool:
    """Return whether the storage has this file."""
    try:
        reader.size(name)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor: the bytes ``start <= i < stop`` of ``file``, row-major, little-endian."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def range(self) -> ByteRange:
        return ByteRange(self.start, self.stop)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Whole:
    """An entry, by key, as it is."""

    key: str


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of an entry that is a flat storage."""

    key: str
    strided: Strided


@dataclass(frozen=True, slots=True)
class Joined:
    """Compositions concatenated along a dimension."""

    pieces: tuple[Composition, ...]
    dim: int


class Coded(Protocol):
    """Numbers that are stored in few bits, with scales: plain data of a quantized form, a dataclass.

    Its entries are fields, or inside of fields, as :class:`Whole`. ``stored_tensors`` has a table of the
    functions that return an expression of it, by ``kind``.
    """

    @property
    def kind(self) -> str: ...


Composition: TypeAlias = Whole | View | Joined | Coded


@dataclass(frozen=True, slots=True)
class Composed:
    """A tensor that is composed of entries."""

    dtype: DType
    shape: tuple[int, ...]
    composition: Composition


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, and its entries: one, for most."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def numel(self) -> int:
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements. Its entries may be larger."""
        return self.numel * self.dtype.bits // 8


@dataclass(frozen=True)
class CheckpointIndex:
    """Content of a checkpoint, without the bytes of its tensors. Plain data: ranks send it to each other.

    Attributes:
        root: path or URL of the checkpoint.
        files: sizes in bytes of the files with tensors, in name order.
        entries: contiguous tensors by key, file by file in the order of their bytes.
        metadata: metadata of the files' headers, and of the index file, which takes precedence.
        layout: description of the files, for people.
        composed: tensors composed of several entries, or of views of one. These entries are not tensors themselves.
        wrapper: path of the model in nested dicts, such as "model".
        ignored: other values there, which are not loaded.
        quantized: ``quant_method`` of a quantized checkpoint, or "".
        quant_type: ``bnb_4bit_quant_type`` of a checkpoint of bitsandbytes, the form that a training's checkpoint
            records, otherwise as ``quantized``.
        extra: entries that are loaded only into a model with a tensor of that name.
    """

    root: str
    files: Mapping[str, int]
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    layout: str
    composed: Mapping[str, Composed] = field(default_factory=dict)
    wrapper: str = ""
    ignored: tuple[str, ...] = ()
    quantized: str = ""
    quant_type: str = ""
    extra: frozenset[str] = frozenset()

    @property
    def is_distributed(self) -> bool:
        """Whether it is a distributed checkpoint, of torch or transformers, with names that a model gave."""
        return self.layout in (DISTRIBUTED, DISTRIBUTED_SAFETENSORS)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without headers. Bytes that several tensors share count once."""
        # Ranges are united, because views of one storage share bytes.
        by_file = defaultdict(list)
        for entry in self.entries.values():
            by_file[entry.file].append(entry.range)
        return sum(item.nbytes for ranges in by_file.values() for item in coalesce(ranges, max_gap_bytes=0))

    def is_scaled(self, key: str) -> bool:
        """Return whether a tensor is stored in few bits, with scales. Its dtype is the dequantized one."""
        return key in self.composed and not isinstance(self.composed[key].composition, Whole | View | Joined)

    def tensors(self) -> list[StoredTensor]:
        """Return every tensor in the order of the entries, composed ones last."""
        # Entries that are parts of composed tensors, and extra ones, are not tensors of their own.
        composing = {key for item in self.composed.values() for key in iter_entry_keys(item.composition)}
        simple: list[StoredTensor] = []
        for key, entry in self.entries.items():
            if key not in composing and key not in self.extra:
                simple.append(StoredTensor(key, entry.dtype, entry.shape, (entry,)))
        composed: list[StoredTensor] = []
        for key, item in self.composed.items():
            entries = tuple(self.entries[name] for name in iter_entry_keys(item.composition))
            composed.append(StoredTensor(key, item.dtype, item.shape, entries))
        return simple + composed


def iter_entry_keys(composition: object) -> Iterator[str]:
    """Yield the keys of the entries of a composition."""
    match composition:
        case Whole(key) | View(key):
            yield key
        # Fields of quantized forms may be tuples of compositions. Numbers and strings in them are no
        # dataclasses, and end here.
        case tuple():
            for inner in composition:
                yield from iter_entry_keys(inner)
        case _:
            kind: Any = type(composition)
            for name in _field_names(kind):
                yield from iter_entry_keys(getattr(composition, name))


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass. Empty for another class."""
    return tuple(item.name for item in fields(kind)) if is_dataclass(kind) else ()


def without_wrappers(index: CheckpointIndex) -> tuple[CheckpointIndex, list[str]]:
    """Return a checkpoint without what wrappers add to its keys, and notes for the report.

    It is unchanged if two keys would be one. ``module.`` is left out if all keys have it.
    """
    # `module.` is left out only if all keys have it: a model may have a module of this name.
    tensors = index.tensors()
    keys = {tensor.key: canonical_name(tensor.key) for tensor in tensors}
    if all(key.startswith(OF_DDP) for key in keys.values()):
        keys = {tensor.key: plain_key(tensor.key) for tensor in tensors}
    wrapped = [key for key, plain in keys.items() if key != plain]
    if not wrapped or len({*keys.values()}) < len(keys):
        return index, []
    return with_keys(index, keys), wrapper_notes(wrapped)


def with_keys(index: CheckpointIndex, keys: Mapping[str, str]) -> CheckpointIndex:
    """Return a checkpoint with other keys, which are given by the present ones of all tensors."""
    # Entries keep their keys, by which bytes are found. The new names are those of compositions over them.
    tensors = {item.key: Composed(item.dtype, item.shape, Whole(item.key)) for item in index.tensors()}
    return replace(index, composed={keys[key]: index.composed.get(key, item) for key, item in tensors.items()})


def add_prefix(composition: T, prefix: str) -> T:
    """Return the same composition of entries whose keys begin with a prefix."""
    prefixed: Any = composition
    match composition:
        case Whole(key) | View(key):
            prefixed = replace(composition, key=prefix + key)
        case tuple():
            prefixed = tuple(add_prefix(inner, prefix) for inner in composition)
        case _ if is_dataclass(composition) and not isinstance(composition, type):
            names = [item.name for item in fields(composition)]
            values = {name: add_prefix(getattr(composition, name), prefix) for name in names}
            prefixed = replace(composition, **values)
    return cast(T, prefixed)


_ITEMS_AT_ONCE: Final = 4096


def each(reader: StorageReader, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the results for all items, computed by several threads for a remote storage."""
    if not reader.policy.is_remote:
        return [function(item) for item in items]
    results: list[R] = []
    remaining = iter(items)
    with ThreadPoolExecutor(reader.policy.concurrency) as pool:
        # In portions, because the pool keeps a future for every item that it is given.
        while portion := list(islice(remaining, _ITEMS_AT_ONCE)):
            results += pool.map(function, portion)
    return results


def contents(reader: StorageReader, entries: Sequence[TensorEntry]) -> dict[str, bytes]:
    """Return the bytes of small entries by key."""
    read = each(reader, lambda entry: reader.read(entry.file, entry.start, entry.stop), entries)
    return {entry.key: content for entry, content in zip(entries, read, strict=True)}


def parse_object(text: bytes, *, what: str, allow_constants: bool = False) -> dict[str, object]:
    """Return the JSON object in ``text``. ``what`` names it in messages (file and part of it).

    Stricter than :func:`json.loads`: UTF-8 only, no key twice in one object, no NaN or Infinity unless
    ``allow_constants``, no lone surrogates in names. A :class:`FormatError` for all else, never another exception.
    """
    constants = None if allow_constants else _refuse_constant
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_require_distinct_keys, parse_constant=constants)
    except (ValueError, RecursionError) as error:  # not UTF-8, too deep, our own refusals, integers of many digits
        raise invalid_file(what, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise invalid_file(what, f"it is a JSON {type(value).__name__}, not an object")
    return value


def invalid_file(what: str, cause: str) -> FormatError:
    """Return the error for a file whose content contradicts its format."""
    return FormatError(f"{what}: {cause}. The file is damaged or of another format: download or write it again")


_LFS: Final = b"version https://git-lfs"
FIRST_BYTES: Final = len(_LFS)
"""Length of the beginning of a file by which :func:`reject_pointer` tells."""


def reject_pointer(first: bytes, what: str) -> None:
    """Raise :class:`FormatError` if a file begins as a pointer of git-lfs does. ``what`` names it in messages."""
    if first.startswith(_LFS):
        raise FormatError(f"{what}: it is a pointer of git-lfs, not the file itself. Run `git lfs pull`")


def _require_distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content: dict[str, object] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {shown(key)} occurs twice")
        key.encode()  # lone surrogates raise
        content[key] = value
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
