"""Numbers of bytes in words."""

from __future__ import annotations


def in_bytes(nbytes: int) -> str:
    """As in "1.50 GiB"; below a KiB exactly, as in "12 B"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
