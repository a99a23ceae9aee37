"""Expansion of ``adapters:`` and ``sweep:``, and the keys that are refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.training import tiny

from shardwise.core.errors import ConfigError
from shardwise.training import adapters_config
from shardwise.training.adapters_config import read_adapters
from shardwise.training.run_config import RunConfig, read_run_config
from shardwise.training.run_estimate import plan_run

COMMON = {"model_name_or_path": "base", "dataset_name": "rows", "output_dir": "out", "max_steps": 5}


def read(folder: Path, **values: Any) -> RunConfig:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**COMMON, **values}, sort_keys=False), "utf-8")
    return read_run_config([str(file)])


def test_common_keys_are_defaults_of_each_adapter(tmp_path: Path) -> None:
    adapters = {
        "ada": {"lora_r": 4, "num_train_epochs": 2},
        "bob": {"datasets": [{"path": "x"}]},
    }
    config = read(tmp_path, adapters=adapters, lora_alpha=7)
    assert config.own.has_adapters
    found = read_adapters(config)
    assert found["ada"].values == {
        "model_name_or_path": "base",
        "dataset_name": "rows",
        "output_dir": "out/ada",
        "lora_alpha": 7,
        "lora_r": 4,
        "num_train_epochs": 2,
        "use_peft": True,
    }
    assert found["bob"].values["max_steps"] == 5


def test_adapters_have_losses_with_keys_of_their_own(tmp_path: Path) -> None:
    adapters = {"ada": {}, "eve": {"loss": "dpo", "beta": 0.5}}
    found = read_adapters(read(tmp_path, adapters=adapters, assistant_only_loss=True))
    assert [(one.method, one.own.loss) for one in found.values()] == [("sft", "sft"), ("dpo", "sft")]
    assert found["ada"].values["assistant_only_loss"]
    assert found["eve"].values["beta"] == 0.5
    assert "assistant_only_loss" not in found["eve"].values
    of_sft = {"completion_only_loss": None}
    found = read_adapters(
        read(tmp_path, loss="dpo", beta=0.5, **of_sft, adapters={"ada": {"loss": "sft"}, "eve": {}})
    )
    assert [(one.method, one.values.get("beta")) for one in found.values()] == [("sft", None), ("dpo", 0.5)]
    swept = read_adapters(read(tmp_path, loss="dpo", sweep={"beta": [0.1, 0.2]}))
    assert [one.values["beta"] for one in swept.values()] == [0.1, 0.2]


def test_folders_of_adapters_are_never_their_names(tmp_path: Path) -> None:
    found = read_adapters(read(tmp_path, adapters={"../x": {}, "ada": {}}))
    assert [one.values["output_dir"] for one in found.values()] == ["out/%2E.%2Fx", "out/ada"]


def test_a_sweep_is_a_product_of_lists(tmp_path: Path) -> None:
    sweep = {"lora_r": [4, 8], "learning_rate": [1e-4, 0.001], "optim": ["sgd"]}
    alone = read_adapters(read(tmp_path, sweep=sweep))
    assert list(alone) == ["r4-lr0.0001-sgd", "r4-lr0.001-sgd", "r8-lr0.0001-sgd", "r8-lr0.001-sgd"]
    assert [own.values["learning_rate"] for own in alone.values()] == [1e-4, 1e-3] * 2
    both = read_adapters(read(tmp_path, sweep={"lora_r": [4, 8]}, adapters={"ada": {"seed": 1}, "bob": {}}))
    wanted = {"ada-r4": (4, 1), "ada-r8": (8, 1), "bob-r4": (4, None), "bob-r8": (8, None)}
    assert {name: (own.values["lora_r"], own.values.get("seed")) for name, own in both.items()} == wanted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"adapters": {"ada": {"lora_alfa": 4}}},
            "adapters.ada.lora_alfa: is not a key of sft. Did you mean lora_",
        ),
        ({"adapters": {"ada": {"lora_r": "four"}}}, "adapters.ada.lora_r: 'four' is a str. Expected int"),
        ({"adapters": {"ada": {"bf16": True}}}, "adapters.ada.bf16: cannot differ between adapters. Set it once"),
        (
            {"adapters": {"ada": {"packing": True}}},
            "adapters.ada.packing: cannot differ between adapters. Remove it",
        ),
        (
            {"adapters": {"ada": {"optim": "adamw_torch_8bit"}}},
            "adapters.ada.optim: adamw_torch_8bit is not support",
        ),
        ({"adapters": {"ada": {"lr_scheduler_type": "greedy"}}}, "adapters.ada.lr_scheduler_type: greedy is not"),
        ({"adapters": {"": {}}}, "adapters: '' is not a name"),
        ({"adapters": {"a\nb": {}}}, "is not a name. Use up to 100 characters that can be printed"),
        ({"adapters": {"ada": 3}}, "adapters.ada: is not a mapping"),
        ({"adapters": [{"name": "ada"}]}, "adapters: .* is a list. Expected dict"),
        ({"adapters": {}}, "adapters: is empty"),
        ({"adapters": {"ada": {5: 1}}}, "adapters.ada.5: is not a key of sft"),
        ({"sweep": {5: [1]}}, "sweep.5: is not a key of sft"),
        ({"sweep": {"lora_r": 4}}, "sweep.lora_r: is not a list of values"),
        ({"sweep": {"lora_r": []}}, "sweep.lora_r: is not a list of values"),
        ({"sweep": {"lora_r": [4, 4]}}, "sweep: two combinations have the same name"),
        ({"sweep": {"seed": list(range(2000))}}, "sweep: has 2000 combinations. Use at most 1024"),
        ({"adapters": {"ada": {"beta": 1.0}}}, "adapters.ada.beta: is a key of loss: dpo, not of sft. Remove it"),
        (
            {"loss": "dpo", "adapters": {"ada": {"completion_only_loss": True}}},
            "adapters.ada.completion_only_loss: is a key of loss: sft, not of dpo. Remove it, or set loss",
        ),
        ({"adapters": {"ada": {"loss": "kto"}}}, "adapters.ada.loss: 'kto' is not a choice. Use one of dpo, sft"),
        ({"adapters": {"ada": {"loss": "dpo"}}, "beta": 1.0}, "beta: is a key of dpo, kto.*, not of sft"),
        (
            {"adapters": {"ada": {}, "eve": {"loss": "dpo"}}, "sweep": {"beta": [1.0]}},
            "sweep.beta: is a key of loss: dpo, not of sft",
        ),
        ({"adapters": {"ada": {"loss": "dpo", "loss_type": ["ipo"]}}}, "adapters.ada.loss_type: cannot differ"),
        (
            {"adapters": {"ada": {"loss": "dpo"}}, "disable_dropout": False},
            "disable_dropout: is a key of .*not of sft",
        ),
        (
            {"loss": "dpo", "adapters": {"ada": {"loss": "sft"}}, "completion_only_loss": False},
            "completion_only_loss: is a key of .*not of dpo",
        ),
        (
            {"sweep": {f"dataset_{key}": [40 * key[0]] for key in ("name", "config", "train_split", "test_split")}},
            "sweep: n{40}-c{40}-t{40}-t{40} has more than 128 characters. Sweep fewer keys",
        ),
        (
            {"adapters": {"ada": {}}, "gradient_checkpointing_kwargs": {"offload": True}},
            "gradient_checkpointing_kwargs: offload is not supported with adapters",
        ),
        ({"adapters": {"ada": {"loss": "dpo"}}, "eos_token": "x"}, "eos_token: no adapter has a loss with it"),
        ({"loss": "dpo"}, "loss: dpo is for many LoRAs. Set adapters or sweep, or method instead"),
        ({"adapters": {"ada": {}}, "env": {"A=B": "x"}}, "adapters.ada: env: 'A=B' cannot be set"),
        ({"adapters": {"ada": {}}, "packing": True}, "packing: is not supported with adapters"),
        ({"adapters": {"ada": {}}, "method": "dpo"}, "method: dpo is not supported with adapters"),
        ({"adapters": {"ada": {}}, "use_peft": False}, "use_peft: False is not supported with adapters. Use True"),
        ({"adapters": {"ada": {}}, "report_to": "wandb"}, "report_to: wandb is not supported with adapters"),
        ({"adapters": {"ada": {}}, "dp_replicate_size": 2}, "dp_replicate_size: is not supported with adapters"),
    ],
)
def test_bad_keys_are_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_adapters(read(tmp_path, **values))


def test_a_sweep_is_counted_before_it_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_config, "itertools", None)
    sweep = {key: list(range(1, 101)) for key in ("lora_r", "seed", "max_steps", "save_steps")}
    with pytest.raises(ConfigError, match="sweep: has 200000000 combinations. Use at most 1024"):
        read_adapters(read(tmp_path, sweep=sweep, adapters={"ada": {}, "bob": {}}))


def test_the_former_key_works_with_one_line(tmp_path: Path) -> None:
    config = read(tmp_path, tenants={"ada": {}, "bob": {}})
    assert list(read_adapters(config)) == ["ada", "bob"]
    assert config.notes == ("tenants: read as adapters",)
    with pytest.raises(ConfigError, match="tenants: is a former name of adapters, which has another value"):
        read(tmp_path, tenants={"ada": {}}, adapters={"bob": {}})


def test_all_bad_keys_are_reported_without_torch(tmp_path: Path) -> None:
    read_file = tmp_path / "config.yaml"
    read_file.write_text(yaml.safe_dump({**COMMON, "adapters": {"ada": {"lora_q": 1}, "bob": {"lora_z": 1}}}))
    program = (
        "import sys\n"
        "from shardwise.cli.train import _read_config\n"
        "from shardwise.core.errors import ConfigError\n"
        "try:\n"
        f"    _read_config([{str(read_file)!r}])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "invalid keys (2)" in done.stdout
    assert "adapters.ada.lora_q" in done.stdout
    assert "adapters.bob.lora_z" in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing`:FutureWarning")
def test_a_plan_has_the_memory_of_all_adapters(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "model")
    common = {
        "model_name_or_path": str(tmp_path / "model"),
        "bf16": False,
        "tokens_per_pass": 128,
        "max_length": 64,
    }
    # Of a training on 8 ranks, on a machine without vLLM.
    batches = {"per_device_train_batch_size": 1, "num_generations": 8, "max_length": None}
    batches |= {"reward_funcs": ["accuracy_reward"]}
    sampled = read(tmp_path, **{**common, "tokens_per_pass": None, **batches}, method="grpo", use_vllm=True)
    assert "generation" in " ".join(plan_run(sampled, 8, {"device": "cuda"}).notes)
    adapters = {
        "ada": {"lora_r": 2, "lora_target_modules": ["q_proj"]},
        "bob": {"lora_r": 4, "lora_target_modules": ["q_proj"], "optim": "sgd"},
        "eve": {"lora_r": 4, "lora_target_modules": ["q_proj"], "loss": "dpo", "optim": "adamw_torch"},
    }
    config = read(tmp_path, **common, adapters=adapters)
    one, many = (plan_run(each, 2, {"device": "cuda"}) for each in (read_adapters(config)["eve"], config))
    half = read(tmp_path, **common, adapters=adapters, activation_checkpointing_kwargs={"every_n_layers": 2})
    less_recomputed = plan_run(read_adapters(half)["eve"], 2, {"device": "cuda"})
    assert less_recomputed.peak_bytes > one.peak_bytes
    assert one.training and many.training  # noqa: PT018
    # Two layers from width 32 to 32.
    elements = [2 * r * (32 + 32) for r in (2, 4, 4)]
    assert (one.trainable_parameters, many.trainable_parameters) == (elements[-1], sum(elements))
    assert many.training.gradient_bytes == 4 * sum(elements)
    assert many.training.optimizer_bytes == (8 * (elements[0] + elements[2]),) * 2
    own = {phase.phase: phase.device for phase in many.training.phases}
    assert {phase["gradients"] for phase in own.values()} == {4 * sum(elements)}
    assert own["loss"]["logits"] == 12 * 128 * 260 + 2 * 128 * 32 * 4
    assert own["loss"]["activations"] > 0
    assert "2 x 64 tokens on each rank" in str(many)
    assert "3 adapters" in str(many)
