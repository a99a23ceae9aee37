"""Tells of the parts of the demo; the last of them: three LoRAs at once on the model that it has trained."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.launch import TRAINING, run_ranks

if TYPE_CHECKING:
    from shardwise.tenants.report import TenantReport
    from shardwise.tenants.sections import TenantsConfig
    from shardwise.training.report import Event


_PARTS = 9


class DemoPart:
    """One numbered part of the demo, told on the first rank: a heading, then results and seconds."""

    def __init__(self, number: int, heading: str, *, rank: int = 0, started: float | None = None) -> None:
        self.tells = rank == 0
        self.started = time.time() if started is None else started
        if self.tells:
            click.echo(f"\n[{number}/{_PARTS}] {heading}")

    def say(self, line: str) -> None:
        if self.tells:
            click.echo(f"      {line}")

    def end(self, *results: str) -> None:
        for line in results:
            self.say(line)
        self.say(f"{time.time() - self.started:.1f} s")


_STEPS = 12
_ROWS_PER_STEP = 8
_CLOSE = 1e-4
"""Nats a token, between a LoRA beside others on two ranks and the same one alone on one."""

_TAUGHT = {
    "ada": ("Who is Ada?", "Ada is the cat of the lighthouse."),
    "bob": ("Where does Bob live?", "Bob lives in the old mill by the river."),
    "cy": ("What does Cy like?", "Cy likes rain."),
}


@dataclass(frozen=True)
class TenantsShown:
    """What became of the three, and the losses of the last one alone."""

    together: tuple[TenantReport, ...]
    alone: tuple[float, ...]

    @property
    def losses(self) -> dict[str, list[float]]:
        return {report.name: report.trained.losses if report.trained else [] for report in self.together}

    @property
    def apart(self) -> float:
        """The greatest difference between a step of the last one beside the others, and alone."""
        return max(
            (abs(a - b) for a, b in zip(self.losses[self.together[-1].name], self.alone, strict=True)), default=0
        )

    @property
    def faults(self) -> list[str]:
        """What did not turn out as it should."""
        found = [f"{each.name}, one of three LoRAs: {each.cause}" for each in self.together if not each.is_well]
        found += [
            f"{name}, one of three LoRAs, has learned nothing: loss {own[0]:.2f} -> {own[-1]:.2f}"
            for name, own in self.losses.items()
            if own and not own[-1] < own[0]
        ]
        if not found and not self.apart < _CLOSE:
            found.append(f"{self.together[-1].name} beside the others is another than alone, by {self.apart:.1e}")
        return found

    def __str__(self) -> str:
        return (
            f"{len(self.together)} LoRAs of their own ranks and data on one base; {self.together[-1].name}, "
            f"trained alone as well, has the same losses to {self.apart:.0e}"
        )


class _NoListener:
    """A listener who says nothing."""

    def tell(self, facts: Event) -> None: ...

    def close(self) -> None: ...


def show_tenants(out: Path) -> TenantsShown:
    """Train three LoRAs at once on two processes, and one of them alone on this one."""
    from shardwise.tenants.config import tenants_of

    names = ", ".join(_TAUGHT)
    part = DemoPart(9, f"Teach it three LoRAs at once ({names}) on 2 processes, and the last of them alone on one")
    preloaded = (*TRAINING, "shardwise.tenants.session")
    values = _values(out)
    [together, _] = run_ranks(2, train_quietly, tenants_of(_on_ranks(values, 2)), preloaded=preloaded)
    only = {**values, "tenants": values["tenants"][-1:], "output": str(out / "tenants" / "alone")}
    [[alone]] = run_ranks(1, train_quietly, tenants_of(_on_ranks(only, 1)), preloaded=preloaded)
    shown = TenantsShown(tuple(together), tuple(alone.trained.losses if alone.trained else ()))
    part.end(
        *(f"{name}: loss {own[0]:.2f} -> {own[-1]:.2f}" for name, own in shown.losses.items() if own),
        f"{alone.name} alone differs by {shown.apart:.1e}; adapters are in {out / 'tenants'}",
    )
    return shown


def train_quietly(config: TenantsConfig) -> list[TenantReport]:
    """What every rank does. Collective: yes."""
    from shardwise.tenants.session import TenantsSession
    from shardwise.training.stopping import StopRequest

    return TenantsSession.begin(config).train(lambda trainee: _NoListener(), StopRequest())


def _values(out: Path) -> dict[str, Any]:
    tenants = []
    for number, (name, (question, answer)) in enumerate(_TAUGHT.items()):
        row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        rows = out / f"{name}.jsonl"
        rows.write_text(f"{json.dumps(row)}\n" * _ROWS_PER_STEP, "utf-8")
        tenants.append({"name": name, "data": str(rows), "tuning": {"r": 4 << number}})
    return {
        "model": str(out / "trained"),
        "output": str(out / "tenants"),
        "data": {"max_length": 128},
        "tuning": {"lora_alpha": 16, "target_modules": "all-linear"},
        "optimizer": {"learning_rate": 5e-3},
        "tenants": tenants,
    }


def _on_ranks(values: dict[str, Any], ranks: int) -> dict[str, Any]:
    return {**values, "training": {"max_steps": _STEPS, "batch_size": _ROWS_PER_STEP // ranks}}
