"""Many LoRAs on one base: a bank against what one does without it. ``python -m benchmarks.bank``.

In float32, arms in turn in the same processes:

- turns: a step of eight adapters: through a bank at once; by PEFT's ``set_adapter`` with an optimizer for each,
  on a base that FSDP2 shards alike; and by trainings of one LoRA each, one after the other. The losses must
  agree.
- share: as many tokens a step in all, of 1 adapter or more, and of one training with ``tuning=Lora``.
- products: of many small adapters in one layer, forward and backward alone, grouped and one after the other.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.harness import meter, results
from benchmarks.harness.checkpoints import SHAPES
from benchmarks.harness.loaders import own_device, synchronize
from benchmarks.harness.results import Limit
from benchmarks.harness.training import MAX_NORM, compute_loss, quieten, train
from torch.nn.utils import clip_grad_norm_

Batches = Sequence[Sequence[torch.Tensor]]
"""By step and adapter, ids of (rows, tokens)."""

BANK, SWITCHED, IN_TURN = "one bank", "PEFT, set_adapter", "one after the other"
ARMS = (BANK, SWITCHED, IN_TURN)
SINGLE = "tuning=Lora"
RANKS_OF_ADAPTERS = (4, 8, 8, 16, 16, 16, 32, 32)
LEARNING_RATE = 1e-4
SWITCHED_RATIO, IN_TURN_RATIO, SHARE_RATIO, LOSS_DIFFERENCE = 0.5, 1.0, 1 / 0.85, 1e-3


@dataclass(frozen=True)
class BankJob:
    """A base, adapters by their ranks, and for each of them, on each rank and step, ``rows`` of ``tokens`` tokens.

    ``counts`` of adapters share ``shared_rows`` rows a rank.
    """

    folder: str
    vocab_size: int
    ranks_of_adapters: tuple[int, ...]
    rows: int
    tokens: int
    steps: int
    counts: tuple[int, ...] = ()
    shared_rows: int = 0

    def ids(self, adapter: int, step: int, rows: int) -> torch.Tensor:
        """(rows, tokens), different ones on every rank. All tokens are learned."""
        generator = torch.Generator().manual_seed(100_000 * step + 100 * adapter + dist.get_rank())
        return torch.randint(0, self.vocab_size, (rows, self.tokens), generator=generator)


def lora(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def build_bank(job: BankJob, ranks: Sequence[int], backend: Any = "auto") -> Any:
    """Collective: yes."""
    import shardwise

    bank = shardwise.AdapterBank(shardwise.from_pretrained(job.folder, dtype="float32"), backend=backend)
    for adapter, rank in enumerate(ranks):
        bank.add_adapter(str(adapter), lora(rank), optimizer=adamw, max_grad_norm=MAX_NORM)
    return bank


def step_bank(bank: Any, batch: Sequence[torch.Tensor]) -> list[float]:
    """A step of as many adapters as the batch has ids, and their losses. Collective: yes."""
    output = bank.forward_backward([(str(adapter), {"input_ids": ids}) for adapter, ids in enumerate(batch)])
    bank.optim_step({str(adapter): {} for adapter in range(len(batch))})
    return [output.adapters[str(adapter)].loss for adapter in range(len(batch))]


class SwitchedAdapters:
    """PEFT's adapters on a base that FSDP2 shards, one active at a time, each with an optimizer.

    They are outside FSDP2's groups, and their gradients are averaged by one all-reduce, as in a bank: within the
    groups all of them would be gathered for each pass. They begin with the weights of a bank's adapters.
    """

    def __init__(self, job: BankJob, weights: Sequence[dict[str, Any]]) -> None:
        from peft import get_peft_model, set_peft_model_state_dict
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
        first, *others = (lora(rank) for rank in job.ranks_of_adapters)
        self.model: Any = get_peft_model(base, first, adapter_name="0")
        for adapter, config in enumerate(others, 1):
            self.model.add_adapter(str(adapter), config)
        for adapter, values in enumerate(weights):
            set_peft_model_state_dict(self.model, values, adapter_name=str(adapter))
        self.model.to(own_device())  # FSDP2 moves its groups only
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if "lora_" in name]
        self.parameters = [
            [parameter for name, parameter in named if f".{adapter}.weight" in name]
            for adapter in range(len(job.ranks_of_adapters))
        ]
        ignored = {parameter for _, parameter in named}
        self.inner = self.model.get_base_model()
        for layer in self.inner.model.layers:
            fully_shard(layer, ignored_params=ignored)
        fully_shard(self.inner, ignored_params=ignored)
        self.model.train()
        self.optimizers = [adamw(parameters) for parameters in self.parameters]

    def step(self, batch: Sequence[Any], loss_of: Any = None) -> list[float]:
        """A step of all adapters, and their losses, by default of ids. Collective: yes."""
        losses = []
        for adapter, rows in enumerate(batch):
            self.model.set_adapter(str(adapter))
            loss = loss_of(self.inner, rows) if loss_of else compute_loss(self.inner, rows.to(own_device()))
            loss.backward()
            parameters = self.parameters[adapter]
            flat = torch.cat([each.grad.flatten() for each in parameters] + [loss.detach().view(1)])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            gradients = flat[:-1].split([each.numel() for each in parameters])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad.copy_(gradient.view_as(parameter))
            clip_grad_norm_(parameters, MAX_NORM)
            self.optimizers[adapter].step()
            self.optimizers[adapter].zero_grad()
            losses.append(float(flat[-1]))
        return losses


def load_single(job: BankJob, rank: int) -> Any:
    """For a training of one LoRA. Collective: yes."""
    import shardwise

    return shardwise.from_pretrained(job.folder, dtype="float32", tuning=shardwise.Lora(lora(rank)))


def step_singles(models: Sequence[Any], batches: Batches) -> tuple[list[float], list[Any]]:
    """Seconds and losses of each step of trainings one after the other, each for all of its steps."""
    seconds, losses = [], []
    for adapter, model in enumerate(models):
        steps = [batch[adapter].to(own_device()) for batch in batches]
        taken, reached = train(model, steps, learning_rate=LEARNING_RATE)
        seconds.append(taken)
        losses.append(reached)
    return [sum(each) for each in zip(*seconds, strict=True)], [list(each) for each in zip(*losses, strict=True)]


def take_steps(arm: Any, batches: Batches) -> tuple[list[float], list[Any]]:
    """Seconds and losses of each step of a bank, of switched adapters, or of single models. Collective: yes."""
    if isinstance(arm, list):
        return step_singles(arm, batches)
    seconds, losses = [], []
    for batch in batches:
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        losses.append(arm.step(batch) if isinstance(arm, SwitchedAdapters) else step_bank(arm, batch))
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, losses


def measure_turns(job: BankJob, repeats: int) -> dict[str, Any]:
    """By arm, seconds of each step by repeat, and the losses of the first repeat. Collective: yes."""
    quieten()
    bank = build_bank(job, job.ranks_of_adapters)
    adapters = range(len(job.ranks_of_adapters))
    weights = [bank.state_dict(str(adapter))["adapter"] for adapter in adapters]
    models: dict[str, Any] = {
        BANK: bank,
        SWITCHED: SwitchedAdapters(job, weights),
        IN_TURN: [load_single(job, rank) for rank in job.ranks_of_adapters],
    }
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    losses: dict[str, Any] = {}
    for arm in results.turns(ARMS, repeats):
        begin = len(seconds[arm]) * job.steps
        steps = range(begin, begin + job.steps)
        batches = [[job.ids(adapter, step, job.rows) for adapter in adapters] for step in steps]
        taken, reached = take_steps(models[arm], batches)
        seconds[arm].append(taken)
        losses.setdefault(arm, reached)
    return {"seconds": seconds, "losses": losses}


def measure_share(job: BankJob, repeats: int) -> dict[str, list[list[float]]]:
    """By number of adapters of rank 8, and of one training, seconds of each step by repeat. Collective: yes."""
    quieten()
    bank, single = build_bank(job, [8] * max(job.counts)), load_single(job, 8)
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in (*map(str, job.counts), SINGLE)}
    for arm in results.turns(seconds, repeats):
        count = 1 if arm == SINGLE else int(arm)
        rows = job.shared_rows // count
        batches = [[job.ids(adapter, step, rows) for adapter in range(count)] for step in range(job.steps)]
        seconds[arm].append(take_steps([single] if arm == SINGLE else bank, batches)[0])
    return seconds


def measure_products(width: int, adapters: int, tokens: int, rank: int, repeats: int) -> dict[str, Any]:
    """By dtype, seconds of the adapters' own products in one layer: grouped, and one after the other."""
    from shardwise.bank.kernels import GroupedProducts, LoraWeights, RoutedSegment, SegmentLoop

    quieten()
    device = own_device()
    seconds: dict[str, dict[str, list[float]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        segments = []
        for adapter in range(adapters):
            A = torch.randn(rank, width, device=device) / width
            B = torch.randn(width, rank, device=device)
            pair = LoraWeights(A, B, torch.zeros_like(A), torch.zeros_like(B), 1.0)
            segments.append(RoutedSegment(pair, adapter * tokens, (adapter + 1) * tokens))
        x, gradient = (torch.randn(adapters * tokens, width, device=device).to(dtype) for _ in range(2))
        of_dtype: dict[str, list[float]] = {"grouped": [], "loop": []}
        for repeat in range(repeats + 1):  # the first sets up
            for name, backend in (("grouped", GroupedProducts()), ("loop", SegmentLoop())):
                start = time.perf_counter()
                for _ in range(10):
                    out, x_gradient = torch.zeros_like(x), torch.zeros_like(x)
                    intermediate = backend.forward_rows(segments, x, out)
                    backend.backward_rows(segments, x, intermediate, gradient, x_gradient)
                synchronize()
                if repeat:
                    of_dtype[name].append((time.perf_counter() - start) / 10)
        seconds[str(dtype).removeprefix("torch.")] = of_dtype
    return seconds


# ── the program ───────────────────────────────────────────────────────────────────────────────────


def join(ranks: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> dict[str, list[dict[str, float]]]:
    """By arm and repeat, the median step."""
    return {
        arm: [
            {"seconds": meter.spread(results.slowest(steps))["median"]}
            for steps in zip(*(rank[arm] for rank in ranks), strict=True)
        ]
        for arm in ranks[0]
    }


def run(options: argparse.Namespace, job: BankJob) -> tuple[dict[str, Any], list[str], list[Limit]]:
    small = (256, 4, 8, 8) if options.tiny else (1024, 32, 8, 8)
    with results.start_ranks(options) as world:
        turns = world.run(measure_turns, job, options.repeats)
    with results.start_ranks(options) as world:
        share = join(world.run(measure_share, job, options.repeats))
    with results.start_ranks(options, 1) as world:
        [products] = world.run(measure_products, *small, options.repeats)
    steps, losses = join([rank["seconds"] for rank in turns]), turns[0]["losses"]
    pairs = [
        pair
        for arm in (SWITCHED, IN_TURN)
        for ours, theirs in zip(losses[BANK], losses[arm], strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    lines = results.runs_table("a step of all adapters", steps, BANK)
    tokens = job.shared_rows * options.ranks * job.tokens
    lines += results.runs_table(f"adapters that share {tokens} tokens a step", share, "1")
    for dtype, of in products.items():
        runs = {name: [{"seconds": each} for each in seconds] for name, seconds in of.items()}
        lines += results.runs_table(f"width, adapters, tokens, rank: {small}, {dtype}", runs, "grouped")
    step_s, shared_s, most = results.medians(steps, "seconds"), results.medians(share, "seconds"), max(job.counts)
    limits = [
        Limit("step / PEFT's set_adapter", step_s[BANK] / step_s[SWITCHED], SWITCHED_RATIO),
        Limit("step / one training after the other", step_s[BANK] / step_s[IN_TURN], IN_TURN_RATIO),
        Limit(f"{most} adapters / 1, as many tokens", shared_s[str(most)] / shared_s["1"], SHARE_RATIO),
        Limit("difference of a loss", max(abs(one - other) / abs(other) for one, other in pairs), LOSS_DIFFERENCE),
    ]
    return {"turns": turns, "share": share, "products": products}, lines, limits


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__, ranks=2)
    parser.add_argument("--steps", type=int, default=21, help="of each arm and repeat [21]")
    options = results.parse(parser, argv)
    report = results.describe(options, "bank")
    shape = SHAPES["qwen3-8m"].tiny() if options.tiny else SHAPES["qwen3-8m"]
    folder, _ = results.write_shape(options, SHAPES["qwen3-8m"])
    job = BankJob(
        folder=str(folder),
        vocab_size=shape.vocab_size,
        ranks_of_adapters=RANKS_OF_ADAPTERS,
        rows=2,
        tokens=16 if options.tiny else 64,
        steps=min(options.steps, 3) if options.tiny else options.steps,
        counts=(1, 2, 4) if options.tiny else (1, 2, 4, 8, 16, 32),
        shared_rows=8 if options.tiny else 4096 // 64 // options.ranks,
    )
    runs, lines, limits = run(options, job)
    adapters = f"LoRAs of ranks {', '.join(map(str, job.ranks_of_adapters))} on q_proj and v_proj"
    about = f"{folder.name} in float32; {adapters}, {job.rows} rows of {job.tokens} tokens for each on each rank."
    return results.publish(options, {**report, "job": asdict(job), "runs": runs}, [about, "", *lines], limits)


if __name__ == "__main__":
    sys.exit(main())
