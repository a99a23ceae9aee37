"""Configurations of many tenants: what is said once, what each has otherwise, sweeps, faults by their places."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.tenants import trying

from shardwise.errors import ConfigError
from shardwise.tenants.config import is_of_many, tenants_of
from shardwise.tenants.sections import TenantsConfig
from shardwise.training.configuration.config import read_config, read_values
from shardwise.training.configuration.config_sections import LoraTuning

NO_NAME = (
    "'../b' is no name of an adapter: up to 128 letters, digits, '.', '_' and '-', the first a letter or a digit, "
    "the last no '.', and no '..'"
)

RECIPES = Path(__file__).parents[2] / "recipes" / "tenants"

SHARED: dict[str, Any] = {"model": "org/name", "output": "out", "data": "rows.jsonl"}


def made(**more: Any) -> TenantsConfig:
    return tenants_of({**SHARED, **more})


def faults(**more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        made(**more)
    heading, *lines = str(caught.value).splitlines()
    assert heading == "the configuration: the training cannot be set up so"
    return [line.strip() for line in lines]


def test_what_is_said_once_is_everybodys_and_each_may_have_its_own():
    config = made(
        tuning={"r": 4, "lora_alpha": 8},
        training={"epochs": 2, "batch_size": 8},
        schedule={"warmup_ratio": 0.1},
        evaluation={"every": 5},
        tenants=[
            {"name": "ada"},
            {
                "name": "bob",
                "data": "bob.jsonl",
                "tuning": {"r": 16},
                "training": {"max_steps": 9},
                "schedule": {"name": "linear", "warmup_steps": 3},
                "evaluation": {"data": "held-out.jsonl"},
            },
        ],
    )
    ada, bob = config.tenants["ada"], config.tenants["bob"]
    assert (config.output, ada.output.directory, bob.output.directory) == ("out", "out/ada", "out/bob")
    assert ada.tuning == LoraTuning(method="lora", r=4, lora_alpha=8)
    assert bob.tuning == LoraTuning(method="lora", r=16, lora_alpha=8)
    assert (ada.data.train, bob.data.train) == ("rows.jsonl", "bob.jsonl")
    assert (ada.training.epochs, ada.training.max_steps) == (2, None)
    assert (bob.training.epochs, bob.training.max_steps, bob.training.batch_size) == (None, 9, 8)
    assert (ada.schedule.warmup_ratio, bob.schedule.warmup_ratio, bob.schedule.warmup_steps) == (0.1, None, 3)
    assert (ada.evaluation.every, bob.evaluation.every) == (None, 5)


def test_a_sweep_is_a_tenant_for_each_combination():
    config = made(
        tuning={"lora_alpha": 16},
        sweep={"tuning": {"r": [8, 16]}, "optimizer.learning_rate": [1e-4, 3e-4]},
    )
    assert list(config.tenants) == ["r8-lr1e-4", "r8-lr3e-4", "r16-lr1e-4", "r16-lr3e-4"]
    found = [(each.tuning.r, each.optimizer.learning_rate) for each in config.tenants.values()]  # type: ignore[union-attr]
    assert found == [(8, 1e-4), (8, 3e-4), (16, 1e-4), (16, 3e-4)]
    assert {each.output.directory for each in config.tenants.values()} == {f"out/{name}" for name in config.tenants}


@pytest.mark.parametrize(
    ("sweep", "names"),
    [
        ({"tuning.lora_dropout": [0.0, 0.05, 0.125]}, ["dropout0", "dropout0.05", "dropout0.125"]),
        ({"optimizer.learning_rate": [2.5e-4, 0.1, 1.0]}, ["lr2.5e-4", "lr0.1", "lr1"]),
        ({"schedule.name": ["cosine", "linear"], "training.seed": [0, 1000]}, None),
        ({"tuning.target_modules": ["all-linear", ["q_proj", "v_proj"]]}, ["all-linear", "target_modules2"]),
        ({"tuning.use_rslora": [True, False]}, ["use_rslora-true", "use_rslora-false"]),
        ({"data.train": ["a/x.jsonl", "b/x.jsonl"]}, ["train1", "train2"]),
    ],
)
def test_names_tell_values(sweep, names):
    expected = names or ["cosine-seed0", "cosine-seed1e3", "linear-seed0", "linear-seed1e3"]
    assert list(made(sweep=sweep).tenants) == expected


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        (
            {"tenants": [{"name": "a", "optimzer": {}}, {"name": "b", "optimizer": {"lr": 1}}]},
            [
                "tenants[0].optimzer: no such key; did you mean optimizer?",
                "tenants[1].optimizer.lr: no such key; did you mean optimizer.learning_rate?",
            ],
        ),
        (
            {"tenants": [{"name": "a", "lora": {"r": 2}}, {"name": "b", "training": {"batch_size": 0}}]},
            [
                "tenants[0].lora: no such key; did you mean tuning?",
                "tenants[1].training.batch_size=0: it must be greater than or equal to 1",
            ],
        ),
        ({"tenants": [{"name": "a"}], "trainin": {}}, ["trainin: no such key; did you mean training?"]),
        (
            {"tenants": [{"name": "a"}], "bank": {"token_per_pass": 3}},
            ["bank.token_per_pass: no such key; did you mean bank.tokens_per_pass?"],
        ),
        (
            {"tenants": [{"name": "a"}, {"name": "a"}, {"data": "x"}, {"name": "../b"}]},
            [
                "tenants[1].name: 'a' is the name of tenants[0], too",
                "tenants[2].name: it must be given",
                f"tenants[3].name: {NO_NAME}",
            ],
        ),
        (
            {"tenants": [{"name": "a", "model": "other", "sharding": {}}]},
            [
                "tenants[0].model: it is the same for all tenants; give it once, beside them",
                "tenants[0].sharding: it is the same for all tenants; give it once, beside them",
            ],
        ),
        (
            {"data": {}, "tenants": [{"name": "a", "data": "x"}, {"name": "b"}]},
            ["tenants[1].data.train: it must be given"],
        ),
        ({"data": {}, "tenants": [{"name": "a"}, {"name": "b"}]}, ["data.train: it must be given"]),
        ({"tenants": []}, ["tenants: list should have at least 1 item after validation, not 0"]),
        (
            {"tenants": [{"name": "a"}], "sweep": {"tuning.r": [1]}},
            ["the whole: give one of tenants (a list) and sweep (keys with lists of values)"],
        ),
        (
            {"sweep": {"tuning.rr": [1], "lr": [1, 2]}},
            [
                "sweep.tuning.rr: no such key; did you mean tuning.r?",
                "sweep.lr: no such key; did you mean optimizer.learning_rate?",
            ],
        ),
        (
            {"sweep": {"model.name": ["a"], "tuning.r": 8}},
            [
                "sweep.model.name: it is the same for all tenants; give it once, beside the sweep",
                "sweep.tuning.r: it must be a list of one or more values",
            ],
        ),
        (
            {"sweep": {"tuning.r": [8, 8]}},
            ["sweep: values come twice, or have the same names; give tenants names of their own"],
        ),
        (
            {"tenants": [{"name": "a", "tuning": "full"}], "sharding": {"precision": "float16", "compile": True}},
            [
                "tenants[0].tuning.method='full': tenants share one base, so each is a lora",
                "sharding.precision='float16': tenants have no gradient scaler; take bfloat16",
                "sharding.compile: blocks that are compiled would not notice adapters that come later",
            ],
        ),
        (
            {
                "tenants": [{"name": "a"}, {"name": "b", "optimizer": {"lora_plus_ratio": 16.0}}],
                "optimizer": {"name": "somebodys.Best", "allow_import": True},
                "output": {"directory": "out", "push_to_hub": "me/mine"},
            },
            [
                "optimizer.allow_import: tenants take optimizers that are known to step each element for itself",
                "output.push_to_hub: tenants would be pushed over each other; push their last/ folders afterwards",
                "tenants[1].optimizer.lora_plus_ratio: a tenant's matrices are stepped at one rate; leave it out",
            ],
        ),
    ],
)
def test_every_fault_is_named_with_whose_it_is(more, lines):
    assert faults(**more) == lines


def test_a_training_alone_tells_of_tenants_where_they_are_meant():
    with pytest.raises(ConfigError, match="tenant: no such key; did you mean tenants"):
        read_config(None, ("model=m", "data=d", "output=o", "tenant=[]"))


def test_what_was_given_comes_back_from_its_file(tmp_path):
    config = made(tenants=[{"name": "ada", "tuning": {"r": 2}}], bank={"pad_to": 8})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    values, _ = read_values(str(tmp_path / "config.yaml"))
    assert is_of_many(values)
    assert tenants_of(values).tenants == config.tenants
    assert not is_of_many(read_values(None, ("model=m",))[0])


def test_overrides_change_what_is_said_once(tmp_path):
    file = trying.write(
        tmp_path / "c.yaml", {**SHARED, "tenants": [{"name": "a"}, {"name": "b", "tuning": {"r": 3}}]}
    )
    values, told = read_values(str(file), ("tuning.r=5", "bank.tokens_per_pass=99"))
    config = tenants_of(values, told)
    assert [each.tuning.r for each in config.tenants.values()] == [5, 3]  # type: ignore[union-attr]
    assert config.bank.tokens_per_pass == 99


@pytest.mark.parametrize("value", [3, "x", [3], [{}], {"a": 1}, [{"name": 3}], [[]]])
def test_tenants_of_any_kind_are_refused_and_never_crash(value):
    assert faults(tenants=value)
    with suppress(ConfigError):
        made(sweep={"tuning": value})


def test_recipes_are_configurations():
    files = sorted(RECIPES.glob("*.yaml"))
    assert {file.stem for file in files} == {"tenants", "sweep"}
    for file in files:
        config = tenants_of(*read_values(str(file)))
        assert len(config.tenants) >= 3
        for each in config.tenants.values():
            assert Path(each.data.train).is_file() or (RECIPES.parents[1] / each.data.train).is_file()


def test_keys_of_a_bank_are_documented():
    from shardwise.tenants.sections import BankSection

    text = (RECIPES.parents[1] / "docs" / "train.md").read_text()
    assert [key for key in BankSection.model_fields if f"`bank.{key}`" not in text] == []
    assert yaml.safe_load("tenants: [{name: ada}]")["tenants"][0]["name"] == "ada"
