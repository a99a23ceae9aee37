"""Configurations of ``shardwise train``: TRL's keys, checked without torch."""

import dataclasses
import datetime
import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.conftest import Worlds
from tests.integrations.requirements import require_patched_names

import shardwise
from shardwise.core.errors import ConfigError
from shardwise.training import run_config
from shardwise.training.adapters_config import read_adapters
from shardwise.training.arguments import ShardwiseArguments
from shardwise.training.former_keys import INERT, NESTED, OFF, RENAMED, SWITCHES, VALUES
from shardwise.training.keys import OTHER_METHODS, REJECTED, get_keys, own_keys
from shardwise.training.run_config import read_run_config

PAGE = Path(__file__).parents[2] / "docs" / "train.md"
FORMER_PAGE = PAGE.with_name("former_keys.md")


def config(folder: Path, text: str) -> str:
    file = folder / "config.yaml"
    file.write_text(text, "utf-8")
    return str(file)


def tables() -> tuple[Path, str, str, str]:
    from tests.training import key_table

    return key_table.FILE, key_table.text(), key_table.page(), key_table.former_page()


@pytest.mark.slow
def test_the_tables_are_those_of_the_dataclasses(worlds: Worlds) -> None:
    """On a rank: TRL's import takes seconds."""
    file, text, page, former_page = worlds(1).run(tables)[0]
    assert file.read_text("utf-8") == text
    assert page in PAGE.read_text("utf-8"), page
    assert FORMER_PAGE.read_text("utf-8") == former_page


def test_a_file_with_overrides(tmp_path: Path) -> None:
    file = config(tmp_path, "model_name_or_path: m\ndataset_name: d\nlearning_rate: 1e-4\nmax_length: 64\n")
    overrides = "--max_length 32 --lora_target_modules q v --bf16=no --save_strategy=no --use_peft"
    found = read_run_config(["dpo", file, *overrides.split()])
    assert found.method == "dpo"
    assert found.values["max_length"] == 32
    assert found.values["lora_target_modules"] == ["q", "v"]
    assert found.values["bf16"] is False
    assert found.values["save_strategy"] == "no"
    assert found.values["use_peft"] is True
    assert found.values["learning_rate"] == "1e-4"  # TrlParser converts strings
    assert found.own == ShardwiseArguments(method="dpo")
    former = read_run_config([file, "--exp_name", "007", "--evaluation_strategy=no", "--wandb_run_group", "1e3"])
    assert (former.values["run_name"], former.values["eval_strategy"]) == ("007", "no")
    assert former.own.env == {"WANDB_RUN_GROUP": "1e3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1.0", r"lerning_rate: is not a key of sft. Did you mean learning_rate\?"),
        ("max_length: 3.7", r"max_length: 3.7 is a float. Expected int or null"),
        ("hub_strategy: no", r"hub_strategy: False is a bool. Expected str"),
        ("packing: 'yes'", r"packing: 'yes' is a str. Expected bool"),
        ("learning_rate: fast", r"learning_rate: 'fast' is a str. Expected float"),
        ("lr_scheduler_type: cosin", r"lr_scheduler_type: 'cosin' is not a choice. Did you mean cosine\?"),
        ("method: grpo\nloss_type: dappo", r"loss_type: 'dappo' is not a choice. Did you mean dapo\?"),
        ("method: dpo\nloss_type: [sft, sigmod]", r"loss_type: 'sigmod' is not a choice. Did you mean sigmoid\?"),
        ("method: ppo", r"method: 'ppo' is not a choice"),
        ("method: gkd", r"method: gkd is not supported: its trainer loads or copies another model"),
        ("method: distillation", r"teacher_model_name_or_path: is missing. Set it to the model to learn from"),
        (
            "method: rloo",
            r"reward_funcs: is missing. Name functions of trl.rewards, import paths, or reward models",
        ),
        (
            "method: grpo\nuse_vllm: true\nuse_peft: true\nlora_modules_to_save: [lm_head]",
            "lora_modules_to_save: cannot be merged for the engine",
        ),
        (
            "method: grpo\nuse_vllm: true\nmodel_init_kwargs: {use_cache: false, rope_theta: 1}",
            "config_overrides: the engine of use_vllm takes the config of the checkpoint",
        ),
        ("optim: lion_8bit", r"optim: lion_8bit is not known to step sharded .*adamw_torch_8bit"),
        ("optim: adafactor", r"optim: adafactor is not known to step sharded parameters"),
        ("adafactor: true", r"adafactor, read as optim: adafactor is not known to step sharded parameters"),
        ("evaluation_strategy: never", r"evaluation_strategy, read as eval_strategy: 'never' is not a choice"),
        ("no_cuda: true", r"no_cuda: is not a key of sft"),
        ("fsdp: full_shard", r"fsdp: the model is sharded by shardwise"),
        ("load_in_8bit: true", r"load_in_8bit: 8-bit bases are not supported. Use load_in_4bit"),
        (
            "datasets:\n- path: a\n  fractoin: 0.5",
            r"datasets\[0\].fractoin: is not a key of datasets. Did you mean fraction\?",
        ),
        ("datasets:\n- name: a", r"datasets\[0\]: .* has no path"),
        ("beta: 0.1", r"beta: is a key of dpo, kto, grpo, .*cpo, .*, not of sft"),
        ("training:\n  epochs: 3", r"training: is not a key of sft"),
        ("hub_modl_id: x", r"hub_modl_id: is not a key of sft. Did you mean hub_model_id\?"),
        ("lora_model_rank: 4", "lora_model_rank: is not a key of sft. Remove it if it only steers your own script"),
        (
            "nproc_per_node: 2",
            "nproc_per_node: is not a key of sft, .*Write --nproc-per-node, or set num_processes",
        ),
        ("adapter: lora", "adapter: is not a key of sft, it is axolotl's. Set use_peft"),
        ("lora_target_modules: [q_proj,v_proj, 'k_proj,o_proj']", r"'k_proj,o_proj' is read as one name. Write \["),
        ("lora_r: 0", "lora_r: 0 is less than 1. Write 1 or more"),
        ("load_best_model_at_end: true", "eval_strategy is no, save_strategy steps. Set both to one value"),
        ("lora_rank: 4", "lora_rank: is not a key of sft, it is LLaMA-Factory's. Set lora_r"),
        ("finetuning_type: lora", "finetuning_type: is not a key of sft, it is LLaMA-Factory's. Set use_peft"),
        ("max_seq_length: 8\nmax_length: 16", "max_seq_length: is a former name of max_length, which has another"),
        ("warmup_ratio: 1.5", "warmup_ratio: 1.5 is not a fraction of the steps"),
        ("model_init_kwargs: {device_map: auto}", "model_init_kwargs: device_map cannot be passed on"),
        ("dataset_mixer: {a: 2}", "dataset_mixer.a: 2 is not a share of its rows"),
        (
            "dataset_mixer: {a: 1}\ndataset_splits: [sft]",
            "dataset_splits: sft is neither for training nor for tests",
        ),
        ("dataset_mixer: {a: 1}\ndataset_configs: [b, c]", "dataset_configs: has another number of entries"),
        ("dataset_mixer: {a: 1}\ndataset_splits: [1]", "dataset_splits: 1 is a int. Expected str"),
        ("dataset_mixer: {1: 0.5}", "dataset_mixer: 1 is a int. Expected str"),
        ("dataset_mixture: {datasets: [{id: 5}]}", r"dataset_mixture.datasets\[0\].id: 5 is a int. Expected str"),
        ("dataset_mixture: {datasets: [{id: a}], seed: -1}", "dataset_mixture.seed: -1 is not a seed"),
        ("dataset_mixture: {datasets: [{path: a}]}", "dataset_mixture: has no datasets"),
        ("dataset_mixture: {datasets: [{id: a, rows: 3}]}", "dataset_mixture: does not know rows"),
        ("dataset_mixture: {datasets: [{id: a, weight: x}]}", r"dataset_mixture.datasets\[0\].weight: 'x' is not"),
        ("dataset_mixer: {a: 1}\ndatasets: [{path: b}]", "dataset_mixer: contradicts datasets"),
        (
            "dataset_mixer: {a: 1}\ndataset_mixture: {datasets: [{id: a}]}",
            "dataset_mixer: contradicts dataset_mixture",
        ),
        ("dataset_mixer: {a: 1}\ntest_split_size: 0.1", "dataset_mixer: contradicts test_split_size"),
        (
            "dataset_mixture: {datasets: [{id: a}]}\ndataset_streaming: true",
            "dataset_mixture: contradicts dataset_streaming",
        ),
        (
            "dataset_mixer: {a: 1}\ndataset_splits: [train]\neval_strategy: steps",
            "eval_strategy: dataset_splits has no split for tests. Add one, or set eval_dataset_name",
        ),
        (
            "dataset_mixture: {datasets: [{id: a}]}\neval_strategy: steps",
            "eval_strategy: dataset_mixture has no test_split_size",
        ),
        ("a: [", r"is not valid YAML"),
        ("seed: 1\nmax_steps: 6\nseed: 2", r"is not valid YAML. seed is there twice, again in line 3. Remove one"),
        ("env: {A: 1, A: 2}", r"is not valid YAML. A is there twice, again in line 1"),
        ("a: " + "[" * 5000, r"is not valid YAML"),
        ("seed: " + "9" * 5000, r"is not valid YAML"),
        ("seed: 0x" + "f" * 5000, r"is not valid YAML. it has a number of more than 300 digits"),
        ("warmup_ratio: " + "9" * 400, r"is not valid YAML. it has a number of more than 300 digits"),
        ("seed: 1" + ":00" * 200 + ".5", r"is not valid YAML. a value does not have the type of its tag"),
        ("seed: !!int ''", r"is not valid YAML. a value does not have the type of its tag"),
        ("packing: !!bool x", r"is not valid YAML. a value does not have the type of its tag"),
        ("method: [sft]", r"method: \['sft'\] is a list. Expected str"),
        ("model_init_kwargs: [1]", r"model_init_kwargs: \[1\] is not a mapping"),
        ("output_dir: 2024-13-01", r"is not valid YAML. month must be"),
        ("learning_rate: .nan", r"learning_rate: nan is not finite"),
        ("num_train_epochs: .inf", r"num_train_epochs: inf is not finite"),
        ("per_device_train_batch_size: 0", r"per_device_train_batch_size: 0 is less than 1"),
        ("num_processes: '-1'", r"num_processes: '-1' is less than 1"),
        ("env: {5: x}", r"env: 5 cannot be set to 'x'"),
        ("env: {'A=B': x}", r"env: 'A=B' cannot be set to 'x'"),
        ("- a", r"is not a mapping of keys to values"),
        ("load_in_4bit: true", "load_in_4bit: packed weights are not trained. Set use_peft"),
        ("method: reward\nuse_peft: true", "lora_task_type: CAUSAL_LM does not fit reward. Set it to SEQ_CLS"),
        ("use_peft: true\ntrainable_layers: 2", "trainable_layers: contradicts use_peft"),
        ("accelerate_config: fsdp2\ncpu_offload: true", "cpu_offload: contradicts accelerate_config"),
        ("accelerate_config: fsdp2\ndp_replicate_size: 2", "dp_replicate_size: contradicts accelerate_config"),
        (
            "method: distillation\nteacher_model_name_or_path: t\nteacher_model_init_kwargs: abc",
            "teacher_model_init_kwargs: 'abc' is not a mapping. Write {KEY: VALUE, ...}",
        ),
        (
            "use_liger_kernel: true\nliger_kernel_config: {fused_linear_cross_entropy: true}",
            "liger_kernel_config: fused_linear_cross_entropy replaces the head",
        ),
        ("model_init_kwargs: {use_kernels: true}\ntorch_compile: true", "use_kernels: contradicts torch_compile"),
        ("use_kernels: true\ntorch_compile_backend: eager", "use_kernels: contradicts torch_compile_backend"),
        ("use_kernels: true\ntorch_compile_mode: default", "use_kernels: contradicts torch_compile_mode"),
        (
            "method: dpo\nprecompute_ref_log_probs: true",
            "precompute_ref_log_probs: TRL would hash the model's weights",
        ),
        (
            "method: grpo\ncast_lm_head_to_fp32: true\ndtype: bfloat16",
            "cast_lm_head_to_fp32: TRL converts the head after it is sharded",
        ),
        ("early_stopping_patience: 2", "early_stopping_patience: needs load_best_model_at_end"),
        (
            "interleave: [1]",
            r"interleave: is not a key of sft, .*Write datasets: \[\{path: ..., fraction: ...\}",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_run_config([config(tmp_path, text)])


def test_own_lists_and_numbers_may_be_strings(tmp_path: Path) -> None:
    text = (
        "transformer_layer_cls_to_wrap: A, B\nnum_processes: '2'\nextra_modules: lm_head\ntokenizer_name_or_path: t"
    )
    own = read_run_config([config(tmp_path, text)]).own
    assert own.transformer_layer_cls_to_wrap == ["A", "B"]
    assert own.extra_modules == ["lm_head"]
    assert own.num_processes == 2
    assert own.tokenizer_name_or_path == "t"
    file = config(tmp_path, "lora_modules_to_save: score\nresume_from_checkpoint: true")
    words = ["grpo", "--reward_funcs", "think_format_reward", "--reward_weights", "0.5", "--config", file]
    values = read_run_config(words).values
    assert (values["reward_funcs"], values["reward_weights"]) == (["think_format_reward"], [0.5])
    assert values["lora_modules_to_save"] == ["score"]
    assert read_run_config(["dpo", "--loss_type", "[sigmoid, sft]"]).values["loss_type"] == ["sigmoid", "sft"]
    with pytest.raises(ConfigError, match="--max_steps: is not a valid value"):
        read_run_config(["--max_steps", "2024-13-01"])


def test_text_on_the_command_line_stays_text() -> None:
    texts = {"model_revision": "1234567", "run_name": "2", "output_dir": "2024-13-01"}
    prompts = {
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "system_prompt": "Answer: be brief",
    }
    config = read_run_config([f"--{key}={value}" for key, value in {**texts, **prompts}.items()])
    assert config.values == texts
    assert (config.own.chat_template, config.own.system_prompt) == tuple(prompts.values())
    for text, value in (("", None), ("null", None), ("false", False), ("out/a: b", "out/a: b")):
        assert read_run_config(["--resume_from_checkpoint", text]).values["resume_from_checkpoint"] == value
    assert not read_run_config(["--resume_from_checkpoint", "true"]).values  # as is the default here
    rewarded = ["grpo", "--reward_funcs", "accuracy_reward"]
    for text, value in (("False", "none"), ("true", "group"), ("batch", "batch")):
        assert read_run_config([*rewarded, "--scale_rewards", text]).values["scale_rewards"] == value


def test_paths_below_the_home_folder_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    file = config(tmp_path, "model_name_or_path: ~/m\ndatasets: [{path: ~/a.jsonl}]\ntokenizer_name_or_path: ~/t")
    found = read_run_config([file, "--output_dir", "~/out", "--run_name=~"])
    assert found.values["model_name_or_path"] == "/home/ada/m"
    assert found.values["datasets"] == [{"path": "/home/ada/a.jsonl"}]
    assert (found.values["output_dir"], found.values["run_name"]) == ("/home/ada/out", "~")
    assert found.own.tokenizer_name_or_path == "/home/ada/t"


CONVERTED = ("warmup_ratio", "gamma_beta_ratio", "model_init_kwargs", "unsloth_configs", "unsloth_lora_r")
KEYS = [*own_keys(), *RENAMED, *SWITCHES, *NESTED, *VALUES, *INERT, *OFF, *CONVERTED, "dataset_name", "loss_type"]
HOSTILE = [
    *(None, True, -1, 10**308, math.nan, math.inf, "", "x", "1e999", b"x", datetime.date(2024, 1, 1)),
    *([], [None], [["a"], {"b": 1}], {}, {1: 2}, {"x": [math.nan]}, {"x": {"y": {1: [2]}}}, {"a", "b"}),
]


def hostile_files() -> Iterator[dict[str, Any]]:
    for key, value in itertools.product(get_keys("grpo"), HOSTILE):
        yield {"method": "sft", key: value}
        yield {"method": "grpo", "reward_funcs": ["accuracy_reward"], key: value}
    for key, value in itertools.product(dict.fromkeys(KEYS), HOSTILE):
        yield {"method": "cpo", "dataset_mixer": {"a": 1}, key: value}  # which takes the most translated keys
    for key, value in itertools.product(("method", "loss", "datasets", "optim", "lora_r", "env", 5), HOSTILE):
        yield {"adapters": {"a": {key: value}}}
        yield {"sweep": {key: [value]}}
    for key, value in itertools.product(("id", "config", "split", "columns", "weight", 5), HOSTILE):
        yield {"dataset_mixture": {"datasets": [{"id": "a", key: value}]}}
    for key, value in itertools.product(("datasets", "seed", "test_split_size", 5), HOSTILE):
        yield {"dataset_mixture": {"datasets": [{"id": "a"}], key: value}}
    for key, value in itertools.product(("env", "lora_r", "datasets", "num_epochs", "wandb_project"), HOSTILE):
        yield {
            "base_model": "m",
            "adapter": "lora",
            "sequence_len": 5,
            "saves_per_epoch": 2,
            "wandb_x": 1,
            key: value,
        }


def test_every_value_is_taken_or_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for values in hostile_files():
        monkeypatch.setattr(run_config, "read_yaml", lambda _, values=values: dict(values))
        with suppress(ConfigError):
            config = read_run_config(["config.yaml"])
            if config.own.has_adapters:
                read_adapters(config)


def test_keys_that_are_refused_are_in_the_documentation() -> None:
    page = PAGE.read_text("utf-8")
    sources = [
        Path(run_config.__file__).with_name(name).read_text("utf-8") for name in ("trl_objects.py", "keys.py")
    ]
    keys = {*re.findall(r'(?:ConfigError\(|yield)\s*\(?\s*f?"(\w+): ', "".join(sources))}
    keys |= {*REJECTED}
    assert len(keys) > 15
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", page)] == []


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"invalid keys \(2\).\n.*\n.*"):
        read_run_config([config(tmp_path, "max_length: x"), "--lerning_rate", "1"])
    with pytest.raises(ConfigError, match="x.yaml: cannot be read"):
        read_run_config([str(tmp_path / "x.yaml")])
    with pytest.raises(ConfigError, match="stray: is not a key"):
        read_run_config([config(tmp_path, "max_length: 3"), "stray"])


def test_aliases_that_expand_without_end_are_refused(tmp_path: Path) -> None:
    """Of lists, of merged mappings, and of one that contains itself."""
    lists = [f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    merged = [f"- &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 30)]
    for bomb in (["- &a0 [x]", *lists], ["- &a0 {x: 1}", *merged], ["- &a [*a]"]):
        file = config(tmp_path, "\n".join(["datasets:", *bomb]))
        with pytest.raises(ConfigError, match="config.yaml: is not valid YAML. its aliases expand to more than"):
            read_run_config([file])
        with pytest.raises(ConfigError, match="config.yaml: .* cannot be read .its aliases expand to more than"):
            shardwise.Sharding.from_accelerate(file)
    defaults = "datasets:\n- &first {path: a, split: train}\n- {<<: *first, path: b}"
    second = read_run_config([config(tmp_path, defaults)]).values["datasets"][1]
    assert second == {"path": "b", "split": "train"}
    nested = "env: {a: {b: &base {X: 1}, c: &own {<<: *base, X: 2}}}\ndataset_kwargs: {<<: *own, X: 3}"
    assert run_config.read_yaml(Path(config(tmp_path, nested)))["dataset_kwargs"] == {"X": 3}


def test_a_mistake_is_reported_at_once(tmp_path: Path) -> None:
    """Before the imports that take seconds."""
    slow = ("accelerate", "datasets", "numpy", "peft", "torch", "transformers", "trl")
    code = (
        "import sys\nfrom shardwise.training.run_config import read_run_config\n"
        f"try: read_run_config([{config(tmp_path, 'max_lenght: 3')!r}])\n"
        f"except Exception as error: print(error)\nprint([name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Did you mean max_length?" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_a_method_that_is_not_supported_is_named(tmp_path: Path) -> None:
    for method in (*OTHER_METHODS, "ppo"):
        with pytest.raises(ConfigError, match=f"{method}: is not supported. Use one of sft, dpo"):
            read_run_config([method, config(tmp_path, "max_length: 3")])
    for method, why in OTHER_METHODS.items():
        with pytest.raises(ConfigError, match=f"method: {method} is not supported: {why}"):
            read_run_config([config(tmp_path, f"method: {method}")])


PUBLISHED = Path(__file__).with_name("published")
ENGINES_AND_KERNELS = {"use_vllm", "vllm_server_port", "use_liger_kernel", "use_liger", "torch_compile"}


def test_published_configurations_with_an_engine_or_kernels_pass_the_check(tmp_path: Path) -> None:
    """As they were published, also those of which ``published.py`` runs the rest."""
    seen = Counter[str]()
    for file in PUBLISHED.rglob("*.yaml"):
        given = yaml.safe_load(file.read_text("utf-8"))
        kept = given.keys() & (ENGINES_AND_KERNELS | {"attn_implementation"})
        if "dataset_splits" in given:  # names are masked
            given["dataset_splits"] = ["train", "test"][: len(given["dataset_splits"])]
        found = read_run_config([file.stem.partition("-")[0], config(tmp_path, yaml.safe_dump(given))]).values
        for key in kept:
            today = "use_liger_kernel" if key == "use_liger" else key
            assert found[today] == given[key], (file.stem, key)
        seen.update(kept)
    assert seen.keys() == ENGINES_AND_KERNELS | {"attn_implementation"}


def test_our_keys_are_in_the_table_and_none_of_trls() -> None:
    table = json.loads(Path(run_config.__file__).with_name("trl_keys.json").read_text("utf-8"))
    assert len(table["all"]) > 100
    ours = table.pop("shardwise")
    assert ours.keys() == {field.name for field in dataclasses.fields(ShardwiseArguments)}
    assert not ours.keys() & set().union(*table.values())


def test_a_training_on_the_cpu_beside_an_accelerator_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_patched_names()
    from shardwise.training import trl_objects

    monkeypatch.setattr(trl_objects, "accelerator", lambda: torch.device("cuda"))
    lines = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nactivation_checkpointing: false\nbf16: false\n"
    read = read_run_config(["sft", config(tmp_path, lines + "use_cpu: true\n")])
    with pytest.raises(ConfigError, match=r"use_cpu: ranks of this machine compute on cuda\. Hide its devices"):
        trl_objects.parse(read)
    assert trl_objects.parse(read, planned_ranks=1).training.use_cpu


def test_offloaded_activations_that_would_fail_or_be_weights_are_refused(tmp_path: Path) -> None:
    require_patched_names()
    from shardwise.training import trl_objects

    lines = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nbf16: false\nactivation_offloading: true\n"
    words = ["sft", config(tmp_path, lines), "--activation_checkpointing"]
    read = read_run_config([*words, "true"])
    if trl_objects.accelerator() is None:
        with pytest.raises(ConfigError, match=r"activation_offloading: needs an accelerator\. Remove it"):
            trl_objects.parse(read)
    assert trl_objects.parse(read, planned_ranks=2).training.activation_offloading
    read = read_run_config([*words, "false"])
    assert trl_objects.parse(read, planned_ranks=1).training.activation_offloading
    with pytest.raises(ConfigError, match=r"gathered weights .* Set gradient_checkpointing: true, or remove it"):
        trl_objects.parse(read, planned_ranks=2)


def test_a_value_that_the_parser_of_trl_refuses_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    require_patched_names()
    from shardwise.training import trl_objects

    read = read_run_config(
        ["--model_name_or_path=m", "--include_num_input_tokens_seen=non_padding", "--bf16=false"]
    )
    with pytest.raises(ConfigError, match=r"argument --include_num_input_tokens_seen.* got non_padding"):
        trl_objects.parse(read)
    assert not capsys.readouterr().err, "the usage"


def test_keys_that_the_installed_libraries_lack_are_not_left_out(tmp_path: Path) -> None:
    require_patched_names()
    import transformers

    from shardwise.training import trl_objects

    read = read_run_config(["sft", config(tmp_path, "model_name_or_path: m\ndataset_name: d\noutput_dir: o\n")])
    read = dataclasses.replace(read, values={**read.values, "newer": False, "bf16": False, "newest": {"a": 1}})
    message = rf"newer, newest: transformers {re.escape(transformers.__version__)} and TRL .* do not have this"
    with pytest.raises(ConfigError, match=message):
        trl_objects.parse(read)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_what_trl_switches_off_of_liger_stays_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """In the trained model and in frozen ones: TRL's losses need the hidden states before the head."""
    require_patched_names()
    from shardwise.training import trl_objects

    lines = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nactivation_checkpointing: false\nbf16: false\n"
    lines += "use_liger_kernel: true\n" + "reward_funcs: [accuracy_reward]\n" * (method == "grpo")
    read = read_run_config([method, config(tmp_path, lines + "liger_kernel_config: {rope: false}\n")])
    arguments = trl_objects.parse(read)
    monkeypatch.setattr(trl_objects, "accelerator", lambda: torch.device("cuda"))
    for options in (trl_objects.model_options(arguments), trl_objects._frozen_options(arguments, None)):
        assert options["liger_kernel_config"] == {"rope": False, "fused_linear_cross_entropy": False}


def test_the_base_of_many_loras_is_in_bfloat16_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    """TRL's own default is float32, for parameters that are trained."""
    require_patched_names()
    from shardwise.training import trl_objects

    lines = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nactivation_checkpointing: false\nbf16: true\n"
    for dtype, expected in (("", "bfloat16"), ("dtype: float32", "float32")):
        file = config(tmp_path, lines + dtype)
        arguments = trl_objects.parse(read_run_config(["sft", file]))
        assert trl_objects.base_options(arguments)["dtype"] == expected
    # Its blocks are recomputed in evaluation mode.
    lines = lines.replace(
        "checkpointing: false", "checkpointing: true\nactivation_checkpointing_kwargs: {every_n_layers: 2}"
    )
    arguments = trl_objects.parse(read_run_config(["sft", config(tmp_path, lines)]))
    assert trl_objects.base_options(arguments)["sharding"].activation_checkpointing == 2
