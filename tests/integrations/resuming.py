"""Functions that ranks run on checkpoints of the Trainer."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.integrations.trading import Theirs
from tests.loading.on_ranks import attempt
from tests.small_checkpoints import small_qwen3
from tests.state.optimizing import differences
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

import shardwise


def optimizer_for(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Grouped as the Trainer does it: matrices, and what has no decay."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if "norm" in name or name.endswith("bias")]
    decayed = [p for name, p in named if not ("norm" in name or name.endswith("bias"))]
    return AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=lr)


def schedule_for(optimizer: AdamW) -> LambdaLR:
    return get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=6)


def train(folder: Path, is_named: bool) -> None:
    """A run of the real Trainer on one process, stopped after two of six steps."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    torch.manual_seed(3)
    model = small_qwen3()
    tokens = torch.randint(0, model.config.vocab_size, (12, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        str(folder), max_steps=6, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, warmup_steps=1,
        weight_decay=0.01, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    optimizer = optimizer_for(model)
    if is_named:
        names = {p: name for name, p in model.named_parameters()}
        groups = [{**group, "params": [(names[p], p) for p in group["params"]]} for group in optimizer.param_groups]
        optimizer = AdamW(groups, lr=1e-3)
    given = (optimizer, schedule_for(optimizer))
    Trainer(model, arguments, train_dataset=rows, optimizers=given, callbacks=[Stop()]).train()


def sharded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = small_qwen3()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    if dist.is_initialized():
        shardwise.shard(model)
    return model


def resume(folder: str) -> tuple[list[str], dict[str, Any]]:
    """Return what differs from the files then, and the report."""
    model = sharded(5)
    optimizer = optimizer_for(model, lr=7.0)
    report = shardwise.load_trainer_checkpoint(model, folder)
    shardwise.load_accelerate_optimizer(model, optimizer, Path(folder, "optimizer.pt"))
    wanted = load_file(Path(folder, "model.safetensors"))
    state = shardwise.get_model_state_dict(model, "full_on_all_ranks")
    faults = differences({name: state[name] for name in wanted}, wanted, "model")
    restored = shardwise.get_optimizer_state_dict(model, optimizer, "full_on_all_ranks")
    saved = torch.load(Path(folder, "optimizer.pt"), weights_only=True)
    names = [name for group in restored["param_groups"] for name in group["params"]]
    by_name = {names[number]: entries for number, entries in saved["state"].items()}
    faults += differences(restored["state"], by_name, "optimizer")
    if [group["lr"] for group in restored["param_groups"]] != [group["lr"] for group in saved["param_groups"]]:
        faults.append("other learning rates")
    return faults, report.to_dict()


def write_fsdp(folder: str, form: str) -> None:
    """A folder as the Trainer writes it under FSDP."""
    model = sharded(1)
    optimizer = optimizer_for(model)
    step(model, optimizer)
    theirs = Theirs(form)
    theirs.save_model(model, folder)
    theirs.save_optimizer(model, optimizer, folder)
    if dist.get_rank() == 0:
        Path(folder, "trainer_state.json").write_text(json.dumps({"global_step": 1, "epoch": 0.5}))
    torch.save({}, Path(folder, f"rng_state_{dist.get_rank()}.pth"))


def step(model: nn.Module, optimizer: AdamW) -> None:
    tokens = torch.arange(12).reshape(2, 6)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def resume_fsdp(folder: str) -> tuple[list[str], dict[str, Any]]:
    source, model = sharded(1), sharded(2)
    before = optimizer_for(source)
    step(source, before)
    optimizer = optimizer_for(model, lr=3.0)
    report = shardwise.load_trainer_checkpoint(model, folder)
    shardwise.load_accelerate_optimizer(model, optimizer, folder)
    wanted, found = (shardwise.get_model_state_dict(item, "full_on_all_ranks") for item in (source, model))
    faults = [name for name in wanted if not torch.allclose(wanted[name], found[name], atol=1e-6)]
    state = shardwise.get_optimizer_state_dict(model, optimizer, "full_on_all_ranks")["state"]
    faults += [name for name, entries in state.items() if entries["step"] != 1]
    return faults, report.to_dict()


def refused(folder: str, how: str) -> tuple[str, str]:
    model = sharded(5)
    before = shardwise.get_model_state_dict(model, "full_on_all_ranks")
    if how == "unnamed":
        path = Path(folder, "optimizer.pt")
        return attempt(lambda: shardwise.load_accelerate_optimizer(model, optimizer_for(model), path))
    error = attempt(lambda: shardwise.load_trainer_checkpoint(model, folder))
    after = shardwise.get_model_state_dict(model, "full_on_all_ranks")
    return ("the model was changed", error[1]) if differences(after, before) else error
