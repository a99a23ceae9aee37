"""What sections of a configuration become."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.quiet import quieten
from tests.training import tiny
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.models.wrapping.blocks import CompileBlocks, Off, PerBlock
from shardwise.models.wrapping.policies import (
    Automatic,
    Classes,
    MinSize,
    ModelPlan,
    ModuleListBlocks,
    NoSplitModules,
    WholeModel,
)
from shardwise.tenants.config import tenants_of
from shardwise.tenants.foreseeing import plan_tenants
from shardwise.training.configuration.config import config_of, read_config
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.configuration.config_values import (
    accumulation_of,
    loss_of,
    resolved,
    row_layout,
    sharding_of,
    tuning_of,
)
from shardwise.training.data.batches import Flattened, Packed, Padded
from shardwise.training.foretelling.foreseeing import plan_training
from shardwise.training.options import TrainOptions
from shardwise.training.passes.forward import ShardedGradients, WholeGradients
from shardwise.training.passes.losses import ChunkedLogits, WholeLogits
from shardwise.training.prepare import ModelRequest, load_model
from shardwise.tuning.modes import ExistingLora, Freeze, Full, InBlocks, Lora, Replicated


def configured(*overrides: str) -> TrainConfig:
    return read_config(None, ("model=org/name", "data=chats.jsonl", "output=out", *overrides))


@pytest.mark.parametrize(
    ("override", "policy"),
    [
        ("sharding.wrap=automatic", Automatic()),
        ("sharding.wrap=model_plan", ModelPlan()),
        ("sharding.wrap=no_split_modules", NoSplitModules()),
        ("sharding.wrap=module_list", ModuleListBlocks()),
        ("sharding.wrap=whole_model", WholeModel()),
        ("sharding.wrap.classes=[A,B]", Classes(("A", "B"))),
        ("sharding.wrap.min_parameters=1000", MinSize(1000)),
    ],
)
def test_groups(override: str, policy: object) -> None:
    assert sharding_of(configured(override).sharding, TrainOptions()).wrap == policy


def test_how_blocks_are_run_and_what_is_computed_in() -> None:
    plain = sharding_of(configured().sharding, TrainOptions())
    assert (plain.activation_checkpointing, plain.compiling, plain.reshard_after_forward) == (Off(), Off(), True)
    config = configured(
        "sharding.activation_checkpointing=true",
        "sharding.compile=true",
        "sharding.reshard_after_forward=false",
        "sharding.precision=bfloat16",
        "sharding.reduce_dtype=bfloat16",
    )
    found = sharding_of(config.sharding, config.options())
    assert (found.activation_checkpointing, found.compiling) == (PerBlock(), CompileBlocks())
    assert found.reshard_after_forward is False
    second = configured("sharding.activation_checkpointing=2").sharding
    assert sharding_of(second, TrainOptions()).activation_checkpointing == PerBlock(every=2)
    assert found.mp_policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sharding.replicas=2", "sharding.replicas=2: 1 ranks cannot be dealt"),
        ("sharding.offload=cpu", "sharding.offload='cpu': one process"),
    ],
)
def test_what_one_process_cannot_do(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharding_of(configured(override).sharding, TrainOptions())


def test_tunings() -> None:
    assert tuning_of(configured().tuning) == Full()
    freeze = configured("tuning=freeze", "tuning.trainable_layers=-2", "tuning.extra_modules=[norm]")
    assert tuning_of(freeze.tuning) == Freeze(-2, (), ("norm",))
    existing = configured("tuning=lora", "tuning.adapter=there", "tuning.placement=replicated")
    assert tuning_of(existing.tuning) == ExistingLora("there", adapters=Replicated())


def test_a_lora_is_pefts() -> None:
    given = ("tuning.r=4", "tuning.lora_alpha=8", "tuning.target_modules=[q_proj,v_proj]", "tuning.use_rslora=true")
    found = tuning_of(configured("tuning=lora", *given, "tuning.options.bias=all").tuning)
    expected = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True, bias="all"
    )
    assert isinstance(found, Lora)
    assert found.config.to_dict() == expected.to_dict()
    assert found.adapters == InBlocks()
    plain = tuning_of(configured("tuning=lora").tuning)
    assert isinstance(plain, Lora)
    assert plain.config.to_dict() == LoraConfig(task_type="CAUSAL_LM").to_dict()
    with pytest.raises(ConfigError, match=r"tuning: PEFT takes no such LoRA: .*rr"):
        tuning_of(configured("tuning=lora", "tuning.options.rr=1").tuning)


def test_layouts_losses_and_accumulation() -> None:
    packing = configured("data.packing=true", "data.max_length=64").data
    assert row_layout(configured().data, "flash_attention_2") == Padded()
    assert row_layout(packing, None) == row_layout(packing, "sdpa") == Packed(64)
    assert row_layout(packing, "flash_attention_2") == Flattened(64)
    assert loss_of(configured().training) == ChunkedLogits(512)
    assert loss_of(configured("training.loss_chunk_tokens=null").training) == WholeLogits()
    model, options = torch.nn.Linear(2, 2), TrainOptions()
    for override, accumulation in (
        ("training.accumulate=auto", WholeGradients()),
        ("training.accumulate=whole_gradients", WholeGradients()),
        ("training.accumulate=sharded_gradients", ShardedGradients()),
    ):
        assert accumulation_of(configured(override).training, model, options, "float32") == accumulation


def test_what_is_left_open_is_decided_by_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured()
    on_cpu = resolved(config, torch.device("cpu"))
    assert (on_cpu.sharding.precision, on_cpu.sharding.activation_checkpointing) == ("float32", False)
    for can, precision in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda can=can, **_: can)
        on_gpu = resolved(config, torch.device("cuda", 0))
        assert (on_gpu.sharding.precision, on_gpu.sharding.activation_checkpointing) == (precision, True)
        assert on_gpu.options().dtype == precision
        assert sharding_of(on_gpu.sharding, on_gpu.options()).activation_checkpointing == PerBlock()
    asked = configured("sharding.precision=fp16", "sharding.activation_checkpointing=false")
    assert resolved(asked, torch.device("cuda", 0)) == asked
    assert asked.sharding.precision == "float16"


def on_four(folder: str) -> tuple[tuple[int, ...], int, str]:
    """The mesh of two replicas, parameters on the host, and the error for three."""
    quieten()
    config = configured("sharding.replicas=2", "sharding.offload=cpu", "tuning=freeze", "tuning.trainable_layers=1")
    sharding = sharding_of(config.sharding, config.options())
    assert isinstance(sharding.offload_policy, CPUOffloadPolicy)
    model, _ = load_model(ModelRequest(folder, config.options(), tuning_of(config.tuning), sharding))
    [mesh] = {tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    with pytest.raises(ShardwiseError) as caught:
        sharding_of(configured("sharding.replicas=3").sharding, config.options())
    return mesh, trained, str(caught.value)


@pytest.mark.distributed
def test_replicas_on_four_ranks(worlds: Any, tmp_path: Any) -> None:
    folder = tiny.write_model(tmp_path)
    layer = sum(parameter.numel() for parameter in tiny.model().model.layers[0].parameters())
    for mesh, trained, error in worlds(4).run(on_four, str(folder)):
        assert (mesh, trained) == ((2, 2), layer)
        assert error.startswith("sharding.replicas=3: 4 ranks cannot be dealt")


@pytest.mark.parametrize("many", [False, True], ids=["one training", "tenants"])
def test_a_plan_asks_for_the_tokenizer_that_the_training_will_have(monkeypatch, tmp_path, many: bool) -> None:
    """As many tokens as it has: of the revision, and with the code, that the configuration says."""
    folder, asked = str(tiny.write_model(tmp_path)), []

    def found(name: str, **how: Any) -> object:
        asked.append((name, how))
        return tiny.tokenizer()

    monkeypatch.setattr("shardwise.training.prepare.AutoTokenizer.from_pretrained", found)
    values: dict[str, Any] = {
        "model": {"name": folder, "revision": "abc", "trust_remote_code": True, "resize_vocab": "tokenizer"},
        "data": {"train": "none.jsonl", "max_length": 8},
        "output": "none",
    }
    if many:
        tuning = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
        plan_tenants(tenants_of({**values, "tenants": [{"name": "ada", "tuning": tuning}]}), ranks=1, device="cpu")
    else:
        plan_training(config_of({**values, "output": {"directory": "none"}}), ranks=1, device="cpu")
    assert asked == [(folder, {"revision": "abc", "trust_remote_code": True})]
