"""Many LoRAs at chat lengths, on experts, and samples of them. ``python -m benchmarks.bank_requests``.

In float32, arms in turn in the same processes, by processor time (a busy machine stretches wall time):

- mixed: a step of eight adapters with four rows each of lognormal lengths, through a bank, and by PEFT's
  ``set_adapter`` with an optimizer for each (as in ``benchmarks.bank``), whose rows are padded to the longest.
- experts: eight adapters on attention; the same beside an idle one on 64 experts; and all on experts.
- logits: memory of a pass above its hidden states.
- rates: steps of eight adapters with eight learning rates, and of one with their total size.
- samples: eight requests of three adapters in one batch, and one by one.
"""

import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks import bank as banks
from benchmarks.harness import meter, results
from benchmarks.harness.results import Limit
from benchmarks.harness.training import quieten
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import shardwise

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
ADAPTERS, ROWS = 8, 4
MIXED_RATIO, IDLE_RATIO, EXPERTS_RATIO, LOGITS_GB, RATES_RATIO, SAMPLES_RATIO = 1 / 1.35, 1.05, 2.5, 0.6, 1.5, 0.4


def cpu_s() -> float:
    return time.process_time()


def measure(arms: dict[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of each arm, by repeat. The first one sets up."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(repeats + 1):
        for arm in results.turns(arms, 1):
            if dist.is_initialized():
                dist.barrier()
            start = cpu_s()
            arms[arm](repeat)
            if repeat:
                seconds[arm].append(cpu_s() - start)
    return seconds


def lengths(adapter: int, step: int, median: int, longest: int) -> list[int]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = random.Random(f"{adapter} {step} {rank}")
    return [min(max(round(generator.lognormvariate(0, 0.9) * median), 2), longest) for _ in range(ROWS)]


def mixed_rows(adapter: int, step: int, median: int) -> dict[str, torch.Tensor]:
    """Padded to the longest of the adapter."""
    of_rows = torch.tensor(lengths(adapter, step, median, 10 * median))
    generator = torch.Generator().manual_seed(100 * step + adapter)
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, int(of_rows.max())), generator=generator)
    mask = (torch.arange(ids.shape[1]) < of_rows.unsqueeze(1)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def measure_mixed(folder: str, median: int, repeats: int) -> dict[str, list[float]]:
    quieten()
    ranks = banks.RANKS_OF_ADAPTERS
    job = banks.BankJob(folder, SIZES["vocab_size"], ranks, ROWS, 0, 0)
    bank = banks.build_bank(job, ranks)
    weights = [bank.state_dict(str(adapter))["adapter"] for adapter in range(len(ranks))]
    switched = banks.SwitchedAdapters(job, weights)
    losses: dict[str, list[float]] = {}

    def step_bank(step: int) -> None:
        output = bank.forward_backward([(str(each), mixed_rows(each, step, median)) for each in range(len(ranks))])
        bank.optim_step({name: {} for name in bank.names})
        losses.setdefault(banks.BANK, [each.loss for each in output.requests])

    def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())

    def step_switched(step: int) -> None:
        batches = [mixed_rows(each, step, median) for each in range(len(ranks))]
        losses.setdefault(banks.SWITCHED, switched.step(batches, loss_of))

    seconds = measure({banks.BANK: step_bank, banks.SWITCHED: step_switched}, repeats)
    if not dist.is_initialized() or dist.get_world_size() == 1:  # on ranks PEFT has the mean of means
        pairs = zip(losses[banks.BANK], losses[banks.SWITCHED], strict=True)
        assert max(abs(one - other) for one, other in pairs) < 1e-3
    return seconds


def save(config: Any, folder: Any) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def measure_experts(folder: str, repeats: int) -> dict[str, list[float]]:
    quieten()
    attention = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    experts = LoraConfig(
        r=8,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    made = {}
    for arm in ("attention", "idle", "experts"):
        made[arm] = shardwise.AdapterBank(shardwise.from_pretrained(folder, dtype="float32"))
        for number in range(ADAPTERS):
            made[arm].add_adapter(str(number), experts if arm == "experts" else attention)
        if arm == "idle":
            made[arm].add_adapter("idle", experts)

    def step(arm: str) -> Callable[[int], object]:
        def run(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            made[arm].forward_backward(
                [
                    (str(each), {"input_ids": torch.randint(0, 4096, (2, 64), generator=generator)})
                    for each in range(ADAPTERS)
                ]
            )

        return run

    return measure({arm: step(arm) for arm in made}, repeats)


def measure_logits(tokens: int, vocab_size: int) -> float:
    """Gigabytes that the peak of a pass grows by the vocabulary."""
    peaks = []
    for size in (256, vocab_size):
        config = Qwen3Config(
            **{**SIZES, "vocab_size": size, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
        )
        bank = shardwise.AdapterBank(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        bank.add_adapter("ada", LoraConfig(r=4, target_modules=["q_proj"]))
        ids = torch.randint(0, 256, (tokens // 256, 256))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bank.forward_backward([("ada", {"input_ids": ids})])
        peaks.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6)
    return peaks[1] - peaks[0]


def measure_rates(folder: str, repeats: int) -> dict[str, list[float]]:
    quieten()
    bank = shardwise.AdapterBank(shardwise.from_pretrained(folder, dtype="float32"))
    for number in range(ADAPTERS):
        bank.add_adapter(str(number), LoraConfig(r=16, target_modules="all-linear"))
    bank.add_adapter("all", LoraConfig(r=16 * ADAPTERS, target_modules="all-linear"))
    steps: dict[str, Any] = {str(number): {"lr": 1e-4 * (1 + number)} for number in range(ADAPTERS)}

    def several(_: int) -> None:
        for _ in range(10):
            bank.optim_step(steps)

    def one(_: int) -> None:
        for _ in range(10):
            bank.optim_step({"all": {"lr": 1e-4}})

    return measure({"eight": several, "one": one}, repeats)


def measure_samples(folder: str, repeats: int) -> dict[str, list[float]]:
    from shardwise.bank.sampling import Sample

    quieten()
    bank = shardwise.AdapterBank(shardwise.from_pretrained(folder, dtype="float32"))
    for number in range(3):
        bank.add_adapter(str(number), LoraConfig(r=8, target_modules="all-linear"), seed=number)
    samples = [
        Sample(str(number % 3), list(range(10 + number)), max_tokens=32, temperature=0.0, stop=[])
        for number in range(8)
    ]

    def together(_: int) -> None:
        bank.generate(samples)

    def in_turn(_: int) -> None:
        for sample in samples:
            bank.generate([sample])

    return measure({"one batch": together, "one by one": in_turn}, repeats)


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__, ranks=2)
    options = results.parse(parser, argv)
    report = results.describe(options, "bank_requests")
    median, repeats = (20, 1) if options.tiny else (100, options.repeats)
    layers = {**SIZES, "num_hidden_layers": 1} if options.tiny else SIZES
    dense = save(Qwen3Config(**layers, tie_word_embeddings=True), options.dir / "bank-dense")
    moe = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
    experts = save(Qwen3MoeConfig(**layers, **moe, tie_word_embeddings=False), options.dir / "bank-experts")
    runs: dict[str, Any] = {}
    for ranks in (1, options.ranks):
        with results.start_ranks(options, ranks) as world:
            of_ranks = world.run(measure_mixed, dense, median, repeats)
            runs[f"mixed, {ranks}"] = {
                arm: [sum(each) for each in zip(*(rank[arm] for rank in of_ranks), strict=True)]
                for arm in of_ranks[0]
            }
    tokens, vocab_size = (512, 4096) if options.tiny else (4096, 151936)
    for name, call, arguments in (
        ("experts", measure_experts, (experts, repeats)),
        ("rates", measure_rates, (dense, repeats)),
        ("samples", measure_samples, (dense, repeats)),
        ("logits", measure_logits, (tokens, vocab_size)),
    ):
        with results.start_ranks(options, 1) as world:
            [runs[name]] = world.run(call, *arguments)
    medians = {
        name: {arm: meter.spread(seconds)["median"] for arm, seconds in of.items()}
        for name, of in runs.items()
        if name != "logits"
    }
    lines = []
    for name, of in runs.items():
        if name != "logits":
            own = {arm: [{"seconds": each} for each in seconds] for arm, seconds in of.items()}
            lines += results.runs_table(f"{name}: processor seconds", own, next(iter(own)))

    def ratio(name: str, one: str, other: str) -> float:
        return medians[name][one] / medians[name][other]

    limits = [
        *(
            Limit(
                f"mixed rows / PEFT, ranks: {ranks}",
                ratio(f"mixed, {ranks}", banks.BANK, banks.SWITCHED),
                MIXED_RATIO,
            )
            for ranks in (1, options.ranks)
        ),
        Limit("an idle adapter on experts / none", ratio("experts", "idle", "attention"), IDLE_RATIO),
        Limit("all on experts / on attention", ratio("experts", "experts", "attention"), EXPERTS_RATIO),
        Limit("GB of the logits of a pass", runs["logits"], LOGITS_GB),
        Limit("eight steps / one as large", ratio("rates", "eight", "one"), RATES_RATIO),
        Limit("eight samples at once / one by one", ratio("samples", "one batch", "one by one"), SAMPLES_RATIO),
    ]
    about = f"Eight LoRAs on q_proj and v_proj, four rows of lognormal lengths (median {median}) for each."
    return results.publish(options, {**report, "runs": runs}, [about, "", *lines], limits)


if __name__ == "__main__":
    sys.exit(main())
