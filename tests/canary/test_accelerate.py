"""The meaning of unexported names of accelerate, and of the functions that delay a load."""

import inspect
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate import accelerator as accelerator_module
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from torch import nn

from shardwise.core.errors import find_private
from shardwise.fsdp.rebind import plain_optimizer
from shardwise.integrations import accelerate_compat as compat
from shardwise.models import build
from shardwise.models.lora import peft_private


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not compat.has_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def llama(folder: Path) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return model


FSDP = ("fsdp_plugin", "accelerator")


@pytest.mark.parametrize(
    ("owner", "name", "arguments"),
    [
        (Accelerator, "_prepare_cp", ("self", "args")),
        (Accelerator, "_prepare_fsdp2", ("self", "args")),
        (Accelerator, "_prepare_one", ("self", "obj", "first_pass", "device_placement")),
        (Accelerator, "prepare", ("self", "args", "device_placement")),
        (Accelerator, "get_state_dict", ("self", "model", "unwrap")),
        (Accelerator, "clip_grad_norm_", ("self", "parameters", "max_norm", "norm_type")),
        (Accelerator, "save_state", ("self", "output_dir", "safe_serialization")),
        (Accelerator, "load_state", ("self", "input_dir", "load_kwargs")),
        (accelerator_module, "save_fsdp_model", (*FSDP, "model", "output_dir", "model_index")),
        (accelerator_module, "load_fsdp_model", (*FSDP, "model", "input_dir", "model_index")),
        (accelerator_module, "save_fsdp_optimizer", (*FSDP, "optimizer", "model", "output_dir", "optimizer_index")),
        (accelerator_module, "load_fsdp_optimizer", (*FSDP, "optimizer", "model", "input_dir", "optimizer_index")),
        (fsdp_utils, "fsdp2_load_full_state_dict", ("accelerator", "model", "full_sd")),
        (AcceleratorState, "__init__", ("self", "mixed_precision", "cpu")),
    ],
)
def test_functions_begin_with_the_arguments_that_are_known(owner, name, arguments) -> None:
    assert tuple(inspect.signature(getattr(owner, name)).parameters)[: len(arguments)] == arguments


def test_one_process_is_no_fsdp_and_a_state_may_become_one(accelerator) -> None:
    assert compat.has_state()
    assert accelerator.distributed_type == compat.DistributedType.NO
    assert not accelerator.is_fsdp2
    assert compat.get_plugin(accelerator) is None
    chosen = FullyShardedDataParallelPlugin(fsdp_version=2)
    compat.become_fsdp2(accelerator.state, chosen)
    assert accelerator.is_fsdp2
    assert accelerator.distributed_type == "FSDP"
    assert compat.get_plugin(accelerator) is chosen
    assert compat.fsdp2_plugin().auto_wrap_policy is None


def test_objects_prepared_with_a_model(accelerator) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found = compat.prepare_without_wrapping(accelerator, (model, optimizer, schedule), (None, None, None))
    assert found[0] is model
    assert plain_optimizer(found[1]) is optimizer
    assert type(found[2]).__name__ == "AcceleratedScheduler"
    assert accelerator._models == [model]
    assert accelerator._optimizers == [found[1]]
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_from_pretrained_fills_a_model_through_one_door(tmp_path: Path, monkeypatch) -> None:
    """The model is on meta, with nothing tied; what the outcome says is missing is tied, or initialized."""
    saved = llama(tmp_path)
    owner, name = find_private(build.LOADING_FUNCTION)
    original, seen = getattr(owner, name), []

    def door(model, state_dict, files, config, *others):
        seen.append((state_dict, [Path(file).name for file in files], build.is_plain_load(config)))
        assert all(tensor.is_meta for tensor in model.parameters())
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert build.get_load_dtype(config) is torch.bfloat16
        outcome, rest = original(model, state_dict, files, config, *others)
        assert outcome.missing_keys == {"lm_head.weight"}
        same = build.load_outcome({"lm_head.weight"}, set(), set())
        assert vars(same).keys() == vars(outcome).keys()
        return same, rest

    monkeypatch.setattr(owner, name, staticmethod(door))
    owner, name = find_private(build.ALLOCATING_FUNCTION)
    placing = vars(owner)[name]

    def place(model, missing, *others):
        placed.append((type(model).__name__, missing))
        return placing(model, missing, *others)

    placed: list[tuple[str, object]] = []
    monkeypatch.setattr(owner, name, place)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert placed == [("LlamaForCausalLM", set())] or placed == [("LlamaForCausalLM", {"lm_head.weight"})]
    assert seen == [(None, ["model.safetensors"], True)]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight.bfloat16())
    assert not build.loads_for_fsdp()


def test_peft_moves_adapters_through_patched_methods_and_copies_modules(tmp_path: Path, monkeypatch) -> None:
    from peft import LoraConfig, get_peft_model

    seen: list[nn.Module] = []
    for owner, name in map(find_private, peft_private.moving_functions()):
        original = vars(owner)[name]

        def door(*given, original=original, **keywords):
            layer = peft_private.find_adapter_layer(given)
            if layer is not None:
                seen.append(layer)
                assert [tensor.shape for tensor in layer.get_base_layer().parameters()] == [(8, 8)]
            return original(*given, **keywords)

        monkeypatch.setattr(owner, name, door)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["model.norm"])
    model = get_peft_model(llama(tmp_path), config)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert len(seen) >= 2
    assert {id(item) for item in seen} == {id(layer)}
    prefix = "base_model.model.model.norm"
    wanted = {f"{prefix}.modules_to_save.default.weight": f"{prefix}.original_module.weight"}
    assert peft_private.map_copied_names(model) == wanted
