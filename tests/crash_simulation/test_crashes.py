"""What a crash leaves: careless saves are caught, careful ones are not, and what was synced stays."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_simulation.saving import HALF, NBYTES, NEW, OLD, begin, commit, fill, old_save, see
from tests.support import Effect, EffectLog, RecordingWriter, assert_old_or_new, states_after_crash
from tests.support.crashes import Created, NamesSynced, Renamed, Synced, Wrote

from shardwise.errors import StorageError
from shardwise.storage.contract import LOCAL_WRITES, StorageWriter
from shardwise.storage.writing import LocalWriter

NAMES = ["model-new-1", "model-new-2"]
Save = Callable[[list[StorageWriter]], None]


def recorded(before: dict[str, bytes], save: Save, folder: Path) -> list[Effect]:
    """What two ranks do, on top of what was there before."""
    (folder / "model").mkdir()
    for name, content in before.items():
        (folder / "model" / name).write_bytes(content)
    log = EffectLog(folder / "log")
    save([RecordingWriter(writer_of(folder / "model"), log, writer=rank) for rank in range(2)])
    return log.effects()


def writer_of(folder: Path) -> LocalWriter:
    return LocalWriter(folder, policy=LOCAL_WRITES)


def careful(writers: list[StorageWriter]) -> None:
    begin(writers[0], NAMES)
    for rank, writer in enumerate(writers):
        fill(writer, rank, NAMES)
    commit(writers[0], NAMES)


def in_place(writers: list[StorageWriter]) -> None:
    """As files are overwritten by those who do not think of crashes."""
    for name in ("model-0ld-1", "model-0ld-2"):
        for rank, writer in enumerate(writers):
            start, stop = (0, HALF) if rank == 0 else (HALF, NBYTES)
            writer.write(name, start, [memoryview(NEW)[start:stop]])


def anew(writers: list[StorageWriter]) -> None:
    writers[0].remove("model-0ld-1")
    writers[0].create("model-0ld-1", NBYTES)
    writers[0].write("model-0ld-1", 0, [memoryview(NEW)])


def test_a_careful_save_passes(tmp_path: Path) -> None:
    effects = recorded(old_save(), careful, tmp_path)
    looked_at = assert_old_or_new(old_save(), effects, see, old=[OLD] * 2, new=[NEW] * 2, samples=20)
    assert looked_at > 5 * len(effects)


@pytest.mark.parametrize("save", [in_place, anew])
def test_a_careless_save_leaves_a_mixture(save: Save, tmp_path: Path) -> None:
    effects = recorded(old_save(), save, tmp_path)
    with pytest.raises(AssertionError, match=r"a crash .* leaves"):
        assert_old_or_new(old_save(), effects, see, old=[OLD] * 2, new=[NEW] * 2)
    found = [
        state.files["model-0ld-1"]
        for state in states_after_crash(old_save(), effects)
        if "model-0ld-1" in state.files
    ]
    torn = [content for content in found if content not in (OLD, NEW)]
    assert torn
    # Torn at blocks, and where a writer's bytes end.
    assert {len(content) for content in torn} - {0, NBYTES, 4096, 8192, 12288, HALF} == set()


def without(effects: Sequence[Effect], left_out: Effect) -> list[Effect]:
    position = effects.index(left_out)
    return [*effects[:position], *effects[position + 1 :]]


@pytest.mark.parametrize(
    "left_out",
    [
        Synced(0, NAMES[0]),
        Synced(0, NAMES[1]),
        Synced(1, NAMES[0]),
        Synced(1, NAMES[1]),
        NamesSynced(0),  # the one before the index is replaced
        Wrote(1, NAMES[1], HALF, NEW[HALF:]),
    ],
    ids=str,
)
def test_nothing_of_a_careful_save_can_be_left_out(left_out: Effect, tmp_path: Path) -> None:
    effects = without(recorded(old_save(), careful, tmp_path), left_out)
    with pytest.raises(AssertionError, match=r"a crash .* leaves"):
        assert_old_or_new(old_save(), effects, see, old=[OLD] * 2, new=[NEW] * 2, samples=0)


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
    told = {"".join(s.files) for s in states_after_crash({}, [*effects, NamesSynced(0)]) if s.completed == 10}
    assert told == {"abc"}


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


def executed(
    given_calls: list[tuple[int, tuple[object, ...]]], folder: Path
) -> list[tuple[Effect, dict[str, bytes]]]:
    """The effects of the calls that succeed, and what was seen after each."""
    place = Path(tempfile.mkdtemp(dir=folder))
    log = EffectLog(place.with_suffix(".log"))
    recording = [RecordingWriter(writer_of(place), log, writer=number) for number in range(2)]
    seen: list[dict[str, bytes]] = []
    for number, (name, *arguments) in given_calls:
        if name == "write":
            arguments[2] = [memoryview(arguments[2])]
        try:
            getattr(recording[number], name)(*arguments)
        except StorageError:
            continue
        seen.append({path.name: path.read_bytes() for path in place.iterdir()})
    return list(zip(log.effects(), seen, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("effects")


@given(given_calls=st.lists(st.tuples(writers, calls), max_size=12))
def test_visible_states_are_among_the_possible_ones_and_synced_writes_in_all(
    folder: Path, given_calls: list[tuple[int, tuple[object, ...]]]
) -> None:
    done = executed(given_calls, folder)
    effects = [effect for effect, _ in done]
    states = list(states_after_crash({}, effects, samples=4))
    for number, (_, seen) in enumerate(done):
        moment = [dict(state.files) for state in states if state.completed == number + 1]
        assert seen in moment
    # With everything synced at the end nothing is left to chance.
    closing: list[Effect] = [Synced(writer, name) for writer in range(2) for name in "ab"] + [NamesSynced(0)]
    last = [
        state.files
        for state in states_after_crash({}, effects + closing)
        if state.completed == len(effects + closing)
    ]
    assert last == [done[-1][1] if done else {}]
