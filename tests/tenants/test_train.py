"""`train` of many tenants: each as if it were alone, on any ranks, whatever becomes of others."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.tenants import on_ranks, trying
from tests.tenants.trying import alone, halved, losses, metrics, run, values, write
from tests.training import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli.tenants import SOME_FAILED
from shardwise.cli.training_log import STOPPED, StepLog
from shardwise.tenants.config import tenants_of
from shardwise.tenants.keeping import kept_steps
from shardwise.tenants.session import TenantsSession
from shardwise.training.report import Event, StepFacts
from shardwise.training.stopping import StopRequest

CLOSE = 1e-5
"""Relative. Rows of a training alone are padded to the longest of a batch, those of a tenant to a multiple; and
ranks sum gradients in another order. In float32 losses of a few steps then differ by some 1e-7; a row too many or
a wrong rate would show at 1e-3 and more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trying.base(tmp_path_factory.mktemp("tenants"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, list[float]]:
    """Three tenants in one process, to their ends; the folder is ``whole``."""
    config = write(folder / "whole.yaml", values(folder, folder / "whole"))
    result = run(config, "--json")
    assert result.exit_code == 0, result.stderr
    return losses(result)


def test_each_tenant_is_as_trained_alone_by_the_command(
    folder: Path, whole: dict[str, list[float]], tmp_path: Path
) -> None:
    assert {name: len(own) for name, own in whole.items()} == {"ada": 3, "bob": 6, "cy": 7}
    for name, own in whole.items():
        place = folder / "whole" / name
        assert alone(place, tmp_path / name) == pytest.approx(own, rel=CLOSE)
        assert [loss for _, loss in metrics(place)] == own
        assert json.loads((place / "last" / "adapter_config.json").read_text())["r"] == (8 if name == "bob" else 4)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), place / "last")
        assert any(bool(value.any()) for key, value in model.named_parameters() if "lora_B" in key)
    looked = [json.loads(line) for line in (folder / "whole" / "bob" / "metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in looked if line["kind"] == "evaluation"]
    theirs = [json.loads(line) for line in (tmp_path / "bob" / "metrics.jsonl").read_text().splitlines()]
    assert ours == pytest.approx([line["loss"] for line in theirs if line["kind"] == "evaluation"], rel=CLOSE)
    assert len(ours) == 3
    assert (folder / "whole" / "bob" / "best" / "adapter_model.safetensors").is_file()
    assert not (folder / "whole" / "ada" / "best").exists()


def test_who_else_is_there_changes_nothing_of_a_tenant(
    folder: Path, whole: dict[str, list[float]], tmp_path: Path
) -> None:
    """One alone in the bank; with a budget that cuts its steps into other portions; and with dropout."""

    def trained(tokens: int, names: str, dropout: float = 0.0) -> list[float]:
        config = values(folder, tmp_path / f"{tokens}-{names}-{dropout}") | {"bank": {"tokens_per_pass": tokens}}
        config["tenants"] = [each for each in config["tenants"] if each["name"] in names]
        for each in config["tenants"]:
            each["tuning"] = each.get("tuning", {}) | {"lora_dropout": dropout}
        result = run(write(tmp_path / "c.yaml", config), "--json")
        assert result.exit_code == 0, result.stderr
        return losses(result)["bob"]

    assert trained(256, "bob") == pytest.approx(whole["bob"], rel=1e-7)
    assert trained(128, "bob") == pytest.approx(whole["bob"], rel=CLOSE)
    dropped = trained(256, "bob", 0.2)
    assert dropped == pytest.approx(trained(256, "ada bob cy", 0.2), rel=1e-7)
    assert dropped != pytest.approx(whole["bob"], rel=1e-3)


def test_what_is_computed_in_bfloat16_is_near(folder: Path, whole: dict[str, list[float]], tmp_path: Path) -> None:
    config = values(folder, tmp_path / "out") | {"sharding": {"precision": "bfloat16"}}
    result = run(write(tmp_path / "c.yaml", config), "bank.backend=looped", "--json")
    assert result.exit_code == 0, result.stderr
    for name, own in whole.items():
        assert losses(result)[name] == pytest.approx(own, rel=0.02)
        assert losses(result)[name] != own


@pytest.mark.distributed
def test_on_two_ranks_beside_some_that_are_broken(
    worlds: Any, folder: Path, whole: dict[str, list[float]], tmp_path: Path
) -> None:
    """Refused alone, by name: data that is not there, malformed, that teaches nothing; a target that is none."""
    broken = tiny.write_rows(tmp_path / "broken.jsonl", tiny.chat("Hi", "Ho"), "{")
    empty = tiny.write_rows(tmp_path / "empty.jsonl", tiny.chat("Hi" * 40, "Ho"))
    config = halved(values(folder, tmp_path / "out"))
    config["bank"]["optimizer_state"] = "sharded"
    config["tenants"][1:1] = [
        {"name": "gone", "data": str(tmp_path / "none.jsonl")},
        {"name": "broken", "data": str(broken)},
        {"name": "empty", "data": str(empty), "training": {"max_steps": 3}},
        {"name": "nowhere", "data": str(folder / "ada.jsonl"), "tuning": {"target_modules": ["none_such"]}},
    ]
    outcomes = worlds(2).run(on_ranks.train, config)
    assert [code for code, _ in outcomes] == [SOME_FAILED] * 2
    found = [{each["name"]: each for each in told["tenants"]} for _, told in outcomes]
    for rank in found:
        assert {name: each["ended"] for name, each in rank.items() if each["ended"] != "trained"} == dict.fromkeys(
            ("gone", "broken", "empty", "nowhere"), "refused"
        )
        assert "none.jsonl: the data cannot be read" in rank["gone"]["cause"]
        assert "broken.jsonl: 1 row cannot be used\n  line 2" in rank["broken"]["cause"]
        assert "in none of its 1 rows is there a token to learn" in rank["empty"]["cause"]
        assert "none_such" in rank["nowhere"]["cause"]
        for name, own in whole.items():
            assert [step["loss"] for step in rank[name]["train"]["steps"]] == pytest.approx(own, rel=CLOSE)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["ada", "bob", "config.yaml", "cy"]


def test_where_all_are_refused_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    config = values(folder, tmp_path / "out")
    for each in config["tenants"]:
        each["data"] = "none.jsonl"
    result = run(write(tmp_path / "c.yaml", config))
    assert result.exit_code == 2
    assert result.stderr.count("none.jsonl: the data cannot be read") == 3
    assert not (tmp_path / "out").exists()


def test_a_tenant_that_fails_ends_alone(folder: Path, whole: dict[str, list[float]], tmp_path: Path) -> None:
    config = values(folder, tmp_path / "out")
    config["tenants"][2]["optimizer"]["learning_rate"] = 1e30
    result = run(write(tmp_path / "c.yaml", config), "--json")
    assert result.exit_code == SOME_FAILED, result.stderr
    for told in (
        "ada  step 1/3  loss",
        "bob  step 2/6  evaluation: loss",
        "ada  step 3/3  checkpoint, in",
        "cy: 7 steps, 896 parameters",
        "training: 3 tenants on 1 rank",
    ):
        assert told in result.stderr, told
    found = losses(result)
    cy = json.loads(result.stdout)["ranks"][0]["tenants"][2]
    assert cy["ended"] == "failed"
    assert cy["cause"].startswith(f"step {len(found['cy']) + 1}: the loss is")
    assert "cy.jsonl, line" in cy["cause"]
    assert not (tmp_path / "out" / "cy" / "last").exists()
    assert (found["ada"], found["bob"]) == (whole["ada"], whole["bob"])


@pytest.mark.parametrize("tokens", [256, 64])
def test_a_tenant_whose_rows_break_a_pass_off_ends_alone(
    folder: Path, whole: dict[str, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Whether others are in that pass or not: in 64 tokens there is room for one row."""
    config = values(folder, tmp_path / "out") | {"bank": {"tokens_per_pass": tokens}}
    bad = tiny.write_rows(
        tmp_path / "bad.jsonl", *[tiny.chat("Hi", "Ho" * (n % 3)) for n in range(1, 8)], {"text": "~"}
    )
    config["tenants"][2]["data"] = str(bad)
    unbearable = tiny.tokenizer()("~")["input_ids"][0]
    forward = torch.nn.Embedding.forward

    def look(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if bool((ids == unbearable).any()):
            raise ValueError("not this token")
        return forward(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", look)
    result = run(write(tmp_path / "c.yaml", config), "--json")
    assert result.exit_code == SOME_FAILED, result.stderr
    cy = json.loads(result.stdout)["ranks"][0]["tenants"][2]
    assert cy["ended"] == "failed"
    assert "not this token" in cy["cause"]
    found = losses(result)
    for name in ("ada", "bob"):
        assert found[name] == pytest.approx(whole[name], rel=CLOSE)
        assert (tmp_path / "out" / name / "last" / "adapter_model.safetensors").is_file()


@pytest.mark.distributed
def test_asked_to_stop_all_end_in_order_and_go_on_on_other_ranks(
    worlds: Any, folder: Path, whole: dict[str, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM comes after step 2 of ``cy``; ``bob`` is in the middle of a step then, or has not begun it."""
    out = tmp_path / "out"
    config = write(tmp_path / "c.yaml", values(folder, out))
    tell = StepLog.tell

    def ask(self: StepLog, facts: Event) -> None:
        tell(self, facts)
        if self.whose.startswith("cy") and isinstance(facts, StepFacts) and facts.step == 2:
            trying.kill_self(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(StepLog, "tell", ask)
        result = run(config)
    assert result.exit_code == STOPPED, result.stderr
    assert "cy: stopped, " in result.stdout
    kept = {name: kept_steps(out / name / "states") for name in whole}
    done = {name: len(metrics(out / name)) for name in whole}
    assert {name: steps[-1:] for name, steps in kept.items()} == {n: [d] if d else [] for n, d in done.items()}
    assert 2 <= done["cy"] < 7
    assert not (out / "cy" / "last").exists()

    assert {code for code, _ in worlds(2).run(on_ranks.train, halved(values(folder, out)))} == {0}
    for name, own in whole.items():
        found = metrics(out / name)
        assert [step for step, _ in found] == list(range(1, len(own) + 1)), name
        assert [loss for _, loss in found] == pytest.approx(own, rel=CLOSE)
        assert (out / name / "last" / "adapter_model.safetensors").is_file()

    longer = run(config, "training.batch_size=1", "bank.pad_to=32", "checkpoints.resume=never")
    assert longer.exit_code == 2
    assert "checkpoints.resume='never', but there is" in longer.stderr


def test_a_tenant_that_has_ended_and_is_to_go_on_goes_on(folder: Path, tmp_path: Path) -> None:
    """More steps than before; and another one beside it. Data that have changed refuse their tenant alone."""
    config = values(folder, tmp_path / "out")
    config["tenants"], config["evaluation"] = config["tenants"][:1], {}
    assert run(write(tmp_path / "c.yaml", config)).exit_code == 0
    config["tenants"][0]["training"]["max_steps"] = 5
    config["tenants"].append({"name": "new", "data": str(folder / "cy.jsonl"), "training": {"max_steps": 1}})
    result = run(write(tmp_path / "c.yaml", config), "--json")
    assert result.exit_code == 0, result.stderr
    assert {name: len(own) for name, own in losses(result).items()} == {"ada": 2, "new": 1}
    assert [step for step, _ in metrics(tmp_path / "out" / "ada")] == [1, 2, 3, 4, 5]
    again = run(tmp_path / "c.yaml", "--json")
    assert again.exit_code == 0, again.stderr
    assert losses(again) == {"ada": [], "new": []}
    elsewhere = run(
        tmp_path / "c.yaml", f"output={tmp_path / 'two'}", f"checkpoints.resume={tmp_path / 'out'}", "--json"
    )
    assert losses(elsewhere) == {"ada": [], "new": []}
    assert (tmp_path / "two" / "ada" / "last" / "adapter_model.safetensors").is_file()
    config["tenants"][0]["data"] = str(folder / "bob.jsonl")
    config["tenants"][1]["training"]["max_steps"] = 2
    other = run(write(tmp_path / "c.yaml", config), "--json")
    assert other.exit_code == SOME_FAILED
    ada, new = json.loads(other.stdout)["ranks"][0]["tenants"]
    assert (ada["ended"], new["ended"], len(new["train"]["steps"])) == ("refused", "trained", 1)
    assert "bob.jsonl: the position is one in other data" in ada["cause"]
    config["tenants"][0] |= {"data": str(folder / "ada.jsonl"), "tuning": {"r": 2}}
    changed = run(write(tmp_path / "c.yaml", config))
    assert changed.exit_code == SOME_FAILED
    assert "of another LoRA (tuning.r 4 then and 2 now)" in changed.stderr
    progress = tmp_path / "out" / "ada" / "states" / "step-5" / "progress.json"
    progress.write_bytes(progress.read_bytes().replace(b'{"step": 5', b'{"step": 4'))
    damaged = run(tmp_path / "c.yaml")
    assert damaged.exit_code == SOME_FAILED
    assert f"{progress}: is damaged" in damaged.stderr


def test_tenants_have_optimizers_and_ends_of_their_own(folder: Path, tmp_path: Path) -> None:
    """Each as alone. One that is none refuses its tenant alone; settings on going on are those asked for."""
    config = values(folder, tmp_path / "out")
    ada, bob, cy = config["tenants"]
    ada |= {"optimizer": {"name": "sgd", "options": {"momentum": 0.9}}}
    bob |= {"optimizer": "muon", "training": {"max_steps": 2, "batch_size": 4}, "evaluation": {}}
    cy |= {"evaluation": {"data": ada["data"], "every": "epoch", "patience": 2, "min_delta": 50.0}}
    cy["training"] = {"epochs": 9, "batch_size": 6}
    config["tenants"] += [
        {"name": "eve", "data": ada["data"], "optimizer": "adafactor"},
        {"name": "dan", "data": ada["data"], "optimizer": "adamv"},
    ]
    result = run(write(tmp_path / "c.yaml", config), "--json")
    assert result.exit_code == SOME_FAILED, result.stderr
    told = {each["name"]: each for each in json.loads(result.stdout)["ranks"][0]["tenants"]}
    assert "Adafactor is not known to treat each element for itself" in told["eve"]["cause"]
    assert "there is no such optimizer" in told["dan"]["cause"]
    found = losses(result)
    assert told["bob"]["cause"] == ""
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out" / "bob" / "last")) == len(tiny.tokenizer())
    for name in ("ada", "bob"):
        assert alone(tmp_path / "out" / name, tmp_path / name) == pytest.approx(found[name], rel=1e-3)
    # Two steps an epoch; of the evaluation after the third, two have not been better.
    assert (told["cy"]["ended"], len(found["cy"])) == ("trained", 6)
    assert "the training ends after step 6 of 18" in told["cy"]["train"]["remarks"][0]
    config["tenants"] = [ada, cy]
    ada["training"]["max_steps"] = 4
    ada["optimizer"]["learning_rate"] = 1e-2
    kept = run(
        write(tmp_path / "c.yaml", config), f"output={tmp_path / 'two'}", f"checkpoints.resume={tmp_path / 'out'}"
    )
    assert "goes on with the checkpoint's learning_rate 0.005 (asked for now: 0.01)" in kept.stdout
    config["checkpoints"] = {"optimizer_settings": "config"}
    again = run(write(tmp_path / "c.yaml", config), "--json")
    assert again.exit_code == 0, again.stderr
    assert {name: len(own) for name, own in losses(again).items()} == {"ada": 1, "cy": 0}
    [remark] = json.loads(again.stdout)["ranks"][0]["tenants"][0]["train"]["remarks"]
    assert "the optimizer goes on with learning_rate 0.01 (the checkpoint's: 0.005)" in remark


def test_what_another_run_has_left_refuses_its_tenant_alone(folder: Path, tmp_path: Path) -> None:
    config = values(folder, tmp_path / "out")
    config["tenants"], config["evaluation"] = config["tenants"][::2], {}
    (tmp_path / "out" / "cy" / "last").mkdir(parents=True)
    (tmp_path / "out" / "cy" / "last" / "adapter_config.json").write_text("{}")
    result = run(write(tmp_path / "c.yaml", config), "--json")
    assert result.exit_code == SOME_FAILED, result.stderr
    assert [len(own) for own in losses(result).values()] == [3, 0]
    assert "there is last/ of another run" in result.stderr


def test_a_sweep_trains_every_point(folder: Path, tmp_path: Path) -> None:
    config = {key: value for key, value in values(folder, tmp_path / "out").items() if key != "tenants"}
    config |= {
        "data": {"train": str(folder / "ada.jsonl"), "max_length": 64},
        "evaluation": {},
        "sweep": {"tuning.r": [2, 4], "optimizer.learning_rate": [1e-3, 5e-3]},
        "training": {"max_steps": 2, "batch_size": 4},
    }
    result = run(write(tmp_path / "c.yaml", config), "--json")
    assert result.exit_code == 0, result.stderr
    found = losses(result)
    assert list(found) == ["r2-lr1e-3", "r2-lr5e-3", "r4-lr1e-3", "r4-lr5e-3"]
    assert len({own[1] for own in found.values()}) == 4, "each is another tenant"
    for name in ("r2-lr5e-3", "r4-lr1e-3"):
        assert alone(tmp_path / "out" / name, tmp_path / name) == pytest.approx(found[name], rel=CLOSE)


def killed(folder: Path, config: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks, of which one is killed after so many passes."""
    program = (
        "from shardwise.cli.train import train_command; from tests.tenants import dying; "
        "dying.install(); train_command()"
    )
    start = [sys.executable, "-c", program, str(write(tmp_path / "c.yaml", config)), "--nproc-per-node=2"]
    root = Path(__file__).parents[2]
    result = subprocess.run(start, check=False, timeout=100, capture_output=True, text=True, cwd=root)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "goes on from the newest checkpoint of each tenant" in result.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 3])
def test_killed_and_gone_on_with_on_other_ranks(
    folder: Path, whole: dict[str, list[float]], tmp_path: Path, ranks: int
) -> None:
    """Two ranks, of which one is killed with SIGKILL in a pass; then one, or three, go on.

    Steps have 12 rows, which 2, 1 and 3 ranks share evenly: else a step would be of another size.
    """
    place, other = tmp_path / "out", tmp_path / "whole"

    def config(output: Path, size: int) -> dict[str, Any]:
        found = values(folder, output) | {"checkpoints": {"every": 1, "keep": 2}}
        for each in found["tenants"]:
            each["training"] |= {"batch_size": 12 // size, "gradient_accumulation_steps": 1}
        return found

    uninterrupted = run(write(tmp_path / "w.yaml", config(other, 1)), "--json")
    assert uninterrupted.exit_code == 0, uninterrupted.stderr
    killed(folder, config(place, 2), tmp_path)
    before = {name: kept_steps(place / name / "states")[-1:] for name in whole}
    assert any(before.values())
    assert not all((place / name / "last").exists() for name in whole)
    start = trying.command(write(tmp_path / "c.yaml", config(place, ranks)), "--nproc-per-node", ranks, "--json")
    rest = subprocess.run(start, check=False, timeout=100, capture_output=True, text=True)
    assert rest.returncode == 0, rest.stderr
    for name, own in losses(uninterrupted).items():
        found = metrics(place / name)
        assert [step for step, _ in found] == list(range(1, len(own) + 1)), name
        assert [loss for _, loss in found] == pytest.approx(own, rel=CLOSE)
        assert len(kept_steps(place / name / "states")) <= 2


@pytest.mark.parametrize("name", ["tenants", "sweep"])
def test_a_recipe_runs_offline_on_what_it_ships(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    changes = (f"model={folder / 'model'}", f"output={tmp_path / 'out'}", "training.epochs=1")
    result = run(f"recipes/tenants/{name}.yaml", *changes, "--json")
    assert result.exit_code == 0, result.stderr
    found = losses(result)
    assert len(found) == (3 if name == "tenants" else 6)
    assert all(own[-1] < own[0] for own in found.values() if len(own) > 8)
    assert all((tmp_path / "out" / each / "last" / "adapter_model.safetensors").is_file() for each in found)


def test_a_tenant_begins_with_an_adapter_that_is_there(
    folder: Path, whole: dict[str, list[float]], tmp_path: Path
) -> None:
    """Its config counts, whatever is said for all; evaluation before and after are those of a training alone."""
    config = values(folder, tmp_path / "out")
    config["tenants"] = [
        {
            "name": "more",
            "data": str(folder / "bob.jsonl"),
            "tuning": {"adapter": str(folder / "whole" / "bob" / "last")},
            "training": {"max_steps": 2},
            "evaluation": {"data": str(folder / "ada.jsonl")},
        }
    ]
    result = run(write(tmp_path / "c.yaml", config), "--json")
    assert result.exit_code == 0, result.stderr
    [first, *_] = losses(result)["more"]
    assert first < whole["bob"][0] - 0.1
    assert alone(tmp_path / "out" / "more", tmp_path / "alone") == pytest.approx(losses(result)["more"], rel=CLOSE)
    assert json.loads((tmp_path / "out" / "more" / "last" / "adapter_config.json").read_text())["r"] == 8


def test_the_memory_of_a_tenant_that_has_ended_is_free(folder: Path, tmp_path: Path) -> None:
    session = TenantsSession.begin(tenants_of(values(folder, tmp_path / "out")))
    assert session.bank is not None
    bank, numbers = session.bank, [weakref.ref(tenant.flat) for tenant in session.bank._tenants.values()]
    seen: list[tuple[tuple[str, ...], list[bool]]] = []

    class Looking:
        def tell(self, facts: Event) -> None:
            if isinstance(facts, StepFacts) and facts.step == 7:
                gc.collect()
                seen.append((bank.names, [number() is None for number in numbers]))

        def close(self) -> None: ...

    session.train(lambda trainee: Looking(), StopRequest())
    [(names, are_gone)] = seen
    assert "ada" not in names
    assert are_gone == [name not in names for name in ("ada", "bob", "cy")]
    assert bank.names == ()
