"""Functions that ranks run on adapters in accelerate's files."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tests.integrations.trading import FORMS, SMALL, Theirs
from tests.small_checkpoints import small_qwen3
from tests.state.optimizing import differences
from tests.state.stating import local
from torch import nn

import shardwise
from shardwise.options import AdapterOnly


def adapted(seed: int, config: LoraConfig, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = get_peft_model(small_qwen3(**changes), config)
    shardwise.shard(model)
    return model


def lora(seed: int) -> nn.Module:
    """Matrices, a module trained whole, and embeddings, whose factors are in a dict of parameters."""
    names = ["q_proj", "down_proj", "embed_tokens"]
    return adapted(seed, LoraConfig(r=4, target_modules=names, modules_to_save=["lm_head"]))


def tied_lora(seed: int) -> nn.Module:
    """Matrices on a base whose head is its embeddings, which torch does not know as frozen by its second name."""
    return adapted(seed, LoraConfig(r=4, target_modules=["q_proj"]), tie_word_embeddings=True)


def tied(folder: str, form: str) -> tuple[list[str], tuple[str, ...]]:
    """accelerate's adapter of a tied base, alone and in a checkpoint of the Trainer's; what was left out."""
    model = tied_lora(1)
    fill(model)
    Theirs(form).save_model(model, folder, adapter_only=True)
    faults: list[str] = []
    for load in (_adapter_in, _trainer_checkpoint_in):
        target = tied_lora(2)
        base = {name: tensor.clone() for name, tensor in base_of(target).items()}
        report = load(target, folder)
        faults += differences(adapter_of(target), adapter_of(model)) + differences(base_of(target), base, "base")
    return faults, report.unexpected


def _adapter_in(model: nn.Module, folder: str) -> Any:
    return shardwise.load_accelerate_model(model, folder, only=AdapterOnly(), options=SMALL)


def _trainer_checkpoint_in(model: nn.Module, folder: str) -> Any:
    if dist.get_rank() == 0:
        Path(folder, "trainer_state.json").write_text('{"global_step": 2, "epoch": 1.0}')
    dist.barrier()
    return shardwise.load_trainer_checkpoint(model, folder, options=SMALL).model


def fill(model: nn.Module) -> None:
    """Values that no other rank has: a part that gets lost, or another rank's, is seen."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                local(parameter).copy_(torch.randn(local(parameter).shape, generator=generator))


def adapter_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return shardwise.get_model_state_dict(model, "full_on_all_ranks", only=AdapterOnly())


def traded(folder: str, form: str, ours_first: bool) -> tuple[list[str], int]:
    """An adapter written by one and read by the other; how many tensors it has."""
    model, target = lora(1), lora(2)
    fill(model)
    base = {name: tensor.clone() for name, tensor in base_of(target).items()}
    if ours_first:
        shardwise.save_accelerate_model(model, folder, FORMS[form], only=AdapterOnly(), options=SMALL)
        Theirs(form).load_model(target, folder, adapter_only=True)
    else:
        Theirs(form).save_model(model, folder, adapter_only=True)
        report = shardwise.load_accelerate_model(target, folder, only=AdapterOnly(), options=SMALL)
        left_out = ("base_model.model.model.embed_tokens.base_layer.weight",) if form == "full" else ()
        assert (report.missing, report.unexpected, report.mismatched) == (left_out, (), ()), str(report)
    faults = differences(adapter_of(target), adapter_of(model))
    return faults + differences(base_of(target), base, "base"), len(adapter_of(model))


def base_of(model: nn.Module) -> dict[str, torch.Tensor]:
    mine = {id(p) for p in model.parameters() if p.requires_grad}
    return {name: local(p.detach()) for name, p in model.named_parameters() if id(p) not in mine}


def full_names(folder: str) -> Any:
    """The names in the file of a whole adapter."""
    model = lora(1)
    shardwise.save_accelerate_model(model, folder, FORMS["full"], only=AdapterOnly())
    found = torch.load(Path(folder, "pytorch_model_fsdp.bin"), weights_only=True)
    return sorted(found), sorted(name for name, p in model.named_parameters() if p.requires_grad)


def beside_another(folder: str) -> tuple[list[str], int, tuple[str, ...]]:
    """An adapter that is not the trained one, in one file and back; how many tensors, and what was missing."""

    def two(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(small_qwen3(), config)
        model.add_adapter("other", config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("default" in name)
        shardwise.shard(model)
        return model

    model, target, other = two(1), two(2), AdapterOnly("other")
    default = adapter_of(target)
    shardwise.save_accelerate_model(model, folder, FORMS["full"], only=other, options=SMALL)
    report = shardwise.load_accelerate_model(target, folder, only=other, options=SMALL)
    wanted, found = (
        shardwise.get_model_state_dict(item, "full_on_all_ranks", only=other) for item in (model, target)
    )
    return differences(found, wanted) + differences(adapter_of(target), default), len(wanted), report.missing
