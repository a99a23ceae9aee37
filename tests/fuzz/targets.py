"""The formats that strangers write, each as a function of bytes, and what must hold whatever the bytes are.

Every input is put where a user would have it: into a local folder, opened through ``open_checkpoint``. It opens,
and what is said of it is within its files; or it is refused with a :class:`~shardwise.core.errors.CheckpointError`.
Either way nothing stays open, and neither memory nor time grow with what the bytes claim.

Imports nothing but shardwise and Python's own library.
"""

import io
import os
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwise.core.errors import CheckpointError
from shardwise.core.tensors import numel
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.stored_tensors import stored_tensors

FILES = Path(__file__).parent.parent / "fixtures" / "files" / "2"

MOST_SECONDS = 2.0
"""Of processor time, for one input of some kilobytes; a thousandth of that is usual."""

MOST_BYTES = 16 << 20
"""Of memory, for one input of some kilobytes."""


class Broken(Exception):
    """An input did what none may do."""


@dataclass(frozen=True)
class Target:
    """A format: the file that an input is, what lies beside it, and sound inputs to begin from."""

    name: str
    file: str
    beside: Mapping[str, bytes]
    seeds: tuple[bytes, ...]
    around: Callable[[bytes], bytes] = bytes

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder with what lies beside."""
        with tempfile.TemporaryDirectory(prefix="shardwise-fuzz-") as name:
            for file, content in self.beside.items():
                Path(name, file).write_bytes(content)
            yield Path(name)

    def check(self, folder: Path, content: bytes) -> bool:
        """Whether the input opens.

        Raises:
            Broken: something does not hold.
        """
        (folder / self.file).write_bytes(self.around(content))
        index: CheckpointIndex | None = None
        with _watched():
            try:
                index = open_checkpoint(folder)
            except CheckpointError as error:
                _check_message(str(error))
            except Exception as error:
                raise Broken(f"{type(error).__name__}: {error}") from error
        if index is not None:
            _check_index(folder, index)
        return index is not None


@contextmanager
def _watched() -> Iterator[None]:
    """Descriptors, Python's memory and processor time of what is done in the block.

    Raises:
        Broken: some descriptor stays open; or it was too much.
    """
    before, start = len(os.listdir("/proc/self/fd")), time.process_time()
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    seconds, after = time.process_time() - start, len(os.listdir("/proc/self/fd"))
    if after != before:
        raise Broken(f"{after - before} descriptors stay open")
    if peak > MOST_BYTES:
        raise Broken(f"{peak} bytes of memory")
    if seconds > MOST_SECONDS:
        raise Broken(f"{seconds:.1f} s of processor time")


def _check_message(text: str) -> None:
    if not 10 < len(text) < 100_000:
        raise Broken(f"a message of {len(text)} characters")


def _check_index(folder: Path, index: CheckpointIndex) -> None:
    """What an index says lies within its files, and its tensors can be planned with."""
    for entry in index.entries.values():
        if not 0 <= entry.start <= entry.stop <= (folder / entry.file).stat().st_size:
            raise Broken(f"{entry} is not within its file")
        if entry.nbytes != numel(entry.shape) * entry.dtype.bits // 8:
            raise Broken(f"{entry} has not the bytes of its shape")
    try:
        expressions = stored_tensors(index)
        if {item.key: item.shape for item in index.tensors()} != {k: e.shape for k, e in expressions.items()}:
            raise Broken("the tensors of the index are not those that are planned with")
    except Exception as error:
        raise Broken(f"of an index that opened: {type(error).__name__}: {error}") from error


def _archive_of(members: Mapping[str, bytes], pickle: bytes) -> bytes:
    """A file as by ``torch.save``, with this pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as made:
        for name, content in members.items():
            made.writestr(name, pickle if name.endswith("/data.pkl") else content)
    return stream.getvalue()


def _files_in(folder: Path, pattern: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob(pattern))}


def targets() -> dict[str, Target]:
    """All of them, by name."""
    shards = _files_in(FILES / "model", "*.safetensors")
    adapter = (FILES / "adapter" / "adapter_model.safetensors").read_bytes()
    index = (FILES / "model" / "model.safetensors.index.json").read_bytes()
    torch_file = (FILES / "torch.bin").read_bytes()
    with zipfile.ZipFile(FILES / "torch.bin") as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    (pickle,) = (content for name, content in members.items() if name.endswith("/data.pkl"))
    folder = FILES / "accelerate" / "folder" / "pytorch_model_fsdp_0"
    chunks, metadata = _files_in(folder, "*.distcp"), (folder / ".metadata").read_bytes()
    first, *others = chunks
    beside = {".metadata": metadata, **{name: chunks[name] for name in others}}
    made = (
        Target("header", "model.safetensors", {}, (*shards.values(), adapter)),
        Target("index", "model.safetensors.index.json", shards, (index,)),
        Target("archive", "pytorch_model.bin", {}, (torch_file,)),
        Target("pickle", "pytorch_model.bin", {}, (pickle,), around=partial(_archive_of, members)),
        Target("metadata", ".metadata", chunks, (metadata,)),
        Target("chunks", first, beside, (chunks[first],)),
    )
    return {target.name: target for target in made}
