"""From this rank's memory into a folder, and the one step after which the checkpoint counts.

Each rank creates, fills and syncs its own file; the ranks meet; the first one puts ``.metadata`` in place. See
[Note: When a checkpoint counts].
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from shardwise.checkpoints import folder
from shardwise.checkpoints.archive import envelope
from shardwise.checkpoints.facts import FACTS, FINGERPRINTS, Facts
from shardwise.checkpoints.fingerprints import Marked, Marker, digest, told_by_all
from shardwise.checkpoints.fingerprints import to_bytes as fingerprints_file
from shardwise.checkpoints.folder import data_file
from shardwise.checkpoints.modes import Keep, KeepLast
from shardwise.checkpoints.plan import Chunk, TensorsPlan, metadata_of
from shardwise.checkpoints.state import Keys
from shardwise.errors import StorageError
from shardwise.execution import saving_lock
from shardwise.execution.saving_lock import Renewal, release_lock, require_lock, take_lock
from shardwise.execution.workers import Ahead
from shardwise.execution.world import World
from shardwise.formats.distributed import METADATA
from shardwise.storage import StorageWriter, open_writer


class Source(Protocol):
    """Where the bytes of chunks come from.

    Attributes:
        block_bytes: the most that is asked for before what came is let go.
    """

    @property
    def block_bytes(self) -> int: ...

    def blocks(self, chunk: Chunk) -> Iterator[memoryview]: ...


@dataclass(frozen=True, slots=True)
class Content:
    """What this rank writes: its chunks of tensors, and what is no tensor, packed, by the keys that lead to it."""

    source: Source
    values: Mapping[Keys, bytes]


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint that is to be written.

    Attributes:
        root: the folder of checkpoints.
        newest: the newest complete step that this run knows of.
        plan: of the tensors.
        content: asked for once, when the folder has been marked; raises what kept this rank from having it.
        facts: all but what is known only at the end.
    """

    root: Path
    step: int
    newest: int | None
    keep: Keep
    plan: TensorsPlan
    content: Callable[[], Content]
    facts: Facts

    @property
    def folder(self) -> Path:
        return self.root / folder.name_of(self.step)


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a job: bytes of all files and of this rank's, and the steps that were removed."""

    nbytes: int
    own_nbytes: int
    removed: tuple[int, ...]


def require_after(root: Path, step: int, newest: int | None) -> None:
    """Refuse a step that a resumed run would not take for the latest.

    Raises:
        StorageError: the newest checkpoint is of this step or a later one.
    """
    if newest is not None and newest >= step:
        raise StorageError(
            f"{root}: step {step} is not after {newest}, the newest checkpoint there, which a resumed run would "
            f"take for the latest; discard_after({step - 1}) removes what came after, or save to another folder"
        )


def carry_out(world: World, job: Job) -> Written:
    """Mark the folder, write, sync, commit, and remove what is not kept; the same steps in both modes.

    Collective: yes.

    Raises:
        StorageError: somebody else writes there, or has since; or bytes could not be written. The checkpoint does
            not count then, unless it says otherwise.
        RankLostError: a rank has been lost.
    """
    with ExitStack() as undoing, ExitStack() as renewing:

        def begin() -> str:
            token = secrets.token_hex(4)
            _begin(job, token)
            undoing.callback(_undo, job, token)
            renewing.enter_context(Renewal(job.root, saving_lock.RENEWED_S))
            return token

        written = _carried_out(world, job, world.from_first(begin))
        undoing.pop_all()
    return written


def _begin(job: Job, token: str) -> None:
    """What one rank does before anything is written: mark the folder, see that the step is a new one, tidy up."""
    root, step, newest = job.root, job.step, job.newest
    with open_writer(root) as writer:
        take_lock(writer, token, renewed_s=saving_lock.RENEWED_S)
        try:
            present = max(folder.steps_in(root), default=None)
            if present is not None and present != newest and (newest is None or present > newest):
                raise StorageError(
                    f"{root}: another run has saved step {present} there since this one began; give every run a "
                    "folder of its own"
                )
            require_after(root, step, present)
            folder.remove(root, folder.leftovers_in(root))
            with open_writer(root / folder.name_of(step)) as inner:
                if there := inner.list():
                    raise StorageError(
                        f"{inner.root}: holds {there[0]}, which no Checkpointer put there; move it elsewhere"
                    )
        except BaseException:
            release_lock(writer, token)
            raise


def _carried_out(world: World, job: Job, token: str) -> Written:
    contents: list[Content] = []

    def ask() -> dict[Keys, int]:
        contents.append(job.content())
        return {path: len(value) for path, value in contents[0].values.items()}

    sizes = world.each(ask)
    [content] = contents
    files = {data_file(rank): job.plan.nbytes(rank) + sum(own.values()) for rank, own in enumerate(sizes)}
    own = world.together(lambda: _write_own(world, job, token, content, files[data_file(world.rank)]))
    marked = told_by_all(world, own)
    removed = world.from_first(lambda: _commit(job, token, sizes, files, marked))
    return Written(sum(files.values()), files[data_file(world.rank)], tuple(removed))


def _write_own(world: World, job: Job, token: str, content: Content, nbytes: int) -> Marked:
    with open_writer(job.root) as writer:
        require_lock(writer, token)
    file = data_file(world.rank)
    with open_writer(job.folder) as writer:
        writer.create(file, nbytes)
        stream = _Stream(writer, file, world.check)
        stream.write(job.plan.by_rank[world.rank], content.source, list(content.values.values()))
        writer.sync(file)
        writer.sync_names()
    return stream.marker.told()


class _Stream:
    """A file written from its beginning to its end, in requests as large as the storage likes them."""

    def __init__(self, writer: StorageWriter, file: str, check: Callable[[], None]) -> None:
        self._writer = writer
        self._file = file
        self._check = check
        self._position = 0
        self._pending: list[memoryview] = []
        self._pending_nbytes = 0
        self._unmarked: list[tuple[int, int, memoryview]] = []
        self.marker = Marker()

    def write(self, chunks: Sequence[Chunk], source: Source, values: Sequence[bytes]) -> None:
        most = min(source.block_bytes, self._writer.policy.request_bytes)
        for chunk in chunks:
            around = envelope(chunk.box.sizes, chunk.dtype)
            self._add_around(bytes(chunk.start - self._position - self._pending_nbytes) + around.before)
            number, start = self.marker.begin(), 0
            for block in source.blocks(chunk):
                self._add(block)
                self._unmarked.append((number, start, block))
                start += block.nbytes
                if self._pending_nbytes >= most:
                    self._flush()
            self._add_around(around.after)
        for content in values:
            self._add(content)
            self.marker.values.append(digest(content))
        self._flush()

    def _add_around(self, content: bytes) -> None:
        self._add(content)
        self.marker.add_around(content)

    def _add(self, content: bytes | memoryview) -> None:
        self._pending.append(memoryview(content))
        self._pending_nbytes += len(content)

    def _flush(self) -> None:
        self._check()
        marked = Ahead(self._mark)  # while the bytes are written
        self._writer.write(self._file, self._position, self._pending)
        marked.value(self._check)
        self._position += self._pending_nbytes
        self._pending, self._pending_nbytes = [], 0

    def _mark(self) -> None:
        for number, start, block in self._unmarked:
            self.marker.add(number, start, block)
        self._unmarked = []


def _commit(
    job: Job, token: str, sizes: Sequence[Mapping[Keys, int]], files: dict[str, int], told: Sequence[Marked]
) -> list[int]:
    metadata = metadata_of(job.plan, sizes)
    marks = {
        data_file(rank): own.marks(job.plan.by_rank[rank], job.plan.nbytes(rank), list(sizes[rank].values()))
        for rank, own in enumerate(told)
    }
    fingerprints = fingerprints_file(marks)
    facts = replace(
        job.facts, files=files, metadata_sha256=digest(metadata), fingerprints_sha256=digest(fingerprints)
    )
    with open_writer(job.root) as marked:
        require_lock(marked, token)
        with open_writer(job.folder) as writer:
            _require_all(writer, files)
            writer.replace(FINGERPRINTS, fingerprints)
            writer.replace(FACTS, facts.to_bytes())
            writer.sync_names()
            writer.replace(METADATA, metadata)
        removed: list[int] = []
        if isinstance(job.keep, KeepLast):
            removed = folder.remove(job.root, folder.steps_in(job.root)[: -job.keep.count])
        release_lock(marked, token)
        marked.sync_names()
    return removed


def _require_all(writer: StorageWriter, files: Mapping[str, int]) -> None:
    missing = sorted(files.keys() - set(writer.list()))
    if missing:
        raise StorageError(
            f"{writer.root}: rank 0 does not see {missing[0]}, which another rank wrote; save to a folder that all "
            "ranks share"
        )


def _undo(job: Job, token: str) -> None:
    """Remove what was written for a step, unless it counts by now, and take the mark away."""
    with contextlib.suppress(StorageError):
        if job.step not in folder.steps_in(job.root):
            folder.remove(job.root, [job.step])
    with contextlib.suppress(StorageError), open_writer(job.root) as writer:
        release_lock(writer, token)
        writer.sync_names()
