"""The plan of a save: which tensor goes to which file at which bytes, and who writes it. The same on every rank.

[Note: One commit] A reader of the hub's layout looks for ``model.safetensors`` first, and for
``model.safetensors.index.json`` next. A save to several files gives them names that no other save has, so that an
older save in the same folder stays whole until the index is replaced (or, where the older one is a single file,
until that file is set aside). A save to one file is written under another name and renamed. So at every moment
there is one step after which the new save counts, and before which the old one does. An adapter of PEFT's is saved
in the same way under a stem of its own, ``adapter_model``, and always to one file; where its config changes with
it, the older one is set aside first, since a config of another scaling would make other values of it. The state of
its training may lie in a file beside it, which counts when the adapter does: see [Note: Named by the adapter].

[Note: One commit].

[Note: A list of renames] Some files have given names, and no step renames several. They are written under names of
the save's own, and what makes all of them count in one step is a small file that lists the renames. Before it is
there the older files count, from then on the new ones: whoever saves there next carries out what a kill has left of
the list, and whoever loads changes nothing, but reads each file by the name that it has until then
(``execution/renames.py``). Another program would see some files of either save until then. A single
file needs no list.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from shardwise.conversion.computed import Copy, pieces
from shardwise.conversion.expression import Expression, Stored
from shardwise.formats.contract import TensorEntry
from shardwise.formats.distributed import is_of_accelerate
from shardwise.formats.peft_adapter import TRAINING_KEY, is_training_file, training_file
from shardwise.formats.safetensors_files import NewFile, lay_out
from shardwise.planning.load_memory import ReadRequest, Segment, schedule, segments_of
from shardwise.planning.moves import Move, whole_on
from shardwise.storage.contract import ReadPolicy, WritePolicy
from shardwise.storage.names import why_unsafe
from shardwise.tensors import Box, DType, Strided, numel

MODEL = "model"
ADAPTER = "adapter_model"
"""Stems: what the names of a save's files begin with."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Saved = tuple[str, DType, tuple[int, ...]]
"""Key, dtype and shape of a tensor that is saved."""


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """The state of an adapter's training: its tensors, and a text of JSON with all that is no tensor."""

    tensors: Sequence[Saved]
    text: str


@dataclass(frozen=True)
class SavePlan:
    """Files to be written and the name each is to have in the end; the index, where there is one.

    ``token`` sets this save apart from any other.
    """

    token: str
    files: tuple[NewFile, ...]
    names: tuple[str, ...]
    index: bytes | None
    stem: str = MODEL

    @property
    def single_file(self) -> str:
        """The name of the file of weights, where there is one only."""
        return f"{self.stem}.safetensors"

    @property
    def index_file(self) -> str:
        """The name of the index of several files."""
        return f"{self.single_file}.index.json"

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Where each tensor is written, by key."""
        return {entry.key: entry for file in self.files for entry in file.entries}

    @property
    def nbytes(self) -> int:
        """Of all tensors; headers are not counted."""
        return sum(entry.nbytes for file in self.files for entry in file.entries)


def plan_save(
    tensors: Sequence[Saved],
    *,
    max_shard_bytes: int,
    parameters: int,
    token: str,
    can_rename: bool = True,
    stem: str = MODEL,
    training: SavedTraining | None = None,
) -> SavePlan:
    """Assign tensors to files as the hub's library does, in their order, and lay the files out.

    Args:
        tensors: in the order in which transformers saves them.
        max_shard_bytes: of one file's tensors; a larger tensor has a file of its own.
        parameters: of the model, for the index.
        token: what sets the names of this save's files apart from those of any other.
        can_rename: a file can take another's place in one step; otherwise one file has an index too.
        stem: what the names of the files begin with.
        training: of an adapter, what lies in a file beside the one that it is saved to; None for nothing.

    Raises:
        FormatError: something that no safetensors file can hold.
    """
    groups = _grouped(tensors, max_shard_bytes)
    metadata = {"format": "pt"}
    if len(groups) == 1 and can_rename:
        files: tuple[NewFile, ...] = ()
        if training is not None:
            files = (lay_out(training_file(token), training.tensors, {**metadata, TRAINING_KEY: training.text}),)
            metadata[TRAINING_KEY] = files[0].name
        files = (lay_out(f"{stem}.{token}.incomplete", groups[0], metadata), *files)
        return SavePlan(token, files, (f"{stem}.safetensors", *(file.name for file in files[1:])), None, stem)
    count = len(groups)
    names = [f"{stem}-{token}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = tuple(lay_out(name, group, metadata) for name, group in zip(names, groups, strict=True))
    total = sum(_nbytes(item) for item in tensors)
    weight_map = {entry.key: file.name for file in files for entry in file.entries}
    content = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
    index = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    return SavePlan(token, files, tuple(names), index, stem)


def _grouped(tensors: Sequence[Saved], max_shard_bytes: int) -> list[list[Saved]]:
    """``split_state_dict_into_shards_factory`` of huggingface_hub, for tensors that share nothing."""
    groups: list[list[Saved]] = []
    current: list[Saved] = []
    used = 0
    for item in tensors:
        nbytes = _nbytes(item)
        if nbytes > max_shard_bytes:
            groups.append([item])
            continue
        if used + nbytes > max_shard_bytes:
            groups.append(current)
            current, used = [], 0
        current.append(item)
        used += nbytes
    if current or not groups:
        groups.append(current)
    return groups


def _nbytes(item: Saved) -> int:
    return numel(item[2]) * item[1].itemsize


Held = Mapping[str, Sequence[tuple[Box, Strided]]]
"""By name of a tensor of the model: boxes of it that this rank writes, and where they lie in its memory."""


def arrange_writes(
    saved: Iterable[tuple[TensorEntry, Expression]],
    held: Held,
    numbers: Mapping[str, int],
    staged: Collection[str],
    policy: WritePolicy,
    staging_bytes: int,
) -> list[ReadRequest]:
    """What this rank writes where: requests of runs that touch, in the order of the files and of the bytes in them.

    In a segment, ``copy.source`` is the place in the saved tensor, and ``copy.target`` that in the rank's memory.

    Args:
        saved: where each tensor is written, and what it is made of.
        held: what this rank writes.
        numbers: of the tensors whose memory is read, by name.
        staged: names of tensors that cannot be written as they lie in memory: cast, or on an accelerator.
        policy: of the storage.
        staging_bytes: of one worker.
    """
    like_reads = ReadPolicy(
        max_gap_bytes=0,
        request_bytes=policy.request_bytes,
        concurrency=policy.concurrency,
        is_remote=False,
        bytes_per_s=1.0,
    )
    segments: list[tuple[str, Segment]] = []
    for entry, expression in saved:
        leaf = Stored(entry.key, entry.shape, entry.dtype)
        for piece in pieces(expression, held):
            name = piece.leaf.key
            back = Copy(leaf, piece.target, piece.source)
            found = segments_of(
                back,
                numbers[name],
                entry,
                needs_staging=name in staged,
                policy=like_reads,
                block_bytes=staging_bytes,
            )
            segments += ((entry.file, segment) for segment in found)
    return schedule(segments, like_reads, staging_bytes=staging_bytes)


def choose_owners(files: Sequence[NewFile], size: int) -> tuple[int, ...]:
    """By file, the rank that writes it: the largest first, each to the rank that has the fewest bytes by then.

    Where there are fewer files than ranks, the owners are spread over all of these, and so over machines.
    """
    count = min(len(files), size)
    load = {number * size // count: 0 for number in range(count)}
    owners = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda item: -files[item].nbytes):
        owner = min(load, key=lambda rank: (load[rank], rank))
        owners[number] = owner
        load[owner] += files[number].nbytes
    return tuple(owners)


def wanted_by_owners(
    files: Sequence[NewFile], owners: Sequence[int], expressions: Mapping[str, Expression], size: int
) -> list[list[Move]]:
    """For every rank, the tensors of its files, in the order in which they lie in these."""
    return [
        [
            Move(entry.key, expressions[entry.key], entry.dtype.itemsize, whole_on((rank,), entry.shape, size))
            for file, owner in zip(files, owners, strict=True)
            if owner == rank
            for entry in file.entries
        ]
        for rank in range(size)
    ]


OLDER = ".older"
"""Ends the name of older weights that were set aside for the moment of a commit."""

_ON_ITS_WAY = r"\..+\.[0-9a-f]{8}\.incomplete"
"""What has a name only to lose it: what a save renames, and what replaces a small file."""

_OF_A_SAVE = (
    rf"(-[0-9a-f]{{8}}-\d{{5,}}-of-\d{{5,}}\.safetensors|\.[0-9a-f]{{8}}(\.incomplete|{re.escape(OLDER)}))"
    rf"|{_ON_ITS_WAY}"
)
"""What follows the stem in names that only saves give."""


@dataclass(frozen=True, slots=True)
class FolderState:
    """What a folder holds before a save.

    Attributes:
        files: all of them.
        weights: those that make up the weights that count.
        named: those that the index names. Beside a single file they do not count, but may be about to. Of an
            adapter, the file with its training.
    """

    files: frozenset[str]
    weights: frozenset[str]
    named: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Rename:
    """Give a file another name, in place of whatever had it."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Give a small file another name, on any storage."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file, for good."""

    file: str


CommitStep: TypeAlias = Rename | Publish | Remove

NOTHING_BOUND: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Commit:
    """How a save that is written and synced comes to count; what the executor asks for, and does.

    Attributes:
        files: as they are called before the steps, with their sizes in bytes.
        ready: small files that are written and synced before the steps, which publish them.
        steps: in their order, each durable before the next. After the last, and not before, the save counts.
        then: the files as they are called when it counts, with their sizes.
        says: small files that have this content then.
        without: names that are not there then: whoever had them would count in its place.
        obsolete: what is removed once it counts.
        carried_out: those of ``says`` that list what is left to do, which whoever has the folder next does.
    """

    files: Mapping[str, int]
    steps: tuple[CommitStep, ...]
    then: Mapping[str, int]
    ready: Mapping[str, bytes] = field(default_factory=dict)
    says: Mapping[str, bytes] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    obsolete: tuple[str, ...] = ()
    carried_out: frozenset[str] = frozenset()

    @property
    def aside(self) -> tuple[Rename, ...]:
        """The steps that set something older aside."""
        return tuple(step for step in self.steps if isinstance(step, Rename) and step.name.endswith(OLDER))


def on_its_way(name: str, token: str) -> str:
    """What a file is called until the save of this token gives it its name."""
    return f".{name}.{token}.incomplete"


def is_on_its_way(file: str) -> bool:
    """Whether a file has a name that it gets only to lose it."""
    return re.fullmatch(r".+\.[0-9a-f]{8}\.incomplete", file) is not None


def look_at_folder(files: Collection[str], index: bytes | None, single_file: str = SINGLE_FILE) -> FolderState:
    """What is there, of the names in a folder and of its index file; an index that makes no sense names nothing."""
    named: set[str] = set()
    if index is not None:
        try:
            values = json.loads(index)["weight_map"].values()
            named = {name for name in values if isinstance(name, str)} & set(files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            named = set()
    weights = {single_file} & set(files) or named
    return FolderState(frozenset(files), frozenset(weights), frozenset(named))


def commit_of(
    plan: SavePlan, standing: FolderState, *, can_rename: bool, bound: Mapping[str, bytes] = NOTHING_BOUND
) -> Commit:
    """The commit of a save in the hub's layout.

    ``bound`` are small files, by name, beside which the older weights would be read as what they are not (the
    config of an adapter has its scaling). Then there are no weights, rather than wrong ones, between the first step
    and the last: the older ones are set aside. So is a single file that would count in place of an index.
    """
    files = {file.name: file.nbytes for file in plan.files}
    then = {name: file.nbytes for name, file in zip(plan.names, plan.files, strict=True)}
    removed = tuple(obsolete(plan, standing))
    aside: list[CommitStep] = []
    if plan.single_file in standing.files and can_rename and (bound or plan.index is not None):
        aside = [Rename(plan.single_file, set_aside(plan))]
    if plan.index is None:
        published = {name: on_its_way(name, plan.token) for name in bound}
        steps = [*aside, *(Publish(file, name) for name, file in published.items())]
        steps.append(Rename(plan.files[0].name, plan.single_file))
        made = {published[name]: content for name, content in bound.items()}
        return Commit(files, tuple(steps), then, made, bound, frozenset({*files, *made}) - then.keys(), removed)
    says, without = {plan.index_file: plan.index}, frozenset({plan.single_file})
    ready = on_its_way(plan.index_file, plan.token)
    if plan.single_file in standing.files and not can_rename:
        aside = [Remove(plan.single_file)]
    into_place = (Publish(ready, plan.index_file), *aside)
    return Commit(files, into_place, then, {ready: plan.index}, says, without | {ready}, removed)


def set_aside(plan: SavePlan) -> str:
    """The name that older weights have while a save commits that cannot be told from them."""
    return f"{plan.stem}.{plan.token}{OLDER}"


def obsolete(plan: SavePlan, standing: FolderState) -> list[str]:
    """Files to remove once the new save counts: those of the older one, and of saves that were never committed."""
    new = {*plan.names, plan.single_file if plan.index is None else plan.index_file}
    old = {name for name in standing.weights if name.endswith(".safetensors")}
    old |= {name for name in standing.files if re.fullmatch(f"{plan.stem}{_OF_A_SAVE}", name)}
    old |= {plan.index_file} & standing.files
    if plan.stem == ADAPTER:
        old |= {name for name in standing.files if is_training_file(name)}
    return sorted(old - new)


_LIST = re.compile(r"\.shardwise\.([0-9a-f]{8})\.renames\.json")
_FRESH = re.compile(r"\.(.+)\.([0-9a-f]{8})\.new")


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What a save has written and synced into a folder, as the first rank knows it.

    Attributes:
        named: files that are to have these names, with their sizes; until then they are called as :func:`fresh`
            says.
        beside: files that have their names already, which nothing that counts tells of yet.
    """

    named: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)

    def with_more(self, other: WrittenFiles) -> WrittenFiles:
        """Both together."""
        return WrittenFiles({**self.named, **other.named}, {**self.beside, **other.beside})


@dataclass(frozen=True, slots=True)
class Renames:
    """What is left to do once a save counts: files get these names, and older ones go.

    Names may have a folder in front.
    """

    token: str
    names: tuple[str, ...]
    older: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of the list."""
        return f".shardwise.{self.token}.renames.json"

    def to_bytes(self) -> bytes:
        content = {"token": self.token, "names": list(self.names), "older": list(self.older)}
        return json.dumps(content).encode()

    @classmethod
    def from_bytes(cls, file: str, content: bytes) -> Renames | None:
        """What a list of this name says; None where it makes no sense, or leads elsewhere."""
        try:
            found: Any = json.loads(content)
            token, names, older = found["token"], found["names"], found["older"]
            named = _LIST.fullmatch(file)
            if named is None or token != named[1] or not isinstance(names, list) or not isinstance(older, list):
                return None
            if all(map(_is_safe, names)) and all(map(is_of_accelerate, older)):
                return cls(token, tuple(names), tuple(older))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return None

    def commit(self, written: WrittenFiles) -> Commit:
        """The commit of files that have been written."""
        files = {**{fresh(name, self.token): nbytes for name, nbytes in written.named.items()}, **written.beside}
        if len(self.names) == 1:
            [name] = self.names
            return Commit(
                files,
                steps=(Rename(fresh(name, self.token), name),),
                then={**written.named, **written.beside},
                without=frozenset({fresh(name, self.token)}),
                obsolete=self.older,
            )
        ready = on_its_way(self.file, self.token)
        return Commit(
            files,
            steps=(Publish(ready, self.file),),
            then={},  # not these, of which whoever has the folder by then may have given some their names
            ready={ready: self.to_bytes()},
            says={self.file: self.to_bytes()},
            carried_out=frozenset({self.file}),
            without=frozenset({ready}),
        )


def fresh(name: str, token: str) -> str:
    """What a file is called until it is renamed: no name of what any save takes for left behind by itself."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}.{file}.{token}.new"


def token_of_fresh(file: str) -> str | None:
    """The save that has given a file such a name; None for others."""
    found = _FRESH.fullmatch(file.rpartition("/")[2])
    return found[2] if found else None


def lists_among(files: Collection[str]) -> list[str]:
    """Those that are lists of renames."""
    return sorted(file for file in files if _LIST.fullmatch(file))


_LONGEST_NAME, _LONGEST_PATH = 255, 4096
"""Bytes, on common file systems."""


def _is_safe(name: object) -> bool:
    """Whether a file below a folder, and while it waits for its name, may be called this."""
    if not isinstance(name, str) or len(name) > _LONGEST_PATH or why_unsafe(name) is not None:
        return False
    return all(len(os.fsencode(part)) <= _LONGEST_NAME for part in fresh(name, "0" * 8).split("/"))
