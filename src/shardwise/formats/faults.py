"""What is wrong with a checkpoint, collected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.errors import FormatError, StorageError
from shardwise.storage.names import shown

LISTED = 20
"""How many names, or faults of one kind, a message lists."""


@dataclass
class FormatFaults:
    """What is wrong with a checkpoint, by kind, so that all of it is said at once."""

    root: str
    by_kind: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unread: list[str] = field(default_factory=list)

    def add(self, kind: str, fault: str) -> None:
        self.by_kind[kind].append(fault)

    def add_error(self, kind: str, error: FormatError | StorageError) -> None:
        """A file's own error; bytes that exist but could not be read are no fault of the checkpoint."""
        if isinstance(error, StorageError) and isinstance(error.__cause__, OSError):
            if not isinstance(error.__cause__, FileNotFoundError):
                self.unread.append(str(error))
                return
            kind = "missing files"
        self.add(kind, str(error))

    def raise_if_any(self) -> None:
        kinds = dict(self.by_kind)
        if self.unread:
            kinds["files that could not be read"] = self.unread
        if not kinds:
            return
        lines = [f"the checkpoint in {shown(self.root)} cannot be used as it is"]
        for kind, faults in kinds.items():
            lines.append(f"  {kind}: {len(faults)}")
            lines += [f"    {fault}" for fault in faults[:LISTED]]
            if len(faults) > LISTED:
                lines.append(f"    ... and {len(faults) - LISTED} more")
        if not self.by_kind:
            raise StorageError("\n".join([*lines, "Make these files readable and try again."]))
        raise FormatError("\n".join([*lines, "Download or write the files named above again."]))


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    more = len(every) - LISTED
    return ", ".join(every[:LISTED]) + (f", ... and {more} more" if more > 0 else "")
