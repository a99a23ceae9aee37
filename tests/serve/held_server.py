"""``shardwise`` with a clock and stops of the test: ``python -m tests.serve.held_server FOLDER serve ...``.

While there is a file ``FOLDER/hold before optim_step``, the server waits before that call of the bank, and writes
``FOLDER/held`` when it does. ``FOLDER/clock`` has the seconds by which the clock is ahead.
"""

import mmap
import secrets
import struct
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

from shardwise import AdapterBank
from shardwise.cli import main


def hold(folder: Path, moment: str) -> None:
    file = folder / f"hold {moment}"
    while file.exists():
        (folder / "held").touch()
        time.sleep(0.01)


def hold_calls(folder: Path, name: str) -> None:
    call = getattr(AdapterBank, name)

    @wraps(call)
    def held(*args: Any, **keywords: Any) -> Any:
        hold(folder, f"before {name}")
        result = call(*args, **keywords)
        hold(folder, f"after {name}")
        return result

    setattr(AdapterBank, name, held)


def set_clock(folder: Path) -> None:
    """Take the time from a file of 8 bytes, so that it changes at once."""
    monotonic = time.monotonic
    with (folder / "clock").open("rb") as file:
        ahead = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    time.monotonic = lambda: monotonic() + struct.unpack("d", ahead[:])[0]


if __name__ == "__main__":
    controls = Path(sys.argv.pop(1))
    set_clock(controls)
    secrets.randbits = lambda _: 0  # the seed of a model without one: how fast it learns would vary
    for method in ("forward_backward", "optim_step", "save"):
        hold_calls(controls, method)
    main(prog_name="shardwise")
