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
from tests.support.crashes.histories import BEFORE, assert_nothing_is_lost, may_be_found, model_in
from tests.support.crashes.recording import recorded
from tests.support.crashes.states import CrashState, KilledState, states_after_crash, states_after_kill

__all__ = [
    "BEFORE", "Called", "CrashState", "Created", "Effect", "EffectLog", "Entry", "Failed", "FolderMade",
    "FolderRemoved", "Killed", "KilledState", "NamesSynced", "Partly", "Removed", "Renamed",
    "ReplacedFile", "Returned", "Synced", "Wrote", "assert_nothing_is_lost", "may_be_found", "model_in",
    "recorded", "states_after_crash", "states_after_kill",
]  # fmt: skip
