"""What ranks say of the process they were forked from. Imports no torch, as whoever starts ranks does not."""

import os
import sys
import time
from pathlib import Path


def place_of_torch() -> int:
    """Where the module is in memory: at one place in processes that were forked after it had been imported."""
    return id(sys.modules["torch"])


def goes_on(folder: str) -> None:
    """Work that does not end by itself soon; a file named after each process says that it has begun."""
    Path(folder, str(os.getpid())).touch()
    for _ in range(1_000):
        time.sleep(0.05)
