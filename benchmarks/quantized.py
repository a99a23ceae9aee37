"""Quantized bases: loading FP8 and into 4 bits, and a LoRA on 4 bits. ``python -m benchmarks.quantized``.

- load: ranks load the same model in bfloat16 from files in bfloat16; from files of which the matrices are in
  FP8 in blocks of 128 x 128, dequantized; and from bfloat16 into NF4. Each load has its own processes, which
  load a tiny model first. The roof of NF4 is the longer of reading alone (the first arm), and of packing as
  many numbers that are in memory, on the same ranks at once.
- step: a step of a LoRA on two ranks: on shardwise's bases in bfloat16 and in NF4; on transformers' and
  bitsandbytes', to which ``fully_shard`` is applied by hand (its scales stay whole on every rank); on torchao's
  NF4, likewise (its scales are nested, and its values are others). In the same processes, in turn. A peer that
  is not installed is left out.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import meter, results
from benchmarks.harness.checkpoints import SHAPES, write
from benchmarks.harness.results import SLACK_MIB, Limit, say
from benchmarks.harness.training import LEARNING_RATE, Job, batches, quieten, trained_parameters, update

BFLOAT16, FP8, NF4 = "bfloat16", "FP8", "NF4"
FORMS = (BFLOAT16, FP8, NF4)
ROWS = ("load", "step")
BLOCK = 128
BUDGET_MIB = 64
FP8_RATIO, NF4_RATIO, STEP_RATIO = 1.3, 1.2, 1.15


# ── loads ─────────────────────────────────────────────────────────────────────────────────────────


def write_fp8(folder: Path) -> Path:
    """A copy of a checkpoint with its matrices in FP8, and random scales. Written once."""
    import torch
    from safetensors.torch import load_file, save_file

    out = folder.with_name(f"{folder.name}-fp8")
    if (out / "config.json").is_file():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    weight_map: dict[str, str] = {}
    for file in meter.files_of(folder):
        tensors = {}
        for key, tensor in load_file(file).items():
            tensors[key] = tensor
            if tensor.ndim == 2 and key.endswith("proj.weight"):
                tensors[key] = tensor.to(torch.float8_e4m3fn)
                tensors[f"{key}_scale_inv"] = torch.rand([-(-size // BLOCK) for size in tensor.shape])
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (out / "config.json").write_text(json.dumps(config))  # last: an incomplete copy has none
    return out


def load(folder: str, warm_up: str, form: str) -> dict[str, Any]:
    """One load. Collective: yes."""
    import torch.distributed as dist

    import shardwise

    quieten()
    keywords: dict[str, Any] = {"quantization": shardwise.options.Nf4()} if form == NF4 else {}
    keywords["options"] = shardwise.options.LoadOptions(progress=False, budget_bytes=BUDGET_MIB << 20)
    shardwise.from_pretrained(warm_up, dtype=BFLOAT16, **keywords)
    if dist.get_rank() == 0:
        meter.warm_cache(meter.files_of(Path(folder)))
    memory = meter.MemoryWatch()
    dist.barrier()
    with memory, meter.Stopwatch() as watch:
        _, report = shardwise.from_pretrained(folder, dtype=BFLOAT16, output_loading_info=True, **keywords)
        dist.barrier()
    facts = {"phases": dict(report.seconds), "over_shards_bytes": memory.growth_bytes - report.placed_bytes}
    return {**watch.facts(), **facts}


def pack(numel: int) -> dict[str, float]:
    """Pack so many numbers of this rank, which are in memory, to NF4. Collective: yes."""
    import torch
    import torch.distributed as dist

    from shardwise.core.tensors import DType, Form4
    from shardwise.files.four_bit_blocks import quantize_rows

    quieten()
    rows, width = 1024, 2048
    values = torch.randn(rows, width).bfloat16()
    packed, scales = torch.empty(rows, width // 2, dtype=torch.uint8), torch.empty(rows, width // 64)
    dist.barrier()
    with meter.Stopwatch() as watch:
        for _ in range(-(-numel // values.numel())):
            quantize_rows(values, DType.BF16, 64, Form4.NF4, packed, scales)
        dist.barrier()
    return watch.facts()


def measure_loads(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[Limit]]:
    folder, tiny = results.write_shape(options, SHAPES["qwen3-1.7b"])
    shape = SHAPES["qwen3-1.7b"].tiny() if options.tiny else SHAPES["qwen3-1.7b"]
    packed = sum(sizes[0] * sizes[1] for key, sizes in shape.tensors() if key.endswith("proj.weight"))
    folders = {BFLOAT16: (folder, tiny), FP8: (write_fp8(folder), write_fp8(tiny)), NF4: (folder, tiny)}
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in (*FORMS, "packing alone")}
    for form in results.turns(FORMS, options.repeats):
        with results.start_ranks(options) as world:
            ranks = world.run(load, *map(str, folders[form]), form)
            if form == NF4:
                packing = world.run(pack, packed // options.ranks)
                runs["packing alone"].append(dict(meter.join_ranks(packing)))
        over = max(rank["over_shards_bytes"] for rank in ranks)
        runs[form].append({**meter.join_ranks(ranks), "over_shards_bytes": over, "phases": ranks[0]["phases"]})
        say(f"  {form}: {runs[form][-1]['seconds']:.2f} s")
    seconds = results.medians(runs, "seconds")
    over_mib = results.most_mib(runs[NF4], "over_shards_bytes")
    limits = [
        Limit("load FP8 / bfloat16", seconds[FP8] / seconds[BFLOAT16], FP8_RATIO),
        Limit(
            "load NF4 / the longer of reading and packing",
            seconds[NF4] / max(seconds[BFLOAT16], seconds["packing alone"]),
            NF4_RATIO,
        ),
        Limit("load NF4, memory over the shards, MiB", over_mib, BUDGET_MIB + SLACK_MIB),
    ]
    lines = results.runs_table(f"load {folder.name}", runs, BFLOAT16, nbytes=("over_shards_bytes",))
    return runs, lines, limits


# ── steps of a LoRA ───────────────────────────────────────────────────────────────────────────────

ON_BFLOAT16, ON_NF4 = "shardwise, bfloat16", "shardwise, NF4"
BITSANDBYTES, BITSANDBYTES_SHARDED = "bitsandbytes, one process", "bitsandbytes, fully_shard by hand"
TORCHAO_SHARDED = "torchao, fully_shard by hand"
STEP_ARMS = (ON_BFLOAT16, ON_NF4, BITSANDBYTES_SHARDED, TORCHAO_SHARDED)


def load_for_lora(arm: str, folder: str) -> Any:
    """A model with a LoRA on all linear layers. Collective: yes."""
    import torch
    from benchmarks.harness.loaders import adapter_config, own_device
    from peft import get_peft_model
    from tests.peers import use_peers
    from torch.distributed.fsdp import fully_shard

    import shardwise

    if arm in (ON_BFLOAT16, ON_NF4):
        keywords: dict[str, Any] = {"quantization": shardwise.options.Nf4()} if arm == ON_NF4 else {}
        return shardwise.from_pretrained(
            folder, dtype=BFLOAT16, tuning=shardwise.Lora(adapter_config()), **keywords
        )
    package = "torchao" if arm == TORCHAO_SHARDED else "bitsandbytes"
    if Path(sys.prefix, "peers", package).is_dir():  # beside the environment, for tests
        use_peers(package)
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if arm == TORCHAO_SHARDED:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for module in base.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(to_nf4(module.weight.data), requires_grad=False)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=config, device_map={"": own_device()}
        )
    model = get_peft_model(base, adapter_config())
    if arm in (BITSANDBYTES_SHARDED, TORCHAO_SHARDED):
        for layer in base.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def base_bytes(model: Any) -> int:
    """Bytes that this rank holds of the blocks' linear layers: packed values, and scales."""
    total = 0
    for name, module in model.named_modules():
        if not name.endswith("base_layer"):
            continue
        for parameter in module.parameters(recurse=False):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            inner = [getattr(local, part) for part in getattr(local, "__tensor_flatten__", lambda: ((), None))()[0]]
            total += sum(item.nbytes for item in inner) if inner else local.nbytes
        state = getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
        total += 0 if state is None else state.absmax.nbytes
    return total


def take_steps(arms: Sequence[str], job: Job, repeats: int) -> dict[str, dict[str, Any]]:
    """By arm: seconds of steps, without the first of each turn, and bytes; or how a peer fails. Collective: yes."""
    import torch
    import torch.distributed as dist

    quieten()
    models: dict[str, Any] = {}
    figures: dict[str, dict[str, Any]] = {}
    steps = batches(job, dist.get_rank())
    for arm in arms:
        try:
            models[arm] = load_for_lora(arm, job.folder)
            update(models[arm], torch.optim.AdamW(trained_parameters(models[arm]), lr=LEARNING_RATE), steps[0])
        except Exception as error:
            if arm in (ON_BFLOAT16, ON_NF4):
                raise
            models.pop(arm, None)
            figures[arm] = {"fails": f"{type(error).__name__}: {error}"[:300]}
        else:
            figures[arm] = {"seconds": [], "base_bytes": base_bytes(models[arm])}
    for arm in results.turns(models, repeats):
        optimizer = torch.optim.AdamW(trained_parameters(models[arm]), lr=LEARNING_RATE)
        for number, ids in enumerate(steps):
            start = time.perf_counter()
            float(update(models[arm], optimizer, ids))
            if number:
                figures[arm]["seconds"].append(time.perf_counter() - start)
    return figures


def measure_steps(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[Limit]]:
    shape = SHAPES["qwen3-8m" if options.tiny else "qwen3-36m"]  # torchao cannot pack what is smaller
    folder = write(shape, options.dir)
    job = Job(str(folder), 4, options.rows_per_step, 16 if options.tiny else 128, shape.vocab_size, BFLOAT16)
    with results.start_ranks(options, 2) as world:
        figures = world.run(take_steps, STEP_ARMS, job, options.repeats)[0]
    with results.start_ranks(options, 1) as world:
        figures |= world.run(take_steps, [BITSANDBYTES], job, options.repeats)[0]
    runs = {
        arm: [{"seconds": each, "base_bytes": of["base_bytes"]} for each in of["seconds"]]
        for arm, of in figures.items()
        if "fails" not in of
    }
    lines = results.runs_table(f"step of a LoRA on {folder.name}", runs, ON_NF4, nbytes=("base_bytes",))
    for arm in figures.keys() - runs.keys():
        lines += [f"{arm} fails: {figures[arm]['fails']}", ""]
    seconds = results.medians(runs, "seconds")
    return figures, lines, [Limit("step on NF4 / on bfloat16", seconds[ON_NF4] / seconds[ON_BFLOAT16], STEP_RATIO)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__)
    results.add_choice(parser, "--rows", ROWS, f"of {', '.join(ROWS)}")
    parser.add_argument("--rows-per-step", type=int, default=8, help="on each rank [8]")
    options = results.parse(parser, argv)
    report = results.describe(options, "quantized")
    lines: list[str] = []
    limits: list[Limit] = []
    for row in options.rows:
        figures, described, promised = (measure_loads if row == "load" else measure_steps)(options)
        report[row] = figures
        lines += described
        limits += promised
    return results.publish(options, report, lines, limits)


if __name__ == "__main__":
    sys.exit(main())
