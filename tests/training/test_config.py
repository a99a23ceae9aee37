"""Configurations: read, merged, and every fault named with its key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shardwise.errors import ConfigError
from shardwise.training.configuration.config import config_of, known_keys, read_config
from shardwise.training.configuration.config_sections import FreezeTuning, FullTuning, LoraTuning, WrapSection
from shardwise.training.configuration.other_names import NONE, OURS
from shardwise.training.options import Epochs, Ratio, Steps, TrainOptions

NEEDED = ("model=org/name", "data=chats.jsonl", "output=out")
RECIPES = sorted(
    path for path in (Path(__file__).parents[2] / "recipes").glob("**/*.yaml") if path.parent.name != "tenants"
)
"""Of one training; those of many are read in ``tests/tenants``."""


def faults(*overrides: str) -> list[str]:
    """What is wrong, line by line, with what is needed given."""
    with pytest.raises(ConfigError) as caught:
        read_config(None, (*NEEDED, *overrides))
    heading, *lines = str(caught.value).splitlines()
    assert heading == "the configuration: the training cannot be set up so"
    return [line.strip() for line in lines]


def test_what_is_needed_is_enough() -> None:
    config = read_config(None, NEEDED)
    assert (config.model.name, config.data.train, config.output.directory) == ("org/name", "chats.jsonl", "out")
    assert config.tuning == FullTuning()
    assert config.options() == TrainOptions()


def test_overrides_change_a_file_and_the_later_one_counts(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {name: org/name, revision: v1}\ndata: {train: a.jsonl, packing: true}\noutput: out\n"
        "tuning: {method: lora, r: 4, target_modules: [q_proj]}\ntraining: {max_steps: 10}\n"
    )
    config = read_config(
        str(file),
        (
            "data=b.jsonl",
            "optimizer.learning_rate=1e-4",
            "tuning.r=8",
            "tuning.r=16",
            "tuning.target_modules=all-linear",
        ),
    )
    assert (config.model.revision, config.data.packing, config.data.train) == ("v1", True, "b.jsonl")
    assert config.optimizer.learning_rate == 1e-4
    assert config.tuning == LoraTuning(method="lora", r=16, target_modules="all-linear")
    assert config.options().duration == Steps(10)


def test_interpolation(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "model: org/name\ndata: a.jsonl\noutput: runs/${training.seed}\ntraining: {seed: 5}"
    )
    assert read_config(str(tmp_path / "config.yaml"), ["training.seed=6"]).output.directory == "runs/6"


def test_every_fault_at_once() -> None:
    assert faults(
        "optimizer.learning_rte=1",
        "training.batch_size=0",
        "data.packing=1",
        "learning_rate=1e-4",
        "training.seed=true",
        "log=null",
    ) == [
        "data.packing=1: it must be a valid boolean",
        "optimizer.learning_rte: no such key; did you mean optimizer.learning_rate?",
        "training.batch_size=0: it must be greater than or equal to 1",
        "training.seed=True: it must be a valid integer",
        "log=None: it must be keys with values, of every, trackers, project, tracker_options",
        "learning_rate: no such key; did you mean optimizer.learning_rate?",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("tuning=lor",), "tuning.method='lor': it must be one of 'full', 'freeze', 'lora'"),
        (("tuning.r=8",), "tuning.method: it must be given: full, freeze or lora"),
        (("tuning=lora", "tuning.rank=8"), "tuning.rank: no such key; did you mean tuning.r?"),
        (("tuning=lora", "tuning.lora_r=8"), "tuning.lora_r: no such key; did you mean tuning.r?"),
        (("tuning=full", "tuning.r=8"), "tuning.r: no such key; did you mean tuning.r?"),
        (("tuning=lora", "tuning.target_modules=3"), "tuning.target_modules=3: it must be a valid list, or"),
        (("tuning=freeze",), "tuning: say what is trained: trainable_layers (the last n;"),
        (("schedule=cosin",), "schedule.name='cosin': it must be 'constant', 'linear', 'cosine'"),
        (("schedule.warmup_ratio=0.1", "schedule.warmup_steps=3"), "schedule: warmup_ratio and warmup_steps both"),
        (("training.epochs=1", "training.max_steps=3"), "training: epochs and max_steps both"),
        (("evaluation.every=3",), "evaluation: every says how often, but data does not say on what"),
        (("sharding.wrap=blocks",), "sharding.wrap='blocks': it must be 'automatic', 'model_plan'"),
        (("sharding.wrap.classes=[]",), "sharding.wrap.classes: list should have at least 1 item"),
        (("sharding.wrap.min_parameters=3", "sharding.wrap.classes=[A]"), "sharding.wrap: it must be"),
        (("optimizer.beta2=1.0",), "optimizer.beta2=1.0: it must be less than 1"),
        (("optimizer.learning_rate=.nan",), "optimizer.learning_rate=nan: it must be"),
        (("checkpoint.every=3",), "checkpoint: no such key; did you mean checkpoints?"),
        (("model.name=''",), "model.name='': string should have at least 1 character"),
        (("model.name=",), "model.name=None: it must be a valid string"),
        (("num_train_epochs=3",), "num_train_epochs: no such key; did you mean training.epochs?"),
        (("bananas=1",), "bananas: no such key"),
        ((".bananas=1",), "'': no such key"),
        (("data.columns.prompt=",), "data.columns.prompt=None: it must be a valid string"),
        (("data.columns={1: question}",), "data.columns.1=1: it must be a valid string"),
        (("data.cache_size=5 apples",), "data.cache_size: '5 apples' is not a size of at least one byte"),
        (("output.max_shard_size=0GB",), "output.max_shard_size: '0GB' is not a size of at least one byte"),
    ],
)  # fmt: skip
def test_a_fault_names_the_key_and_what_is_wanted(overrides: tuple[str, ...], expected: str) -> None:
    [fault] = faults(*overrides)
    assert fault.startswith(expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: {", "the configuration cannot be read (while parsing"),
        ("model: a\nmodel: b\n", "duplicate key model"),
        ("- a\n- b\n", "it is a list, not keys with values"),
        ("just words", "just words: no such key"),
        ("model: ${nowhere}", "the configuration cannot be read (Interpolation key 'nowhere' not found"),
        ("model: ???", "the configuration cannot be read (Missing mandatory value: name\n    full_key: model.name"),
        ("1.5: 3", "1.5: no such key"),
        ("output: !!int abc", "the configuration cannot be read (invalid literal for int()"),
        (b"\xff\xfe\x00", "the configuration cannot be read ("),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read_config(str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: the configuration cannot be read \(No such file"):
        read_config(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("override", ["--model", "=3", "training", "a.b: 3"])
def test_an_override_is_a_key_and_a_value(override: str) -> None:
    with pytest.raises(ConfigError, match="overrides are written key=value"):
        read_config(None, [*NEEDED, override])


@pytest.mark.parametrize("override", ["data.train.0.weight=2", "data.train[0].weight=2", "data.train.a=b"])
def test_an_override_of_a_part_of_a_list_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="an override replaces a list as a whole"):
        read_config(None, [*NEEDED, "data.train=[{path: a, weight: 1}]", override])


@pytest.mark.parametrize("name", ["${HOME}", r"\${a}", r"\\${a.b}c", "a\\", "${"])
def test_what_looks_like_an_interpolation_is_written_as_what_it_is(tmp_path: Path, name: str) -> None:
    config = config_of(
        {"model": {"name": name}, "data": {"train": "a"}, "output": {"directory": "o"}}
        | {"log": {"tracker_options": {"wandb": {"tags": [name]}}}}
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert read_config(str(tmp_path / "config.yaml")) == config


def test_a_configuration_that_is_written_is_read_again(tmp_path: Path) -> None:
    config = read_config(
        None,
        (
            *NEEDED,
            "tuning=freeze",
            "tuning.trainable_layers=-2",
            "sharding.wrap.classes=[Block]",
            "schedule.options.min_lr_rate=0.1",
            "log.tracker_options.wandb.tags=[a,b]",
        ),
    )
    assert config.tuning == FreezeTuning(method="freeze", trainable_layers=-2)
    assert config.sharding.wrap == WrapSection(classes=["Block"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert read_config(str(tmp_path / "config.yaml")) == config


def test_options_of_the_loop() -> None:
    config = read_config(
        None, (*NEEDED, "training.epochs=2", "schedule.warmup_ratio=0.1", "optimizer.beta2=0.95", "log.every=3")
    )
    options = config.options()
    assert (options.duration, options.warmup, options.betas) == (Epochs(2), Ratio(0.1), (0.9, 0.95))
    assert options.log_every == 3


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {"full", "freeze", "lora"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: "-".join(path.parts[-2:]))
def test_a_recipe_is_a_configuration(recipe: Path) -> None:
    config = read_config(str(recipe), ["output=elsewhere"])
    assert config.output.directory == "elsewhere"
    assert recipe.stem.startswith(config.tuning.method)


def test_every_key_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    assert [key for key in known_keys() if f"`{key}`" not in text] == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("base_model=a",), "base_model: no such key; did you mean model.name?"),
        (("sequence_len=9",), "sequence_len: no such key; did you mean data.max_length?"),
        (("micro_batch_size=2",), "micro_batch_size: no such key; did you mean training.batch_size?"),
        (("data.max_seq_length=2",), "data.max_seq_length: no such key; did you mean data.max_length?"),
        (("cutoff_len=9",), "cutoff_len: no such key; did you mean data.max_length?"),
        (("loraplus_lr_ratio=16",), "loraplus_lr_ratio: no such key; did you mean optimizer.lora_plus_ratio?"),
        (("early_stopping_patience=2",), "early_stopping_patience: no such key; did you mean evaluation.patience?"),
        (("bf16=true",), "bf16: no such key; did you mean sharding.precision?"),
        (("hub_model_id=a/b",), "hub_model_id: no such key; did you mean output.push_to_hub?"),
        (("save_total_limit=2",), "save_total_limit: no such key; did you mean checkpoints.keep?"),
        (("schedule.lr=1",), "schedule.lr: no such key; did you mean optimizer.learning_rate?"),
        (("load_in_8bit=true",), "load_in_8bit: no such key; bases are kept in four bits (quantization: nf4)"),
        (("deepspeed=zero3.json",), "deepspeed: no such key; ranks are sharded by FSDP2 alone"),
        (("group_by_length=true",), "group_by_length: no such key; the seed alone decides the order of rows"),
    ],
)  # fmt: skip
def test_names_of_other_trainers_are_answered_with_ours_or_with_why_there_is_none(
    overrides: tuple[str, ...], expected: str
) -> None:
    [fault] = faults(*overrides)
    assert fault.startswith(expected)


def test_what_is_answered_with_is_a_key() -> None:
    known = set(known_keys())
    assert {ours for ours in OURS.values() if ours not in known} == set()
    assert OURS.keys().isdisjoint(NONE)
    # Ours would never be looked up, were they unknown: a key at the top is answered with where it belongs.
    assert not {name for name in NONE if name in {key.rpartition(".")[2] for key in known}}


def test_other_ways_to_write_a_value(tmp_path: Path) -> None:
    """A reader of YAML 1.1 takes ``1e-4`` for text, and so it is in quotes."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: org/name\noutput: {directory: out, dtype: fp16}\n"
        "optimizer: {learning_rate: '1e-4', weight_decay: '.1', beta2: '0.95'}\n"
        "data: {train: a.jsonl, validation_fraction: '1e-2'}\n"
        "tuning: {method: lora, target_modules: q_proj, modules_to_save: 'norm, lm_head'}\n"
        "log: {trackers: wandb}\nsharding: {precision: bf16, reduce_dtype: fp32}\n"
    )
    config = read_config(str(file))
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (1e-4, 0.1)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.data.validation_fraction == 0.01
    assert isinstance(config.tuning, LoraTuning)
    assert (config.tuning.target_modules, config.tuning.modules_to_save) == (["q_proj"], ["norm", "lm_head"])
    assert config.log.trackers == ["wandb"]
    assert (config.sharding.precision, config.sharding.reduce_dtype, config.output.dtype) == (
        "bfloat16",
        "float32",
        "float16",
    )
    for pattern in ("all-linear", r".*\.[qv]_proj", "model|lm_head"):
        given = {"method": "lora", "target_modules": pattern}
        assert LoraTuning.model_validate(given).target_modules == pattern
    assert faults("optimizer.learning_rate=fast") == ["optimizer.learning_rate='fast': it must be a valid number"]
    assert faults("sharding.reduce_dtype=fp16")[0].startswith("sharding.reduce_dtype: sums over ranks leave")
    assert faults("evaluation.data=a", "evaluation.patience=2")[0].startswith("evaluation: patience counts evaluat")


def test_values_of_any_kind_are_refused_and_never_crash() -> None:
    for value in (
        None,
        3,
        [],
        [1],
        "x",
        {"model": []},
        {1: 2},
        {"tuning": {"method": []}},
        {"data": {"train": {}}},
    ):
        with pytest.raises(ConfigError, match="the training cannot be set up so"):
            config_of(value)


def test_the_example_of_the_help_is_a_configuration(tmp_path: Path) -> None:
    from shardwise.cli.train import _EPILOG

    lines = [line for line in _EPILOG.splitlines() if line.startswith("  ")]
    assert set(yaml.safe_load("\n".join(lines))) >= {"model", "data", "output", "checkpoints"}
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    assert read_config(str(tmp_path / "config.yaml")).checkpoints.every == 200


def test_a_base_as_it_is_stored() -> None:
    lora = ("tuning={method: lora}", "quantization=stored")
    config = read_config(None, (*NEEDED, *lora))
    assert config.quantization is not None
    assert config.quantization.form == "stored"
    [fault] = faults(lora[0], "quantization={form: stored, block_size: 32, stay: [lm_head]}")
    assert "takes what the checkpoint has, so that block_size, stay cannot be given" in fault
