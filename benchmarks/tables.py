"""Results as a text with tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.limits import best_s


def render(results: Mapping[str, Any]) -> str:
    """Markdown, of what :mod:`benchmarks.load` has measured."""
    return "\n".join(_lines(results)).rstrip() + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield "# Loading"
    yield ""
    yield f"{results['date']}, commit {results['commit']}, {results['minutes']:.0f} minutes."
    yield f"`{results['command']}`"
    yield (
        f"{machine['cpus']} cores ({machine['processor']}), {machine['memory_bytes'] / 2**30:.0f} GiB, Linux "
        f"{machine['kernel']}, huge pages {machine['thp_enabled']}; Python {machine['python']}, {versions}."
    )
    yield (
        f"{results['ranks']} gloo ranks, fresh processes for each load, {results['repeats']} repeats, arms in turn."
        " The clock runs from a barrier until every page of every parameter has been written to on the last rank. "
        "Processor time and page faults are summed over the ranks; memory is that of the rank with most. "
        "'Others' is what the machine did meanwhile for somebody else."
    )
    yield ""
    if results.get("limits"):
        yield "## Limits"
        yield ""
        yield "| promise | measured | at most | |"
        yield "|---|--:|--:|---|"
        for limit in results["limits"]:
            value = "-" if limit["value"] is None else f"{limit['value']:.3g}"
            yield f"| {limit['name']} | {value} | {limit['most']:g} | {limit['verdict']} |"
        yield ""
    for row in results["rows"]:
        yield from _row(row)
    yield from _capped(results)
    yield from _others(results)


def _row(row: Mapping[str, Any]) -> Iterator[str]:
    cold = "page cache dropped before each load" if row["cold"] else "files in the page cache"
    yield f"## {row['name']}"
    yield ""
    priority = "at raised priority" if row["priority"] else "at normal priority"
    yield f"{row['bytes'] / 1e9:.2f} GB bf16, loaded as {row['dtype']}; {cold}; {priority}; {row['state']}."
    if any("alone_s" in arm for arm in row["arms"].values()):
        yield "Alone: what the arm takes on the machine as it is, in the same run. The better of both counts."
    yield ""
    yield (
        "| arm | seconds | min .. max | alone | shardwise / it | user s | system s | minor faults / GB "
        "| major / GB | memory growth MiB | over the shards MiB | others | model |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|"
    ours = row["arms"].get("shardwise")
    for name, arm in row["arms"].items():
        wall = arm["wall_s"]
        ratio = f"{ours['wall_s']['median'] / best_s(arm):.2f}" if ours is not None else "-"
        alone = f"{arm['alone_s']:.3f}" if "alone_s" in arm else "-"
        grown = f"{arm['growth_bytes'] / 2**20:.0f}" if "growth_bytes" in arm else "-"
        over = f"{arm['excess_bytes'] / 2**20:.0f}" if "excess_bytes" in arm else "-"
        same = row["same_model"].get(name, "-")
        if arm.get("all_private") is False:
            same += "; NOT ALL IN MEMORY"
        yield (
            f"| {name} | {wall['median']:.3f} | {wall['min']:.3f} .. {wall['max']:.3f} | {alone} | {ratio} "
            f"| {arm['user_s']:.2f} | {arm['system_s']:.2f} | {arm['minor_faults_per_gb']:,.0f} "
            f"| {arm['major_faults_per_gb']:,.0f} | {grown} | {over} | {arm['others_share']:.0%} "
            f"| {same} |"
        )
    yield ""
    for name, why in row["skipped"].items():
        yield f"{name} is not measured: {why}."
        yield ""
    if ours is not None and "phases" in ours:
        phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in ours["phases"].items())
        yield (
            f"shardwise by phase, seconds of the slowest rank: {phases}. "
            f"It read {ours['read_fraction']:.4f} of the checkpoint's bytes in {ours['reads']:,} calls."
        )
        yield ""
    if row["cold"]:
        left = max(part for arm in row["arms"].values() for part in arm["cached_fraction"])
        yield f"At most {left:.2%} of the pages were in the cache when the clock started (mincore)."
        yield "What the storage itself caches, below this machine, is not under control."
        yield ""


def _capped(results: Mapping[str, Any]) -> Iterator[str]:
    capped = results.get("capped")
    if capped is None:
        return
    yield "## In little memory"
    yield ""
    if "skipped" in capped:
        yield f"Not measured: {capped['skipped']}."
        yield ""
        return
    yield (
        f"{capped['shape']}, {capped['model_bytes'] / 2**20:.0f} MiB; the kernel kills a rank that allocates more "
        f"than {capped['cap_bytes'] / 2**20:.0f} MiB while loading (its shard, 256 MiB, 32 MiB)."
    )
    yield ""
    yield "| arm | outcome |"
    yield "|---|---|"
    for name, arm in capped["arms"].items():
        seconds = f" in {arm['wall_s']:.2f} s" if "wall_s" in arm else ""
        yield f"| {name} | {arm['outcome']}{seconds} |"
    yield ""


def _others(results: Mapping[str, Any]) -> Iterator[str]:
    if found := results.get("replicated"):
        yield "## Two replicas of two shards"
        yield ""
        yield (
            f'{found["shape"]}, reads shared (`shared_reads="always"`): all ranks together read '
            f"{found['read_fraction']:.4f} of "
            f"the checkpoint's bytes, in {found['wall_s']:.2f} s."
        )
        yield ""
    if found := results.get("remote"):
        yield "## Over HTTP"
        yield ""
        yield (
            f"A server that sends {found['bytes_per_s'] / 1e6:.0f} MB/s to all, each answer "
            f"{found['latency_s']:.3f} s "
            "late. The bound is max(bytes / bandwidth, requests x latency / concurrency)."
        )
        yield ""
        yield "| mesh | seconds | bound | ratio | min .. max | requests | read / checkpoint |"
        yield "|---|--:|--:|--:|--:|--:|--:|"
        for name, mesh in found["meshes"].items():
            yield (
                f"| {name} | {mesh['seconds']:.2f} | {mesh['bound_s']:.2f} | {mesh['ratio']:.3f} | "
                f"{mesh['min']:.3f} .. {mesh['max']:.3f} | {mesh['requests']:,} | {mesh['read_fraction']:.4f} |"
            )
        yield ""
    if found := results.get("planning"):
        yield from _planning(found)


def _planning(found: Mapping[str, Any]) -> Iterator[str]:
    yield "## Planning"
    yield ""
    yield (
        f"One rank of {found['ranks']}; {found['layers']} layers of {found['experts']} experts, "
        f"{found['stored']:,} stored tensors; median of {found['repeats']} fresh processes. "
        f"Planning is {', '.join(found['counted'])}."
    )
    yield ""
    yield "| phase | processor seconds | min .. max |"
    yield "|---|--:|--:|"
    for name, phase in {**found["phases"], "total": found["total_s"]}.items():
        yield f"| {name} | {phase['median']:.3f} | {phase['min']:.3f} .. {phase['max']:.3f} |"
    yield ""
