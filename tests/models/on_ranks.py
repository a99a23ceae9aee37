"""Functions that ranks run in tests of tuning."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PromptTuningConfig
from tests import truth
from tests.models import reference
from tests.support.world import attempt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise

SLOWLY = 1e-3
"""A rate at which steps do not make of the last bits whatever they like."""


def place() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def bring_up(directory: str, keywords: Mapping[str, Any], mesh: Mapping[str, int] | None = None) -> nn.Module:
    """The model, on a mesh with these axes."""
    torch.set_num_threads(1)
    settings = dict(keywords)
    if mesh is not None:
        made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        settings["sharding"] = shardwise.Sharding(mesh=made)
    model: nn.Module = shardwise.from_pretrained(directory, **settings)
    return model


def error_of(directory: str, keywords: dict[str, Any]) -> tuple[str, str]:
    return attempt(lambda: bring_up(directory, keywords))


def report_of(directory: str, keywords: dict[str, Any]) -> dict[str, Any]:
    _, report = shardwise.from_pretrained(directory, output_loading_info=True, **keywords)
    return {**report.to_dict(), "text": str(report)}


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: truth.whole(parameter.detach()).clone() for name, parameter in named}


def values_after_load(
    directory: str, keywords: dict[str, Any], mesh: dict[str, int] | None = None
) -> dict[str, torch.Tensor]:
    return whole_values(bring_up(directory, keywords, mesh))


def set_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Whole values into a model that may be sharded."""
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in values:
                value = values[name].to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)


def logits(directory: str, keywords: dict[str, Any], mesh: dict[str, int] | None = None) -> torch.Tensor:
    """What the model answers once its adapter has other values than at first."""
    model = bring_up(directory, keywords, mesh)
    set_values(model, reference.unsettle(whole_values(model)))
    return reference.logits(model)


def train(
    directory: str, keywords: dict[str, Any], mesh: dict[str, int] | None, steps: int, rows: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of this rank's rows, and all parameters at the end."""
    model = bring_up(directory, keywords, mesh)
    set_values(model, reference.unsettle(whole_values(model)))
    losses = reference.train(model, steps, rows, *place())
    return losses, whole_values(model)


def merged_tensors(directory: str, targets: list[str]) -> tuple[str, str]:
    """The error that the tensors of a merged model raise."""
    model = bring_up(directory, {"tuning": shardwise.Lora(LoraConfig(r=2, target_modules=targets))})
    return attempt(lambda: list(shardwise.iter_hf_tensors(model, only=shardwise.options.MergedAdapter())))


def merge_in_place(directory: str, keywords: dict[str, Any], safe: bool) -> tuple[tuple[str, str], float]:
    """The error of PEFT's merge, and how far the answers are from before. A second adapter is not merged."""
    model: Any = bring_up(directory, keywords)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    set_values(model, reference.unsettle(whole_values(model)))
    before = reference.logits(model)
    with torch.no_grad():
        error = attempt(lambda: model.merge_adapter(safe_merge=safe))
        after = reference.logits(model)
        told = attempt(lambda: model.merge_and_unload(safe_merge=safe, adapter_names=["default"]))
    return (error if error == told else ("two errors", f"{error} {told}")), float((after - before).abs().max())


def use_second_adapter(directory: str, keywords: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The errors of passes through an adapter that PEFT adds to the sharded model, and of a save by PEFT."""
    model: Any = bring_up(directory, keywords)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    tokens = reference.batch(1, 3)
    errors = {"first": attempt(lambda: model(tokens).logits.sum().backward())}
    errors["saved by PEFT"] = attempt(lambda: model.save_pretrained("nowhere", is_main_process=not dist.get_rank()))
    model.set_adapter("second")
    errors["trained"] = attempt(lambda: model(tokens))
    with torch.no_grad():
        errors["without gradients"] = attempt(lambda: model(tokens))
    model.set_adapter("second", inference_mode=True)
    errors["frozen"] = attempt(lambda: model(tokens))
    return errors


def save_prompt(directory: str) -> tuple[str, str]:
    """The error of saving what prompt tuning has added to a model before it was sharded."""
    config: Any = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = reference.stock(directory, config)
    shardwise.shard(model)
    return attempt(lambda: shardwise.save_adapter(model, "nowhere"))


def what_is_sharded(directory: str, keywords: dict[str, Any]) -> dict[str, str]:
    """Placement of each parameter, and the shape that this rank holds."""
    model = bring_up(directory, keywords)
    return {
        name: f"{parameter.placements} {tuple(parameter.to_local().shape)}"
        if isinstance(parameter, DTensor)
        else f"whole {tuple(parameter.shape)}"
        for name, parameter in model.named_parameters()
    }


def save_adapter(
    directory: str, keywords: dict[str, Any], adapter: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Save an adapter whose elements all matter; what the live model answers, and its values."""
    model = bring_up(directory, keywords)
    values = whole_values(model)
    set_values(model, reference.unsettle(values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.mul_(1.5)
    name = keywords["tuning"].adapter
    report = shardwise.save_adapter(model, adapter, adapter=name, verify=True)
    assert report.is_verified
    return reference.logits(model), whole_values(model)


def save_adapter_of_ranks(directory: str, keywords: dict[str, Any], adapter: str) -> dict[str, int]:
    """Save an adapter that every rank has filled with its own number; the rows that this rank held, by key."""
    model = bring_up(directory, keywords)
    rows: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            local = parameter.detach().to_local()
            local.fill_(dist.get_rank() + 1.0)
            rows[name.replace(".default", "")] = local.shape[0]
    shardwise.save_adapter(model, adapter)
    return {
        key.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): count for key, count in rows.items()
    }


def save_wrapped(directory: str, keywords: dict[str, Any], adapter: str) -> None:
    """Save the adapter of a model with checkpointed blocks, compiled."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    model = bring_up(directory, keywords)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Qwen3DecoderLayer))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    shardwise.save_adapter(torch.compile(model), adapter)  # type: ignore[arg-type]


def held_in_training(directory: str, keywords: dict[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """What this rank holds after a step of AdamW, in bytes, and the report of the load."""
    from shardwise.fsdp import torch_private

    torch.set_num_threads(1)
    model, report = shardwise.from_pretrained(directory, output_loading_info=True, **keywords)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    tokens = reference.batch(1, seed=dist.get_rank())
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
    optimizer.step()
    assert len(optimizer.state) == len(trained)

    def nbytes(tensors: Any) -> int:
        return sum(truth_local(tensor).nbytes for tensor in tensors)

    managers = torch_private.fsdp_params(model)
    padded = {p: torch_private.padded_numel(m) * p.element_size() for p, m in managers.items()}
    groups = [
        sum(padded[item.sharded_param] * place()[1] for item in group.fsdp_params)
        for group in torch_private.iter_fsdp_param_groups(model)
    ]
    held = {
        "weights": nbytes(model.parameters()),
        "padding": sum(padded[p] - truth_local(p).nbytes for p in padded),
        "gradients": nbytes(p.grad for p in trained),
        "moments": nbytes(s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")),
        "largest": max(groups),
    }
    return held, report.to_dict()


def truth_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def with_other_tunings(directory: str, what: str) -> tuple[str, str]:
    """The error where the last rank has another tuning."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    alpha = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=3 if is_last else 2)
    tuning = shardwise.Lora(alpha) if what == "alpha" else shardwise.Freeze(1 if is_last else -1)
    return error_of(directory, {"tuning": tuning})


def generated(directory: str, keywords: dict[str, Any]) -> torch.Tensor:
    model: Any = bring_up(directory, keywords)
    tokens = reference.batch(1, seed=2)
    answer: torch.Tensor = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        model(input_ids=tokens, decoder_input_ids=tokens) if model.config.is_encoder_decoder else model(tokens)
    return answer


def train_in_half(directory: str, keywords: dict[str, Any]) -> tuple[dict[str, str], list[float]]:
    """The dtypes of what is trained, and the losses of some steps on the same rows in mixed precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = bring_up(directory, {**keywords, "dtype": "bfloat16", "sharding": shardwise.Sharding(mp_policy=policy)})
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, foreach=False)
    tokens = reference.batch(2, seed=dist.get_rank())
    losses: list[float] = []
    for _ in range(6):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {name: str(parameter.dtype) for name, parameter in trained.items()}, losses


def accumulated(
    directory: str, keywords: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of a batch at once, and of its halves one after the other, exchanged with the last."""
    rank, size = place()
    tokens = reference.batch(4 * size, seed=1)[rank * 4 : (rank + 1) * 4]
    found: list[dict[str, torch.Tensor]] = []
    for parts in (1, 2):
        model: Any = bring_up(directory, keywords)
        set_values(model, reference.unsettle(whole_values(model)))
        for part, rows in enumerate(tokens.chunk(parts)):
            model.set_requires_gradient_sync(part == parts - 1)  # PEFT's model passes it on
            (model(input_ids=rows, labels=rows, use_cache=False).loss / parts).backward()
        named = model.named_parameters()
        found.append({name: truth.whole(p.grad).clone() for name, p in named if p.grad is not None})
    return found[0], found[1]


def train_long(
    directory: str, keywords: dict[str, Any], steps: int, rows: int, by_hand: bool
) -> tuple[list[float], list[str]]:
    """Losses of this rank's rows, and after every step a digest of all that a LoRA adds, whole, on this rank."""
    model = bring_up(directory, keywords)
    values = reference.unsettle(whole_values(model))
    if by_hand:
        model = _sharded_by_hand(directory, keywords["tuning"], whole_values(model), model)
    set_values(model, values)
    digests: list[str] = []

    def after() -> None:
        digests.append(_digest(model))

    losses = reference.train(model, steps, rows, *place(), learning_rate=SLOWLY, after=after)
    return losses, digests


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def _sharded_by_hand(directory: str, tuning: Any, values: Mapping[str, torch.Tensor], like: nn.Module) -> nn.Module:
    """The model that transformers and PEFT bring up on every rank, with these values, sharded by torch alone."""
    model = reference.stock(directory, getattr(tuning, "config", None))
    trained = {name for name, parameter in like.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
            parameter.requires_grad_(name in trained)
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module)
    return fully_shard(model).train(like.training)
