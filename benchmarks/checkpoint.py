"""Checkpoints of a training: how long it waits, against torch's own. ``python -m benchmarks.checkpoint``.

Gloo ranks hold a model of random values and its AdamW, in float32; with ``--what lora``, the adapter of
Qwen3-1.7B's shape and its AdamW. Arms take turns. The clock of a rank runs from a barrier until the call
returns, and the slowest rank counts; for asynchronous arms it is also told when the checkpoint is complete.
Every arm syncs what it writes. torch's arms write the model and its moments only. "the copy alone" is what no
asynchronous checkpoint can do without: each rank copies its shards to memory that exists.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.checkpoints import SHAPES, Shape, sizes, smaller
from benchmarks.harness.results import Limit

SYNC, ASYNC, COPY = "synchronous", "asynchronous", "the copy alone"
PEERS = ("dcp.save", "dcp.async_save")
WAIT_RATIO, DCP_RATIO = 0.15, 1.0
LORA_SYNC_S, LORA_WAIT_S = 1.0, 0.12

Rounds = dict[str, list[dict[str, float]]]
"""By arm, of each round the seconds by phase; the first round makes imports, plans and memory."""


def measure(what: str, shape: Shape, out: str, repeats: int) -> dict[str, Any]:
    """Saves on this rank: rounds, and the number of trained parameters. Collective: yes."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from benchmarks.harness.loaders import own_device, synchronize
    from benchmarks.harness.values import DTensor
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import shardwise

    model, optimizer, trained = build(what, shape)
    only = shardwise.options.AdapterOnly() if what == "lora" else None
    state = shardwise.TrainState(model, optimizer)
    checkpointers = {
        SYNC: shardwise.Checkpointer(f"{out}/sync", mode="sync", keep=1, only=only),
        ASYNC: shardwise.Checkpointer(f"{out}/async", mode="async", keep=1, only=only),
    }
    tensors = [*trained, *(value for values in optimizer.state.values() for value in values.values())]
    sources = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    is_pinned = own_device().type != "cpu"
    copies = [torch.zeros_like(tensor, device="cpu", pin_memory=is_pinned) for tensor in sources]
    arms = [SYNC, ASYNC, *PEERS, COPY] if what == "full" else [SYNC, ASYNC, COPY]  # torch would write the base, too
    rounds: Rounds = {arm: [] for arm in arms}
    for arm in results.turns(arms, repeats + 1):
        number = len(rounds[arm])
        phases: dict[str, float] = {}
        dist.barrier()
        start, processor = time.perf_counter(), time.thread_time()
        with torch.no_grad():
            if arm in checkpointers:
                phases |= checkpointers[arm].save(number, state).seconds
            elif arm == COPY:
                for target, source in zip(copies, sources, strict=True):
                    target.copy_(source, non_blocking=True)
                synchronize()
            else:
                values, moments = get_state_dict(model, optimizer)
                save = dcp.save if arm == "dcp.save" else dcp.async_save
                saving = save({"model": values, "optimizer": moments}, checkpoint_id=f"{out}/torch/{number}")
        phases |= {"seconds": time.perf_counter() - start, "processor": time.thread_time() - processor}
        if arm == ASYNC:
            checkpointers[arm].wait()
        elif arm == "dcp.async_save":
            saving.result()
        phases["total"] = time.perf_counter() - start
        rounds[arm].append(phases)
        clean(out)
    return {"rounds": rounds, "parameters": sum(parameter.numel() for parameter in trained)}


def clean(out: str) -> None:
    """Remove torch's checkpoints, which nobody else does, and let the disk finish. Collective: yes."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{out}/torch", ignore_errors=True)
        os.sync()
    dist.barrier()


def full_shape(layers: int, hidden: int) -> Shape:
    """Of a model that is trained whole."""
    heads = hidden // 128
    return smaller("checkpoint", **sizes(hidden, 3 * hidden, layers, heads, min(8, heads), 128, 32768))


def build(what: str, shape: Shape) -> tuple[Any, Any, list[Any]]:
    """A sharded model of random values, its AdamW with moments, and its trained parameters.

    The base of an adapter is never written to, and so takes no memory.
    """
    import torch
    from benchmarks.harness.loaders import adapter_config, own_device
    from benchmarks.harness.training import quieten, trained_parameters
    from peft import get_peft_model
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM

    quieten()
    config = {key: value for key, value in shape.config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**config))
        blocks = model.model.layers
        if what == "lora":
            model = get_peft_model(model.to(torch.bfloat16), adapter_config(), autocast_adapter_dtype=True)
    for block in blocks:
        frozen = {parameter for parameter in block.parameters() if not parameter.requires_grad}
        fully_shard(block, ignored_params=frozen)
    if what == "full":
        fully_shard(model)
    model.to_empty(device=own_device())
    trained = trained_parameters(model)
    with torch.no_grad():
        for parameter in trained:
            parameter.to_local().normal_(0, 0.02)
            parameter.grad = parameter.clone()
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, trained


def join(ranks: Sequence[Mapping[str, Any]]) -> Rounds:
    """Of each round the slowest rank."""
    return {
        arm: [
            {phase: max(rank["rounds"][arm][number][phase] for rank in ranks) for phase in phases}
            for number, phases in enumerate(rounds)
        ]
        for arm, rounds in ranks[0]["rounds"].items()
    }


def limits_of(what: str, later: Rounds) -> list[Limit]:
    """Of the rounds after the first."""
    waits = results.medians(later, "seconds")
    if what == "lora":
        return [
            Limit("wait for an asynchronous checkpoint, s", waits[ASYNC], LORA_WAIT_S),
            Limit("synchronous checkpoint, s", waits[SYNC], LORA_SYNC_S),
        ]
    # Nothing waits less than the copy takes.
    most = max(WAIT_RATIO, waits[COPY] / waits[SYNC])
    return [
        Limit("wait for an asynchronous checkpoint / synchronous", waits[ASYNC] / waits[SYNC], most),
        Limit("synchronous / dcp.save", waits[SYNC] / waits["dcp.save"], DCP_RATIO),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--what", choices=("full", "lora"), default="full")
    parser.add_argument("--layers", type=int, default=6, help="of the full model [6]")
    parser.add_argument("--hidden", type=int, default=1024, help="of the full model [1024]")
    options = results.parse(parser, argv)
    shape = full_shape(options.layers, options.hidden) if options.what == "full" else SHAPES["qwen3-1.7b"]
    shape = shape.tiny() if options.tiny else shape
    report = results.describe(options, "checkpoint")
    with tempfile.TemporaryDirectory(dir=options.dir) as out, results.start_ranks(options) as world:
        ranks = world.run(measure, options.what, shape, out, options.repeats)
    rounds, parameters = join(ranks), ranks[0]["parameters"]
    later = {arm: of[1:] for arm, of in rounds.items()}
    firsts = ", ".join(f"{arm} {of[0]['seconds']:.2f}" for arm, of in rounds.items())
    lines = [f"{parameters / 1e6:.0f} million trained parameters. Seconds of the first round: {firsts}.", ""]
    lines += results.runs_table("waiting for", later, SYNC, figures=("total", "processor"))
    report |= {"parameters": parameters, "runs": rounds}
    return results.publish(options, report, lines, limits_of(options.what, later), f"-{options.what}")


if __name__ == "__main__":
    sys.exit(main())
