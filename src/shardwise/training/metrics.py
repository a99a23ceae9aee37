"""What is told of a training, kept: lines of JSON in a file, and trackers."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, assert_never

from shardwise.errors import ConfigError, StorageError
from shardwise.training.report import CheckpointFacts, EvaluationFacts, Event, Remark, StepFacts, as_values


def values_of(facts: Event) -> dict[str, Any]:
    """Facts as plain JSON values, with their kind."""
    values = as_values(facts)
    match facts:
        case StepFacts():
            values |= {"kind": "step", "tokens_per_second": facts.tokens_per_second}
        case EvaluationFacts():
            values |= {"kind": "evaluation"}
        case CheckpointFacts():
            values |= {"kind": f"checkpoint_{facts.kind}"}
            del values["told"]
        case Remark():
            values |= {"kind": "remark"}
        case _:
            assert_never(facts)
    return values


class MetricsFile:
    """One line of JSON for every step, evaluation and checkpoint, written as it happens.

    A training that goes on from a checkpoint writes on after that checkpoint's step: what an earlier run wrote
    about later steps, which are now done again, is taken out, and so is a line that it did not finish. One that
    begins anew begins an empty file.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def tell(self, facts: Event) -> None:
        after = facts.step if isinstance(facts, CheckpointFacts) and facts.kind == "restored" else 0
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _cut(self.path, after)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(values_of(facts)) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self.path}: it cannot be written ({error.strerror or error})") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _cut(path: Path, step: int) -> None:
    """Keep the lines about steps up to ``step``; the file is replaced in one go."""
    kept: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if 0 < json.loads(line)["step"] <= step:
                    kept.append(f"{line}\n")
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text("".join(kept), "utf-8")
    os.replace(fresh, path)


_MOST_FAILURES = 3
"""In a row, after which a tracker is left alone: each may have waited long for a network."""


class Trackers:
    """accelerate's trackers: ``tensorboard``, ``wandb``, ``mlflow``, ``trackio`` and the others, by its names.

    For one rank, which tells; the others have none. A tracker that fails ends no training: it is told once, and
    left alone when it could not be started, or has failed thrice in a row.

    Args:
        names: of trackers.
        directory: for those that write into one.
        project: what a run belongs to.
        config: what the run was asked to do, shown by trackers that can.
        options: keyword arguments of a tracker, by its name.
        complain: told in words of a tracker that fails, once for each.

    Raises:
        ConfigError: a tracker is unknown, its library is not installed, or it takes no such options.
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: Path,
        project: str,
        config: Mapping[str, Any],
        options: Mapping[str, Mapping[str, Any]],
        complain: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._trackers: dict[str, Any] = {}
        self._failures: Counter[str] = Counter()
        self._told: set[str] = set()
        self._complain = complain
        self._is_started = False
        self._config = _flat(config)
        known = available_trackers(names)
        for name in names:
            kind = known[name]
            given = dict(options.get(name, {}))
            if kind.requires_logging_directory:
                given.setdefault("logging_dir", str(directory))
            try:
                self._trackers[name] = kind(project, **given)
            except TypeError as error:
                raise ConfigError(
                    f"log.trackers: {name} cannot be started ({error}); look at log.tracker_options.{name}, or "
                    "leave it out"
                ) from error
            except Exception as error:  # whatever the libraries of trackers raise: no network, no login, ...
                self._failed(name, "started", error)

    def _start(self) -> None:
        """Start them, once there is something to tell: of a training that is refused nothing is told."""
        self._is_started = True
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.start()
                tracker.store_init_configuration(self._config)
            except Exception as error:
                del self._trackers[name]
                self._failed(name, "started", error)

    def tell(self, facts: Event) -> None:
        if not self._is_started:
            self._start()
        values = values_of(facts)
        prefix = {"step": "train"}.get(values["kind"], values["kind"].partition("_")[0])
        numbers = {
            f"{prefix}/{name}": value
            for name, value in _flat(values).items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if not numbers:
            return
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(numbers, step=facts.step)
            except Exception as error:
                self._failures[name] += 1
                if self._failures[name] >= _MOST_FAILURES:
                    del self._trackers[name]
                self._failed(name, "told of a step", error)
            else:
                self._failures[name] = 0

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()) if self._is_started else ():
            try:
                tracker.finish()
            except Exception as error:
                self._failed(name, "finished", error)

    def _failed(self, name: str, what: str, error: Exception) -> None:
        if name not in self._told:
            self._told.add(name)
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._complain(f"the tracker {name} cannot be {what} ({cause}); the training and metrics.jsonl go on")


class RunLog:
    """What is kept of a run on the first rank: the file of metrics, and what trackers have.

    Each thing is told to the listener, then written, then tracked, so that no tracker keeps a line out of the file.
    That a tracker has failed is told after what it failed at.

    Args:
        listener: told of everything as well.
        metrics: the file.
        trackers: makes them, given whom they complain to.
    """

    def __init__(
        self,
        listener: Callable[[Event], object],
        metrics: MetricsFile,
        trackers: Callable[[Callable[[str], object]], Trackers],
    ) -> None:
        self._listener = listener
        self._metrics = metrics
        self._complaints: list[str] = []
        self._step = 0
        self._trackers = trackers(self._complaints.append)

    def tell(self, facts: Event) -> None:
        """Raises StorageError where the file of metrics cannot be written, and what the listener raises."""
        self._step = facts.step
        self._keep(facts)
        self._trackers.tell(facts)
        self._pass_on()

    def close(self) -> None:
        """There is no more to be told."""
        self._trackers.close()
        self._pass_on()
        self._metrics.close()

    def _keep(self, facts: Event) -> None:
        self._listener(facts)
        self._metrics.tell(facts)

    def _pass_on(self) -> None:
        while self._complaints:
            self._keep(Remark(self._step, self._complaints.pop(0)))


def available_trackers(names: Sequence[str]) -> dict[str, Any]:
    """accelerate's classes of trackers, by name; without starting any.

    Raises:
        ConfigError: naming those that are unknown, or whose library is not installed.
    """
    if not names:
        return {}
    try:
        from accelerate import PartialState, tracking
    except ImportError as error:
        raise ConfigError(
            f"log.trackers: {', '.join(names)} are driven by accelerate, which is not installed; pip install "
            "'shardwise[accelerate]', or leave them out: metrics.jsonl is written in any case"
        ) from error
    PartialState()  # accelerate's trackers log through it
    known: dict[str, Any] = dict(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()} | (known.keys() - _SHIPPED)
    faults = [
        f"{name!r} is none of {', '.join(sorted(known))}"
        if name not in known
        else f"the library of {name!r} is not installed"
        for name in names
        if name not in known or name not in installed
    ]
    if faults:
        raise ConfigError("log.trackers: " + "; ".join(faults))
    return known


_SHIPPED = frozenset(
    {"aim", "comet_ml", "mlflow", "tensorboard", "wandb", "clearml", "dvclive", "swanlab", "trackio"}
)
"""accelerate's own trackers, which need a library each; others have been registered by who has theirs."""


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted names, as what trackers take: numbers, texts, truth values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return flat
