"""A LoRA on a base in four bits, beside what others make of that: a step, and what a rank holds of the base.

``python -m benchmarks.four_bit_peers``. Two gloo ranks train LoRAs on a small Qwen3 shape: on shardwise's base; on
transformers' with bitsandbytes, to which ``fully_shard`` is applied by hand (its scales stay whole on every rank);
on one with torchao's NF4 tensors, likewise (its scales are nested, and other numbers). One process trains as
transformers, PEFT and bitsandbytes do. In the same processes, in turn. Wants bitsandbytes and torchao.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write
from benchmarks.place import add_device, commit, machine, own_device
from benchmarks.training import LEARNING_RATE, SMALL, Job, batches, quieten, step_by_hand
from tests.support.local_ranks import LocalRanks


def by_shardwise(folder: str) -> Any:
    from benchmarks.arms import adapter_config

    import shardwise

    quantization = shardwise.options.Nf4()
    return shardwise.from_pretrained(
        folder, dtype="bfloat16", quantization=quantization, tuning=shardwise.Lora(adapter_config())
    )


def by_bitsandbytes(folder: str) -> Any:
    import torch
    from benchmarks.arms import adapter_config
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, device_map={"": own_device()}
    )
    return get_peft_model(model, adapter_config())


def by_torchao(folder: str) -> Any:
    import torch
    from benchmarks.arms import adapter_config
    from peft import get_peft_model
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(to_nf4(module.weight.data), requires_grad=False)
    return get_peft_model(model, adapter_config())


def sharded_by_hand(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


ARMS: dict[str, Callable[[str], Any]] = {
    "shardwise": by_shardwise,
    "bitsandbytes, fully_shard by hand": lambda folder: sharded_by_hand(by_bitsandbytes(folder)),
    "torchao, fully_shard by hand": lambda folder: sharded_by_hand(by_torchao(folder)),
}


def take_steps(job: Job, turns: int, who: str) -> dict[str, Any]:
    """Seconds of steps by arm, but for the first of each turn; or what an arm fails with. Collective: yes."""
    import torch
    import torch.distributed as dist

    quieten()
    arms = ARMS if who == "ranks" else {"transformers, one process": by_bitsandbytes}
    models: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, make in arms.items():
        try:
            models[name] = make(job.folder)
            [batch] = batches(job, 1, dist.get_rank())[0]
            optimizer = torch.optim.AdamW(trained(models[name]), lr=LEARNING_RATE)
            step_by_hand(models[name], optimizer, batch)
            found[name] = {"seconds": [], "base_bytes": base_bytes(models[name])}
        except Exception as error:  # what a peer cannot do is told, too
            models.pop(name, None)
            found[name] = {"fails": f"{type(error).__name__}: {error}"[:300]}
    for _ in range(turns):
        for name, model in models.items():
            optimizer = torch.optim.AdamW(trained(model), lr=LEARNING_RATE)
            for number, [batch] in enumerate(batches(job, job.steps, dist.get_rank())):
                start = time.perf_counter()
                step_by_hand(model, optimizer, batch)
                if number:
                    found[name]["seconds"].append(time.perf_counter() - start)
    return found


def trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def base_bytes(model: Any) -> int:
    """Bytes that this rank holds of linear layers of the blocks: what is packed, and the scales."""
    total = 0
    for name, module in model.named_modules():
        if not name.endswith("base_layer"):
            continue
        for parameter in module.parameters(recurse=False):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            inner = [getattr(local, part) for part in getattr(local, "__tensor_flatten__", lambda: ((), None))()[0]]
            total += sum(item.nbytes for item in inner) if inner else local.nbytes
        state = getattr(getattr(module, "weight", None), "quant_state", None) or getattr(
            module, "quant_state", None
        )
        total += 0 if state is None else state.absmax.nbytes
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    add_device(parser)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="rows of 128 tokens of a step, on each rank")
    parser.add_argument("--out", type=Path, help="results, as .json")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args(argv)
    folder = write(SMALL, given.dir)
    job = Job(str(folder), 3, given.rows, 128, int(SMALL.config["vocab_size"]), "bfloat16")
    with LocalRanks(given.ranks, timeout_s=600, device=given.device) as world:
        found = world.run(take_steps, job, given.turns, "ranks")[0]
    with LocalRanks(1, timeout_s=600, device=given.device) as world:
        found |= world.run(take_steps, job, given.turns, "alone")[0]
    for name, told in found.items():
        if "fails" in told:
            print(f"{name}: {told['fails']}")
        else:
            seconds = statistics.median(told["seconds"])
            print(f"{name}: {seconds:.2f} s a step, {told['base_bytes']:,} bytes of the base a rank")
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.four_bit_peers --turns {given.turns}",
        "commit": commit(),
        "machine": machine(),
        "model": folder.name,
        "arms": found,
    }
    place = given.out or Path("benchmarks/results", f"four-bit-peers-{datetime.now(UTC):%Y-%m-%d-%H%M}.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
