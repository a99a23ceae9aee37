"""Decisions that are a few lines of arithmetic each, at their edges."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.conversion import Stored, permute
from shardwise.errors import ConfigError
from shardwise.formats.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.formats.safetensors_header import NewFile
from shardwise.layout import LocalBox
from shardwise.planning.loads.load_plan import Consent, FaultKind, Faults, Ignore, Initialize, Refuse
from shardwise.planning.loads.schedule import ComputingShare, staging_within
from shardwise.planning.moves.sharing_choice import Alone, InIntervals, OncePerGroup, Weighed, choose, times_read
from shardwise.planning.saves.fingerprints import FINGERPRINTS_FILE, RecordedSave, from_bytes, to_bytes
from shardwise.planning.saves.save_plan import choose_owners, wanted_by_owners
from shardwise.planning.states.forms import (
    DistributedFolder,
    FullState,
    OneFile,
    RankFiles,
    ShardedState,
    require_file_form,
    require_form,
)
from shardwise.planning.states.sources import EveryRank, FirstRank
from shardwise.storage.contract import ReadPolicy
from shardwise.storage.policies import LOCAL
from shardwise.tensors import Box, DType, Strided

REMOTE = ReadPolicy(
    is_remote=True, max_gap_bytes=100, request_bytes=1 << 20, concurrency=4, bytes_per_s=1e9
)  # fmt: skip

# Who reads


@pytest.mark.parametrize("policy", [LOCAL, REMOTE])
def test_what_is_asked_for_is_done(policy: ReadPolicy) -> None:
    for mode, is_shared in ((Alone(), False), (OncePerGroup(), True), (InIntervals(), True)):
        found = choose(mode, policy, replicas=2, factor=8.0, network_bytes_per_s=1e12)
        assert (found.is_shared, found.reason) == (is_shared, "as asked")


def test_reading_once_pays_where_the_network_is_quicker_than_the_storage() -> None:
    def pays(factor: float, replicas: int, network: float, given: float | None = None) -> bool:
        weighed = Weighed(given)
        return choose(weighed, REMOTE, replicas=replicas, factor=factor, network_bytes_per_s=network).is_shared

    assert pays(4.0, 2, 1e9)  # 3 reads less at 1 GB/s, 2 copies at 1 GB/s
    assert not pays(3.0, 2, 1e9)  # 2 against 2
    assert not pays(1.0, 1, 1e12)
    assert not pays(4.0, 2, 1e9, given=0.5e9), "what the user says counts"
    assert pays(3.0, 2, 1e6, given=2e9)
    reason = choose(Weighed(), REMOTE, replicas=2, factor=4.0, network_bytes_per_s=2.5e9).reason
    assert reason == "4 reads of each byte at 1 GB/s against one, and 2 x over a network of 2.5 GB/s"
    local = choose(Weighed(), LOCAL, replicas=2, factor=100.0, network_bytes_per_s=1e15)
    assert not local.is_shared
    assert "page cache" in local.reason


@pytest.mark.parametrize("given", [0, -1.0, math.inf, math.nan])
def test_a_network_has_a_speed(given: float) -> None:
    with pytest.raises(ConfigError, match="not a positive number"):
        Weighed(given)


def test_how_often_a_byte_would_be_read() -> None:
    leaf = Stored("a", (8, 4), DType.F32)
    entry = TensorEntry("a", DType.F32, (8, 4), "f", 0, 128)
    index = CheckpointIndex("r", {"f": 128}, {"a": entry}, {}, "single file")

    def found(expression: object, box: Box, *, size: int, replicas: int) -> float:
        boxes = [LocalBox(box, Strided.contiguous(box.sizes))]
        return times_read(expression, boxes, index, REMOTE, size=size, replicas=replicas)  # type: ignore[arg-type]

    rows = Box((2, 0), (2, 4))
    assert found(leaf, rows, size=4, replicas=1) == 1.0, "whole rows are read as they are"
    assert found(leaf, rows, size=8, replicas=2) == 2.0
    # Two columns of four, of 8 rows: 64 bytes are needed, of a block of 120, and a gap's worth for the request.
    columns, column = Box((0, 1), (8, 2)), Box((0, 1), (8, 1))
    assert found(leaf, columns, size=100, replicas=1) == (120 + 100) / 64
    assert found(leaf, columns, size=3, replicas=1) == 3.0, "never more than every rank all of it"
    assert found(leaf, column, size=100, replicas=1) == 116 / 32
    assert found(permute(leaf, (1, 0)), Box((1, 0), (1, 8)), size=4, replicas=2) == 2 * 2.0
    assert times_read(leaf, [], index, REMOTE, size=4, replicas=2) == 1.0


# Staging


@given(st.integers(1, 1 << 34), st.integers(1, 64), st.booleans())
def test_staging_stays_within_its_budget_where_it_can(budget: int, concurrency: int, on_device: bool) -> None:
    made = staging_within(budget, concurrency, on_device=on_device)
    slabs = 2 if on_device else 1
    assert 1 <= made.workers <= concurrency
    assert made.total_bytes == slabs * made.workers * made.nbytes
    assert made.nbytes % 64 == 0
    if budget >= slabs * (1 << 18):
        assert made.total_bytes <= budget
        assert made.nbytes >= 1 << 18
    if on_device:
        assert made.nbytes & (made.nbytes - 1) == 0
        assert made.nbytes <= 32 << 20
    else:
        assert made.nbytes <= 4 << 20


def test_staging_of_large_and_small_budgets() -> None:
    host, device = (staging_within(1 << 30, 8, on_device=on_device) for on_device in (False, True))
    assert (host.workers, host.nbytes) == (8, 4 << 20)
    assert (device.workers, device.nbytes) == (8, 32 << 20)
    few = staging_within(3 << 18, 8, on_device=False)
    assert (few.workers, few.nbytes) == (3, 1 << 18)
    assert staging_within(3 << 18, 8, on_device=True).workers == 1
    assert staging_within(1, 8, on_device=False).workers == 1


@given(st.integers(2, 1 << 34), st.integers(1, 64))
def test_what_is_computed_and_the_staging_of_its_inputs_take_half_of_a_budget_each(
    budget: int, workers: int
) -> None:
    share = ComputingShare.of(budget, workers)
    assert share.staging_bytes == budget // 2
    made = staging_within(share.staging_bytes, workers, on_device=False).workers
    assert made * share.most_bytes <= budget // 2 < made * (share.most_bytes + 1), (
        "all blocks that are made at once"
    )


def test_however_small_a_budget_something_is_computed() -> None:
    assert ComputingShare.of(1, 8) == ComputingShare.of(0, 8) == ComputingShare(0, 1)


# Fingerprints

saves = st.lists(
    st.builds(
        RecordedSave,
        st.dictionaries(st.text(max_size=5), st.integers(0, 2**60), max_size=3),
        st.dictionaries(st.text(max_size=5), st.integers(0, 2**64 - 1), max_size=3),
    ),
    max_size=3,
)


@given(saves)
def test_fingerprints_come_back(recorded: list[RecordedSave]) -> None:
    assert from_bytes(to_bytes(recorded)) == recorded


def test_the_file_of_fingerprints() -> None:
    content = to_bytes([RecordedSave({"f": 3}, {"a": 255}, {"c": "ab"}, {"f": "cd"})])
    older = {"files": {"f": 3}, "tensors": {"a": "00000000000000ff"}}
    written = json.loads(content)
    saved = {**older, "beside": {"c": "ab"}, "headers": {"f": "cd"}}
    assert written.pop("sha256") != json.loads(to_bytes([]))["sha256"]
    assert written == {"format": "shardwise fingerprints 1", "saves": [saved]}
    by_older_code = json.dumps({**written, "saves": [older]}).encode()
    assert from_bytes(by_older_code) == [RecordedSave({"f": 3}, {"a": 255})]
    assert FINGERPRINTS_FILE == "model.fingerprints.json"
    assert content.endswith(b"}\n")
    for damaged in (
        None,
        b"",
        b"[]",
        b"{",
        b"\xff",
        content.replace(b"ff", b"fe"),
        content.replace(b'"cd"', b'"ce"'),
        content.replace(b'"sha256"', b'"sha257"'),
        json.dumps({**written, "format": "shardwise fingerprints 2"}).encode(),
        json.dumps({**written, "saves": 3}).encode(),
        json.dumps({**written, "saves": [{"files": {}}]}).encode(),
        json.dumps({**written, "saves": [{"files": {}, "tensors": {"a": "xyz"}}]}).encode(),
        json.dumps({**written, "saves": [{"files": {"f": 1e999}, "tensors": {}}]}).encode(),
        b'{"format": "shardwise fingerprints 1", "saves": ' + b"[" * 100_000,
    ):
        assert from_bytes(damaged) == []


# Owners


def files_of(*sizes: int) -> list[NewFile]:
    return [
        NewFile(f"f{i}", b"", (TensorEntry(f"k{i}", DType.F16, (size,), f"f{i}", 0, 2 * size),), size)
        for i, size in enumerate(sizes)
    ]


def test_the_largest_files_first_each_to_whoever_has_least() -> None:
    assert choose_owners(files_of(1, 9, 5, 5), 2) == (0, 0, 1, 1)
    assert choose_owners(files_of(5, 5), 8) == (0, 4), "spread over all ranks"
    assert choose_owners(files_of(5, 5, 5), 4) == (0, 1, 2)
    assert choose_owners(files_of(1, 2, 3), 1) == (0, 0, 0)
    assert choose_owners([], 3) == ()


def test_what_owners_want() -> None:
    files = files_of(1, 9, 5)
    expressions = {f"k{i}": Stored(f"k{i}", (1,), DType.F16) for i in range(3)}
    wanted = wanted_by_owners(files, (0, 2, 0), expressions, 3)
    assert [[item.key for item in rank] for rank in wanted] == [["k0", "k2"], [], ["k1"]]
    assert [(item.itemsize, item.targets) for item in wanted[2]] == [(2, (2,))]


# What is said, and agreed to


def test_faults_in_words() -> None:
    faults = Faults()
    assert not faults
    for number in range(30):
        faults.add(FaultKind.MISSING, f"{chr(97 + number % 26)}{'x' * (number // 26)}weight")
    faults.add(FaultKind.UNEXPECTED, "model.extra")
    for layer in range(4):
        faults.add(FaultKind.MISMATCHED, f"layers.{layer}.weight")
    assert faults
    lines = faults.message("place").splitlines()
    assert lines[0] == "the checkpoint place does not fit the model"
    assert lines[1] == "  mismatched 4     layers.{0..3}.weight (x4)"
    assert lines[2].startswith("  missing 30       ")
    assert [line.startswith("    ") for line in lines[3:15]] == [True] * 12
    assert lines[14] == f"  {'':<17}... and 18 more"
    assert lines[15] == "  unexpected 1     model.extra"
    assert lines[16].startswith("Pass on_mismatched=Initialize(only=...)")
    assert "; on_unexpected=Ignore" in lines[16]
    assert "buffers=" not in lines[16]


def test_forms_of_states() -> None:
    assert (FullState().on, FullState(EveryRank()).on) == (FirstRank(), EveryRank())
    assert (FullState().receivers(3), FullState(EveryRank()).receivers(3)) == (range(1), range(3))
    for good in (FullState(), ShardedState()):
        require_form(good)
        with pytest.raises(ConfigError, match="is none of files; pass OneFile"):
            require_file_form(good)
    for good in (OneFile(), DistributedFolder(), RankFiles()):
        require_file_form(good)
        with pytest.raises(ConfigError, match=r"form \w+\(\) is none; pass FullState"):
            require_form(good)
    with pytest.raises(ConfigError, match=r"FullState\(on=0\): on is FirstRank\(\) or EveryRank\(\)"):
        FullState(0)  # type: ignore[arg-type]


def test_consents() -> None:
    assert not Refuse().covers("a")
    assert Initialize(("a.*",)).covers("a.b")
    assert not Initialize(("a.*",)).covers("b.a.b")
    assert not Initialize(("A.*",)).covers("a.b"), "case matters"
    assert Ignore().covers("whatever")
    assert not Ignore(("x",)).covers("y")
    with pytest.raises(ConfigError, match=r"must be a tuple of globs: only=\('\*',\)"):
        Ignore("*")  # type: ignore[arg-type]
    assert Consent() == Consent(Refuse(), Refuse(), Refuse())
