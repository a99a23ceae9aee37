"""Names of tensors without what wrappers add, lists of names, values as text, and numbers of bytes."""

import hashlib
import re
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Final

_DIGITS = re.compile(r"(\d{1,18})")
"""Names are untrusted. Python rejects the conversion of numbers with thousands of digits."""

_SHOWN = 6
"""Patterns in a listing."""

_MOST_RANKS = 8
"""Ranks, or ranges of them, in a message."""


_LONGEST_FOLDER = 200
"""Bytes of the name of a folder. Most file systems have 255, and saves add to it."""


def folder_name(name: str) -> str:
    """Return a name for a folder, percent-encoded, for any text: the same text, if it is letters, digits, _.-~ .

    ``a/b`` becomes ``a%2Fb``, and ``..`` becomes ``%2E.``. Longer ones end with a digest of the text.
    """
    quoted = urllib.parse.quote(name, safe="")
    # quote() keeps dots, and . and .. are no names for a folder.
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if len(quoted) <= _LONGEST_FOLDER:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{quoted[: _LONGEST_FOLDER - 17]}-{digest}"


ALL_RANKS: Final = range(1 << 31)
"""The global rank of each rank of the default group."""


WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of names that torch.compile, activation checkpointing and FSDP1 add."""

OF_DDP: Final = "module."


def canonical_name(name: str) -> str:
    """Return a name of a tensor or module without :data:`WRAPPERS` (compile, activation checkpointing, FSDP1)."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def join_names(prefix: str, name: str) -> str:
    """Return the name of a tensor or module inside of a module, whose own name is "" if it is the root."""
    return f"{prefix}.{name}" if prefix else name


def plain_key(key: str) -> str:
    """Return a key without what wrappers add to it: :data:`WRAPPERS`, and ``module.`` in front (DDP, DeepSpeed)."""
    return canonical_name(key).removeprefix(OF_DDP)


def collapse(names: Iterable[str]) -> list[tuple[str, int]]:
    """Group names that differ only in numbers: one pattern with the number of names.

    ``layers.0.up, layers.1.up, layers.3.up`` become ``("layers.{0..1,3}.up", 3)``. The order is that of the first
    name of each pattern. Names in which two or more numbers vary keep a ``*`` for each.
    """
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        # The split alternates: text at even places, numbers at odd ones.
        tokens = _DIGITS.split(name)
        groups.setdefault(tuple(tokens[::2]), []).append(tokens[1::2])
    return [(_pattern(words, numbers), len(numbers)) for words, numbers in groups.items()]


def format_ranks(ranks: Sequence[int], global_ranks: Sequence[int] = ALL_RANKS) -> str:
    """Format ranks in ascending order, shortened if there are many: ``1, 3``, or ``1-511, 513-1023``.

    ``global_ranks`` are the ranks of the group in the default group.
    """
    ranks = sorted(global_ranks[rank] for rank in ranks)
    if len(ranks) <= _MOST_RANKS:
        return ", ".join(map(str, ranks))
    runs = _runs(ranks)
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MOST_RANKS])
    remaining = sum(last - first + 1 for first, last in runs[_MOST_RANKS:])
    return f"{shown} and {remaining} more" if remaining else shown


def _pattern(words: tuple[str, ...], numbers: list[list[str]]) -> str:
    # For layers.0.up and layers.3.up, words are ("layers.", ".up"), and numbers have one column, (0, 3).
    columns = [sorted(set(column), key=int) for column in zip(*numbers, strict=True)]
    varying = sum(len(column) > 1 for column in columns)
    pieces = [words[0]]
    for column, word in zip(columns, words[1:], strict=True):
        if len(column) == 1:
            pieces.append(column[0])
        else:
            runs = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in _runs([*map(int, column)]))
            pieces.append("{" + runs + "}" if varying == 1 else "*")
        pieces.append(word)
    return "".join(pieces)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        first = runs.pop()[0] if runs and number == runs[-1][1] + 1 else number
        runs.append((first, number))
    return runs


def abbreviate(lines: Iterable[str], most: int = 12) -> list[str]:
    """Return the first dozen names or sentences, collapsed."""
    groups = collapse(lines)
    shown = [pattern + (f" (x{count})" if count > 1 else "") for pattern, count in groups[:most]]
    if len(groups) > most:
        shown.append(f"... and {sum(count for _, count in groups[most:])} more")
    return shown


def few_names(names: Iterable[str], most: int = _SHOWN) -> str:
    """Return the first few names, those of layers collapsed, and the number of further ones."""
    groups = [pattern for pattern, _ in collapse(names)]
    more = f" and {len(groups) - most} more" if len(groups) > most else ""
    return ", ".join(groups[:most]) + more


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def comparable_text(value: object) -> str:
    """Return text to compare a value between ranks: ``repr``, but functions by name, as their addresses differ."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        attributes = ", ".join(
            f"{item.name}={comparable_text(getattr(value, item.name))}" for item in fields(value)
        )
        return f"{type(value).__name__}({attributes})"
    return type(value).__qualname__ if callable(value) else repr(value)


def listing(word: str, names: Iterable[str]) -> list[str]:
    """Return lines of a report with these names under ``word``: collapsed, the first few."""
    return [f"  {word:<11} {line}" for line in abbreviate(names, _SHOWN)]


def describe_trainable(trainable: int, parameters: int) -> str:
    """Format the counts as PEFT's ``print_trainable_parameters``."""
    share = 100 * trainable / max(parameters, 1)
    return f"trainable params: {trainable:,} || all params: {parameters:,} || trainable%: {share:.4f}"


def in_bytes(nbytes: int) -> str:
    """Format a number of bytes ("1.50 GiB", below a KiB exactly, "12 B")."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> list[str]:
    """Align rows under the names of columns. Those in ``numbers`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines: list[str] = []
    for row in (head, *rows):
        cells: list[str] = []
        for name, cell, width in zip(head, row, widths, strict=True):
            cells.append(cell.rjust(width) if name in numbers else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines
