"""Header of a checkpoint, and checksums of its data files.

A data file is its content, followed by a checksum of 8 bytes for each block of 128 KiB. The header has a digest of
these checksums, so every byte of every file is covered.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, get_type_hints

import numpy as np
import torch
from huggingface_hub.dataclasses import type_validator
from torch.distributed.tensor import DTensor

from shardwise.core.errors import ConfigError, FormatError
from shardwise.files.checkpoint_index import TRAINING_HEADER
from shardwise.files.local_reader import LocalReader
from shardwise.state.base_identity import BaseIdentity
from shardwise.transfer.fingerprints import MODULUS, digest, fingerprint

HEADER: Final = TRAINING_HEADER
MAX_HEADER_BYTES: Final = 64 << 20

_KIND: Final = "shardwise training checkpoint"
_VERSION: Final = 1
_SEAL: Final = "sha256"


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """Header of a training checkpoint.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        holds: "everything", or "adapter NAME" for that adapter and all other trained parameters.
        adapter: settings of the adapter's config that affect its output; if everything is stored, of all adapters
            and the base. None without an adapter, in older headers.
        others: digest of names and shapes of the model's tensors that are not stored.
        equal_generators: random generators whose state was the same on all ranks. In the file ``alike``.
        data: "none", "one" position for all ranks, or "each" rank its own.
        user: JSON of the user.
        optimizers: class of each optimizer and the number of its parameter groups.
        base: identity of the tensors that are not stored. None if all are stored.
        files: sizes in bytes of the data files, by name.
        metadata_sha256: digest of the file ``.metadata``.
        checksums: digest of the checksums in each data file, by name.
    """

    step: int
    world_size: int
    holds: str
    adapter: dict[str, Any] | None
    others: str
    equal_generators: list[str]
    data: str
    user: dict[str, Any]
    optimizers: list[list[Any]]
    base: BaseIdentity | None
    files: dict[str, int] = field(default_factory=dict)
    metadata_sha256: str = ""
    checksums: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        content = {"kind": _KIND, "version": _VERSION, **asdict(self)}
        content["alike"] = content.pop("equal_generators")
        return json.dumps({**content, _SEAL: _seal(content)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes, what: str) -> CheckpointHeader:
        """Parse the header of a checkpoint. ``what`` names the file.

        Raises:
            FormatError: it is not the header of a checkpoint, or is damaged.
        """
        try:
            values = json.loads(content) if len(content) <= MAX_HEADER_BYTES else None
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or values.get("kind") != _KIND:
            raise FormatError(f"{what}: is not a checkpoint of shardwise, or is damaged. Pass another folder")
        if values.get("version") != _VERSION:
            raise FormatError(
                f"{what}: has version {values.get('version')!r}, and this shardwise reads {_VERSION}. Use the "
                "version of shardwise that wrote it"
            )
        # Before the values are looked at: what a damaged file has in them is of no interest.
        if values.pop(_SEAL, None) != _seal(values):
            raise FormatError(f"{what}: does not match its checksum. It is damaged, or was changed by hand")
        try:
            values["equal_generators"] = values["alike"]
            header = cls(**{item.name: values[item.name] for item in fields(cls)})
            if header.base is not None:
                header = replace(header, base=BaseIdentity.from_dict(header.base, what))
            for name, kind in get_type_hints(cls).items():
                type_validator(name, getattr(header, name), kind)
            header._require_valid()
        except (KeyError, TypeError) as error:
            raise FormatError(f"{what}: has an invalid value: {error}. It is damaged") from error
        return header

    def _require_valid(self) -> None:
        """Check what the types do not show.

        Raises:
            TypeError: a number or a word is out of range, the base is missing, an optimizer has no class, or a
                file no checksums.
        """
        if self.data not in ("none", "one", "each"):
            raise TypeError("data")
        if self.step < 0 or self.world_size < 1:
            raise TypeError("step or world_size")
        if (self.base is None) != (self.holds == "everything"):
            raise TypeError("base")
        if not all([type(value) for value in item] == [str, int] for item in self.optimizers):
            raise TypeError("optimizers")
        sizes = self.files.values()
        if self.checksums.keys() != self.files.keys() or any(
            with_checksums(content_nbytes(nbytes)) != nbytes for nbytes in sizes
        ):
            raise TypeError("files")


def _seal(content: Mapping[str, Any]) -> str:
    """Return a digest of the header that does not depend on the layout of its JSON."""
    try:
        plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return ""
    return hashlib.sha256(plain.encode()).hexdigest()


def as_json(user: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the user's state as JSON values.

    Raises:
        ConfigError: it is not JSON.
    """
    values: object = {} if user is None else user
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"user is a {type(values).__name__}. Pass a mapping from strings to JSON values")
    try:
        plain = json.loads(json.dumps(dict(values)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"user: is not JSON: {error}. Pass strings, numbers, lists and dicts") from error
    assert isinstance(plain, dict)
    return plain


def to_pickle(value: object, what: str) -> bytes:
    """Return a value as ``torch.save`` writes it and ``torch.load(weights_only=True)`` reads it.

    Raises:
        ConfigError: it is not plain data. The message has the path of the first such value.
    """
    buffer = io.BytesIO()
    try:
        plain = _on_cpu(value)
        torch.save(plain, buffer)
        # Values of doubtful types are read back. For others, that would only take time.
        if not _is_plain(plain):
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # pickle raises errors of many kinds
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        # The first item that cannot be written raises, with its path. A list that contains itself has no such item.
        if not isinstance(error, RecursionError):
            for key, item in items:
                to_pickle(item, f"{what}.{key}")
        if isinstance(value, DTensor):
            raise ConfigError(
                f"{what}: is a DTensor, and those are stored for the model and the optimizers only. Make it a "
                "parameter or buffer of a module beside the model, TrainState(nn.ModuleDict({...}), ...)"
            ) from error
        raise ConfigError(
            f"{what}: is a {type(value).__name__} that torch.load(weights_only=True) does not read. "
            "Return dicts, lists, tuples, strings, numbers, bytes and tensors"
        ) from error
    return buffer.getvalue()


def _is_plain(value: object) -> bool:
    """Return whether ``torch.load(weights_only=True)`` reads a value for certain, because of its types."""
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if type(value) is int:
        return value.bit_length() <= 64
    return type(value) in (str, float, bool, type(None))


def _on_cpu(value: Any) -> Any:
    """Copy tensors in a value to the CPU, each with storage of its own size, and make numpy's numbers Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, DTensor):
        raise TypeError("DTensor")  # a pickle would have this rank's shard only
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return type(value)({key: _on_cpu(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(item) for item in value)
    return value


BLOCK_BYTES = 1 << 17
_BLOCKS_PER_READ = 8
"""Blocks that are read at once, few enough to be in the processor's cache when they are compared."""
_SUM_BYTES = 8


def with_checksums(content_nbytes: int) -> int:
    """Return the size in bytes of a data file with ``content_nbytes`` bytes of content."""
    # 300,000 bytes are 3 blocks, so the file has 3 * 8 bytes more: 300,024.
    return content_nbytes + _SUM_BYTES * -(-content_nbytes // BLOCK_BYTES)


def content_nbytes(file_nbytes: int) -> int:
    """Return the size in bytes of the content of a file. Inverse of :func:`with_checksums`."""
    # 300,024 bytes are 3 blocks, each with its checksum of 8 bytes (131,080 together, but the last may be shorter).
    return file_nbytes - _SUM_BYTES * -(-file_nbytes // (BLOCK_BYTES + _SUM_BYTES))


class BlockSums:
    """Checksums of a file, computed while it is written."""

    def __init__(self, nbytes: int) -> None:
        self._sums = [0] * -(-nbytes // BLOCK_BYTES)

    def add(self, start: int, content: memoryview) -> None:
        """Add bytes that are written at byte ``start`` of the file."""
        # A checksum is a sum over words, so parts of a block may be added one by one.
        for block, first, (chunk,) in _cut(start, [content], BLOCK_BYTES):
            self._sums[block] += fingerprint(chunk, first - block * BLOCK_BYTES)
            self._sums[block] %= MODULUS

    def to_bytes(self) -> bytes:
        return b"".join(value.to_bytes(_SUM_BYTES, "little") for value in self._sums)


class CheckedReader(LocalReader):
    """A reader of data files that compares every block it reads from with its checksum.

    Args:
        root: the folder of the checkpoint.
        digests: digest of the checksums of each file.
        sizes: sizes of the files in bytes.
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
        self._content = {file: content_nbytes(nbytes) for file, nbytes in sizes.items()}
        self._describe = describe
        self._sums: dict[str, bytes] = {}
        self._sound: set[tuple[str, int]] = set()

    @property
    def checked_bytes(self) -> int:
        """Bytes of all blocks that were compared."""
        return sum(stop - start for start, stop in (self._span(*block) for block in list(self._sound)))

    @property
    def blocks(self) -> list[tuple[str, int]]:
        """All blocks, as pairs of file and number."""
        return [(file, n) for file, nbytes in self._content.items() for n in range(-(-nbytes // BLOCK_BYTES))]

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        for _, at, run in _cut(start, buffers, _BLOCKS_PER_READ * BLOCK_BYTES):
            super().read_vectored(file, at, run)
            for block, first, chunks in _cut(at, run, BLOCK_BYTES):
                if (first, first + sum(chunk.nbytes for chunk in chunks)) == self._span(file, block):
                    self._compare(file, block, chunks)
                # A part of a block has no checksum of its own: the whole block is read once more, and compared.
                elif (file, block) not in self._sound:
                    self._read_block(file, block)

    def require(self, file: str, start: int, stop: int) -> None:
        """Compare the blocks that overlap a range.

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

    def block_name(self, file: str, block: int) -> str:
        """Return the names of the tensors in a block, and its byte range, for messages."""
        start, stop = self._span(file, block)
        return f"{self._describe(file, start, stop)} (bytes {start}..{stop} of {file})"

    def _span(self, file: str, block: int) -> tuple[int, int]:
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._content[file])

    def _read_block(self, file: str, block: int) -> None:
        start, stop = self._span(file, block)
        content = memoryview(bytearray(stop - start))
        super().read_vectored(file, start, [content])
        self._compare(file, block, [content])

    def _compare(self, file: str, block: int, chunks: Sequence[memoryview]) -> None:
        total = at = 0
        for chunk in chunks:
            total += fingerprint(chunk, at)
            at += chunk.nbytes
        expected = self._get_sums(file)[block * _SUM_BYTES : (block + 1) * _SUM_BYTES]
        if (total % MODULUS).to_bytes(_SUM_BYTES, "little") != expected:
            raise FormatError(
                f"{self.root}: {self.block_name(file, block)} does not match its checksum: the disk or a copy "
                "has damaged it. Do not use what has been restored of it, restore another checkpoint"
            )
        self._sound.add((file, block))

    def _get_sums(self, file: str) -> bytes:
        if file not in self._sums:
            # All checksums of a file at once, behind its content. They are valid if they have the header's digest.
            content = memoryview(bytearray(with_checksums(self._content[file]) - self._content[file]))
            super().read_vectored(file, self._content[file], [content])
            if digest(bytes(content)) != self._digests[file]:
                raise FormatError(
                    f"{self.root}/{file}: its checksums do not match the header. It is damaged: restore another "
                    "checkpoint"
                )
            self._sums[file] = bytes(content)
        return self._sums[file]


def _cut(start: int, buffers: Sequence[memoryview], size: int) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Cut the memory of a range that begins at byte ``start`` at multiples of ``size`` bytes.

    Yield the number of each block, its first byte, and its memory.
    """
    # 100 bytes from byte 100 on, with a size of 64: (1, 100) with 28 bytes, (2, 128) with 64, (3, 192) with 8.
    chunks: list[memoryview] = []
    first = position = start
    for buffer in buffers:
        content = buffer.cast("B")
        while content.nbytes:
            room = size - position % size
            chunks.append(content[:room])
            position += chunks[-1].nbytes
            content = content[room:]
            if position % size == 0:
                yield first // size, first, chunks
                chunks, first = [], position
    if chunks:
        yield first // size, first, chunks
