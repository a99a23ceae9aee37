"""Tensors that should be equal on all ranks are compared before they are saved."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from tests.small_checkpoints import small_qwen3
from tests.support.world import agreed, attempt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.options import AdapterOnly

QUIET = shardwise.options.SaveOptions(progress=False)


class Norms(nn.Module):
    """Matrices, and running statistics: three times three buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.register_buffer("table", torch.arange(20_000.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = norm(x).relu()  # else what the next one sees has the same variance on every rank, but for rounding
        return x


STATISTICS = [f"norms.{number}.{name}" for number in range(3) for name in ("running_mean", "running_var")]
"""The buffers that each rank has for itself. (How many batches there were they count alike.)"""


def trained(way: str = "flat", steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded, and trained by ranks of which each has data of its own, so that running statistics differ."""
    model = Norms()
    size = dist.get_world_size() if dist.is_initialized() else 1
    if dist.is_initialized():
        shape, names = ((2, size // 2), ("replicate", "shard")) if way == "hsdp" else ((size,), ("shard",))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for _ in range(steps):
        model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _of_first(model: nn.Module) -> dict[str, torch.Tensor]:
    """The first rank's buffers."""
    mine = {name: buffer.clone() for name, buffer in model.named_buffers()}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    assert not torch.equal(told[0][STATISTICS[0]], told[1][STATISTICS[0]])
    return told[0]


def buffers_that_are_not_the_firsts(folder: str) -> dict[str, list[str]]:
    """By way of taking a model out: the buffers that came out with other values than the first rank's."""
    model, optimizer = trained()
    wanted = _of_first(model)
    root = Path(folder)
    found: dict[str, list[str]] = {}

    def note(way: str, state: dict[str, torch.Tensor], differing: tuple[str, ...] = tuple(STATISTICS)) -> None:
        found[way] = [name for name, value in wanted.items() if not torch.equal(state[name], value)]
        if sorted(differing) != sorted(STATISTICS):
            found[way].append(f"the report names {differing}")

    report = shardwise.save(model, root / "saved", verify=True, options=QUIET)
    assert "  differing" in str(report)
    with safe_open(root / "saved/model.safetensors", "pt") as file:
        note("save", {name: file.get_tensor(name) for name in file.keys()}, report.differing_buffers)  # noqa: SIM118

    note("iter_hf_tensors", dict(shardwise.iter_hf_tensors(model)))
    note("get_model_state_dict, whole", shardwise.get_model_state_dict(model, "full_on_all_ranks"))
    sharded = shardwise.get_model_state_dict(model, "sharded")
    note("get_model_state_dict, shards", sharded)
    assert sharded["table"].data_ptr() == model.table.data_ptr()  # what is equal is not copied

    for mode in ("sync", "async"):
        way = mode
        with shardwise.Checkpointer(root / way, mode=mode) as checkpointer:
            reports = [checkpointer.save(1, shardwise.TrainState(model, optimizer))]
            checkpointer.wait()
            reports.append(checkpointer.save(2, shardwise.TrainState(model, optimizer)))  # by the same plan
            checkpointer.wait()
            other, its_optimizer = trained(steps=0)
            checkpointer.restore(shardwise.TrainState(other, its_optimizer))
            for report in reports:
                note(f"Checkpointer, {way}", dict(other.named_buffers()), report.differing_buffers)

    for form in ("full", "sharded", "local"):
        report = shardwise.save_accelerate_model(model, root / f"accelerate {form}", form)
        other, _ = trained(steps=0)
        shardwise.load_accelerate_model(other, root / f"accelerate {form}")
        note(f"accelerate's {form}", dict(other.named_buffers()), report.differing_buffers)
    return found


Way = Callable[[], object]


def ways_out(model: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> dict[str, Way]:
    """Every way to take a model and its optimizer out."""

    def checkpointed(mode: Any) -> Any:
        checkpointer = shardwise.Checkpointer(root / f"checkpoints {mode}", mode=mode)
        return checkpointer.save(1, shardwise.TrainState(model, optimizer))

    ways: dict[str, Way] = {
        "save": lambda: shardwise.save(model, root / "saved", names="internal", options=QUIET),
        "iter_hf_tensors": lambda: list(shardwise.iter_hf_tensors(model, names="internal")),
        "synchronous": lambda: checkpointed("sync"),
        "asynchronous": lambda: checkpointed("async"),
    }
    for form in ("full", "full_on_all_ranks", "sharded"):
        ways[f"get_model_state_dict {form}"] = lambda form=form: shardwise.get_model_state_dict(model, form)
    for form in ("full", "sharded", "local"):
        ways[f"accelerate {form}"] = lambda form=form: shardwise.save_accelerate_model(model, root, form)
    return ways


def errors(ways: dict[str, Way], root: Path) -> dict[str, str]:
    found = {way: ": ".join(attempt(take_out)) for way, take_out in ways.items()}
    left = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    return found | ({"left behind": str(left)} if left else {})


def added_after_sharding(folder: str) -> dict[str, str]:
    """A module that FSDP2 does not know of, trained on data of the rank's own: nobody averages its gradients."""
    model, _ = trained(steps=0)
    model.added = nn.Linear(8, 8)  # begins alike: the ranks have one seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(7 + dist.get_rank())
    model.added(model(torch.randn(16, 6))).square().mean().backward()
    optimizer.step()
    return errors(ways_out(model, optimizer, Path(folder)), Path(folder))


def state_of_an_optimizer(folder: str) -> dict[str, str]:
    """Parameters are equal, and what an optimizer holds of them is not."""
    model, _ = trained(steps=0)
    model.added = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    (model.added * (1 + dist.get_rank())).sum().backward()
    optimizer.step()
    root = Path(folder)
    ways = ways_out(model, optimizer, root)
    ways = {name: ways[name] for name in ("synchronous", "asynchronous")}
    for form in ("full", "full_on_all_ranks", "sharded"):
        read = partial(shardwise.get_optimizer_state_dict, model, optimizer, form)
        ways[f"get_optimizer_state_dict {form}"] = read
    for form in ("full", "sharded", "local"):
        ways[f"accelerate {form}"] = partial(shardwise.save_accelerate_optimizer, model, optimizer, root, form)
    return errors(ways, root)


def counts_of_steps(folder: str) -> dict[str, str]:
    """What an optimizer counts is not the same on all ranks: as tensors, or as plain numbers."""
    found: dict[str, str] = {}
    for kind in (torch.tensor, float):
        model, optimizer = trained()
        for state in optimizer.state.values():
            state["step"] = kind(2.0 + dist.get_rank())
        root = Path(folder, kind.__name__)
        ways: dict[str, Way] = {
            "checkpoint": ways_out(model, optimizer, root)["synchronous"],
            "state": partial(shardwise.get_optimizer_state_dict, model, optimizer),
        }
        found |= {f"{name}, {kind.__name__}": error for name, error in errors(ways, root).items()}
    return found


def drifted_between_checkpoints(folder: str) -> dict[str, str]:
    """Equal at the first checkpoint, not at the second, which is written by the same plan; and mended again."""
    found: dict[str, str] = {}
    for mode in ("sync", "async"):
        model, _ = trained(steps=0)
        model.added = nn.Parameter(torch.zeros(5))
        optimizer = torch.optim.AdamW(model.parameters())
        root = Path(folder, mode)
        checkpointer = shardwise.Checkpointer(root, mode=mode)
        for step, value in enumerate((0.0, dist.get_rank(), 1.0)):
            with torch.no_grad():
                model.added.fill_(value)
            error = attempt(checkpointer.save, step, shardwise.TrainState(model, optimizer))
            checkpointer.wait()
            found[f"{root.name}, {step}"] = ": ".join(error)
        found[f"{root.name}, steps"] = str(checkpointer.steps())
    return found


def replicas_apart(folder: str) -> dict[str, str]:
    """One shard of one matrix has one other bit on one of two replicas."""
    model, optimizer = trained("hsdp")
    for buffer in model.buffers():
        buffer.zero_()
    assert isinstance(model.first.weight, DTensor)
    with torch.no_grad():
        if dist.get_rank() == 3:
            model.first.weight.to_local().view(torch.int32)[-1, -1] ^= 1
    return errors(ways_out(model, optimizer, Path(folder)), Path(folder))


def replicas_alike(folder: str) -> dict[str, str]:
    model, optimizer = trained("hsdp")
    root = Path(folder)
    found = {way: "".join(attempt(take_out)) for way, take_out in ways_out(model, optimizer, root).items()}
    return {way: error for way, error in found.items() if error}


def adapter_added_after_sharding(folder: str) -> dict[str, str]:
    """transformers' ``add_adapter`` on a sharded model; each rank draws the matrices for itself."""
    model = small_qwen3()
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    root = Path(folder)
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()))
    ways = ways_out(model, optimizer, root)
    ways["save_adapter"] = lambda: shardwise.save_adapter(model, root / "adapter", options=QUIET)
    only = shardwise.options.AdapterOnly()
    ways["adapter streamed"] = lambda: list(shardwise.iter_hf_tensors(model, only=only))
    ways["adapter's state"] = lambda: shardwise.get_model_state_dict(model, only=only)
    state = shardwise.TrainState(model, optimizer)
    ways["adapter checkpointed"] = lambda: shardwise.Checkpointer(root / "only", only=only).save(1, state)
    return errors(ways, root)


def adapter_of_an_uneven_base(folder: str) -> list[str]:
    """The adapter is the same on all ranks, and comes out; its base, which nobody asks for, is not."""
    model = small_qwen3()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        model.model.embed_tokens.weight += dist.get_rank()
    shardwise.save_adapter(model, Path(folder, "adapter"), options=QUIET)
    only = shardwise.options.AdapterOnly()
    state = shardwise.get_model_state_dict(model, "full_on_all_ranks", only=only)
    return [key for key, _ in shardwise.iter_hf_tensors(model, only=only)] + list(state)


def test_differing_buffers_become_those_of_the_first_rank_and_are_reported(worlds, tmp_path):
    found = agreed(worlds(3), buffers_that_are_not_the_firsts, tmp_path)
    assert len(found) == 9
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("function", "ways", "names"),
    [
        (added_after_sharding, 10, ["added.weight", "added.bias", "modules added after fully_shard"]),
        (state_of_an_optimizer, 8, ["added", "exp_avg", "exp_avg_sq"]),
        (counts_of_steps, 4, ["first.weight", "step"]),
        (adapter_added_after_sharding, 14, ["layers.{0..1}.self_attn.q_proj.lora_A.", "down_proj"]),
    ],
)
def test_parameters_that_differ_are_refused_by_name(worlds, tmp_path, function, ways, names):
    found = agreed(worlds(2), function, tmp_path)
    assert len(found) == ways
    for error in found.values():
        assert error.startswith("RankMismatchError: ")
        assert "other values on rank 1 than on the first rank" in error
        assert all(name in error for name in names)


def test_replicas_of_a_shard_that_differ_by_one_bit_are_refused(worlds, tmp_path):
    found = agreed(worlds(4), replicas_apart, tmp_path)
    assert len(found) == 10
    for error in found.values():
        assert error.startswith("RankMismatchError: one tensor has other values on rank 3 than on the first rank")
        assert "first.weight, so a save" in error
    assert agreed(worlds(4), replicas_alike, tmp_path / "alike") == {}


def test_replicas_that_drift_apart_between_checkpoints_are_refused(worlds, tmp_path):
    found = agreed(worlds(2), drifted_between_checkpoints, tmp_path)
    for mode in ("sync", "async"):
        assert found[f"{mode}, 0"] == found[f"{mode}, 2"] == ": "
        assert found[f"{mode}, 1"].startswith("RankMismatchError: one tensor has other values on rank 1")
        assert "model.added, so a save" in found[f"{mode}, 1"]
        assert found[f"{mode}, steps"] == "[0, 2]"


def test_of_an_adapter_only_the_adapter_is_looked_at(worlds, tmp_path):
    found = agreed(worlds(2), adapter_of_an_uneven_base, tmp_path)
    assert len(found) == 8
    assert all("lora_" in name for name in found)


def test_an_adapter_that_transformers_added_is_saved_as_peft_loads_it(tmp_path):
    model, plain = small_qwen3(), small_qwen3()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    shardwise.save_adapter(model, tmp_path, options=QUIET)
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    tokens = torch.arange(10)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    state = shardwise.get_model_state_dict(model, only=AdapterOnly())
    shardwise.set_model_state_dict(loaded, state, only=AdapterOnly())
