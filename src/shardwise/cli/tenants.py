"""``shardwise train`` of many tenants: what every rank does, and what is told of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.training_log import (
    STOPPED,
    Detail,
    LiveBar,
    StepLog,
    Told,
    count_of,
    curves_of,
    describe_data,
    end_stuck,
    observed,
)

if TYPE_CHECKING:
    from shardwise.report.load_report import LoadReport
    from shardwise.tenants.report import TenantReport
    from shardwise.tenants.sections import TenantsConfig
    from shardwise.tenants.session import TenantsSession
    from shardwise.tenants.trainee import Trainee

SOME_FAILED = 3
"""The exit code where some tenants were refused or have failed, and the others have been trained."""

ALL_FAILED = 2


@dataclass(frozen=True)
class TenantsRequest:
    """What every rank is asked to do, and where the first one tells about it."""

    config: TenantsConfig
    told: Told
    cache_root: Path | None = None
    """Where tokens are kept, where a configuration does not say."""
    detail: Detail = "brief"

    @property
    def directory(self) -> str:
        """Where everything is written."""
        return self.config.output


@dataclass(frozen=True)
class TenantsOutcome:
    """What one rank has seen. ``loaded`` is None where no tenant was left to load the base for."""

    loaded: LoadReport | None
    tenants: tuple[TenantReport, ...]

    @property
    def exit_code(self) -> int:
        kinds = {report.ended.value for report in self.tenants}
        if "stopped" in kinds:
            return STOPPED
        if kinds == {"trained"}:
            return 0
        return SOME_FAILED if "trained" in kinds else ALL_FAILED

    def to_dict(self) -> dict[str, Any]:
        """The reports as plain JSON values."""
        return {
            "load": self.loaded.to_dict() if self.loaded else None,
            "tenants": [report.to_dict() for report in self.tenants],
        }


def train_tenants_on_rank(request: TenantsRequest) -> TenantsOutcome:
    """What every rank does; the first one tells. Collective: yes."""
    from shardwise.tenants.session import TenantsSession
    from shardwise.training.stopping import stopping_on_signals

    with (
        stopping_on_signals() as stop,
        curves_of(os.environ) as curves,
        observed(request.config.shared, request.directory) as observer,
    ):
        session = TenantsSession.begin(request.config, request.cache_root)
        is_silent = session.rank != 0
        every = request.config.shared.log.every
        width = max((len(trainee.name) for trainee in session.trainees), default=0)
        with LiveBar(is_silent=is_silent) as bar:
            log = StepLog(every, request.told, is_silent=is_silent, bar=bar)
            _begin(session, log, request.detail)
            bar.begin(sum(trainee.total for trainee in session.trainees))

            def log_of(trainee: Trainee) -> StepLog:
                return StepLog(
                    every,
                    request.told,
                    is_silent=is_silent,
                    whose=trainee.name.ljust(width),
                    total=trainee.total,
                    bar=bar,
                    output=trainee.output,
                    curves=curves,
                )

            tenants = session.train(log_of, stop, end_stuck)
        log.say_end(observer, curves)
    return TenantsOutcome(session.loaded, tuple(tenants))


def _begin(session: TenantsSession, log: StepLog, detail: Detail) -> None:
    """Tell about the base, the data, and who is not trained."""
    log.say_loaded(session.loaded, detail)
    for trainee in session.trainees:
        log.say(f"{trainee.name}: {count_of(trainee.total, 'step')}, {trainee.trained_count:,} parameters")
        log.say(describe_data(trainee.data))
        if trainee.held_out is not None:
            log.say(describe_data(trainee.held_out, "evaluation"))
    for name, cause in session.refused.items():
        log.say(f"{name}: refused, {cause}")
    if session.trainees:
        log.say(f"training: {count_of(len(session.trainees), 'tenant')} on {count_of(session.size, 'rank')}")


def print_tenants(outcome: TenantsOutcome, directory: str) -> None:
    """A line for each tenant; what is wrong with one goes to the error stream."""
    for report in outcome.tenants:
        if not report.is_well:
            click.echo(f"error: {report.name}: {report.ended.value}: {report.cause}", err=True)
            continue
        trained = report.trained
        assert trained is not None
        losses = f": loss {trained.losses[0]:.4f} -> {trained.losses[-1]:.4f}" if trained.losses else ""
        how = "; the same command goes on from there" if report.ended.value == "stopped" else ""
        done = count_of(len(trained.steps), "step")
        click.echo(f"{report.name}: {report.ended.value}, {done} to step {trained.last_step}{losses}{how}")
    if any(report.is_well for report in outcome.tenants):
        click.echo(f"everything is in {Path(directory)}, a folder for each")
