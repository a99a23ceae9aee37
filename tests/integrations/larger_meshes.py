"""Meshes of context, tensor and expert parallelism, on ranks. Importable, for spawned processes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.integrations import accelerating
from tests.integrations.accelerating import alone, launched, optimizer_of, plugin, same_bits, whole
from tests.integrations.runs import ARGUMENTS
from tests.support.world import said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

import shardwise
from shardwise.integrations import ShardwiseTrainer, for_trainer

LENGTH = 16


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the labels that follow them, positions."""
    ids = torch.randint(0, 97, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    return ids, labels, torch.arange(LENGTH).expand(count, LENGTH).contiguous()


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, items: int) -> Any:
    batch = {"input_ids": ids, "labels": labels, "shift_labels": labels, "position_ids": positions}
    return model(**batch, use_cache=False, num_items_in_batch=items).loss


def plain(checkpoint: str) -> PreTrainedModel:
    with alone():
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()


def furthest_gradient(model: nn.Module, reference: nn.Module) -> float:
    """The greatest difference between gradients, of each tensor relative to its greatest element."""
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    found = 0.0
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole_grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found = max(found, float((whole_grad - expected[name]).abs().max() / expected[name].abs().max()))
    return found


# Context parallelism


def _ring_forward(call: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    query, key, value, dropout, causal = (*args, 0.0, False)[:5]
    mesh, local = query.device_mesh, [each.to_local() for each in (query, key, value)]
    group = mesh.get_group()
    found = ring._templated_ring_attention(group, 2, call, *local, is_causal=causal, dropout_p=dropout, **keywords)
    return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in found)


def _ring_backward(call: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    *tensors, dropout, causal = args
    mesh, group = tensors[0].device_mesh, tensors[0].device_mesh.get_group()
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    local = {name: each.to_local() for name, each in zip(names, tensors, strict=True)}
    found = ring._templated_ring_attention_backward(
        group, 2, call, grad_out_name="grad_out", is_causal=causal, dropout_p=dropout, **local, **keywords
    )
    return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in found)


@contextmanager
def ring_attention_on_cpus() -> Iterator[None]:
    """torch's own ring, which it has for kernels of GPUs only, around the kernel of CPUs."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    with mock.patch.dict(ring.custom_ops, {forward: _ring_forward, backward: _ring_backward}):
        yield


def accelerator_of(**sizes: int) -> Accelerator:
    chosen = plugin(cpu_ram_efficient_loading=True)
    return Accelerator(cpu=True, fsdp_plugin=chosen, parallelism_config=ParallelismConfig(**sizes))


def mesh_named(accelerator: Accelerator, *axes: str) -> DeviceMesh:
    mesh = accelerator.torch_device_mesh
    assert mesh is not None
    return mesh[axes if len(axes) > 1 else axes[0]]


def trained_in_contexts(checkpoint: str, sizes: dict[str, int], axes: tuple[str, ...]) -> tuple[list[str], float]:
    """Train one step with sequences split over ``cp``: what a load got wrong, and the furthest gradient."""
    with launched(), shardwise.integrations.accelerate(), ring_attention_on_cpus():
        accelerator = accelerator_of(**sizes)
        sharding = shardwise.Sharding(mesh=mesh_named(accelerator, *axes) if axes else None)
        model = shardwise.from_pretrained(checkpoint, dtype=torch.float32, sharding=sharding).train()
        model, _ = accelerator.prepare(model, optimizer_of(model))
        reference = plain(checkpoint)
        faults = same_bits(whole(model), dict(reference.state_dict()))
        groups = dist.get_world_size() // sizes["cp_size"]
        everything = rows(2 * groups)
        items = int((everything[1] != -100).sum())
        loss_of(reference, *everything, items).backward()
        own = dist.get_rank() // sizes["cp_size"]
        split = [each[2 * own : 2 * own + 2].clone() for each in everything]
        with accelerator.maybe_context_parallel(
            buffers=split, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(split)
        ):
            assert split[0].shape == (2, LENGTH // sizes["cp_size"])
            accelerator.backward(loss_of(model, *split, items) * dist.get_world_size())
        return faults, furthest_gradient(model, reference)


def trained_by_the_trainer(checkpoint: str, out: str, sizes: dict[str, int]) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of three steps of four rows. Labels are not equally many in all parts of sequences."""
    ids, *_ = rows(12)
    examples = [
        {"input_ids": row, "labels": [-100] * (number % 11) + row[number % 11 :]}
        for number, row in enumerate(ids.tolist())
    ]
    groups = dist.get_world_size() // sizes["cp_size"] if sizes else 1
    with launched(), ring_attention_on_cpus():
        split = {"parallelism_config": ParallelismConfig(**sizes) if sizes else None}
        given = ARGUMENTS | {"max_steps": 3, "learning_rate": 0.1, "optim": "sgd", **split}
        arguments = TrainingArguments(out, per_device_train_batch_size=2 // groups, **given)
        model = shardwise.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        kind: Any = type("Mine", (ShardwiseTrainer, Trainer), {})
        trainer = kind(model=for_trainer(model), args=arguments, train_dataset=examples)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], whole(model)


def refusals(checkpoint: str) -> dict[str, str]:
    """The errors of what would train on other rows, positions or labels than it says. On two ranks."""
    told: dict[str, str] = {}
    with launched(), shardwise.integrations.accelerate():
        accelerator = accelerator_of(cp_size=2)
        model = shardwise.from_pretrained(checkpoint, dtype=torch.float32).train()
        model, _ = accelerator.prepare(model, optimizer_of(model))
        told["no ring"] = said(lambda: _split(accelerator, model, rows(2), range(3)))
        told["no positions"] = said(lambda: _split(accelerator, model, rows(2), (0, 1)))
        told["no labels"] = said(lambda: _split(accelerator, model, rows(2), (0, 2)))
        theirs = plain(checkpoint)
        theirs, _ = accelerator.prepare(theirs, optimizer_of(theirs))
        told["no positions, sharded by accelerate"] = said(lambda: _split(accelerator, theirs, rows(2), (0, 1)))
        eager = shardwise.from_pretrained(checkpoint, attn_implementation="eager")
        told["eager"] = said(lambda: accelerator.prepare(eager, optimizer_of(eager)))
        grid = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        told["mesh"] = said(lambda: shardwise.from_pretrained(checkpoint, sharding=shardwise.Sharding(mesh=grid)))
        part = plain(checkpoint)
        fully_shard(part, mesh=grid["tp"])
        told["part"] = said(lambda: accelerator.prepare(part, optimizer_of(part)))
    with launched(), shardwise.integrations.accelerate():
        ulysses = accelerator_of(dp_shard_size=2, sp_size=2)
        told["sp"] = said(lambda: ulysses.prepare(model, optimizer_of(model)))
    return told


def _split(accelerator: Accelerator, model: nn.Module, given: Any, passed: Iterable[int]) -> None:
    """Call a model with some of tokens, labels and positions within ``maybe_context_parallel``."""
    split = list(given)
    with accelerator.maybe_context_parallel(
        buffers=split, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(split)
    ):
        names = ("input_ids", "shift_labels", "position_ids")
        model(**{names[each]: split[each] for each in passed}, labels=split[1], use_cache=False)


# Tensor and expert parallelism


def distributed(checkpoint: str, **sizes: int) -> PreTrainedModel:
    """A model on meta as transformers' plans deal it."""
    config = AutoConfig.from_pretrained(checkpoint)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    given, _, meshes = kind.prepare_distribute_model(DistributedConfig(**sizes))
    with torch.device("meta"):
        model = kind(config)
    return kind.maybe_distribute_model(model, given, meshes)


def by_plans(checkpoint: str, folder: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Load, train one step, save, and go on from a checkpoint: a model that is dealt by transformers' plans."""
    with launched():
        model = distributed(checkpoint, **sizes)
        shardwise.load(model, checkpoint)
        model.train()
        reference = plain(checkpoint)
        told: dict[str, Any] = {"loaded": same_bits(whole(model), dict(reference.state_dict()))}
        kinds = {str(each.placements) for each in model.parameters() if isinstance(each, DTensor)}
        groups = sizes.get("fsdp_size", 1)
        everything = rows(2 * groups)
        items = int((everything[1] != -100).sum())
        loss_of(reference, *everything, items).backward()
        own = dist.get_rank() // sizes.get("tp_size", 1)
        part = [each[2 * own : 2 * own + 2] for each in everything]
        (loss_of(model, *part, items) * groups).backward()
        told["gradient"] = furthest_gradient(model, reference)
        optimizer = optimizer_of(model)
        optimizer.step()
        shardwise.save(model, Path(folder) / "saved")
        with shardwise.Checkpointer(Path(folder) / "run") as keeper:
            keeper.save(1, shardwise.TrainState(model, optimizer))
        stepped = whole(model)
        states = shardwise.get_optimizer_state_dict(model, optimizer, "full_on_all_ranks")
        flat = shardwise.from_pretrained(Path(folder) / "saved", dtype=torch.float32)
        told["saved"] = same_bits(whole(flat), stepped)
        onto = shardwise.from_pretrained(checkpoint, dtype=torch.float32)
        other = optimizer_of(onto)
        with shardwise.Checkpointer(Path(folder) / "run") as keeper:
            keeper.restore(shardwise.TrainState(onto, other))
        told["resumed"] = same_bits(whole(onto), stepped)
        moments = shardwise.get_optimizer_state_dict(onto, other, "full_on_all_ranks")
        return {**told, "kinds": sorted(kinds), "moments": str(moments) == str(states)}


def adapter_by_plans(checkpoint: str, folder: str) -> list[str]:
    """What shardwise's file of a LoRA on a model that is dealt by transformers' plans has unlike PEFT's."""
    with launched():
        model = distributed(checkpoint, tp_size=2)
        shardwise.load(model, checkpoint)
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = get_peft_model(model, config)
        ours, theirs = Path(folder) / "ours", Path(folder) / f"theirs{dist.get_rank()}"
        shardwise.save_adapter(adapted, ours)
        adapted.save_pretrained(theirs)
        assert adapted._tp_size == 2
        return same_bits(*(load_file(each / "adapter_model.safetensors") for each in (ours, theirs)))


def prepared_by_plans(checkpoint: str) -> dict[str, float]:
    """The furthest of a loop of accelerate from one process, where two ranks share each row. On four ranks."""
    with launched(), shardwise.integrations.accelerate():
        sizes = ParallelismConfig(tp_size=2, dp_shard_size=2)
        accelerator = accelerating.accelerator_for(accelerating.THEIRS, parallelism_config=sizes)
        model = distributed(checkpoint, tp_size=2, fsdp_size=2)
        shardwise.load(model, checkpoint)
        prepared = accelerating.begin(accelerator, model.train())
        seen, final = accelerating.run(accelerator, prepared), whole(prepared[0])
    return accelerating.furthest_of_all(seen, final, plain(checkpoint))
