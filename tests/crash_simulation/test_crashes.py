"""What a crash leaves: careless saves are caught, careful ones are not, and what was synced stays."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.crashes import (
    BEFORE,
    Called,
    CrashState,
    Created,
    Effect,
    EffectLog,
    NamesSynced,
    Renamed,
    Returned,
    Synced,
    Wrote,
    assert_nothing_is_lost,
    recorded,
    states_after_crash,
)

from shardwise.core.errors import StorageError
from shardwise.files.local_writer import LocalWriter

INDEX = "model.safetensors.index.json"
NAMES = ["model-new-1", "model-new-2"]
NBYTES = 3 * 4096 + 100
HALF = 5000
OLD = bytes([1]) * NBYTES
NEW = (bytes(range(2, 102)) * (NBYTES // 100 + 1))[:NBYTES]
BEFORE_ALL = {INDEX: b'["model-0ld-1", "model-0ld-2"]', "model-0ld-1": OLD, "model-0ld-2": OLD}


class Recorder:
    """A writer of one of two ranks, whose calls are noted in a log."""

    def __init__(self, folder: Path, log: EffectLog, rank: int) -> None:
        self._inner = LocalWriter(folder)
        self._recorded = lambda: recorded(log, folder, writer=rank)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._recorded():
                return getattr(self._inner, name)(*args)

        return call


def effects_of(save: Callable[[list[Recorder]], None], folder: Path) -> list[Effect]:
    """What two ranks do, on top of what was there before."""
    (folder / "model").mkdir()
    CrashState(BEFORE_ALL, 0, "").put_into(folder / "model")
    log = EffectLog(folder / "log")
    save([Recorder(folder / "model", log, rank) for rank in range(2)])
    return log.effects()


def fill(writers: list[Recorder], names: Sequence[str]) -> None:
    """Each of two ranks writes its part of every file."""
    for writer, start, stop in zip(writers, (0, HALF), (HALF, NBYTES), strict=True):
        for name in names:
            writer.write(name, start, [memoryview(NEW)[start:stop]])


def careful(writers: list[Recorder]) -> None:
    first = writers[0]
    for name in NAMES:
        first.create(name, NBYTES)
    fill(writers, NAMES)
    for writer in writers:
        for name in NAMES:
            writer.sync(name)
    first.sync_names()
    first.replace(INDEX, json.dumps(NAMES).encode())
    for name in ("model-0ld-1", "model-0ld-2"):
        first.remove(name)
    first.sync_names()


def check(effects: Sequence[Effect]) -> int:
    """After a crash all that the index names is old, or new; the number of states."""

    def look(state: CrashState) -> tuple[bytes, ...]:
        return tuple(state.files[name] for name in json.loads(state.files[INDEX]))

    entries = [Called("new"), *effects, Returned("new")]
    return assert_nothing_is_lost(BEFORE_ALL, entries, look, {BEFORE: (OLD,) * 2, "new": (NEW,) * 2}, samples=20)


def test_a_careful_save_passes(tmp_path: Path) -> None:
    effects = effects_of(careful, tmp_path)
    assert check(effects) > 5 * len(effects)


@pytest.mark.parametrize(
    "left_out",
    [
        Synced(0, NAMES[0]),
        Synced(1, NAMES[1]),
        NamesSynced(0),  # the one before the index is replaced
        Wrote(1, NAMES[1], HALF, NEW[HALF:]),
    ],
    ids=str,
)
def test_nothing_of_a_careful_save_can_be_left_out(left_out: Effect, tmp_path: Path) -> None:
    effects = effects_of(careful, tmp_path)
    effects.remove(left_out)
    with pytest.raises(AssertionError, match=r"a crash .* leaves"):
        check(effects)


def test_a_save_in_place_leaves_torn_files(tmp_path: Path) -> None:
    """As files are overwritten by those who do not think of crashes; torn at blocks, and where a writer ends."""
    effects = effects_of(lambda writers: fill(writers, ["model-0ld-1", "model-0ld-2"]), tmp_path)
    with pytest.raises(AssertionError, match=r"a crash .* leaves"):
        check(effects)
    places = {0, 4096, HALF, 8192, 12288, NBYTES}
    for torn in {state.files["model-0ld-1"] for state in states_after_crash(BEFORE_ALL, effects)} - {OLD, NEW}:
        assert len(torn) == NBYTES
        assert {at for at in range(1, NBYTES) if (torn[at] == 1) != (torn[at - 1] == 1)} <= places


def test_a_renamed_file_keeps_its_old_name_at_most_beside_the_new_one() -> None:
    effects = [Renamed(0, "a", "b")]
    states = [dict(state.files) for state in states_after_crash({"a": b"1", "b": b"2"}, effects, samples=50)]
    assert {"a": b"1", "b": b"2"} in states
    assert {"b": b"1"} in states
    assert {"a": b"1", "b": b"1"} in states
    assert all("b" in state for state in states)


def test_names_are_lost_in_any_order() -> None:
    effects = [
        effect for name in "abc" for effect in (Created(0, name, 1), Wrote(0, name, 0, b"1"), Synced(0, name))
    ]
    found = {"".join(sorted(state.files)) for state in states_after_crash({}, effects, samples=0)}
    assert found >= {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_a_sync_is_of_one_writer_only() -> None:
    effects: list[Effect] = [
        Created(0, "a", 8),
        NamesSynced(0),
        Wrote(0, "a", 0, b"0000"),
        Wrote(1, "a", 4, b"1111"),
        Synced(1, "a"),
    ]
    last = {state.files["a"] for state in states_after_crash({}, effects) if state.completed == len(effects)}
    assert last == {b"00001111", b"\0\0\0\x001111"}


# What is true of every save, whatever it does.

names = st.sampled_from(["a", "b"])
writers = st.integers(0, 1)
calls = st.one_of(
    st.tuples(st.just("create"), names, st.integers(0, 10_000)),
    st.tuples(
        st.just("write"), names, st.integers(0, 9_000), st.binary(min_size=1, max_size=3).map(lambda b: b * 900)
    ),
    st.tuples(st.just("sync"), names),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("replace"), names, st.binary(max_size=20)),
    st.tuples(st.just("remove"), names),
    st.tuples(st.just("sync_names")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("effects")


@given(given_calls=st.lists(st.tuples(writers, calls), max_size=12))
def test_visible_states_are_among_the_possible_ones_and_synced_writes_in_all(
    folder: Path, given_calls: list[tuple[int, tuple[Any, ...]]]
) -> None:
    place = Path(tempfile.mkdtemp(dir=folder))
    log = EffectLog(place.with_suffix(".log"))
    recorders = [Recorder(place, log, rank) for rank in range(2)]
    seen: list[dict[str, bytes]] = []
    for rank, (name, *arguments) in given_calls:
        if name == "write":
            arguments[2] = [memoryview(arguments[2])]
        try:
            getattr(recorders[rank], name)(*arguments)
        except StorageError:
            continue
        seen.append({path.name: path.read_bytes() for path in place.iterdir()})
    effects = [
        effect for effect in log.effects() if getattr(effect, "folder", "") != ".."
    ]  # that is synced at first
    states = list(states_after_crash({}, effects, samples=4))
    for number, files in enumerate(seen, start=1):
        assert files in [dict(state.files) for state in states if state.completed == number]
    # With everything synced at the end nothing is left to chance.
    effects += [*(Synced(rank, name) for rank in range(2) for name in "ab"), NamesSynced(0)]
    last = [state.files for state in states_after_crash({}, effects) if state.completed == len(effects)]
    assert last == [seen[-1] if seen else {}]
