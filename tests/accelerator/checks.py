"""The same work on simulated devices and on the CPU. Each function returns the differences."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model_state_dict
from tests.accelerator import simulated
from tests.integrations import runs
from tests.saving.adapters import tensors_of
from tests.state import sharding
from tests.truth import unlike
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import shardwise
from shardwise.checkpoints import write
from shardwise.core.errors import ShardingError
from shardwise.core.tensors import Box
from shardwise.fsdp.named_tensors import local_tensor as _local
from shardwise.loading import load
from shardwise.ranks.processes import try_collectives
from shardwise.ranks.world import World
from shardwise.saving import save
from shardwise.transfer.distributed_chunks import ChunkStaging
from shardwise.transfer.move import ShardExchange
from shardwise.transfer.move_plan import Block
from shardwise.transfer.staging import DeviceStaging, HostStaging

LOADS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16"},
    "nf4": {"dtype": "bfloat16", "quantization": shardwise.options.Nf4(block_size=32)},
    "nested nf4": {"dtype": "bfloat16", "quantization": shardwise.options.Nf4(block_size=32, double_quant=True)},
    "lora": {"dtype": "float32", "tuning": shardwise.Lora(LoraConfig(r=2, target_modules="all-linear"))},
}


def on_host() -> shardwise.Sharding:
    """A mesh of the same ranks on the CPU."""
    return shardwise.Sharding(mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def own_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor, on the CPU."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _local(tensor).detach().cpu().clone() for name, tensor in named}


def both(folder: str, what: str = "float32", **keywords: Any) -> tuple[nn.Module, nn.Module]:
    """The same model on the devices and on the CPU. Initial values of adapters are drawn alike."""
    models = []
    for given in (keywords, {**keywords, "sharding": on_host()}):
        torch.manual_seed(0)
        model: Any = shardwise.from_pretrained(folder, **LOADS[what], **given)
        model.set_attn_implementation("eager")
        models.append(model)
    there, here = models
    return there, here


@contextlib.contextmanager
def late_copies() -> Iterator[None]:
    """In the block copies to devices take so long that what is read too early is mostly read before they end."""
    simulated.native.set_upload_delay(20_000)
    yield
    simulated.native.set_upload_delay(0)


def loads(folder: str, what: str) -> list[str]:
    with late_copies():
        there, here = both(folder, what)
    kinds = {tensor.device.type for tensor in [*there.parameters(), *there.buffers()]}
    return unlike(own_values(there), own_values(here)) + sorted(kinds - {"npu"})


def loads_without_a_wait(folder: str) -> list[str]:
    """As :func:`loads`, and the load does not wait for its last copies, which come after it has returned.

    Buffers are neither compared between ranks nor filled in the order of the stream: both wait for other copies.
    """
    stagings: list[DeviceStaging] = []
    begin = DeviceStaging.begin

    def begin_late(self: DeviceStaging) -> memoryview:
        """Let the copies of earlier requests go on, one of which this one waits for, and pause before its own."""
        with self.queued():
            simulated.native.resume_stream(self.device.index)
        buffer = begin(self)
        with self.queued():
            simulated.native.pause_stream(self.device.index)
        return buffer

    def finish(self: DeviceStaging) -> None:
        stagings.append(self)

    with (
        mock.patch.object(DeviceStaging, "begin", begin_late),
        mock.patch.object(DeviceStaging, "finish", finish),
        mock.patch.object(load, "require_equal_buffers"),
        mock.patch.object(load, "upload_buffer", return_value=HostStaging(0)),
    ):
        there = shardwise.from_pretrained(folder, dtype="float32")
        found = own_values(there)
    for staging in stagings:
        with staging.queued():
            simulated.native.resume_stream(staging.device.index)
    torch.npu.synchronize()
    assert unlike(own_values(there), own_values(shardwise.from_pretrained(folder, dtype="float32"))) == []
    return unlike(found, own_values(there))


def overwrite(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            _local(parameter).fill_(value)


def shards() -> list[str]:
    """A model of the host with its optimizer."""
    nets = [sharding.net_of(0) for _ in range(2)]
    optimizers = [adamw(net.parameters()) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        sharding.train(net, [optimizer], [], range(2))
    shardwise.shard(nets[0], optimizers=optimizers[:1])
    shardwise.shard(nets[1], optimizers=optimizers[1:], sharding=on_host())
    found = unlike(own_values(nets[0]), own_values(nets[1]))
    states = [moments(optimizer) for optimizer in optimizers]
    return found + unlike(*states)


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's part of an optimizer's state, by the number of its parameter."""
    states = enumerate(optimizer.state.values())
    return {
        f"{number} {key}": _local(value).cpu()
        for number, state in states
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def saves(folder: str, out: str) -> list[str]:
    """The files, and what goes through a stream of whole tensors."""
    there, here = both(folder, "bfloat16")
    shardwise.save(there, f"{out}/there")
    shardwise.save(here, f"{out}/here")
    files = [tensors_of(Path(out, name)) for name in ("there", "here")]
    streams = [
        {name: tensor.cpu().clone() for name, tensor in shardwise.iter_hf_tensors(model)} for model in (there, here)
    ]
    return unlike(*files) + unlike(*streams)


def saves_by_the_device_alone(folder: str, out: str) -> list[str]:
    """An adapter that is whole on each rank, written by owners, and the stream of a model on each host.

    ``dist.init_process_group()`` makes such a group.
    """
    group, options = dist.new_group(backend="hccl"), shardwise.options
    lora = shardwise.Lora(LoraConfig(r=2, target_modules="all-linear"), placement="replicated")
    model: Any = shardwise.from_pretrained(folder, tuning=lora, options=options.LoadOptions(process_group=group))
    with mock.patch.object(save, "_has_owners", return_value=True):
        shardwise.save_adapter(model, out, options=options.SaveOptions(process_group=group))
    saved = tensors_of(Path(out))
    adapter = {key: value.cpu() for key, value in get_peft_model_state_dict(model).items()}
    whole: Any = LlamaForCausalLM.from_pretrained(folder)
    streamed = dict(shardwise.iter_hf_tensors(whole, options=options.StreamOptions(process_group=group)))
    dist.destroy_process_group(group)
    return unlike(saved, adapter) + unlike(streamed, {key: whole.state_dict()[key] for key in streamed})


def moves_of_ranks_without_bytes(backend: str) -> int:
    """Collectives on devices in a round to which these ranks contribute nothing, as if a third one sent it."""
    group = dist.new_group(backend=backend)
    block = Block("", Box((0,), (0,)), (1,), 1, leaves=(), pieces_by_rank=((0, ()),), is_broadcast=False)
    with simulated.counting() as counts, World.current(group, call="move") as world:
        device, dtypes = torch.device("npu"), {"": torch.uint8}
        assert len(list(ShardExchange(world, [(block,)], mock.Mock(), None, dtypes, device).run())) == 1
    dist.destroy_process_group(group)
    return counts["collectives"]


def trained(folder: str, **keywords: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """The same model on both, after two steps by hand."""
    models = list(both(folder, **keywords))
    optimizers = [adamw(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(2):
            step(model, optimizer, number)
    return models, optimizers


def tokens_of(model: nn.Module, number: int) -> torch.Tensor:
    """Other tokens on each rank and in each step, where the model computes."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    kinds = {item.device_mesh.device_type for item in model.parameters() if isinstance(item, DTensor)}
    return torch.randint(0, 60, (2, 8), generator=generator).to(kinds.pop())


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    tokens = tokens_of(model, number)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(folder: str) -> list[str]:
    """Two steps, and the states of the model and of the optimizer, there and back."""
    (there, here), optimizers = trained(folder)
    found = unlike(own_values(there), own_values(here))
    states = [shardwise.get_model_state_dict(model) for model in (there, here)]
    found += unlike(*states)
    shardwise.get_optimizer_state_dict(there, optimizers[0])
    overwrite(there, 7)
    shardwise.set_model_state_dict(there, states[0])
    return found + unlike(own_values(there), own_values(here))


def offloads(folder: str) -> list[str]:
    """Parameters and optimizer stay on the host, pinned; two steps are those on the CPU."""
    policy = shardwise.Sharding(offload_policy=CPUOffloadPolicy())
    there = shardwise.from_pretrained(folder, dtype="float32", sharding=policy)
    here: Any = shardwise.from_pretrained(folder, dtype="float32", sharding=on_host())
    found = [
        name
        for name, parameter in there.named_parameters()
        if parameter.device.type != "cpu" or not _local(parameter).is_pinned()
    ]
    for model in (there, here):
        model.set_attn_implementation("eager")
        optimizer = adamw(model.parameters())
        for number in range(2):
            step(model, optimizer, number)
    return found + unlike(own_values(there), own_values(here))


def checkpoints(folder: str, out: str, mode: str) -> list[str]:
    """Restored as saved, although all weights are overwritten as soon as the call returns."""
    (model, _), optimizers = trained(folder)
    expected, state = own_values(model), moments(optimizers[0])
    with shardwise.Checkpointer(out, mode=mode) as checkpointer:
        checkpointer.save(2, shardwise.TrainState(model, optimizers[0]))
        overwrite(model, 7)
        checkpointer.wait()
    fresh = shardwise.from_pretrained(folder, dtype="float32")
    optimizer = adamw(fresh.parameters())
    with shardwise.Checkpointer(out) as checkpointer:
        checkpointer.restore(shardwise.TrainState(fresh, optimizer))
    return unlike(own_values(fresh), expected) + unlike(moments(optimizer), state)


def checkpoints_without_a_wait(folder: str, out: str) -> list[str]:
    """As :func:`checkpoints`, and no copy comes into host memory before that is written.

    Returns the parameters that are restored all the same.
    """
    device = torch.npu.current_device()
    own_copy, own_write = ChunkStaging.copy, write._write_local
    parameters: list[str] = []

    def copy(self: ChunkStaging, views: Any) -> Any:
        parameters.extend(chunk.key.removeprefix("model.") for chunk in views if chunk.key.startswith("model."))
        simulated.native.pause_stream(device)
        with mock.patch.object(torch.npu, "synchronize", return_value=None):
            return own_copy(self, views)

    def write_local(*args: Any) -> Any:
        try:
            return own_write(*args)
        finally:
            simulated.native.resume_stream(device)

    with mock.patch.object(ChunkStaging, "copy", copy), mock.patch.object(write, "_write_local", write_local):
        differing = checkpoints(folder, out, "async")
    assert parameters
    return [name for name in parameters if name not in differing]


def banks(folder: str) -> list[str]:
    """Two passes and steps of three tenants with different rows."""
    states = []
    for keywords in ({}, {"sharding": on_host()}):
        model: Any = shardwise.from_pretrained(folder, dtype="float32", **keywords)
        model.set_attn_implementation("eager")
        bank = bank_of(model)
        for number in range(2):
            pass_of(bank, number)
            for tenant in range(3):
                bank.optim_step(f"{tenant}")
        states.append({f"{name} {key}": value for name in "012" for key, value in _adapter(bank, name).items()})
    return unlike(*states)


def _adapter(bank: Any, name: str) -> dict[str, torch.Tensor]:
    return {key: value.cpu() for key, value in bank.state_dict(name)["adapter"].items()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """One tensor after the other, as is usual on the CPU: sums in the same order."""
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def rows(tenant: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + 10 * tenant + dist.get_rank())
    return {"input_ids": torch.randint(0, 60, (1 + tenant, 5 + tenant), generator=generator)}


def told(check: Callable[..., list[str]], *args: Any) -> list[str]:
    """What differs, or the error, after which the ranks go on."""
    try:
        return check(*args)
    except Exception:
        return [traceback.format_exc()]


def trainer(run: runs.Run) -> dict[str, torch.Tensor]:
    """The weights after a training by ShardwiseTrainer, and its losses. Attention is the same on all devices."""
    own = runs.bring_up

    def eager(run: runs.Run) -> Any:
        model = own(run)
        model.set_attn_implementation("eager")
        return model

    with mock.patch.object(runs, "bring_up", eager):
        outcome = runs.train(run)
    return {**{name: value.cpu() for name, value in outcome.weights.items()}, "": torch.tensor(outcome.steps)}


COUNTED = ("host_waits", "pageable_to_device", "pageable_to_host", "pinned_peak")


def costs(folder: str, out: str) -> dict[str, dict[str, int]]:
    """How often the host waits and copies pageable memory, and by how much the peak of pinned memory grows."""
    found = {}
    with simulated.counting() as found["load"]:
        model: Any = shardwise.from_pretrained(folder, dtype="float32")
    with simulated.counting() as found["save"]:
        shardwise.save(model, out)
    optimizer = adamw(model.parameters())
    step(model, optimizer, 0)
    with simulated.counting() as found["step"]:
        step(model, optimizer, 1)
    return {what: {name: counts[name] for name in COUNTED} for what, counts in found.items()}


BUDGET_BYTES = 1 << 16


def copies_through_pageable_memory(folder: str, fp8: str, out: str) -> list[str]:
    """Between the device and files, with small budgets: pageable copies, and pinned memory beyond the budget."""
    faults: list[str] = []

    @contextlib.contextmanager
    def counted(what: str, pinned_bytes: int = BUDGET_BYTES) -> Iterator[None]:
        simulated.native.reset_peaks()
        with simulated.counting() as counts:
            yield
        pageable = ("pageable_to_device", "pageable_to_host")
        faults.extend(f"{what}: {counts[name]} {name}" for name in pageable if counts[name])
        if counts["pinned_peak"] > pinned_bytes:
            faults.append(f"{what}: {counts['pinned_peak']} pinned bytes")

    options = shardwise.options
    shardwise.from_pretrained(fp8, dtype="bfloat16")  # keeps tables
    lora = shardwise.Lora(LoraConfig(r=2, target_modules="all-linear"))
    for what, source, keywords in (("FP8", fp8, {}), ("a LoRA", folder, {"tuning": lora})):
        with counted(f"load of {what}"):
            budget = options.LoadOptions(budget_bytes=BUDGET_BYTES)
            shardwise.from_pretrained(source, dtype="bfloat16", options=budget, **keywords)
    net = sharding.net_of(0)
    trained_with = adamw(net.parameters())
    sharding.train(net, [trained_with], [], range(1))
    with counted("sharding"):
        budget = options.StateOptions(budget_bytes=BUDGET_BYTES)
        shardwise.shard(net, optimizers=[trained_with], options=budget)
    model: Any = shardwise.from_pretrained(folder, dtype="float32")
    for has_owners in (False, True):
        with (
            counted(f"save, by owners: {has_owners}"),
            mock.patch.object(save, "_has_owners", return_value=has_owners),
        ):
            budget = options.SaveOptions(budget_bytes=BUDGET_BYTES)
            shardwise.save(model, f"{out}/saved {has_owners}", options=budget)
    with counted("save in another dtype"):
        budget = options.SaveOptions(budget_bytes=BUDGET_BYTES)
        shardwise.save(model, f"{out}/cast", dtype="bfloat16", options=budget)
    with counted("stream to the host"):
        to_host = options.StreamOptions(BUDGET_BYTES, torch.device("cpu"))
        assert {tensor.device.type for _, tensor in shardwise.iter_hf_tensors(model, options=to_host)} == {"cpu"}
    for form in ("full", "sharded", "local"):
        with counted(f"{form} files of accelerate"):
            budget = options.StateOptions(budget_bytes=BUDGET_BYTES)
            shardwise.save_accelerate_model(model, f"{out}/{form}", form, options=budget)
    optimizer = adamw(model.parameters())
    model.set_attn_implementation("eager")
    step(model, optimizer, 0)
    for mode, pinned_bytes in (("sync", BUDGET_BYTES), ("async", 1 << 30)):
        budget = options.StateOptions(budget_bytes=BUDGET_BYTES)
        with (
            counted(f"{mode} checkpoint", pinned_bytes),
            shardwise.Checkpointer(f"{out}/{mode}", mode=mode, options=budget) as checkpointer,
        ):
            checkpointer.save(1, shardwise.TrainState(model, optimizer))
    return faults


def bank_of(model: Any) -> Any:
    """Three tenants of different ranks."""
    bank = shardwise.AdapterBank(model, backend="loop")
    for number in range(3):
        lora = LoraConfig(r=2 + number, target_modules="all-linear")
        bank.add_adapter(f"{number}", lora, optimizer=adamw, seed=number)
    return bank


def pass_of(bank: Any, number: int) -> None:
    bank.forward_backward([(f"{tenant}", rows(tenant, number)) for tenant in range(3)])


def a_first_collective_that_fails() -> str:
    """The error, after one without a fault."""
    try_collectives()
    with mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("Duplicate GPU detected")):
        try:
            try_collectives()
        except ShardingError as error:
            return str(error)
    return ""
