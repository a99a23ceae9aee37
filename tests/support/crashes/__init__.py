"""Simulated crashes and kills of saves; see [Note: What a crash leaves]."""

from tests.support.crashes.effects import (
    Called,
    Created,
    Effect,
    EffectLog,
    Entry,
    Failed,
    FolderMade,
    FolderRemoved,
    Killed,
    NamesSynced,
    Partly,
    Removed,
    Renamed,
    ReplacedFile,
    Returned,
    Synced,
    Wrote,
)
from tests.support.crashes.histories import BEFORE, assert_nothing_is_lost, assert_old_or_new, may_be_found
from tests.support.crashes.recording import RecordingWriter, recorded
from tests.support.crashes.states import CrashState, KilledState, states_after_crash, states_after_kill

__all__ = [
    "BEFORE", "Called", "CrashState", "Created", "Effect", "EffectLog", "Entry", "Failed", "FolderMade",
    "FolderRemoved", "Killed", "KilledState", "NamesSynced", "Partly", "RecordingWriter", "Removed", "Renamed",
    "ReplacedFile", "Returned", "Synced", "Wrote", "assert_nothing_is_lost", "assert_old_or_new", "may_be_found",
    "recorded", "states_after_crash", "states_after_kill",
]  # fmt: skip
