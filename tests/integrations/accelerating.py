"""Functions that ranks run in tests of accelerate."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from tests.support.world import attempt
from tests.truth import unlike as same_bits
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import shardwise

ROWS, LENGTH, STEPS, ACCUMULATION = 12, 8, 3, 2
"""Rows of all ranks in a micro-batch, tokens in a row, and how many steps of how many micro-batches there are."""

OURS, THEIRS = "shardwise", "accelerate"
WAYS = tuple((strategy, efficient) for strategy in (OURS, THEIRS) for efficient in (True, False))


@contextmanager
def launched() -> Iterator[None]:
    """The environment that a launcher gives a rank; accelerate's state is new at the beginning and at the end."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 1}
    _forget()
    with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items() if size > 1}):
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plugin(**settings: Any) -> FullyShardedDataParallelPlugin:
    given = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT", **settings}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **given)


def accelerator_for(strategy: str, efficient: bool = True, **settings: Any) -> Accelerator:
    chosen = plugin(cpu_ram_efficient_loading=efficient) if strategy == THEIRS else None
    split = DataLoaderConfiguration(split_batches=True)
    gradient_accumulation_steps = {"gradient_accumulation_steps": ACCUMULATION, "dataloader_config": split}
    return Accelerator(cpu=True, fsdp_plugin=chosen, **gradient_accumulation_steps, **settings)


def model_of(checkpoint: str, strategy: str, efficient: bool, kind: str = "whole") -> nn.Module:
    """A model as a script of this kind makes it, before ``prepare``."""
    if strategy == OURS and efficient:
        places = {"lora": "sharded", "replicated": "replicated"}
        tuning = {} if kind == "whole" else {"tuning": shardwise.Lora(lora(), placement=places[kind])}
        return shardwise.from_pretrained(checkpoint, dtype=torch.float32, **tuning).train()
    return scripted(checkpoint, kind)


def scripted(checkpoint: str, kind: str = "whole") -> nn.Module:
    """A model as transformers and PEFT alone make it; the same in one process and on the first of several ranks."""
    if kind == "classes":
        torch.manual_seed(5)
        return AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=3, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if kind != "whole":
        torch.manual_seed(11)
        model = get_peft_model(model, lora(["lm_head"] if kind == "saved modules" else None))
    return model.train()


def lora(modules_to_save: list[str] | None = None) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=modules_to_save)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


def schedule_of(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.05 * step))


def rows(steps: int = STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 97, (steps * ACCUMULATION * ROWS, LENGTH), generator=generator)


@dataclass
class Seen:
    """What a loop has seen."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def begin(accelerator: Accelerator, model: nn.Module, steps: int = STEPS) -> Any:
    """Everything prepared: model, optimizer, schedule, data."""
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    data = DataLoader(rows(steps), batch_size=ROWS)
    if not accelerator.is_fsdp2 or accelerator.state.fsdp_plugin.auto_wrap_policy is None:
        shardwise.shard(model, optimizers=(optimizer,))
    before = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    was_sharded = any(hasattr(parameter, "placements") for parameter in model.parameters())
    given = (model, optimizer, schedule, data)
    prepared = accelerator.prepare(*given)
    after = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert not was_sharded or before == after, "optimizers keep their very parameters"
    return prepared


def run(accelerator: Accelerator, prepared: tuple[Any, ...], first: int = 0, steps: int = STEPS) -> Seen:
    """Steps of an ordinary accelerate loop."""
    model, optimizer, schedule, data = prepared
    seen, total = Seen(), 0.0
    for number, batch in enumerate(data):
        if not first * ACCUMULATION <= number < steps * ACCUMULATION:
            continue
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            accelerator.backward(loss)
            total += float(accelerator.gather(loss.detach()).mean()) / ACCUMULATION
            if accelerator.sync_gradients:
                parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
                seen.norms.append(float(accelerator.clip_grad_norm_(parameters, 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen.losses.append(total)
            total = 0.0
    return seen


def plain(model: nn.Module, steps: int = STEPS) -> Seen:
    """The same in one process, by torch alone."""
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    seen = Seen()
    for batches in rows(steps).split(ROWS * ACCUMULATION):
        total = 0.0
        for batch in batches.split(ROWS):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / ACCUMULATION
            loss.backward()
            total += float(loss.detach())
        seen.norms.append(float(nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.losses.append(total)
    return seen


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.clone() for name, value in shardwise.get_model_state_dict(model, "full_on_all_ranks").items()
    }


@contextmanager
def alone() -> Iterator[None]:
    """In the environment of a process that knows nothing of FSDP."""
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    with mock.patch.dict(os.environ):
        for name in names:
            os.environ.pop(name, None)
        yield


def truth(checkpoint: str, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with alone():
        reference = scripted(checkpoint, kind)
    return dict(reference.state_dict()), dict(reference.named_buffers())


def brought_up(checkpoint: str, strategy: str, efficient: bool, kind: str = "whole") -> list[str]:
    """Names of tensors that are not the files', bit for bit, after ``prepare``; buffers too."""
    with launched(), shardwise.integrations.accelerate():
        accelerator = accelerator_for(strategy, efficient)
        model = model_of(checkpoint, strategy, efficient, kind)
        is_meta = {parameter.is_meta for name, parameter in model.named_parameters() if "embed" in name}
        assert is_meta == {strategy == THEIRS and efficient}
        model, *_ = begin(accelerator, model)
        state, buffers = truth(checkpoint, kind)
        return same_bits(whole(model), state) + same_bits(dict(model.named_buffers()), buffers)


def brought_up_by_theirs(checkpoint: str, kind: str) -> tuple[list[str], list[str]]:
    """What of accelerate's own loading differs from ours; the groups that it makes, and those under our switch."""
    from shardwise.integrations import accelerate_compat

    found, groups = [], []
    for switch in (nullcontext(), shardwise.integrations.accelerate()):
        with launched(), switch:
            accelerator = accelerator_for(THEIRS)
            if not accelerator.is_fsdp2:
                accelerate_compat.become_fsdp2(accelerator.state, plugin(cpu_ram_efficient_loading=True))
            model = scripted(checkpoint, kind)
            model, _ = accelerator.prepare(model, optimizer_of(model))
            found.append(whole(model))
            groups.append([name for name, module in model.named_modules() if isinstance(module, FSDPModule)])
    return same_bits(*found), sorted({*groups[0]} ^ {*groups[1]})


def trained(checkpoint: str, strategy: str, efficient: bool, kind: str = "whole") -> dict[str, Any]:
    """The greatest relative differences to the same loop in one process, of a model that begins alike."""
    with launched(), shardwise.integrations.accelerate():
        accelerator = accelerator_for(strategy, efficient)
        prepared = begin(accelerator, model_of(checkpoint, strategy, efficient, kind))
        initial = whole(prepared[0])
        seen, final = run(accelerator, prepared), whole(prepared[0])
        handed = accelerator.get_state_dict(prepared[0])
        assert (sorted(handed) == sorted(final)) if accelerator.is_main_process else handed == {}
        unwrapped = accelerator.unwrap_model(prepared[0])
        assert unwrapped is prepared[0]
        with alone():
            reference = scripted(checkpoint, kind)
    reference.load_state_dict(initial)
    return furthest_of_all(seen, final, reference)


def furthest_of_all(seen: Seen, final: dict[str, torch.Tensor], reference: nn.Module) -> dict[str, float]:
    """From what torch alone makes of a model in one process."""
    expected = plain(reference)
    return {
        "losses": furthest(seen.losses, expected.losses),
        "norms": furthest(seen.norms, expected.norms),
        "weights": max(float((final[name] - value).abs().max()) for name, value in reference.state_dict().items()),
    }


def furthest(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) > 0
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def widened(checkpoint: str, precision: str, efficient: bool) -> tuple[list[str], list[str], list[str]]:
    """The dtypes of a model of 16 bits that accelerate shards, alone and under our switch; names that differ."""
    from shardwise.integrations import accelerate_compat

    dtypes: list[list[str]] = []
    for switch in (nullcontext(), shardwise.integrations.accelerate()):
        with launched(), switch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # accelerate 1.13 warns of what it then does not do
            chosen = plugin(cpu_ram_efficient_loading=efficient)
            accelerator = Accelerator(cpu=True, fsdp_plugin=chosen, mixed_precision=precision)
            if not accelerator.is_fsdp2:
                accelerate_compat.become_fsdp2(accelerator.state, chosen)
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
            model.model.embed_tokens.weight.requires_grad_(False)
            model, _ = accelerator.prepare(model, optimizer_of(model))
            with alone():
                expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).state_dict()
            found = whole(model)
        dtypes.append([f"{name}: {value.dtype}" for name, value in found.items()])
    return *dtypes, same_bits({name: value.bfloat16() for name, value in found.items()}, expected)


def hybrid(values: dict[str, Any]) -> str:
    """The mesh of a configuration with replicas."""
    return shardwise.shard(nn.Linear(8, 8), shardwise.Sharding.from_accelerate(values)).mesh


def hybrid_on_some_ranks(values: dict[str, Any]) -> tuple[str, str]:
    """The last rank has not read the configuration."""
    read = dist.get_rank() < dist.get_world_size() - 1
    sharding = shardwise.Sharding.from_accelerate(values) if read else shardwise.Sharding(wrap="whole_model")
    return attempt(lambda: shardwise.shard(nn.Linear(8, 8), sharding))


def as_stored(checkpoints: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """By checkpoint, what differs from transformers' own after ``prepare``; nobody may broadcast or read whole."""

    def whole_is_read(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a tensor was read or sent whole")

    found = {}
    for checkpoint, keywords in checkpoints.items():
        with launched(), shardwise.integrations.accelerate():
            accelerator = accelerator_for(THEIRS)
            with mock.patch("transformers.modeling_utils.safe_open", whole_is_read):
                model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **keywords)
                assert all(parameter.is_meta for parameter in model.parameters())
                with mock.patch.object(dist, "broadcast", whole_is_read):
                    model, _ = accelerator.prepare(model, optimizer_of(model))
            with alone():
                expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **keywords)
            is_tied = model.lm_head.weight is model.model.embed_tokens.weight
            assert is_tied == (expected.lm_head.weight is expected.model.embed_tokens.weight)
            found[checkpoint] = same_bits(whole(model), expected.state_dict())
    return found


def compiled(checkpoint: str) -> dict[str, float]:
    """A model that torch has compiled, through prepare and the loop."""
    with launched(), shardwise.integrations.accelerate():
        accelerator = accelerator_for(OURS)
        model = torch.compile(model_of(checkpoint, OURS, True), backend="eager")
        optimizer = optimizer_of(model)
        data = DataLoader(rows(), batch_size=ROWS)
        prepared = accelerator.prepare(model, optimizer, schedule_of(optimizer), data)
        assert prepared[0] is model
        initial = whole(model)
        assert not any("_orig_mod" in name for name in initial)
        seen, final = run(accelerator, prepared), whole(model)
        unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
        assert type(unwrapped).__name__ == "FSDPQwen3ForCausalLM"
        with alone():
            reference = scripted(checkpoint)
    reference.load_state_dict(initial)
    return furthest_of_all(seen, final, reference)


def told_of_settings(checkpoint: str) -> list[list[str]]:
    """What ``prepare`` logs of models that lack settings of the accelerator, and of one that has them."""
    from shardwise.integrations import accelerate_patches

    has_all = shardwise.Sharding(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        activation_checkpointing=True,
        compile=True,
    )
    told: list[list[str]] = []
    given = (
        (torch.bfloat16, shardwise.Sharding()),
        (torch.float32, shardwise.Sharding()),
        (torch.float32, has_all),
    )

    def wrapped() -> Any:
        """Recomputed by torch."""
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
        return fully_shard(model)

    def enabled() -> Any:
        """Recomputed by transformers."""
        model = shardwise.from_pretrained(checkpoint)
        model.gradient_checkpointing_enable()
        return model

    models = [partial(shardwise.from_pretrained, checkpoint, dtype=dtype, sharding=how) for dtype, how in given]
    for make in (*models, wrapped, enabled):
        warned = mock.patch.object(accelerate_patches._log, "warning")
        with launched(), shardwise.integrations.accelerate(), warned as warning:
            chosen = plugin(cpu_offload=True, activation_checkpointing=True, cpu_ram_efficient_loading=False)
            accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=chosen, dynamo_backend="eager")
            accelerator.prepare(make())
            told.append([call.args[0] % call.args[1:] for call in warning.call_args_list])
    return told
