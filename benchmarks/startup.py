"""Memory and seconds while a model is loaded for training, with a picture. ``python -m benchmarks.startup``.

Ranks load a model by every loader of ``harness/loaders.py`` that makes a whole model from a Hugging Face
checkpoint, each in new processes: they load, shard, create AdamW, and write to every page of every shard, as a
first step will. The values of all models are compared. A peer that fails is left out.

The baseline of a rank is its first sample, after all imports. Its growth is its private and shared memory above
it. The growth of the machine is the largest sum over its ranks at one moment. Pages of mapped files belong to
the kernel, which can reclaim them; they are told apart. With ``--dtype auto``, or float32 files, plain loading
leaves values in mapped files, which all ranks share: look at both. The promise: our growth is at most the
shards, and of each rank the budget (256 MiB) and 32 MiB.
"""

import argparse
import gc
import io
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.harness import meter, results
from benchmarks.harness.checkpoints import SHAPES
from benchmarks.harness.results import SLACK_MIB, STAGING_MIB, Limit, say
from tests.support.local_ranks import LocalRanks, RankError

OURS = "shardwise"
ARMS = {
    OURS: "each rank reads its own bytes",
    "fully_shard": "every rank loads all, then fully_shard",
    "set_model_state_dict": "rank 0 loads, set_model_state_dict broadcasts",
    "accelerate": "every rank loads all, then FSDP2 by accelerate",
    "accelerate-efficient": "rank 0 loads, accelerate broadcasts (cpu_ram_efficient_loading)",
    "transformers": "from_pretrained(distributed_config=...)",
}
PHASES = LOAD, WRAP, OPTIMIZER = "load", "wrap", "optimizer"
PICTURE = Path("docs", "images", "startup.png")
_SHADES = ("#3b82f6", "#60a5fa")
_BANDS = {LOAD: "#f59e0b", WRAP: "#10b981", OPTIMIZER: "#a855f7"}
_INK = "#7d8590"  # readable on white and on black


@dataclass(frozen=True)
class RankRecord:
    """What a rank reports.

    Attributes:
        samples: (seconds, private and shared bytes, mapped bytes) over time.
        starts: seconds at which each phase begins, and at which the last one ends.
        shard_bytes: final bytes on the host.
        device_bytes: the most that tensors took on an accelerator.
        sums: of values, by name.
    """

    samples: Sequence[tuple[float, int, int]]
    starts: Sequence[float]
    shard_bytes: int = 0
    device_bytes: int = 0
    sums: Any = None


@dataclass(frozen=True)
class Timeline:
    """An arm on all ranks.

    Attributes:
        seconds: since the first rank began to load.
        growth: by rank, GiB of private and shared memory at these seconds.
        spans: of each phase the start on the first rank and the stop on the last one.
    """

    seconds: Any
    growth: Sequence[Any]
    spans: Mapping[str, tuple[float, float]]


def load_by_arm(arm: str, folder: str, dtype: str) -> RankRecord:
    """Load by an arm, and create an optimizer. Collective: yes."""
    import torch
    import torch.distributed as dist
    from benchmarks.harness import values
    from benchmarks.harness.loaders import LOADERS, Request, own_device
    from benchmarks.harness.training import quieten
    from transformers import AutoConfig, AutoModelForCausalLM

    quieten()
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # imports what this model needs
    gc.collect()
    memory = meter.MemoryWatch()
    dist.barrier()
    with memory:
        start = meter.timestamp()
        loaded = LOADERS[arm](Request(folder, dtype))
        wrapped = meter.timestamp()
        torch.optim.AdamW(loaded.model.parameters(), lr=1e-5)
        values.write_to_pages(loaded.model)
        stop = meter.timestamp()
    on_host = [tensor for tensor in values.local_tensors(loaded.model) if tensor.device.type == "cpu"]
    kind = own_device().type
    return RankRecord(
        memory.samples,
        (start, loaded.wrapped_from or wrapped, wrapped, stop),
        sum(tensor.nbytes for tensor in on_host),
        0 if kind == "cpu" else torch.get_device_module(kind).max_memory_allocated(),
        values.sum_values(loaded.model),
    )


def summarize(ranks: Sequence[RankRecord]) -> tuple[dict[str, Any], Timeline]:
    """Figures of an arm: seconds until all ranks have sharded the model, and growth of memory."""
    begin = min(rank.starts[0] for rank in ranks)
    seconds = np.unique(np.concatenate([[sample[0] for sample in rank.samples] for rank in ranks]))
    own, mapped = ([interpolate(rank.samples, seconds, column) for rank in ranks] for column in (1, 2))
    figures = {
        "seconds": max(rank.starts[2] for rank in ranks) - begin,
        "phases": {
            phase: max(rank.starts[number + 1] - rank.starts[number] for rank in ranks)
            for number, phase in enumerate(PHASES)
        },
        "growth_bytes": int(np.sum(own, axis=0).max()),
        "fullest_bytes": int(np.max(own)),
        "mapped_bytes": int(np.sum(mapped, axis=0).max()),
        "device_bytes": max(rank.device_bytes for rank in ranks),
        "limit_bytes": sum(rank.shard_bytes + (STAGING_MIB + SLACK_MIB << 20) for rank in ranks),
    }
    # A span begins when that of the phase before it ends: when the last rank has done it.
    ends = [0.0, *(max(rank.starts[number + 1] for rank in ranks) - begin for number in range(len(PHASES)))]
    spans = dict(zip(PHASES, itertools.pairwise(ends), strict=True))
    return figures, Timeline(seconds - begin, [np.maximum(each, 0) / 2**30 for each in own], spans)


def interpolate(samples: Sequence[tuple[float, int, int]], seconds: Any, column: int) -> Any:
    """Bytes above the first sample at these moments. Before and after its samples, a rank has the nearest one."""
    times, levels = np.array([sample[0] for sample in samples]), np.array([sample[column] for sample in samples])
    return np.interp(seconds, times, levels - levels[0])


def run_arms(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Any], dict[str, Timeline], dict[str, str]]:
    """Figures and timelines by arm, and how peers have failed.

    Raises:
        RankError: our arm failed.
    """
    from benchmarks.harness.values import compare, join_sums

    meter.warm_cache(meter.files_of(folder))
    figures: dict[str, Any] = {}
    timelines: dict[str, Timeline] = {}
    failures: dict[str, str] = {}
    first: dict[str, str] = {}
    for arm in options.arms:
        say(f"{arm}: {ARMS[arm]}")
        try:
            # Forked from a process that has the imports.
            with LocalRanks(
                options.ranks, timeout_s=options.timeout, device=options.device, is_forked=options.device == "cpu"
            ) as world:
                ranks = world.run(load_by_arm, arm, str(folder), options.dtype)
        except RankError as error:
            if arm == OURS:
                raise
            failures[arm] = str(error).strip().splitlines()[-1]
            continue
        figures[arm], timelines[arm] = summarize(ranks)
        sums = join_sums([rank.sums for rank in ranks])
        first = first or sums
        figures[arm]["values"] = compare(first, sums)
    return figures, timelines, failures


def draw(figures: Mapping[str, Any], timelines: Mapping[str, Timeline]) -> bytes:
    """A PNG with memory over time, one panel for each arm, on one scale."""
    import matplotlib
    from matplotlib.figure import Figure

    colors: Any = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    )
    across = min(3, len(timelines))
    down = -(-len(timelines) // across)
    buffer = io.BytesIO()
    with matplotlib.rc_context({**colors, "font.size": 9, "savefig.transparent": True}):
        figure = Figure(figsize=(3.2 * across + 0.4, 2.5 * down + 0.5), dpi=110, layout="constrained")
        panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
        for panel in panels[len(timelines) :]:
            panel.set_visible(False)
        for number, (panel, (arm, line)) in enumerate(zip(panels, timelines.items(), strict=False)):
            shades = [_SHADES[rank % 2] for rank in range(len(line.growth))]
            panel.stackplot(line.seconds, line.growth, colors=shades, lw=0)
            for phase, (start, stop) in line.spans.items():
                panel.axvspan(start, stop, color=_BANDS[phase], alpha=0.2, lw=0, label="" if number else phase)
            growth_gib = figures[arm]["growth_bytes"] / 2**30
            title = f"{arm}\n{figures[arm]['seconds']:.1f} s, at most {growth_gib:.2f} GiB"
            panel.set_title(title, fontsize=9, loc="left")
            panel.label_outer()
        panels[0].set(xlim=(0, None), ylim=(0, None))  # of all panels, when all are drawn
        figure.supxlabel("seconds", fontsize=8)
        figure.supylabel("GiB", fontsize=8)
        figure.legend(loc="outside lower left", ncols=6, frameon=False)
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def lines_of(figures: Mapping[str, Any], failures: Mapping[str, str]) -> Iterator[str]:
    keys = ("growth_bytes", "fullest_bytes", "mapped_bytes", "device_bytes")
    rows = [[arm, of["seconds"], *(of[key] / 2**20 for key in keys), of["values"]] for arm, of in figures.items()]
    columns = ["arm", "seconds to wrapped", "growth, MiB", "fullest rank, MiB", "mapped files, MiB", "device, MiB"]
    yield from results.table([*columns, "values"], rows)
    for arm, reason in failures.items():
        yield from (f"{arm} failed: {reason}", "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__, repeats=None)
    parser.add_argument("--model", default="qwen3-1.7b", help=f"{', '.join(SHAPES)}, or a folder [qwen3-1.7b]")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "auto"])
    results.add_choice(parser, "--arms", ARMS, f"of {', '.join(ARMS)}")
    parser.add_argument("--picture", type=Path, help=f"a PNG, such as {PICTURE} [in the folder of --dir]")
    options = results.parse(parser, argv)
    report = results.describe(options, "startup")
    folder = Path(options.model)
    if options.model in SHAPES:
        folder, _ = results.write_shape(options, SHAPES[options.model])
    figures, timelines, failures = run_arms(options, folder)
    picture = options.picture or options.dir / "startup.png"
    picture.write_bytes(draw(figures, timelines))
    say(f"{picture}")
    limits = []
    if OURS in figures:
        growth, most = (figures[OURS][key] / 2**20 for key in ("growth_bytes", "limit_bytes"))
        limits.append(Limit("growth of shardwise, MiB", growth, most))
    report |= {"model": folder.name, "dtype": options.dtype, "arms": figures, "failures": failures}
    return results.publish(options, report, lines_of(figures, failures), limits)


if __name__ == "__main__":
    sys.exit(main())
