"""``shardwise`` as a module, of which rank 1 is killed in step 4, but not once torchrun has started it again."""

from __future__ import annotations

import contextlib
import os

from tests.training.ending import struck

from shardwise.cli import main

if __name__ == "__main__":
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with struck("kill", 1, 4) if is_first else contextlib.nullcontext():
        main(prog_name="shardwise")
