"""What is promised, and whether a measurement keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import planning, remote, roof
from benchmarks.place import SLACK_BYTES, STAGING_BYTES


@dataclass(frozen=True)
class Limit:
    """What shardwise promises: a ratio of medians, or of bytes, that is at most ``most``."""

    name: str
    value: float | None
    most: float

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "unmeasured"
        return "pass" if self.value <= self.most else "FAIL"


RATIOS = {"transformers": 0.9, "accelerate": 0.12, "set_model_state_dict": 0.25, "dcp": 1.0, "runai": 1.0}
BY_ROOF, ROOF_RATIO, READ_RATIO = 1.1, 1.3, 1.02
"""What is within ``BY_ROOF`` of the roof need not be quicker than a peer that is there, too."""


def limits_of(results: Mapping[str, Any]) -> list[Limit]:
    """Every promise with what was measured."""
    limits: list[Limit] = []
    for row in results["rows"]:
        if "shardwise" in row["arms"]:
            limits += _limits_of_row(row)
    if "replicated" in results:
        limits.append(Limit("2x2: read / checkpoint", results["replicated"]["read_fraction"], READ_RATIO))
    for name, found in results.get("remote", {}).get("meshes", {}).items():
        limits.append(Limit(f"over HTTP, {name}: time / bound", found["ratio"], remote.MOST))
        limits.append(Limit(f"over HTTP, {name}: read / checkpoint", found["read_fraction"], READ_RATIO))
    if "planning" in results:
        limits.append(Limit("planning, s", results["planning"]["total_s"]["median"], planning.MOST_S))
    return limits


def best_s(arm: Mapping[str, Any]) -> float:
    """Seconds of an arm: where it also ran alone, on the machine as it is, the better of both counts."""
    median: float = arm["wall_s"]["median"]
    return min(median, arm.get("alone_s", median))


def _limits_of_row(row: Mapping[str, Any]) -> list[Limit]:
    limits: list[Limit] = []
    arms, ours = row["arms"], row["arms"]["shardwise"]
    name = row["name"]
    seconds = ours["wall_s"]["median"]
    roofs = [best_s(arms[arm]) for arm in roof.ALL if arm in arms]
    for arm, most in RATIOS.items():
        if arm in arms:
            theirs = best_s(arms[arm])
            if most == 1.0 and roofs:
                most = max(most, BY_ROOF * min(roofs) / theirs)
            limits.append(Limit(f"{name}: time / {arm}", seconds / theirs, most))
    if roofs and not row["cold"]:
        value = ours["read_phase_s"] / min(roofs)
        limits.append(Limit(f"{name}: read phase / roof", value, ROOF_RATIO))
    most = (STAGING_BYTES + SLACK_BYTES) / (1 << 20)
    limits.append(Limit(f"{name}: memory over the shards, MiB", ours["excess_bytes"] / (1 << 20), most))
    limits.append(Limit(f"{name}: read / checkpoint", ours["read_fraction"], READ_RATIO))
    return limits
