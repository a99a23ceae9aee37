"""Files of rows as tokens, in order, by as many processes as are worth their start.

[Note: Processes of their own] Whoever tokenises is a fresh interpreter without torch, up in a second, that is sent
blocks through a pipe: neither forked, since threads of a tokenizer or of CUDA do not survive that, nor started by
``multiprocessing``, which would run the user's script once more. Each tokenises on one thread. When the pipe
closes, however this process has ended, they end.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Final, Self

from shardwise.errors import ConfigError
from shardwise.storage import machine
from shardwise.training.data.encoding import EncodedBlock, Encoding, encode_block
from shardwise.training.data.row_blocks import RowBlock
from shardwise.training.data.row_files import RowFile


@dataclass(frozen=True, slots=True)
class Effort:
    """How many processes tokenise, on each machine.

    Attributes:
        processes: at most; None for as many as there are processors for this one. One is this process itself.
        bytes_per_process: another one is started for each so many bytes of rows; 0: all are.
        block_bytes: what a process is given at a time.
    """

    processes: int | None = None
    bytes_per_process: int = 4 << 20
    block_bytes: int = 512 << 10

    def count(self, nbytes: int) -> int:
        """How many for so many bytes."""
        most = self.processes or usable_processors()
        return max(1, min(most, nbytes // self.bytes_per_process) if self.bytes_per_process else most)


def usable_processors() -> int:
    """Processors that this process may use at once."""
    return machine.processor_count()


@dataclass(frozen=True, slots=True)
class BlockStart:
    """Where to begin: a file and a block of it, by their numbers, and how many places of the file are before it."""

    file: int = 0
    block: int = 0
    place: int = 0


BEGINNING: Final = BlockStart()


@dataclass(frozen=True, slots=True)
class FileBlock:
    """A block, and the number of its file."""

    file: int
    block: RowBlock


def encoded_blocks(
    files: Sequence[RowFile],
    encoding: Encoding,
    effort: Effort,
    *,
    start: BlockStart = BEGINNING,
    check: Callable[[], None] = lambda: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Generator[tuple[int, EncodedBlock], None, None]:
    """All blocks of all files as tokens, in order, each with the number of its file.

    ``check`` is called now and then; what it raises ends it all. ``advance`` is told how many bytes are done.

    Raises:
        ConfigError: a file cannot be read, or a process that tokenised has ended.
    """
    jobs = _blocks_from(files, encoding, effort, start)
    count = effort.count(sum(file.nbytes() for file in files))
    pool = None if count == 1 else EncoderPool.started(count, encoding)
    if pool is None:
        for job in jobs:
            check()
            made = encode_block(job.block, encoding)
            advance(job.block.nbytes)
            yield job.file, made
        return
    with pool:
        places = {number: start.place if number == start.file else 0 for number in range(len(files))}
        for job, made in _in_order(pool, jobs, files, places, check):
            advance(job.block.nbytes)
            yield job.file, made


def _blocks_from(
    files: Sequence[RowFile], encoding: Encoding, effort: Effort, start: BlockStart
) -> Iterator[FileBlock]:
    for number, file in enumerate(files[start.file :], start=start.file):
        blocks = file.blocks(effort.block_bytes, encoding.words)
        for block in islice(blocks, start.block if number == start.file else 0, None):
            yield FileBlock(number, block)


def _in_order(
    pool: EncoderPool,
    jobs: Iterator[FileBlock],
    files: Sequence[RowFile],
    places: dict[int, int],
    check: Callable[[], None],
) -> Iterator[tuple[FileBlock, EncodedBlock]]:
    waiting: dict[int, FileBlock] = {}
    made: dict[int, EncodedBlock] = {}
    given = taken = 0
    is_left = True
    while is_left or taken < given:
        check()
        while is_left and pool.has_room and given - taken < 8 * pool.size:
            job = next(jobs, None)
            if job is None:
                is_left = False
                break
            waiting[given] = job
            pool.give(given, job.block)
            given += 1
        try:
            made |= dict(pool.answers())
        except WorkerLost as lost:
            raise ConfigError(f"{_range_of(lost, waiting, made, taken, places, files)}: {lost.cause}") from lost
        while taken in made:
            job, block = waiting.pop(taken), made.pop(taken)
            taken += 1
            places[job.file] += block.place_count
            yield job, block


def _range_of(
    lost: WorkerLost,
    waiting: dict[int, FileBlock],
    made: dict[int, EncodedBlock],
    taken: int,
    places: dict[int, int],
    files: Sequence[RowFile],
) -> str:
    """The rows of the block that was lost: counted by reading what was not made before it."""
    job = waiting[lost.number]
    file, before = files[job.file], places[job.file]
    for number in range(taken, lost.number):
        if waiting[number].file == job.file:
            before += made[number].place_count if number in made else waiting[number].block.read().places
    return f"{file.name}, {file.unit}s {before + 1} to {before + job.block.read().places}"


class WorkerLost(Exception):
    """A process has ended, or could not go on, with the block of this number in hand."""

    def __init__(self, number: int, cause: str) -> None:
        super().__init__(cause)
        self.number = number
        self.cause = cause


# The environment of the other process is its own; a tokenizer reads it when it is first used.
_BEGIN = (
    "import os, sys; os.environ.update(TOKENIZERS_PARALLELISM='false', RAYON_NUM_THREADS='1'); "
    "sys.path[:] = {path!r}; from shardwise.training.data.encoding_worker import serve; serve({descriptor})"
)


class _Worker:
    """One process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = _BEGIN.format(path=sys.path, descriptor=theirs.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self.pipe = Connection(ours.detach())
        self.number: int | None = None
        """Of the block it has."""

    def lost(self) -> WorkerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.poll()
        hint = "; was memory short? Set data.processes to fewer" if code == -9 else ""
        return self.lost_by(f"the process that tokenised these rows has ended (exit code {code}){hint}")

    def lost_by(self, cause: str) -> WorkerLost:
        assert self.number is not None
        return WorkerLost(self.number, cause)

    def close(self) -> None:
        self.pipe.close()
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class EncoderPool:
    """Processes that tokenise; a context manager, at whose end they are gone."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers

    @classmethod
    def started(cls, count: int, encoding: Encoding) -> Self | None:
        """As many processes, ready; None where they cannot have the tokenizer, or cannot be started."""
        try:
            message = pickle.dumps(encoding)
        except (pickle.PicklingError, AttributeError, TypeError):
            return None
        workers: list[_Worker] = []
        pool = cls(workers)
        try:
            for _ in range(count):
                workers.append(_Worker())
            for worker in workers:  # once all have begun: whoever is not up yet does not read
                worker.pipe.send_bytes(message)
            if all(worker.pipe.recv()[0] == "ready" for worker in workers):
                return pool
        except (OSError, EOFError):
            pass
        except BaseException:
            pool.close()
            raise
        pool.close()
        return None

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def has_room(self) -> bool:
        """Whether one of them has nothing to do. Another might wait for its answer to be read, and not read."""
        return any(worker.number is None for worker in self._workers)

    def give(self, number: int, block: RowBlock) -> None:
        """Give a block to one that has none."""
        worker = next(worker for worker in self._workers if worker.number is None)
        worker.number = number
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # told by whoever listens for its answer
            worker.pipe.send_bytes(pickle.dumps(block))

    def answers(self) -> list[tuple[int, EncodedBlock]]:
        """Blocks that have been made, with their numbers; some while is waited for one.

        Raises:
            WorkerLost: a process has ended, or failed.
            ConfigError: as of :func:`~shardwise.training.data.encoding.encode_block`.
        """
        busy = {worker.pipe: worker for worker in self._workers if worker.number is not None}
        found: list[tuple[int, EncodedBlock]] = []
        for pipe in wait(list(busy), timeout=0.5):
            worker = busy[pipe]  # type: ignore[index]
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                raise worker.lost() from None
            if kind == "refused":
                raise value
            if kind == "failed":
                raise worker.lost_by(f"these rows cannot be tokenised ({value})")
            assert worker.number is not None
            found.append((worker.number, value))
            worker.number = None
        return found

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
