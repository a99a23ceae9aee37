"""Files that a test changes or damages."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def contents(root: Path) -> dict[str, bytes]:
    """All files below a folder, by name."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def change_json(path: Path, **changes: Any) -> None:
    """Give some keys of an object in a file other values."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """A file system of so many bytes."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def flip_bit(path: Path, at: int = -1) -> None:
    """Flip a bit of a byte of a file; once more flips it back."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
