"""Many LoRAs on one base, three ways, and what they cost: what ``benchmarks/tenants.py`` has ranks do."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.place import own_device, synchronize
from benchmarks.training import MAX_NORM, quieten, train_by_shardwise

JOINT, SWITCHED, IN_TURN = "one bank", "PEFT, set_adapter", "one after the other"
RATE = 1e-4
TARGETS = ("q_proj", "v_proj")


@dataclass(frozen=True)
class TenancyJob:
    """How much to do: of each tenant on each rank ``rows`` of ``tokens`` tokens a step."""

    folder: str
    words: int
    ranks_of_tenants: tuple[int, ...]
    rows: int
    tokens: int
    steps: int
    repeats: int
    counts: tuple[int, ...]
    """Of tenants, that share ``shared_rows`` rows a rank."""
    shared_rows: int


def lora(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")


def ids_of(job: TenancyJob, tenant: int, step: int, rank: int, rows: int) -> Any:
    """All of a row is learned."""
    import torch

    generator = torch.Generator().manual_seed(100_000 * step + 100 * tenant + rank)
    return torch.randint(0, job.words, (rows, job.tokens), generator=generator)


def adamw(own: Any) -> Any:
    import torch

    return torch.optim.AdamW(own, lr=RATE, weight_decay=0.0)


def bank_of(job: TenancyJob, ranks: Sequence[int], backend: Any = "auto") -> Any:
    import shardwise

    bank = shardwise.AdapterBank(shardwise.from_pretrained(job.folder, dtype="float32"), backend=backend)
    for tenant, rank in enumerate(ranks):
        bank.add_adapter(str(tenant), lora(rank), optimizer=adamw, max_grad_norm=MAX_NORM)
    return bank


def step_of_bank(bank: Any, rows: Sequence[Any]) -> list[float]:
    """A step of as many tenants as there are rows. Collective: yes."""
    told = bank.forward_backward([(str(tenant), {"input_ids": ids}) for tenant, ids in enumerate(rows)])
    for tenant in range(len(rows)):
        bank.optim_step(str(tenant))
    return [told.tenants[str(tenant)].loss for tenant in range(len(rows))]


class SwitchedAdapters:
    """PEFT's adapters on a base that FSDP2 shards, one active at a time, each with an optimizer.

    They are beside FSDP2's groups, and their gradients are averaged by one all-reduce, as in a bank: within the
    groups all of them would be gathered for each pass. They begin with the matrices of a bank's tenants.
    """

    def __init__(self, job: TenancyJob, begin: Sequence[dict[str, Any]]) -> None:
        import torch
        from peft import get_peft_model, set_peft_model_state_dict
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
        first, *others = (lora(rank) for rank in job.ranks_of_tenants)
        self.model: Any = get_peft_model(base, first, adapter_name="0")
        for tenant, config in enumerate(others, 1):
            self.model.add_adapter(str(tenant), config)
        for tenant, values in enumerate(begin):
            set_peft_model_state_dict(self.model, values, adapter_name=str(tenant))
        self.model.to(own_device())  # what is beside the groups is not moved by FSDP2
        self.own = [
            [own for name, own in self.model.named_parameters() if f".{tenant}.weight" in name and "lora_" in name]
            for tenant in range(len(job.ranks_of_tenants))
        ]
        beside = {own for each in self.own for own in each}
        self.inner = self.model.get_base_model()
        for layer in self.inner.model.layers:
            fully_shard(layer, ignored_params=beside)
        fully_shard(self.inner, ignored_params=beside)
        self.model.train()
        self.optimizers = [adamw(own) for own in self.own]

    def step(self, rows: Sequence[Any]) -> list[float]:
        """Collective: yes."""
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F
        from torch.nn.utils import clip_grad_norm_

        losses = []
        for tenant, ids in enumerate(rows):
            self.model.set_adapter(str(tenant))
            ids = ids.to(own_device())
            logits = self.inner(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            own = self.own[tenant]
            flat = torch.cat([each.grad.flatten() for each in own] + [loss.detach().view(1)])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each, gradient in zip(own, flat[:-1].split([each.numel() for each in own]), strict=True):
                each.grad.copy_(gradient.view_as(each))
            clip_grad_norm_(own, MAX_NORM)
            self.optimizers[tenant].step()
            self.optimizers[tenant].zero_grad()
            losses.append(float(flat[-1]))
        return losses


def single_of(job: TenancyJob, rank: int) -> Any:
    import shardwise

    return shardwise.from_pretrained(job.folder, dtype="float32", tuning=shardwise.Lora(lora(rank)))


def train_single(model: Any, steps: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Seconds and losses of the steps of one training; of each its rows. Collective: yes."""
    import torch

    steps = [ids.to(own_device()) for ids in steps]
    batches = [[SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)] for ids in steps]
    told = train_by_shardwise(model, batches, learning_rate=RATE)
    return told.seconds, told.losses


def timed(step: Callable[[], list[float]]) -> tuple[float, list[float]]:
    import torch.distributed as dist

    dist.barrier()
    synchronize()
    start = time.perf_counter()
    found = step()
    synchronize()
    return time.perf_counter() - start, found


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes that collectives of torch's give out in the block, by their names, and how many there were."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
                tensors = [
                    one
                    for each in args
                    for one in (each if isinstance(each, list) else [each])
                    if isinstance(one, torch.Tensor)
                ]
                found[func.__name__.partition(".")[0]] += max((one.nbytes for one in tensors), default=0)
                found["collectives"] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        yield found


def take_turns(job: TenancyJob) -> dict[str, Any]:
    """All tenants a step: in one bank, by switching, one training after the other; in turn. Collective: yes."""
    import torch.distributed as dist

    quieten()
    rank, tenants = dist.get_rank(), range(len(job.ranks_of_tenants))
    bank = bank_of(job, job.ranks_of_tenants)
    switched = SwitchedAdapters(job, [bank.state_dict(str(tenant))["adapter"] for tenant in tenants])
    start = time.perf_counter()
    singles = [single_of(job, own) for own in job.ranks_of_tenants]
    found: dict[str, Any] = {
        "bring_up_s": (time.perf_counter() - start) / len(singles),
        "seconds": {arm: [] for arm in (JOINT, SWITCHED, IN_TURN)},
        "losses": {},
        "bytes": {},
    }

    def rows(step: int) -> list[Any]:
        return [ids_of(job, tenant, step, rank, job.rows) for tenant in tenants]

    for repeat in range(job.repeats):
        steps = range(repeat * job.steps, (repeat + 1) * job.steps)
        for arm, work in (
            (JOINT, lambda step: step_of_bank(bank, rows(step))),
            (SWITCHED, lambda step: switched.step(rows(step))),
        ):
            told = [timed(lambda step=step, work=work: work(step)) for step in steps]
            found["seconds"][arm].append([seconds for seconds, _ in told])
            found["losses"].setdefault(arm, [losses for _, losses in told])
        own = [train_single(singles[tenant], [rows(step)[tenant] for step in steps]) for tenant in tenants]
        found["seconds"][IN_TURN].append([sum(each) for each in zip(*(seconds for seconds, _ in own), strict=True)])
        found["losses"].setdefault(
            IN_TURN, [list(each) for each in zip(*(losses for _, losses in own), strict=True)]
        )
    last = rows(job.repeats * job.steps)
    for arm, step in (
        (JOINT, lambda: step_of_bank(bank, last)),
        (SWITCHED, lambda: switched.step(last)),
        (IN_TURN, lambda: [train_single(singles[tenant], [last[tenant]]) for tenant in tenants]),
    ):
        with counted() as counts:
            step()
        found["bytes"][arm] = dict(counts)
    return found


def share(job: TenancyJob) -> dict[str, Any]:
    """As many rows by 1 tenant or by 32, of one rank; and by one training of one adapter. Collective: yes."""
    import torch.distributed as dist

    quieten()
    rank, most, lora_rank = dist.get_rank(), max(job.counts), 8
    bank, single = bank_of(job, [lora_rank] * most), single_of(job, lora_rank)
    seconds: dict[str, list[list[float]]] = {str(count): [] for count in job.counts} | {"tuning=Lora": []}
    for repeat in range(job.repeats):
        for count in job.counts:
            told = [
                timed(
                    lambda step=step, count=count: step_of_bank(
                        bank,
                        [ids_of(job, tenant, step, rank, job.shared_rows // count) for tenant in range(count)],
                    )
                )
                for step in range(repeat * job.steps, (repeat + 1) * job.steps)
            ]
            seconds[str(count)].append([each for each, _ in told])
        steps = [ids_of(job, 0, step, rank, job.shared_rows) for step in range(job.steps)]
        seconds["tuning=Lora"].append(train_single(single, steps)[0])
    return {"seconds": seconds, "comings": comings(job, bank, most, lora_rank)}


def comings(job: TenancyJob, bank: Any, most: int, lora_rank: int) -> dict[str, dict[str, list[float]]]:
    """Seconds for a tenant to come, to be saved and to go, by how many others there are. Collective: yes."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        places: list[Any] = [folder]
        import torch.distributed as dist

        dist.broadcast_object_list(places)
        for others in (most, 1):
            own: dict[str, list[float]] = {"create": [], "save": [], "remove": []}
            for repeat in range(max(job.repeats, 2)):
                own["create"].append(timed(lambda: bank.add_adapter("late", lora(lora_rank)))[0])
                place = Path(places[0], f"{others}-{repeat}")
                own["save"].append(timed(lambda place=place: bank.save("late", place))[0])
                own["remove"].append(timed(lambda: bank.delete_adapter("late"))[0])
            found[str(others)] = own
            for tenant in range(1, most):
                if str(tenant) in bank.names:
                    bank.delete_adapter(str(tenant))
        dist.barrier()
    return found


def take_products(width: int, tenants: int, tokens: int, lora_rank: int, repeats: int) -> dict[str, Any]:
    """Seconds of adapters' own forward and backward products in one layer: grouped, and one after the other."""
    import torch

    from shardwise.bank.backends import GroupedProducts, LoraWeights, RoutedSegment, SegmentLoop

    quieten()
    device = own_device()
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        parts = []
        for tenant in range(tenants):
            A = torch.randn(lora_rank, width, device=device) / width
            B = torch.randn(width, lora_rank, device=device)
            pair = LoraWeights(A, B, torch.zeros_like(A), torch.zeros_like(B), 1.0)
            parts.append(RoutedSegment(pair, tenant * tokens, (tenant + 1) * tokens))
        x, g = (torch.randn(tenants * tokens, width, device=device).to(dtype) for _ in range(2))
        own: dict[str, list[float]] = {"grouped": [], "loop": []}
        for repeat in range(repeats + 1):
            for name, backend in (("grouped", GroupedProducts()), ("loop", SegmentLoop())):
                start = time.perf_counter()
                for _ in range(10):
                    out, x_grad = torch.zeros_like(x), torch.zeros_like(x)
                    kept = backend.forward_rows(parts, x, out)
                    backend.backward_rows(parts, x, kept, g, x_grad)
                synchronize()
                if repeat:
                    own[name].append((time.perf_counter() - start) / 10)
        found[str(dtype).removeprefix("torch.")] = own
    return found
