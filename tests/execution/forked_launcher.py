"""Work of ranks that are started by a process which is then killed."""

import os
import time
from pathlib import Path


def goes_on(folder: str) -> None:
    """Work that does not end by itself soon; a file named after each process says that it has begun."""
    Path(folder, str(os.getpid())).touch()
    for _ in range(1_000):
        time.sleep(0.05)
