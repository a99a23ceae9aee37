"""What ranks say of the process they were forked from. Imports no torch, as whoever starts ranks does not."""

from __future__ import annotations

import sys


def place_of_torch() -> int:
    """Where the module is in memory: at one place in processes that were forked after it had been imported."""
    return id(sys.modules["torch"])
