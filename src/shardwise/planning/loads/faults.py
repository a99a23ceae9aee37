"""Puts all faults of a load into one message."""

from __future__ import annotations

import enum

from shardwise.report.names import collapse

_SHOWN = 12


class FaultKind(enum.Enum):
    """Kinds of faults: the word shown, and what to do about it."""

    MISMATCHED = ("mismatched", "on_mismatched=Initialize(only=...) for tensors that may start afresh")
    MISSING = ("missing", "on_missing=Initialize(only=...) for the missing ones")
    UNEXPECTED = ("unexpected", "on_unexpected=Ignore(only=...) for keys that may be left unread")
    AMBIGUOUS = ("ambiguous", "a checkpoint that stores each tensor once")
    CONVERSION = ("conversion", "a checkpoint in the layout this version of transformers knows")
    UNINITIALISED = ("uninitialised", "a checkpoint that holds them; no reset_parameters does either")
    UNCOMPUTABLE = ("uncomputable", "buffers=... with a callable that computes them")


class Faults:
    """Faults by kind, in the order found. True when there is one."""

    def __init__(self) -> None:
        self.sentences: dict[FaultKind, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self.sentences)

    def add(self, kind: FaultKind, sentence: str) -> None:
        self.sentences.setdefault(kind, []).append(sentence)

    def message(self, root: str) -> str:
        """The error's text: every kind with its count, its first dozen of names (collapsed), and the way out."""
        lines = [f"the checkpoint {root} does not fit the model"]
        for kind in FaultKind:
            sentences = self.sentences.get(kind, [])
            groups = collapse(sentences)
            for position, (pattern, count) in enumerate(groups[:_SHOWN]):
                head = f"{kind.value[0]} {len(sentences)}" if position == 0 else ""
                lines.append(f"  {head:<17}{pattern}" + (f" (x{count})" if count > 1 else ""))
            if len(groups) > _SHOWN:
                lines.append(f"  {'':<17}... and {sum(count for _, count in groups[_SHOWN:])} more")
        remedies = [kind.value[1] for kind in FaultKind if kind in self.sentences]
        lines.append("Pass " + "; ".join(remedies) + ".")
        return "\n".join(lines)
