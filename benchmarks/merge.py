"""Merging: sharded weights against accelerate, and an adapter into its base. ``python -m benchmarks.merge``.

One new process for each merge, which merges a tiny model first. The files are in the page cache. The output is
synced: by shardwise itself, accelerate's by the benchmark.
"""

import json
import multiprocessing
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import meter, results
from benchmarks.harness.checkpoints import SHAPES
from benchmarks.harness.results import SLACK_MIB, STAGING_MIB, Limit, say

RANK = 16
OURS, PEER, ADAPTER = "shardwise weights", "accelerate weights", "shardwise adapter"
ARMS = (OURS, PEER, ADAPTER)
RATIO = 0.3


def prepare(base: Path) -> None:
    """Write the checkpoint as a folder of torch's distributed checkpoint, and an adapter on its linear layers."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file

    run, adapter = Path(f"{base}-run"), Path(f"{base}-adapter")
    tensors: dict[str, torch.Tensor] = {}
    for file in meter.files_of(base):
        tensors |= load_file(file)
    if not (run / "pytorch_model_fsdp_0" / ".metadata").is_file():
        run.mkdir(exist_ok=True)
        shutil.copy(base / "config.json", run)
        writer = dcp.FileSystemWriter(run / "pytorch_model_fsdp_0", thread_count=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": tensors}, storage_writer=writer, no_dist=True)
    if not (adapter / "adapter_config.json").is_file():
        adapter.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        matrices: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            if "_proj." in key:
                module = f"base_model.model.{key.removesuffix('.weight')}"
                matrices[f"{module}.lora_A.weight"] = torch.rand((RANK, tensor.shape[1]), generator=generator)
                matrices[f"{module}.lora_B.weight"] = torch.rand((tensor.shape[0], RANK), generator=generator)
        save_file(matrices, adapter / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32}
        (adapter / "adapter_config.json").write_text(json.dumps(config))


def merge(arm: str, base: str, out: Path) -> None:
    import shardwise

    if arm == OURS:
        shardwise.merge_weights(f"{base}-run", out)
    elif arm == ADAPTER:
        shardwise.merge_adapter(base, f"{base}-adapter", out)
    else:
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(f"{base}-run/pytorch_model_fsdp_0", str(out), safe_serialization=True)
        meter.sync_files(out)


def measure(arm: str, base: str, tiny: str, out: Path) -> dict[str, Any]:
    """In this process, which is new. Of weights, also whether they are the base's bit for bit."""
    import torch
    from safetensors.torch import load_file
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    shutil.rmtree(out, ignore_errors=True)
    merge(arm, tiny, out)
    shutil.rmtree(out)
    folders = [Path(base), Path(f"{base}-run", "pytorch_model_fsdp_0"), Path(f"{base}-adapter")]
    meter.warm_cache(file for folder in folders for file in folder.iterdir() if file.is_file())
    os.sync()
    meter.wait_for_quiet(2)
    with meter.MemoryWatch() as memory, meter.Stopwatch() as watch:
        merge(arm, base, out)
    run = {**meter.join_ranks([watch.facts()]), "growth_bytes": memory.growth_bytes}
    if arm != ADAPTER:
        merged: dict[str, Any] = {}
        for file in meter.files_of(out):
            merged |= load_file(file)
        for file in meter.files_of(Path(base)):
            if any(not torch.equal(merged[key], tensor) for key, tensor in load_file(file).items()):
                raise RuntimeError(f"{arm}: other values than in {file}")
    return run


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__, ranks=1, repeats=3)
    models = [name for name, shape in SHAPES.items() if not shape.is_moe]
    parser.add_argument("--model", default="qwen3-1.7b", choices=models, help="[qwen3-1.7b]")
    parser.add_argument("--to", type=Path, help="where the output goes; a tmpfs takes the disk out of the times")
    options = results.parse(parser, argv)
    report = results.describe(options, "merge")
    base, tiny = results.write_shape(options, SHAPES[options.model])
    for folder in (base, tiny):
        prepare(folder)
    out = (options.to or options.dir) / "shardwise-merged"
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    context = multiprocessing.get_context("spawn")
    for arm in results.turns(ARMS, options.repeats):
        with ProcessPoolExecutor(1, mp_context=context) as process:
            runs[arm].append(process.submit(measure, arm, str(base), str(tiny), out).result())
        say(f"  {arm}: {runs[arm][-1]['seconds']:.2f} s")
    shutil.rmtree(out, ignore_errors=True)
    seconds = results.medians(runs, "seconds")
    limits = [Limit("time / accelerate", seconds[OURS] / seconds[PEER], RATIO)]
    for arm in (OURS, ADAPTER):
        growth_mib = results.most_mib(runs[arm], "growth_bytes")
        limits.append(Limit(f"memory growth, MiB: {arm}", growth_mib, STAGING_MIB + SLACK_MIB))
    report |= {"model": options.model, "bytes": SHAPES[options.model].nbytes, "runs": runs}
    lines = results.runs_table("arm", runs, OURS, figures=("user_s", "system_s"), nbytes=("growth_bytes",))
    lines += ["Merged weights have the values of the base, bit for bit."]
    return results.publish(options, report, lines, limits)


if __name__ == "__main__":
    sys.exit(main())
