"""Planning, timed: one rank's share of a mixture of experts stored one by one. ``python -m benchmarks.planning``.

No checkpoint and no other rank is needed: the index is made up, and torch's fake process group stands for the rest.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import Shape

RANK, RANKS = 5, 8
LAYERS, EXPERTS = 60, 128
MOST_S = 1.5
COUNTED = ("bind", "layout", "plan_load", "copies")
"""Phases that make up planning. Building the model on meta and wrapping it are shown beside them."""


def shape() -> Shape:
    """The one that is planned for; nothing of it is written."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }
    return Shape("planning", config, file_bytes=4_000_000_000)


def measure(repeats: int) -> dict[str, Any]:
    """Processor seconds by phase, each repeat in a fresh process, after a tiny model of the same architecture."""
    runs = [_in_fresh_process() for _ in range(repeats)]
    stored = [int(run.pop("stored")) for run in runs]
    totals = [sum(run[phase] for phase in COUNTED) for run in runs]
    return {
        "rank": RANK,
        "ranks": RANKS,
        "layers": LAYERS,
        "experts": EXPERTS,
        "stored": stored[0],
        "repeats": repeats,
        "phases": {phase: _spread([run[phase] for run in runs]) for phase in runs[0]},
        "counted": list(COUNTED),
        "total_s": _spread(totals),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _in_fresh_process() -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    found: dict[str, float] = ours.recv()
    process.join()
    return found


def _send(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    plan_once(shape().tiny())
    pipe.send(plan_once(shape()))


def plan_once(wanted: Shape) -> dict[str, float]:
    """Processor seconds by phase of planning for one rank, in the order in which ``from_pretrained`` goes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardwise.conversion.computed import copies
    from shardwise.layout import Origin, TensorKind
    from shardwise.models import build, pretrained, wrap
    from shardwise.models.initialize import Initializers
    from shardwise.models.pretrained import bind
    from shardwise.models.view import TensorRef, build_layout, collect_tensors
    from shardwise.models.wrap import Sharding
    from shardwise.planning.load_memory import stored_tensors
    from shardwise.planning.load_plan import Consent, ModelRules, plan_load

    clock = _Clock()
    index = _index(wanted)
    config = AutoConfig.for_model(**wanted.config)
    with clock.phase("build"):
        model_class, config = build.resolve_class(config, AutoModelForCausalLM, Path(), trust_remote_code=False)
        model = build.build_on_meta(model_class, config, torch.bfloat16, Path())
    with clock.phase("bind"):
        stored = stored_tensors(index)
        transforms = pretrained.conversion_transforms(model, None)
        whole = build_layout(collect_tensors(model))
        bindings = bind(model, stored, whole, transforms)
    with clock.phase("wrap"):
        saved = {name for tensor in whole.saved() for name in tensor.names}
        pretrained.tie(model, saved - set(bindings.matched), set())
        wrap.wrap(model, Sharding(mesh=wrap.default_mesh()))
    with clock.phase("layout"):
        held = collect_tensors(model)
        initializers = Initializers(model, held)
        computed = initializers.buffers({}, seed=0)

        def find_origin(item: TensorRef) -> Origin:
            return computed[item.fqn].origin if item.kind is TensorKind.BUFFER else initializers.find_origin(item)

        layout = build_layout(held, find_origin)
    with clock.phase("plan_load"):
        rules = ModelRules(*pretrained.ignore_patterns(model))
        plan = plan_load(index, layout, bindings, rules, Consent("error", "error", "error"))
        _ = plan.digest
    with clock.phase("copies"):
        count = 0
        for name, read in plan.reads().items():
            for part in layout.by_name[name].boxes:
                count += sum(copy.numel for copy in copies(read.expression, part.box, part.local))
    if count != sum(tensor.local_numel for tensor in layout.saved()):
        raise RuntimeError("the copies do not fill what the rank holds")
    return clock.seconds | {"stored": len(stored)}


class _Clock:
    """Processor seconds: planning waits for nothing, and so a busy machine does not spoil them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = time.process_time() - start


def _index(wanted: Shape) -> Any:
    """The index of a checkpoint of this shape that nobody has written."""
    from shardwise.formats.contract import CheckpointIndex, TensorEntry
    from shardwise.tensors import dtype_named

    bf16 = dtype_named("BF16")
    entries: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for number, keys in enumerate(wanted.files(), start=1):
        file = f"model-{number:05d}.safetensors"
        start = 0
        for key, tensor in keys.items():
            nbytes = 2
            for size in tensor:
                nbytes *= size
            entries[key] = TensorEntry(key, bf16, tensor, file, start, start + nbytes)
            start += nbytes
        sizes[file] = start
    return CheckpointIndex("made up", sizes, entries, {}, "indexed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args(argv).repeats), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
