"""Files that a test changes or damages."""

import json
from pathlib import Path
from typing import Any


def change_json(path: Path, **changes: Any) -> None:
    """Give some keys of an object in a file other values."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip_bit(path: Path, at: int = -1) -> None:
    """Flip a bit of a byte of a file; once more flips it back."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
