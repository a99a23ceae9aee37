"""Which file names a storage accepts, and how names from strangers are printed."""

from __future__ import annotations

import re

_DRIVE = re.compile(r"[A-Za-z]:")
_SHOWN_CHARACTERS = 200


def why_unsafe(name: str) -> str | None:
    """Why ``name`` could leave the storage's root, or cannot be a file name; None when it is fine.

    Names come out of files that anyone may have written (``weight_map`` of an index), so the rule is the same
    on every system: relative, "/"-separated, no way up, no backslash, no drive letter.
    """
    if not name:
        return "it is empty"
    if name.startswith("/"):
        return "it is absolute"
    if "\\" in name:
        return "it contains a backslash"
    if _DRIVE.match(name):
        return "it starts with a drive letter"
    if "\0" in name:
        return "it contains a NUL character"
    parts = name.split("/")
    if ".." in parts:
        return "it climbs out of its folder with '..'"
    if "" in parts or "." in parts:
        return "it has an empty or '.' component"
    return None


def why_not_plain(name: str) -> str | None:
    """Why ``name`` is not that of a file directly in the storage's root; None when it is."""
    return why_unsafe(name) or ("it has a folder in it" if "/" in name else None)


def shown(name: str) -> str:
    """``name`` as it may stand in a message: escaped where not printable, cut where very long."""
    text = name if name and name.isprintable() else ascii(name)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
