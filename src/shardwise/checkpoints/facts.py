"""Facts of a checkpoint, as plain data that runs nothing when read: checksums of its files, identity of its base.

A data file is its content, cut into blocks of 128 KiB, followed by a checksum of 8 bytes for each block. The digest
of these checksums is among the facts, so every byte of every file is covered.

[Note: The identity of a base] A checkpoint of an adapter does not hold the base. It records a config without what
changes from load to load, and fingerprints of samples: of at most 256 frozen parameters, chosen by their names, the
first corner of up to 16 x 16 elements. A fingerprint is a sum over elements, so each rank adds up those of its own
shard, and the sum is the same for any number of ranks and any sharding. Elements on several ranks are counted once.
Names and shapes of all parameters are compared by a digest that the callers keep. Buffers, and other adapters, are
not part of a base. Codes of nested scales are left out: their last bit depends on the machine.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Self, get_type_hints

import numpy as np
import torch
from huggingface_hub.dataclasses import type_validator
from torch import nn

from shardwise.errors import ConfigError, DisagreementError, FormatError
from shardwise.layout import TensorKind, place_of
from shardwise.models.four_bit_linear import SCALES
from shardwise.models.view import Held, local_boxes, local_tensor, strided_view
from shardwise.planning.load_plan import allows
from shardwise.planning.matching import OnFault
from shardwise.storage.reading.local import LocalReader
from shardwise.tensors import Box
from shardwise.tensors.fingerprint import MODULUS, fingerprint, lane_weights

FACTS: Final = "shardwise.checkpoint.json"
_KIND: Final = "shardwise training checkpoint"
_VERSION: Final = 1
MAX_FACTS_BYTES: Final = 64 << 20
"""What is longer is none."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is told of a checkpoint.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        holds: "everything", or "adapter NAME": that adapter and all else that is trained, not the base.
        adapter: the settings of the adapter's config that change what it computes; None without adapter.
        others: a digest of names and shapes of the model's tensors that are not stored.
        alike: generators of random numbers whose state was the same on all ranks.
        data: "none", "one" position for all ranks, or "each" rank its own.
        user: the user's own.
        files: names and sizes in bytes of the files with tensors.
        metadata_sha256: of the file ``.metadata`` that belongs to this one.
        checksums: digests of the checksums in these files.
        optimizers: the class of each optimizer and the number of its parameter groups; None where it is not known.
        base: what the model's tensors that are not stored are known by; None where all are, or it is not known.
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
        """Raises :class:`FormatError` for what is not the facts of a checkpoint; ``what`` names the file."""
        try:
            found = json.loads(content) if len(content) <= MAX_FACTS_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("kind") != _KIND:
            raise FormatError(f"{what}: does not tell of a checkpoint of shardwise; it is damaged, or another's")
        if found.get("version") != _VERSION:
            raise FormatError(
                f"{what}: is of version {found.get('version')!r}, and this shardwise reads {_VERSION}; take the "
                "version of shardwise that wrote it"
            )
        if found.pop(_SEAL, None) != _seal(found):
            raise FormatError(f"{what}: is not what was written; it is damaged, or was changed by hand")
        try:
            base = found.pop("base")
            facts = cls(**{item.name: found[item.name] for item in fields(cls) if item.name != "base"})
            for name, kind in get_type_hints(cls).items():
                type_validator(name, getattr(facts, name), kind)
            facts._require_sound()
        except (KeyError, TypeError) as error:
            raise FormatError(f"{what}: {error} is not what belongs there; it is damaged") from error
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
        raise ConfigError(f"user holds what is no JSON: {error}; give texts, numbers, lists and dicts") from error
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
            f"{what}: holds what is no plain data ({reason}); a checkpoint holds dicts, lists, tuples, texts, "
            "numbers, bytes and tensors: let its state_dict give these"
        ) from error
    return buffer.getvalue()


def digest_of(value: object) -> str:
    """Return a digest that is equal for equal values. Objects that are no plain data count by their class."""
    found = hashlib.sha256()
    _digest(value, found)
    return found.hexdigest()[:32]


def _at_home(value: Any) -> Any:
    """Tensors on the CPU, and without what else their storages hold."""
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
    """Return the size in bytes of the content of a file; the inverse of :func:`with_checksums`."""
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
        digests: of the checksums of each file; other files are not compared.
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
            FormatError: a block is not what was written.
        """
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if (file, block) not in self._sound:
                self._read_block(file, block)

    def is_sound(self, file: str, block: int) -> bool:
        """Read a block; return whether it is what was written."""
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
                    f"{self.root}/{file}: its checksums are not what was written; the file is damaged: restore "
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


_MOST_TENSORS: Final = 256
_CORNER: Final = 16
_SHOWN: Final = 5
_SAMPLE: Final = re.compile(r"[a-z0-9_]{1,32} [0-9a-f]{16}")
_WORDS_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_NOT_OF_A_BASE: Final = re.compile(
    r"_.*|output_.*|.*_token_id|.*_coef|.*drop.*|initializer_.*|transformers_version|(torch_)?dtype|name_or_path"
    r"|architectures|auto_map|use_cache|return_dict|id2label|label2id|problem_type|quantization_config|torchscript"
    r"|tokenizer_class|gradient_checkpointing|chunk_size_feed_forward|loss_type|task_specific_params|pruned_heads"
)
"""Keys of configs that say where a model came from, how it is loaded, or how it is trained."""

ALLOW_OTHER_BASE: Final = (
    "Load the base that it was trained on, or pass on_other_base=Ignore() (in a configuration "
    "checkpoints.on_other_base=ignore) to go on with this one."
)
"""What to do about a base that was refused."""


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """What a base is known by beside the names and shapes of its parameters; plain data, the same on every rank.

    Attributes:
        config: of the model, as JSON; empty where it has none.
        samples: "dtype fingerprint" of sampled parameters, by FQN.
    """

    config: Mapping[str, Any]
    samples: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object, what: str) -> Self:
        """Raises FormatError for what is no identity; ``what`` names where it stands."""
        if isinstance(values, dict) and values.keys() == {"config", "samples"}:
            config, samples = values["config"], values["samples"]
            if isinstance(config, dict) and isinstance(samples, dict):
                texts = [text for text in samples.values() if isinstance(text, str) and _SAMPLE.fullmatch(text)]
                if len(texts) == len(samples):
                    return cls(config, samples)
        raise FormatError(f"{what}: holds no identity of a base; it is damaged or forged")


@dataclass(frozen=True, slots=True)
class BaseMatch:
    """A comparison of two bases.

    Attributes:
        refused: sentences on what differs and is not allowed to.
        told: the outcome in words, for a report.
    """

    refused: tuple[str, ...] = ()
    told: str = ""


def compare_bases(
    there: BaseIdentity | None, here: BaseIdentity, on_other_base: OnFault, *, are_shapes_same: bool
) -> BaseMatch:
    """Compare the base of a checkpoint (None: it does not tell) with the one that is there.

    ``on_other_base`` is asked for "config", "shapes" and "values". Settings that only one config has, as another
    version of transformers does, and values in another dtype, are not compared.
    """
    found: dict[str, str] = {}
    notes: list[str] = []
    if there is None:
        notes.append("config and values not compared: the checkpoint was saved before it told of them")
    elif settings := list(_differing(there.config, here.config, "")):
        found["config"] = _few(settings, "; ")
    if not are_shapes_same:
        odd = [] if there is None else _odd_kinds(there, here)
        found["shapes"] = "frozen parameters have other names or shapes" + (f": {_few(odd, '; ')}" if odd else "")
    elif there is not None:
        pairs = {name: (text, here.samples[name]) for name, text in there.samples.items() if name in here.samples}
        cast = {name: pair for name, pair in pairs.items() if pair[0].split()[0] != pair[1].split()[0]}
        if values := [name for name, (one, other) in pairs.items() if name not in cast and one != other]:
            found["values"] = f"of {len(pairs)} tensors sampled, {len(values)} differ: {_few(sorted(values), ', ')}"
        notes.append(f"samples of {len(pairs) - len(cast)} tensors compared")
        if cast:
            was, now = (text.split()[0] for text in next(iter(cast.values())))
            notes.append(f"values of {len(cast)} not compared: their dtype was {was}, and is {now}")
    refused = tuple(f"{what}: {text}" for what, text in found.items() if not allows(on_other_base, what))
    verdict = f"another, as allowed ({'; '.join(found.values())})" if found else "nothing differs"
    return BaseMatch(refused, "; ".join([verdict, *notes]))


def _few(items: Sequence[str], between: str) -> str:
    return between.join(items[:_SHOWN]) + (f"{between}and {len(items) - _SHOWN} more" if items[_SHOWN:] else "")


def _differing(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in sorted(there.keys() & here.keys()):
        one, other = there[key], here[key]
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key} was {one!r:.80}, is {other!r:.80}"


def _odd_kinds(there: BaseIdentity, here: BaseIdentity) -> list[str]:
    """Sampled parameters of other dtypes, which a base has that is in four bits."""
    kinds = [{name: text.split()[0] for name, text in own.samples.items()} for own in (there, here)]
    return [
        f"{name} was {kinds[0][name]}, is {kinds[1][name]}"
        for name in sorted(kinds[0].keys() & kinds[1].keys())
        if kinds[0][name] != kinds[1][name]
    ]


# The base that is there


def base_config(model: nn.Module) -> dict[str, Any]:
    """The model's config as JSON, without what is not of the base; empty where there is none."""
    config: Any = getattr(model, "config", None)
    told = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if not isinstance(told, Mapping):
        return {}
    text = json.dumps(dict(told), default=lambda value: type(value).__name__, skipkeys=True)
    plain = json.loads(text, parse_constant=str)  # JSON of others has no infinite numbers
    return dict(_of_the_base(plain))


def _of_the_base(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _of_the_base(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not _NOT_OF_A_BASE.fullmatch(key)
    }


def base_of(held: Sequence[Held], stored: Mapping[str, object]) -> list[Held]:
    """The parameters that a checkpoint of these tensors takes for granted."""
    return [
        item
        for item in held
        if item.kind is TensorKind.PARAMETER
        and item.fqn not in stored
        and "lora_" not in item.fqn  # a second adapter, such as a reference, is no part of the base
        and ".modules_to_save." not in item.fqn
        and not any(slot.name == SCALES and getattr(slot.module, "is_nested", False) for slot in item.slots)
    ]


@dataclass(frozen=True, slots=True)
class BaseSamples:
    """Samples of a base's values on this rank, valid as long as the tensors are.

    Attributes:
        kinds: the dtypes of sampled tensors, by FQN.
    """

    kinds: Mapping[str, str]
    _numels: Mapping[str, int]
    _parts: Mapping[tuple[str, Box], tuple[torch.Tensor, Any]]
    """The elements that this rank holds, and their weights."""

    @classmethod
    def of(cls, base: Sequence[Held]) -> Self:
        """Choose samples. Collective: no."""
        chosen = heapq.nsmallest(
            _MOST_TENSORS,
            (item for item in base if item.tensor.numel() and item.tensor.element_size() in _WORDS_BY_SIZE),
            key=lambda item: hashlib.sha256(item.fqn.encode()).digest(),
        )
        chosen.sort(key=lambda item: item.fqn)
        numels: dict[str, int] = {}
        parts: dict[tuple[str, Box], tuple[torch.Tensor, Any]] = {}
        for item in chosen:
            shape = item.tensor.shape
            sizes = (*(1 for _ in shape[:-2]), *(min(size, _CORNER) for size in shape[-2:]))
            corner = Box((0,) * len(sizes), sizes)
            numels[item.fqn] = corner.numel
            weights = lane_weights()[: corner.numel].reshape(sizes)
            held = () if item.tensor.is_meta else local_boxes(item.tensor, item.fqn)
            for part in held:
                if box := part.box.intersect(corner):
                    at = tuple(slice(a, a + size) for a, size in zip(box.offsets, box.sizes, strict=True))
                    view = strided_view(local_tensor(item.tensor), place_of(box, held))
                    parts[item.fqn, box] = view, weights[at]
        kinds = {item.fqn: str(item.tensor.dtype).removeprefix("torch.") for item in chosen}
        return cls(kinds, numels, parts)

    def taken(self) -> dict[tuple[str, Box], int]:
        """Return the fingerprints of the samples on this rank, for :meth:`identity`. Collective: no."""
        found: dict[tuple[str, Box], int] = {}
        for part, (view, weights) in self._parts.items():
            words = view.detach().reshape(-1).view(_WORDS_BY_SIZE[view.element_size()]).cpu().numpy()
            unsigned = words.view(f"<u{words.itemsize}").astype(np.uint64)
            found[part] = int(np.add.reduce(unsigned * weights.reshape(-1)))
        return found

    def identity(self, model: nn.Module, taken: Sequence[Mapping[tuple[str, Box], int]]) -> BaseIdentity:
        """Return the identity of a model, of what each rank has taken. Collective: no.

        Raises:
            DisagreementError: ranks have different bases.
        """
        together = {part: total for own in taken for part, total in own.items()}  # replicas count once
        totals, numels = dict.fromkeys(self.kinds, 0), dict.fromkeys(self.kinds, 0)
        for (name, box), total in together.items():
            if name not in totals:
                raise DisagreementError("frozen parameters are not the same on all ranks; load one base on all")
            totals[name] = (totals[name] + total) % MODULUS
            numels[name] += box.numel
        samples = {
            name: f"{kind} {totals[name]:016x}"
            for name, kind in self.kinds.items()
            if numels[name] == self._numels[name]  # else some are nowhere
        }
        return BaseIdentity(base_config(model), samples)
