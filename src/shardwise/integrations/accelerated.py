"""``accelerate launch ... -m shardwise.integrations.accelerated script.py ...``: a script, under the switch.

With ``-m`` first, a module instead of a file.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.integrations.accelerate_patches import accelerate


def main(arguments: Sequence[str]) -> None:
    """Run a script, or a module after ``-m``, with its arguments, as Python would, while the switch is on."""
    given = list(arguments)
    is_module = given[:1] == ["-m"]
    if len(given) < 1 + is_module:
        sys.exit("usage: python -m shardwise.integrations.accelerated [-m] SCRIPT [ARGUMENT]...")
    sys.argv = given[is_module:]
    with accelerate():
        if is_module:
            runpy.run_module(given[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(given[0]).resolve().parent))
            runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
