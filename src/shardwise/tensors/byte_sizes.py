"""Sizes as people write them."""

from __future__ import annotations

import math
import re

from shardwise.errors import ConfigError


def in_bytes_of(size: int | str) -> int:
    """A size as "5GB", "200MB" (powers of 1000, as on the hub) or "1GiB", or a number of bytes.

    Raises:
        ConfigError: for anything else, and for less than a byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(size).upper())
    nbytes = 0
    if found is not None:
        base = 1024 if found[3] else 1000
        exact = float(found[1]) * base ** " KMGT".index(found[2] or " ")
        nbytes = int(exact) if math.isfinite(exact) else 0
    if nbytes < 1:
        raise ConfigError(f"{size!r} is not a size of at least one byte; pass bytes, or text such as 5GB")
    return nbytes
