"""Work of ranks that are started by a process which is then killed."""

import os
import threading
from pathlib import Path


def goes_on(folder: str) -> None:
    """Work that does not end by itself; a file named after each process says that it has begun."""
    Path(folder, str(os.getpid())).touch()
    threading.Event().wait()
