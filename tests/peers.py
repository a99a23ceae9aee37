"""Packages that lie beside the environment: found by the processes that ask for them, and by no others."""

import importlib
import sys
from pathlib import Path


def use_peers(*names: str) -> None:
    """Put packages such as bitsandbytes on the path of this process, for good.

    In a worker, and first of all there. Not in the process of the tests, from which every later worker would have
    them.
    """
    for name in names:
        folder = Path(sys.prefix, "peers", name)
        if not folder.is_dir():
            raise RuntimeError(f"{folder} is not there: `make .venv/project` makes it")
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    importlib.invalidate_caches()
    # A worker may be forked from a process in which PEFT and transformers have looked already, and found nothing.
    for module in ("peft.import_utils", "transformers.utils.import_utils"):
        for value in vars(sys.modules.get(module, sys)).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    for stale in ("transformers.integrations.bitsandbytes", "peft.tuners.lora.bnb"):
        sys.modules.pop(stale, None)
