"""Optimizers of 8 and 4 bits, and Adafactor: bit by bit, on other ranks within rounding, refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.conftest import PRELOADED
from tests.training import on_peers, tiny
from tests.training.on_peers import DEALT_ANEW, TRAINED

from shardwise.execution.processes.local_ranks import LocalRanks

pytestmark = pytest.mark.distributed


class Runs:
    """What was run on so many ranks, in processes that have the libraries, each once."""

    def __init__(self, folder: str, file: str) -> None:
        self.folder, self.file = folder, file
        self._ranks: dict[int, LocalRanks] = {}
        self._told: dict[tuple[Any, ...], list[Any]] = {}

    def __call__(self, ranks: int, what: str, *args: Any) -> list[Any]:
        if (ranks, what, args) not in self._told:
            if ranks not in self._ranks:
                self._ranks[ranks] = LocalRanks(ranks, timeout_s=200, preloaded=PRELOADED)
            self._told[ranks, what, args] = self._ranks[ranks].run(on_peers.call, what, *args)
        return self._told[ranks, what, args]

    @property
    def saved(self) -> dict[str, Any]:
        return self(2, "save_each", self.folder)[0]

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("blocks")
    found = Runs(str(folder), str(tiny.write_chats(folder / "chats.jsonl", 7)))
    yield found
    found.close()


def test_state_comes_back_bit_by_bit_on_as_many_ranks(runs: Runs) -> None:
    for told in runs(2, "save_each", runs.folder):
        for name, found in told.items():
            assert found["bits"] >= 10, name
            assert [key for key, value in found.items() if not value] == [], name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_go_on_with_the_numbers_that_blocks_can_tell(runs: Runs, ranks: int) -> None:
    assert runs.saved
    _require_close(runs(ranks, "restore_each", runs.folder)[0])


def test_other_meshes_go_on_with_the_numbers_that_blocks_can_tell(runs: Runs) -> None:
    """Copies of shards, of which there is one: each rank has the whole."""
    assert runs.saved
    _require_close(runs(2, "restore_each", runs.folder, (2, 1))[0])


def _require_close(told: dict[str, float]) -> None:
    for name, off in told.items():
        kind, _, is_of_weights = name.partition(", ")
        if is_of_weights:
            # A step of Lion has one length, in a direction that rounding may turn; others follow their moments.
            assert off <= {"Lion8bit": 0.021, "AdamW4bit": 0.02}.get(kind, 2e-3), name
        else:
            assert off <= DEALT_ANEW.get(kind, 1e-6), name
    # torchao's blocks begin where shards do, so that those of two ranks are blocks of the whole.
    for kind in ("torchao.optim.AdamW8bit", "AdamW4bit", "AdamWFp8", "pagedadamw32bit"):
        assert told[f"{kind}, in blocks on both"] == 0


def test_what_is_of_another_kind_or_other_blocks_is_refused_by_name(runs: Runs) -> None:
    assert runs.saved
    told = runs(2, "refused", runs.folder)
    assert told[0] == told[1]
    found = told[0]
    for name, message in {
        "into adamw": "saved by torchao.optim.adam.AdamW8bit, and there is torch.optim.AdamW now",
        "of another library": "and there is bitsandbytes.optim.adamw.AdamW8bit now",
        "of adamw": "saved by torch.optim.AdamW, and there is torchao.optim.adam.AdamW8bit now",
        "smaller blocks": "blocks of 256, and this optimizer has 8 bits",
        "handed to adamw": "exp_avg: saved in blocks (8 bits, map",
        "damaged": "square.weight: exp_avg: saved of shards 0/9, and its scales are (7,); it is damaged",
        "scales cut off": "square.weight: exp_avg: saved of shards 0/2, and its scales are (7,); it is damaged",
        "without scales": "square.weight: exp_avg: saved of shards 0/2, and its scales are None; it is damaged",
        "without codes": "square.weight: exp_avg: its codes are missing; it is damaged",
        "codes alone": "square.weight: exp_avg: brought (256, 64) U8 by rank 0, wanted (256, 64) F32",
        "numbers for codes": "square.weight: exp_avg: brought (256, 64) F32 by rank 0, wanted (256, 64) U8",
    }.items():
        kind, text = found[name]
        assert (kind, message in text) == ("CoverageError", True), (name, text)
    assert "blocks of 128" in found["smaller blocks"][1]
    kind, text = found["in accelerate's files"]
    assert kind == "PlacementError"
    assert "a Checkpointer keeps moments in blocks, and factors, which these files have no form for" in text
    kind, text = found["two moments in one"]
    assert kind == "PlacementError"
    assert "state1 of optimizer 0 has shape (2, 128, 64), the parameter (256, 64): it has no shards" in text
    kind, text = found["each for itself"]
    assert kind == "PlacementError"
    assert (
        "call step_shards(optimizer), of shardwise.training.optimizing.shard_steps, before the first step" in text
    )
    assert found["compiled for DTensors"] == 0
    assert (found["left out"], found["untouched"]) == (("optimizers",), 0)


@pytest.mark.slow
def test_named_optimizers_of_libraries_train_on_two_ranks_as_on_one(runs: Runs) -> None:
    told, alone = runs(2, "train_each", runs.file, runs.folder), runs(1, "train_each", runs.file, runs.folder)[0]
    assert {name: text for name, text in told[0]["said"].items() if text} == {}
    for name, losses in told[0]["losses"].items():
        # Shards have other blocks than the whole, and small ones numbers.
        assert losses == pytest.approx(alone["losses"][name], rel=1e-5 if name == "adamw" else 2e-4), name
        assert losses[0] == pytest.approx(told[0]["losses"]["adamw"][0])
    assert told[0]["losses"]["AdamW8bit"][1:] != told[0]["losses"]["adamw"][1:]


@pytest.mark.slow
def test_a_training_goes_on_bit_by_bit_and_on_one_rank_within_rounding(runs: Runs) -> None:
    told = runs(2, "train_each", runs.file, runs.folder)[0]
    elsewhere = runs(1, "rest_of", runs.file, runs.folder)[0]
    for name in TRAINED:
        begun = told["begun"][name]
        assert [*begun, *told["rest"][name]] == told["losses"][name], name
        assert [*begun, *elsewhere[name]] == pytest.approx(told["losses"][name], rel=2e-4), name


@pytest.mark.slow
def test_a_training_goes_on_with_another_rate_and_more_steps(runs: Runs) -> None:
    """torchao's optimizers have rates in tensors, which are written into and never replaced."""
    told = runs(2, "train_each", runs.file, runs.folder)[0]["otherwise"]
    step, rate, remarks = told["adamw"]
    assert step == 6
    assert "learning_rate 0.004 (the checkpoint's: 0.01)" in str(remarks)
    for name in TRAINED:
        assert told[name] == [6, pytest.approx(rate), remarks], name


@pytest.mark.slow
def test_state_is_foreseen_in_its_own_bytes(runs: Runs) -> None:
    for ranks in (1, 2):
        for found in runs(ranks, "train_each", runs.file, runs.folder):
            for name, (foreseen, there) in found["bytes"].items():
                assert foreseen == there, (ranks, name)
    whole = runs(1, "train_each", runs.file, runs.folder)[0]["bytes"]
    assert whole["torchao.optim.AdamW8bit"][0] < 0.3 * whole["adamw"][0]
    assert whole["AdamW4bit"][0] < 0.17 * whole["adamw"][0]
    assert whole["Adafactor"][0] < 0.13 * whole["adamw"][0]
