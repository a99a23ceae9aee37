"""What ranks say of the process they were forked from. Imports no torch, as whoever starts ranks does not."""

from __future__ import annotations


def importer() -> int:
    """The process that imported what was to be there before the ranks were."""
    from tests.execution.stamp import IMPORTED_BY

    return IMPORTED_BY
