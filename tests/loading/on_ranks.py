"""Functions that ranks run in tests of the public functions."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from tests import load_cases, truth
from tests.files.fake_hub import hub_that_has
from tests.models.stepping import counting
from tests.support.own_code import modules_in
from tests.support.world import attempt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import shardwise
from shardwise.files.local_reader import LocalReader
from shardwise.fsdp.torch_private import iter_fsdp_param_groups
from shardwise.fsdp.wrap import wrap
from shardwise.models import build
from shardwise.ranks.world import World


def bring_up(directory: str, **keywords: Any) -> PreTrainedModel:
    model: PreTrainedModel = shardwise.from_pretrained(directory, **keywords)
    return model


def whole_values(directory: str, keywords: dict[str, Any]) -> dict[str, torch.Tensor]:
    return truth.snapshot(bring_up(directory, **keywords))["values"]


def report_of(directory: str, keywords: dict[str, Any]) -> dict[str, Any]:
    _, report = shardwise.from_pretrained(directory, output_loading_info=True, **keywords)
    return report.to_dict()


def gathered_at_the_loss(directory: str, sharding: shardwise.Sharding) -> int:
    """Bytes that groups have gathered, and those that fewer ranks hold than the shards."""
    model = bring_up(directory, dtype=torch.float32, sharding=sharding, tuning=shardwise.Full())
    output = model(input_ids=batch(97, rows=1, seed=0), use_cache=False)
    kept = 0
    for group in iter_fsdp_param_groups(model):
        for param in group.fsdp_params:
            kept += sum(gathered.untyped_storage().nbytes() for gathered in param.all_gather_outputs)
            held = getattr(param, "_sharded_post_forward_param_data", None)
            kept += 0 if held is None else held.nbytes
    output.logits.sum().backward()
    return kept


def error_of(directory: str, keywords: dict[str, Any]) -> tuple[str, str]:
    return attempt(lambda: bring_up(directory, **keywords))


def error_with_a_full_disk(directory: str) -> tuple[str, str]:
    """The second rank cannot write small files."""
    full = mock.patch.object(Path, "write_bytes", side_effect=OSError("the disk is full"))
    with full if dist.get_rank() == 1 else nullcontext():
        return error_of(directory, {})


def batch(vocabulary: int, *, rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, 12), generator=torch.Generator().manual_seed(seed))


def normally_loaded(directory: str) -> PreTrainedModel:
    """A model loaded whole by transformers on every rank, then sharded as shardwise does it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    wrap(model, shardwise.Sharding(mesh=mesh))
    return model


def loss_and_gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """One forward and backward; the loss and this rank's gradients by name."""
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    gradients = {
        name: parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.detach(), **gradients}


def meta_against_normal(directory: str) -> list[str]:
    """Names of what differs, bit for bit, between the meta path and a normal load at the same world size."""
    mine, normal = bring_up(directory, dtype=torch.float32), normally_loaded(directory)
    tokens = batch(mine.config.get_text_config().vocab_size, rows=2, seed=dist.get_rank())
    found, wanted = loss_and_gradients(mine, tokens), loss_and_gradients(normal, tokens)
    assert found.keys() == wanted.keys()
    assert len(found) > 5
    return [name for name in found if not torch.equal(found[name], wanted[name])]


def poisoned_load(case: truth.Case) -> list[str] | None:
    """Compare as always, but with all fresh memory full of NaN (or of ones, for integers)."""

    def spoiled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **keywords: Any) -> torch.Tensor:
            made = make(*args, **keywords)
            if type(made) is torch.Tensor and made.device.type == "cpu":
                made.fill_(float("nan") if made.is_floating_point() else 1)
            return made

        return wrapper

    with (
        mock.patch.object(torch, "empty", spoiled(torch.empty)),
        mock.patch.object(torch, "empty_like", spoiled(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", spoiled(torch.Tensor.new_empty)),
    ):
        assert torch.empty(3).isnan().all()
        return load_cases.load_and_compare(case, load_cases.Way())


def ties(directory: str) -> tuple[bool, int, list[str]]:
    """Whether head and embedding are one parameter, how many parameters there are, and names with a gradient."""
    model = bring_up(directory, dtype=torch.float32)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    tokens = batch(model.config.vocab_size, rows=2, seed=0)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    with_gradient = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    same = head is embedding and model.get_output_embeddings().weight.grad is embedding.grad
    return same, len(list(model.parameters())), with_gradient


class Block(nn.Module):
    """A small module of nobody's library: a linear layer, a norm with running statistics, a table of angles."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 3)
        self.norm = nn.BatchNorm1d(width + 3)
        self.register_buffer("angles", torch.arange(float(width)), persistent=False)


class Plain(nn.Module):
    """Blocks in a list, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(5), Block(7)])
        self.scale = nn.Parameter(torch.ones(4, 3))


def shard_plain(model: Plain) -> Plain:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def angles(module: nn.Module) -> torch.Tensor:
    """What computes the buffers of a `Block`."""
    return torch.arange(float(module.linear.in_features))


def load_plain(directory: str, kind: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """Load into a plain module that was prepared in a certain way; a snapshot."""
    if kind == "meta":
        with torch.device("meta"):
            model = Plain()
        shard_plain(model)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float64
        before = [id(parameter) for parameter in model.parameters()]
        shardwise.load(model, directory, buffers={"*.angles": angles}, **keywords)
        assert before == [id(parameter) for parameter in model.parameters()]
        assert {parameter.grad_dtype for parameter in model.parameters()} == {torch.float64}
    elif kind == "meta by default":
        with torch.device("meta"):
            model = shard_plain(Plain())
            shardwise.load(model, directory, buffers={"*.angles": angles}, **keywords)
    elif kind == "real":
        model = shard_plain(Plain())
        before = [id(parameter) for parameter in model.parameters()]
        shardwise.load(model, directory, **keywords)
        assert before == [id(parameter) for parameter in model.parameters()]
    else:
        raise AssertionError(kind)
    return truth.snapshot(model)


def buffers_differ(directory: str) -> tuple[str, str]:
    """A kept buffer that is not the same on all ranks."""
    model = shard_plain(Plain())
    model.blocks[0].angles += os.getpid()
    return attempt(lambda: shardwise.load(model, directory))


def downloads(cache: str) -> tuple[bool, str]:
    """Whether this rank was the one to download, and the path it got."""
    from shardwise.loading.source import resolve_everywhere

    hub = shardwise.options.HubOptions(cache_dir=cache)
    names = ["config.json", "model.safetensors", "README.md"]
    with pytest.MonkeyPatch.context() as patch, hub_that_has(names, Path(cache), patch) as options_seen:
        path = resolve_everywhere(World.current(), "org/name", hub)
    return bool(options_seen), str(path)


def with_own_code(directory: str, cache: str) -> list[bool]:
    """Whether the code of a checkpoint is in the cache, each time that this rank reads the config."""
    is_there: list[bool] = []
    read_config = build.read_config

    def record(*args: Any, **keywords: Any) -> Any:
        is_there.append(any(Path(cache).rglob("configuration_own.py")))
        return read_config(*args, **keywords)

    with (
        modules_in(cache),
        mock.patch.object(build, "read_config", record),
    ):
        model = bring_up(directory, trust_remote_code=True)
    assert type(model.config).__name__ == "OwnConfig"
    return is_there


def another_config_on_each_rank(directory: str) -> tuple[str, str]:
    """One rank's norms are declared another size of vocabulary, so that its plan differs."""
    consent = shardwise.options.Initialize(("lm_head.*", "model.embed_tokens.*"))
    return error_of(directory, {"config_overrides": {"vocab_size": 97 + dist.get_rank()}, "on_mismatched": consent})


def tied_on_one_rank_only(directory: str) -> tuple[str, str]:
    return error_of(directory, {"config_overrides": {"tie_word_embeddings": dist.get_rank() == 0}})


def in_a_subgroup(directory: str) -> dict[str, Any] | None:
    """Ranks 0 and 1 of three load together; the third takes no part."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    options = shardwise.options.LoadOptions(process_group=group)
    model, report = shardwise.from_pretrained(directory, options=options, output_loading_info=True)
    assert report.world_size == 2
    assert model.lm_head.weight.device_mesh.mesh.tolist() == [0, 1]
    # Each rank waits for the other, which generates more tokens, and not for the third.
    tokens = batch(model.config.vocab_size, rows=1, seed=0)
    generated = model.generate(tokens, max_new_tokens=2 + dist.get_rank(), do_sample=False, eos_token_id=-1)
    assert generated.shape[1] == tokens.shape[1] + 2 + dist.get_rank()
    return truth.snapshot(model)["values"]


def gradients_of_whole_parameters(directory: str, folder: str, way: str) -> dict[str, torch.Tensor]:
    """Gradients of a LoRA that every rank has whole, of a model that was made without values and then filled."""
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    tuning = shardwise.Lora(adapter, placement="replicated")
    filled, model = (
        bring_up(directory, dtype=torch.float32, tuning=tuning, load_weights=load_weights)
        for load_weights in (True, False)
    )
    if way == "load":
        shardwise.save(filled, folder, names="internal")
        model.requires_grad_(False)  # frozen while it is filled
        shardwise.load(model, folder)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
    elif way == "state":
        shardwise.set_model_state_dict(model, shardwise.get_model_state_dict(filled))
    elif way == "accelerate":
        shardwise.save_accelerate_model(filled, folder)
        shardwise.load_accelerate_model(model, folder)
    else:
        checkpointer = shardwise.Checkpointer(folder)
        checkpointer.save(1, shardwise.TrainState(filled))
        checkpointer.restore(shardwise.TrainState(model))
    found = loss_and_gradients(model, batch(97, rows=2, seed=dist.get_rank()))
    return {name: gradient for name, gradient in found.items() if "lora" in name}


def mesh_of_others(directory: str) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return "", ""
    options = shardwise.options.LoadOptions(process_group=group)
    return error_of(directory, {"options": options, "sharding": shardwise.Sharding(mesh=mesh)})


def path_on_one_rank_only(folder: str) -> tuple[str, str]:
    """A path that exists for the first rank only."""
    name = folder if dist.get_rank() == 0 else folder + "-absent"
    return error_of(name, {})


def offloaded(directory: str) -> list[str]:
    """Names of parameters that are not real, contiguous CPU shards after a load with CPU offload."""
    sharding = shardwise.Sharding(offload_policy=CPUOffloadPolicy(pin_memory=False))
    model = bring_up(directory, dtype=torch.float32, sharding=sharding)
    loss_and_gradients(model, batch(model.config.vocab_size, rows=2, seed=0))
    return [name for name, parameter in model.named_parameters() if parameter.device.type != "cpu"]


def load_again_after_a_step(directory: str) -> list[str]:
    """A model that has been trained gets the checkpoint's values back, in the same parameters."""
    model = bring_up(directory, dtype=torch.float32)
    before = truth.snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_and_gradients(model, batch(model.config.vocab_size, rows=2, seed=0))
    optimizer.step()
    assert truth.differences(truth.snapshot(model), before) != []
    parameters = list(model.parameters())
    loss_and_gradients(model, batch(model.config.vocab_size, rows=2, seed=0))  # the root group is gathered now
    shardwise.load(model, directory)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    return truth.differences(truth.snapshot(model), before)


def file_replaced_while_reading(directory: str, rank: int) -> tuple[str, str]:
    """On one rank, the file is replaced by a copy of itself after its first bytes have been read."""
    original = LocalReader.read_vectored
    replaced: list[str] = []

    def read_vectored(self: LocalReader, file: str, start: int, buffers: Any) -> None:
        original(self, file, start, buffers)
        if not replaced and dist.get_rank() == rank:
            replaced.append(file)
            Path(directory, "copy").write_bytes(Path(directory, file).read_bytes())
            os.replace(Path(directory, "copy"), Path(directory, file))

    with mock.patch.object(LocalReader, "read_vectored", read_vectored):
        return error_of(directory, {})


def shared_load(
    directory: str, mesh_shape: tuple[int, ...], mode: str, budget_bytes: int = 1 << 16
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Whole values of a model on a mesh, and the report."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    modes = {"once": "always", "alone": "never", "weighed": "auto"}
    model, report = shardwise.from_pretrained(
        directory,
        sharding=shardwise.Sharding(mesh=mesh),
        options=shardwise.options.LoadOptions(shared_reads=modes[mode], budget_bytes=budget_bytes),
        output_loading_info=True,
    )
    return truth.snapshot(model)["values"], report.to_dict()


def recomputing(directory: str) -> dict[str, set[int]]:
    """How often the last part of each block is run for one step, after both ways of sharding."""
    sharding = shardwise.Sharding(activation_checkpointing=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    shardwise.shard(model, sharding)
    runs: dict[str, set[int]] = {}
    for way, each in {"from_pretrained": bring_up(directory, sharding=sharding), "shard": model}.items():
        with counting(each) as counts:
            loss_and_gradients(each, batch(each.config.vocab_size, rows=2, seed=0))
        runs[way] = set(counts.values())
    return runs
