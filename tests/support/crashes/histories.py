"""The saves that may be found at a moment, when one or several processes save; see [Note: Histories]."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from tests.support.crashes.effects import Called, Entry, Failed, Killed, Returned
from tests.support.crashes.states import CrashState, states_after_crash

from shardwise.files.open_checkpoint import open_checkpoint

Seen = TypeVar("Seen")

BEFORE: Final = "before"
"""The save that was there before everything."""

# [Note: Histories]
#
# A save whose call has returned is acknowledged: it must be found, until one that was called later has returned,
# too. One that is under way may be found or not, and so may one whose process was killed. One whose call raised
# must not be found: its caller got an error. Two saves that overlapped and both returned replace each other
# in either order. That what is found is whole is checked by the reader.


@dataclass(slots=True)
class _SaveCall:
    """A save from its call to its end, by the number of the entry; whether its end is that of a failure."""

    began: int
    ended: int | None = None
    has_returned: bool = False
    has_failed: bool = False


def may_be_found(entries: Iterable[Entry]) -> set[str]:
    """The saves of which one must be found after these entries, :data:`BEFORE` among them."""
    calls = {BEFORE: _SaveCall(-2, -1, has_returned=True)}
    for number, entry in enumerate(entries):
        match entry:
            case Called(save):
                calls[save] = _SaveCall(number)
            case Returned(save):
                calls[save].ended, calls[save].has_returned = number, True
            case Failed(save):
                calls[save].ended, calls[save].has_failed = number, True
            case Killed(save) if save in calls and calls[save].ended is None:
                calls[save].ended = number
            case _:
                pass
    latest = max(call.began for call in calls.values() if call.has_returned)
    return {
        save for save, call in calls.items() if not call.has_failed and (call.ended is None or call.ended >= latest)
    }


def assert_nothing_is_lost(
    before: Mapping[str, bytes],
    entries: Sequence[Entry],
    look: Callable[[CrashState], Seen],
    saves: Mapping[str, Seen],
    *,
    samples: int = 8,
    seed: int = 0,
    since: int = 0,
) -> int:
    """After a crash at any moment, ``look`` sees one of the saves that may be found then, whole.

    Args:
        before: all files, by name, before the first entry.
        entries: what all processes did, and what became of their calls.
        look: reads all that counts. It is not called twice for the same files.
        saves: what is seen of each save, by the name that the entries have for it, and of :data:`BEFORE`.
        samples: see :func:`states_after_crash`.
        seed: likewise.
        since: likewise.

    Returns:
        How many states were looked at.

    Raises:
        AssertionError: for the first state in which something else is seen, or ``look`` fails; it says which.
    """
    count = 0
    known: dict[frozenset[tuple[str, bytes]], Seen] = {}
    for state in states_after_crash(before, entries, samples=samples, seed=seed, since=since):
        count += 1
        files = frozenset(state.files.items())
        if files not in known:
            known[files] = _looked_at(state, look)
        allowed = may_be_found(entries[: state.completed])
        if known[files] not in [saves[name] for name in allowed]:
            found = [name for name, seen in saves.items() if seen == known[files]]
            raise AssertionError(
                f"a crash {state.what} leaves {' or '.join(found) or 'no save that is whole'}, and not "
                f"{' or '.join(sorted(allowed))}"
            )
    return count


def _looked_at(state: CrashState, look: Callable[[CrashState], Seen]) -> Seen:
    try:
        return look(state)
    except Exception as error:
        raise AssertionError(f"a crash {state.what} leaves what cannot be read: {error}") from error


def model_in(state: CrashState) -> Hashable:
    """Every tensor that who opens the folder finds; None where there is no model."""
    if not {"model.safetensors", "model.safetensors.index.json"} & state.files.keys():
        return None
    with state.reader() as reader:
        entries = open_checkpoint(reader).entries
        return frozenset((key, reader.read(entry.file, entry.start, entry.stop)) for key, entry in entries.items())
