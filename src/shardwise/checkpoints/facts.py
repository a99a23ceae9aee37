"""Header of a checkpoint, as plain data that runs nothing when read, and checksums of its files.

A data file is its content, cut into blocks of 128 KiB, followed by a checksum of 8 bytes for each block. The digest
of these checksums is among the facts, so every byte of every file is covered.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, get_type_hints

import torch
from huggingface_hub.dataclasses import type_validator

from shardwise.checkpoints.base_identity import BaseIdentity
from shardwise.errors import ConfigError, FormatError
from shardwise.planning.fingerprints import MODULUS, fingerprint
from shardwise.storage.reading import LocalReader

FACTS: Final = "shardwise.checkpoint.json"


_KIND: Final = "shardwise training checkpoint"


_VERSION: Final = 1


MAX_FACTS_BYTES: Final = 64 << 20
"""What is longer is none."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Header of a training checkpoint.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        holds: "everything", or "adapter NAME": that adapter and all else that is trained, not the base.
        adapter: the settings of the adapter's config that affect its output. None without an adapter.
        others: a digest of names and shapes of the model's tensors that are not stored.
        alike: generators of random numbers whose state was the same on all ranks.
        data: "none", "one" position for all ranks, or "each" rank its own.
        user: the user's own.
        files: names and sizes in bytes of the files with tensors.
        metadata_sha256: of the file ``.metadata`` that belongs to this one.
        checksums: digests of the checksums in these files.
        optimizers: the class of each optimizer and the number of its parameter groups, or None if unknown.
        base: identity of the tensors that are not stored. None if all are stored, or if unknown.
    """

    step: int
    world_size: int
    holds: str
    adapter: dict[str, Any] | None
    others: str
    alike: list[str]
    data: str
    user: dict[str, Any]
    files: dict[str, int] = field(default_factory=dict)
    metadata_sha256: str = ""
    checksums: dict[str, str] = field(default_factory=dict)
    optimizers: list[list[Any]] | None = None
    base: BaseIdentity | None = None

    def to_bytes(self) -> bytes:
        content = {"kind": _KIND, "version": _VERSION, **asdict(self)}
        return json.dumps({**content, _SEAL: _seal(content)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes, what: str) -> Facts:
        """Raises :class:`FormatError` if it is not a checkpoint's header. ``what`` names the file."""
        try:
            found = json.loads(content) if len(content) <= MAX_FACTS_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("kind") != _KIND:
            raise FormatError(f"{what}: is not a checkpoint of shardwise, or is damaged. Pass another folder")
        if found.get("version") != _VERSION:
            raise FormatError(
                f"{what}: is of version {found.get('version')!r}, and this shardwise reads {_VERSION}. Take the "
                "version of shardwise that wrote it"
            )
        if found.pop(_SEAL, None) != _seal(found):
            raise FormatError(f"{what}: is not what was written. It is damaged, or was changed by hand")
        try:
            base = found.pop("base")
            facts = cls(**{item.name: found[item.name] for item in fields(cls) if item.name != "base"})
            for name, kind in get_type_hints(cls).items():
                type_validator(name, getattr(facts, name), kind)
            facts._require_sound()
        except (KeyError, TypeError) as error:
            raise FormatError(f"{what}: {error} is not what belongs there. It is damaged") from error
        return replace(facts, base=None if base is None else BaseIdentity.from_dict(base, what))

    def _require_sound(self) -> None:
        """Raises TypeError for optimizers and sizes that are none."""
        if not all([type(part) for part in item] == [str, int] for item in self.optimizers or ()):
            raise TypeError("optimizers")
        sizes = self.files.values()
        if self.checksums and (
            self.checksums.keys() != self.files.keys()
            or any(with_checksums(content_nbytes(nbytes)) != nbytes for nbytes in sizes)
        ):
            raise TypeError("files")


_SEAL: Final = "sha256"


def _seal(content: Mapping[str, Any]) -> str:
    """A digest of the facts, however they are laid out."""
    try:
        plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return ""
    return hashlib.sha256(plain.encode()).hexdigest()


def as_json(user: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's state as it comes back from a file.

    Raises:
        ConfigError: it is no JSON.
    """
    given: object = {} if user is None else user
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"user is a mapping from texts to JSON values; got {type(given).__name__}")
    try:
        plain = json.loads(json.dumps(dict(given)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"user: is not JSON: {error}. Give texts, numbers, lists and dicts") from error
    assert isinstance(plain, dict)
    return plain


_PLAIN = (str, int, float, bool, bytes, type(None))


def packed(value: object, what: str) -> bytes:
    """Return a value as ``torch.save`` writes it and ``torch.load(weights_only=True)`` reads it.

    Raises:
        ConfigError: it is no plain data.
    """
    buffer = io.BytesIO()
    try:
        torch.save(_at_home(value), buffer)
        if type(value) not in _PLAIN:
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # pickle raises errors of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{what}: holds something other than plain data ({reason}); a checkpoint holds dicts, lists, tuples, "
            "texts, "
            "numbers, bytes and tensors: let its state_dict give these"
        ) from error
    return buffer.getvalue()


def digest_of(value: object) -> str:
    """Return a digest that is equal for equal values. Objects that are no plain data count by their class."""
    found = hashlib.sha256()
    _digest(value, found)
    return found.hexdigest()[:32]


def _at_home(value: Any) -> Any:
    """Return tensors on the CPU, with storages of their own size."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return type(value)({key: _at_home(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_at_home(item) for item in value)
    return value


def _digest(value: Any, into: Any) -> None:
    into.update(f"{type(value).__name__}(".encode())
    if isinstance(value, torch.Tensor):
        into.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        into.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            _digest(key, into)
            _digest(item, into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest(item, into)
    elif isinstance(value, _PLAIN):
        into.update(repr(value).encode())
    into.update(b")")


BLOCK_BYTES = 1 << 17


_PIECE_BLOCKS = 8  # read at once: they are in a cache of the processor's when they are compared


_SUM_BYTES = 8


def with_checksums(content_nbytes: int) -> int:
    """Return the size in bytes of a file with so much content."""
    return content_nbytes + _SUM_BYTES * -(-content_nbytes // BLOCK_BYTES)


def content_nbytes(file_nbytes: int) -> int:
    """Return the size in bytes of the content of a file. Inverse of :func:`with_checksums`."""
    return file_nbytes - _SUM_BYTES * -(-file_nbytes // (BLOCK_BYTES + _SUM_BYTES))


def digest(content: bytes) -> str:
    """Return the SHA-256 of small content."""
    return hashlib.sha256(content).hexdigest()


class BlockSums:
    """Adds up the checksums of a file while it is written."""

    def __init__(self, nbytes: int) -> None:
        self._sums = [0] * -(-nbytes // BLOCK_BYTES)

    def add(self, start: int, content: memoryview) -> None:
        """Add bytes that are written at byte ``start`` of the file."""
        for block, first, part in _cut(start, [content]):
            found = fingerprint(part[0], first - block * BLOCK_BYTES)
            self._sums[block] = (self._sums[block] + found) % MODULUS

    def to_bytes(self) -> bytes:
        return b"".join(value.to_bytes(_SUM_BYTES, "little") for value in self._sums)


class CheckedReader(LocalReader):
    """A reader of data files that compares every block it touches with its checksum.

    Args:
        root: the folder of the checkpoint.
        digests: digests of the checksums of each file. Other files are not verified.
        sizes: of the files, in bytes.
        describe: returns the names of the tensors in a range of a file, for errors.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        digests: Mapping[str, str],
        sizes: Mapping[str, int],
        describe: Callable[[str, int, int], str],
    ) -> None:
        super().__init__(root)
        self._digests = digests
        self._content = {file: content_nbytes(sizes[file]) for file in digests}
        self._describe = describe
        self._sums: dict[str, bytes] = {}
        self._sound: set[tuple[str, int]] = set()

    @property
    def checked_bytes(self) -> int:
        """The bytes of all blocks that were compared."""
        return sum(stop - start for start, stop in (self._span(*block) for block in list(self._sound)))

    @property
    def blocks(self) -> list[tuple[str, int]]:
        """All blocks, as file and number."""
        return [(file, n) for file, nbytes in self._content.items() for n in range(-(-nbytes // BLOCK_BYTES))]

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        if file not in self._digests:
            return super().read_vectored(file, start, buffers)
        for _, at, piece in _cut(start, buffers, _PIECE_BLOCKS * BLOCK_BYTES):
            super().read_vectored(file, at, piece)
            for block, first, parts in _cut(at, piece):
                if (first, first + sum(part.nbytes for part in parts)) == self._span(file, block):
                    self._compare(file, block, parts)
                elif (file, block) not in self._sound:
                    self._read_block(file, block)
        return None

    def require(self, file: str, start: int, stop: int) -> None:
        """Compare the blocks that have bytes in a range.

        Raises:
            FormatError: a block is damaged.
        """
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if (file, block) not in self._sound:
                self._read_block(file, block)

    def is_sound(self, file: str, block: int) -> bool:
        """Read a block. Return whether its checksum matches."""
        try:
            self._read_block(file, block)
        except FormatError:
            return False
        return True

    def told(self, file: str, block: int) -> str:
        """Name the tensors in a block, and its bytes."""
        start, stop = self._span(file, block)
        return f"{self._describe(file, start, stop)} (bytes {start}..{stop} of {file})"

    def _span(self, file: str, block: int) -> tuple[int, int]:
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._content[file])

    def _read_block(self, file: str, block: int) -> None:
        start, stop = self._span(file, block)
        content = memoryview(bytearray(stop - start))
        super().read_vectored(file, start, [content])
        self._compare(file, block, [content])

    def _compare(self, file: str, block: int, parts: Sequence[memoryview]) -> None:
        total = at = 0
        for part in parts:
            total += fingerprint(part, at)
            at += part.nbytes
        sums = self._sums_of(file)
        found = (total % MODULUS).to_bytes(_SUM_BYTES, "little")
        if found != sums[block * _SUM_BYTES : (block + 1) * _SUM_BYTES]:
            raise FormatError(
                f"{self.root}: {self.told(file, block)} is not what was written, and what has been restored of it "
                "must not be used. The disk, or what copied the files, has damaged it: restore another checkpoint"
            )
        self._sound.add((file, block))

    def _sums_of(self, file: str) -> bytes:
        if file not in self._sums:
            content = memoryview(bytearray(with_checksums(self._content[file]) - self._content[file]))
            super().read_vectored(file, self._content[file], [content])
            if digest(bytes(content)) != self._digests[file]:
                raise FormatError(
                    f"{self.root}/{file}: its checksums are not what was written. The file is damaged: restore "
                    "another checkpoint"
                )
            self._sums[file] = bytes(content)
        return self._sums[file]


def gaps(runs: Iterable[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges of ``nbytes`` bytes that no run covers."""
    found: list[tuple[int, int]] = []
    position = 0
    for start, stop in [*sorted(runs), (nbytes, nbytes)]:
        if start > position:
            found.append((position, start))
        position = max(position, stop)
    return found


def _cut(start: int, buffers: Sequence[memoryview], size: int = 0) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Cut buffers for the range that begins at ``start`` at multiples of ``size`` bytes, by default of a block.

    Return the number of each part, its first byte, and its memory.
    """
    size = size or BLOCK_BYTES
    parts: list[memoryview] = []
    first = position = start
    for buffer in buffers:
        content = buffer.cast("B")
        while content.nbytes:
            room = size - position % size
            parts.append(content[:room])
            position += parts[-1].nbytes
            content = content[room:]
            if position % size == 0:
                yield first // size, first, parts
                parts, first = [], position
    if parts:
        yield first // size, first, parts
