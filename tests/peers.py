"""Packages that lie beside the environment: found by the processes that ask for them, and by no others."""

import importlib
import sys
from pathlib import Path


def use_peers(*names: str) -> None:
    """Put bitsandbytes, or torchao, on the path of this process, for good.

    In a worker, and first of all there: PEFT and transformers look once. Not in the process of the tests, from
    which every later worker would have them.
    """
    for name in names:
        folder = Path(sys.prefix, "peers", name)
        if not folder.is_dir():
            raise RuntimeError(f"{folder} is not there: `make .venv/project` makes it")
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    importlib.invalidate_caches()
