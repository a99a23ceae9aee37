"""Decisions that are a few lines of arithmetic each, at their edges."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.consents import describe_faults
from shardwise.core.errors import ShardingError
from shardwise.core.reports import Available, RankEstimate
from shardwise.loading.memory_estimate import require_fits
from shardwise.transfer.file_requests import ComputingShare, plan_staging
from shardwise.transfer.fingerprints import RecordedSave, fingerprint_file, parse, to_bytes

# Staging


@given(st.integers(1, 1 << 34), st.integers(1, 64), st.booleans())
def test_staging_stays_within_its_budget_where_it_can(budget: int, concurrency: int, on_device: bool) -> None:
    made = plan_staging(budget, concurrency, on_device=on_device)
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


@given(st.integers(2, 1 << 34), st.integers(1, 64))
def test_what_is_computed_and_the_staging_of_its_inputs_take_half_of_a_budget_each(
    budget: int, workers: int
) -> None:
    share = ComputingShare.from_budget(budget, workers)
    assert share.staging_bytes == budget // 2
    made = plan_staging(share.staging_bytes, workers, on_device=False).workers
    assert made * share.max_block_bytes <= budget // 2 < made * (share.max_block_bytes + 1), (
        "all blocks that are made at once"
    )


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
    assert parse(to_bytes(recorded)) == recorded


def test_the_file_of_fingerprints() -> None:
    content = to_bytes([RecordedSave({"f": 3}, {"a": 255}, {"c": "ab"}, {"f": "cd"})])
    older = {"files": {"f": 3}, "tensors": {"a": "00000000000000ff"}}
    written = json.loads(content)
    saved = {**older, "beside": {"c": "ab"}, "headers": {"f": "cd"}}
    assert written.pop("sha256") != json.loads(to_bytes([]))["sha256"]
    assert written == {"format": "shardwise fingerprints 1", "saves": [saved]}
    by_older_code = json.dumps({**written, "saves": [older]}).encode()
    assert parse(by_older_code) == [RecordedSave({"f": 3}, {"a": 255})]
    assert fingerprint_file("model") == "model.fingerprints.json"
    assert content.endswith(b"}\n")
    for damaged in (
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
        assert parse(damaged) is None


# Owners


# What is said, and agreed to


def test_faults_in_words() -> None:
    faults = {
        "mismatched": [f"layers.{layer}.weight" for layer in range(4)],
        "missing": [f"{chr(97 + number % 26)}{'x' * (number // 26)}weight" for number in range(30)],
        "unexpected": ["model.extra"],
        "twice": [],
    }
    ways = {"mismatched": "one", "unexpected": "two", "twice": "three"}
    lines = describe_faults("it does not fit", faults, ways).splitlines()
    assert lines[0] == "it does not fit"
    assert lines[1] == "  mismatched 4     layers.{0..3}.weight (x4)"
    assert lines[2].startswith("  missing 30       ")
    assert [line.startswith("    ") for line in lines[3:15]] == [True] * 12
    assert lines[14] == f"  {'':<17}... and 18 more"
    assert lines[15] == "  unexpected 1     model.extra"
    assert lines[16] == "Pass one; two."


# Free memory


def test_memory_that_ranks_of_a_container_need_together_is_not_given_as_one_ranks() -> None:
    estimate = RankEstimate(3, 0, 0, 5 << 30, 8 << 30, 0)
    require_fits(estimate, Available(5 << 30, 8 << 30), 4)
    shared = r"rank 3 needs 8.00 GiB of host memory for the 4 ranks of its container, of which 2.00 GiB is free"
    with pytest.raises(ShardingError, match=shared):
        require_fits(estimate, Available(host_bytes=2 << 30), 4)
    with pytest.raises(ShardingError, match=r"needs 5.00 GiB of device memory, of which 1.00 GiB is free"):
        require_fits(estimate, Available(1 << 30, 8 << 30), 4)
