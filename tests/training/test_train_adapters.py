"""Many LoRAs on ranks: each as alone, and as if it had not been interrupted."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.local_ranks import RankError
from tests.support.world import run_forked as run_world
from tests.training import tiny
from tests.training.adapters_on_ranks import (
    history_alone,
    prepare,
    train,
    train_alone,
    train_until,
    train_with_timeout,
    values,
    with_pairs,
)
from tests.training.on_ranks import errors_of_all, size_of_png

from shardwise.training.run_outcome import TrlOutcome

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("adapters"))


def losses(outcome: TrlOutcome) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in outcome.metrics}
    for entry in outcome.history:
        if "loss" in entry:
            found[entry["adapter"]].append(entry["loss"])
    return found


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, list[float]]:
    """Losses of both adapters on two ranks."""
    outcomes = run_world(2, train, values(folder, "whole", 2))
    assert losses(outcomes[0]) == losses(outcomes[1])
    assert [(name, one["steps"]) for name, one in outcomes[0].metrics.items()] == [("ada", 8), ("bob", 6)]
    memory = [(entry["step"], entry["memory/host_gib"]) for entry in outcomes[0].history if "adapter" not in entry]
    assert memory[-1][0] == 8 + 6
    assert all(len(by_rank) == 2 and min(by_rank) > 0.01 for _, by_rank in memory)
    assert size_of_png(folder / "whole" / "curves.png") == (900, 750)
    return losses(outcomes[0])


@pytest.mark.parametrize("name", ["ada", "bob"])
def test_an_adapter_on_two_ranks_is_trained_as_alone_by_trl(
    folder: Path, whole: dict[str, list[float]], name: str
) -> None:
    [alone] = run_world(1, train_alone, values(folder, f"alone-{name}", 1), name)
    assert alone[0] - alone[-1] > 0.05
    assert whole[name] == pytest.approx(alone, abs=1e-5)
    ours, theirs = (
        load_file(folder / output / name / "adapter_model.safetensors") for output in ("whole", f"alone-{name}")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in theirs)


def entries(outcome: TrlOutcome, name: str) -> list[dict[str, Any]]:
    return [dict(entry) for entry in outcome.history if entry.get("adapter") == name]


LOGGED = (
    "loss",
    "eval_loss",
    *(f"{kind}rewards/{key}" for kind in ("", "eval_") for key in ("margins", "accuracies")),
)


def test_pairs_beside_rows_are_trained_as_alone_by_trl(folder: Path) -> None:
    outcomes = run_world(2, train, with_pairs(folder, "pairs", 2))
    assert all(losses(outcome) == losses(outcomes[0]) for outcome in outcomes)
    for name in ("eve", "fay"):
        [alone] = run_world(1, history_alone, with_pairs(folder, f"{name}-beside", 1), name)
        own = entries(outcomes[0], name)
        for key in LOGGED:
            expected = [entry[key] for entry in alone if key in entry]
            assert [entry[key] for entry in own if key in entry] == pytest.approx(expected, abs=1e-5), (name, key)
        assert any("rewards/margins" in entry for entry in own)
        assert own[0]["loss"] - [entry["loss"] for entry in own if "loss" in entry][-1] > 0.01
    assert [entry["loss"] for entry in entries(outcomes[0], "ada") if "loss" in entry] == pytest.approx(
        run_world(1, train_alone, with_pairs(folder, "ada-beside", 1), "ada")[0], abs=1e-5
    )


def test_pairs_resume_and_one_that_is_not_finite_ends_alone(folder: Path) -> None:
    """A signal to one of two ranks stops both, and the same command resumes on one."""
    [whole] = run_world(1, train, with_pairs(folder, "all-pairs", 1))
    stopped = run_world(2, train_until, with_pairs(folder, "stopped-pairs", 2), 4)
    assert all(outcome.has_stopped for outcome in stopped)
    assert not (folder / "stopped-pairs" / "curves.png").exists()
    given = {**with_pairs(folder, "stopped-pairs", 1), "gradient_checkpointing": True}
    given["config_overrides"] = {"attention_dropout": 0.1}  # the base does not drop
    [resumed] = run_world(1, train, given)
    assert not resumed.has_stopped
    assert {name: pytest.approx(own, abs=1e-5) for name, own in losses(whole).items()} == losses(resumed)
    given = with_pairs(folder, "failed-pairs", 2)
    given["adapters"]["fay"] |= {"learning_rate": 1e38}
    outcome = run_world(2, train, given)[0]
    assert ["failure" in outcome.metrics[name] for name in ("ada", "eve", "fay")] == [False, False, True]
    assert losses(outcome)["eve"] == pytest.approx(losses(whole)["eve"], abs=1e-5)
    ranks = [tuple(line.split()[:2]) for line in outcome.summary[1:4]]
    assert ranks == [("1", "ada"), ("1", "eve"), ("2", "fay")]  # pairs have ranks of their own


def test_a_kill_costs_no_more_than_the_steps_since_the_newest_checkpoints(
    folder: Path, whole: dict[str, list[float]]
) -> None:
    with pytest.raises(RankError):
        run_world(2, train_until, values(folder, "killed", 2), 7, signal.SIGKILL)
    assert (folder / "killed" / "ada" / "checkpoint-4" / "trainer_state.json").is_file()
    [resumed] = run_world(1, train, values(folder, "killed", 1))
    assert {name: pytest.approx(own, abs=1e-5) for name, own in losses(resumed).items()} == whole
    [again] = run_world(1, train, values(folder, "killed", 1))  # there is nothing left to do
    assert losses(again) == losses(resumed)
    # The limit is today's, not that of the checkpoint.
    given = values(folder, "killed", 1)
    given["adapters"]["bob"] |= {"num_train_epochs": 4, "max_grad_norm": 1e-9}
    run_world(1, train, given)
    bob = folder / "killed" / "bob"
    before, after = (load_file(file / "adapter_model.safetensors") for file in (bob / "checkpoint-6", bob))
    assert (bob / "checkpoint-8").is_dir()
    assert all(torch.allclose(after[key], before[key], rtol=0, atol=1e-6) for key in before)


def test_a_sweep_is_ranked_and_an_adapter_that_fails_ends_alone(folder: Path) -> None:
    given = values(folder, "swept", 1)
    ada = given.pop("adapters")["ada"]
    given |= {**ada, "max_steps": 4, "save_strategy": "no", "sweep": {"learning_rate": [1e-6, 0.01, 1e38]}}
    [outcome] = run_world(1, train_with_timeout, given)
    assert list(outcome.metrics) == ["lr0.01", "lr1e-06", "lr1e-38"]
    assert ["failure" in one for one in outcome.metrics.values()] == [False, False, True]
    assert outcome.metrics["lr0.01"]["eval_loss"] < outcome.metrics["lr1e-06"]["eval_loss"]
    assert outcome.summary[1].split()[:3] == ["1", "lr0.01", "4/4"]
    assert "lr1e-38: failed in step" in "\n".join(outcome.summary)
    assert (folder / "swept" / "lr0.01" / "adapter_model.safetensors").is_file()
    assert not (folder / "swept" / "lr1e-38" / "adapter_model.safetensors").exists()


def test_an_adapter_that_cannot_be_is_one_error_on_all_ranks(folder: Path) -> None:
    expected: list[tuple[str, dict[str, Any], str]] = [
        ("bob", {"dataset_name": "nowhere.jsonl"}, "nowhere.jsonl: cannot be loaded"),
        ("bob", {"max_length": 3}, "max_length: 3 leaves no row of train with a token to train on"),
        ("bob", {"max_length": 6}, "max_length: 6 leaves no row of train with a token to train on"),
        ("fay", {"max_length": 1}, "max_length: 1 leaves no row of train with a token to train on"),
    ]
    cases = []
    for name, further, _ in expected:
        given = {"max_steps": None, **(with_pairs if name == "fay" else values)(folder, "refused", 2)}
        given["adapters"][name] |= further
        cases.append(given)
    for errors in run_world(2, errors_of_all, cases):
        for error, (name, _, message) in zip(errors, expected, strict=True):
            assert re.match(f"adapters.{name}: (rank 0: )?{message}", error)


def test_a_row_that_is_too_long_for_a_pass_and_an_unknown_token_are_named(folder: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(10)])
    tokenizer.save_pretrained(folder / "words")
    given = {"max_steps": None, **values(folder, "refused", 1)}
    with_words = {
        **values(folder, "refused", 1),
        "max_steps": None,
        "tokenizer_name_or_path": str(folder / "words"),
    }
    with_words["adapters"]["bob"]["dataset_name"] = str(tiny.write_rows(folder / "w.jsonl", tiny.chat("Hi", "<9>")))
    cases = [
        {**given, "tokens_per_pass": 32},
        {**with_pairs(folder, "refused", 1), "max_steps": None, "tokens_per_pass": 64},
        {**given, "eos_token": "<end>"},
        with_words,
    ]
    [errors] = run_world(1, errors_of_all, cases)
    expected = (
        r"adapters\.ada: a row has \d+ tokens.*Set max_length or tokens_per_pass",
        r"adapters\.eve: a row has \d+ tokens \(96 with padding, in a pair\)",
        "eos_token: <end> is not in the vocabulary",
        r"adapters\.bob: the dataset, or its chat template, uses '<9>'",
    )
    for error, message in zip(errors, expected, strict=True):
        assert re.match(message, error)


def test_a_folder_with_another_base_or_adapter_is_left_alone(folder: Path, whole: dict[str, list[float]]) -> None:
    other = values(folder, "whole", 1)
    other["adapters"]["ada"] |= {"lora_r": 3}
    with pytest.raises(RankError, match=r"has a training with ada\.lora_r=\S+, not 3"):
        run_world(1, train, other)
    given = {**values(folder, "whole", 1), "model_revision": "other"}
    with pytest.raises(RankError, match="has a training with model_revision='main', not 'other'"):
        run_world(1, train, given)
