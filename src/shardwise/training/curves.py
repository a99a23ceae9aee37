"""Memory of all ranks in the log of a training, and ``curves.png``: losses, learning rates and memory by rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shardwise.core.machine import process_memory
from shardwise.core.phases import busy_with
from shardwise.fsdp import torch_private
from shardwise.ranks.world import World

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LogHistory: TypeAlias = Sequence[Mapping[str, Any]]
"""Entries as in ``log_history`` of a ``TrainerState``: metrics, and the step."""

CURVES_FILE: Final = "curves.png"

_MAX_RANKS_KEPT: Final = 64
"""Ranks whose memory is in the ``log_history`` of a Trainer, and so drawn.

Trackers, and the log of many LoRAs, have all.
"""

_HOST, _DEVICE = "memory/host_gib", "memory/device_peak_gib"
_TITLES = {_HOST: "Host memory, GiB", _DEVICE: "Peak of accelerator memory so far, GiB"}
_GIB = 2**30
_MAX_ROWS = 14
"""Labels one below the other beside a panel."""
_MAX_NAME = 24
"""Characters of a LoRA's name in the legend."""
_FEW_POINTS = 30
"""Curves with fewer points have them marked."""

_log = logging.getLogger(__name__)


def device_peak_bytes() -> int | None:
    """Return the peak of this rank's tensors on its accelerator so far, or None without an accelerator."""
    kind = torch_private.accelerator()
    return None if kind is None else int(torch_private.accelerator_module(kind).max_memory_allocated())


def gather_memory(world: World) -> dict[str, list[float]]:
    """Return the memory of all ranks in GiB, by rank: of the process now, and the accelerator's peak so far.

    Collective: yes.
    """
    with busy_with(""):
        by_rank = world.all_gather_object((process_memory(), device_peak_bytes()))
    memory = {_HOST: [round(host / _GIB, 4) for host, _ in by_rank]}
    peaks = [round(peak / _GIB, 4) for _, peak in by_rank if peak is not None]
    return {**memory, _DEVICE: peaks} if len(peaks) == world.size else memory


class MemoryCallback(TrainerCallback):
    """Adds the memory of all ranks to the entry of each logged loss, and sends it to trackers.

    Ranks log a loss at the same steps, because the Trainer averages it over them. The callback has to be the first
    one: if a callback before it raised on one rank, the other ranks would wait here.

    Args:
        trackers: callbacks of ``report_to``. They get a metric for each rank.
    """

    def __init__(self, trackers: Sequence[TrainerCallback]) -> None:
        self._trackers = trackers
        self._world = World.current(call="the Trainer's log")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Exchange the memory of all ranks, if a loss was logged. Collective: yes."""
        if "loss" not in (logs or {}):
            return
        memory = gather_memory(self._world)
        # The Trainer has appended the entry of these logs before it calls its callbacks.
        entry: dict[str, Any] = state.log_history[-1]
        # Not ``logs``, which the console shows. The entry is kept, and saved with each checkpoint.
        entry.update({name: by_rank[:_MAX_RANKS_KEPT] for name, by_rank in memory.items()})
        metrics = {
            f"{name}/rank_{rank}": gib for name, by_rank in memory.items() for rank, gib in enumerate(by_rank)
        }
        for tracker in self._trackers:
            tracker.on_log(args, state, control, logs=dict(metrics), **others)


def draw_curves(
    folder: Path, logs: Mapping[str, LogHistory], memory: LogHistory, estimated_bytes: int | None = None
) -> None:
    """Draw ``curves.png``. One that cannot be drawn is a warning. Collective: no.

    Args:
        folder: where the file is written.
        logs: losses and learning rates of each LoRA by name, or of one training under the name "".
        memory: entries with the memory of all ranks.
        estimated_bytes: estimated peak of a rank on its accelerator.
    """
    path = folder / CURVES_FILE
    try:
        with busy_with(f"drawing {CURVES_FILE}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _draw(path, logs, memory, estimated_bytes)
    except ModuleNotFoundError:
        _log.warning("%s: is not drawn without matplotlib. Run pip install 'shardwise[report]'", path)
    except Exception as error:  # the training has succeeded
        _log.warning("%s: cannot be drawn, %s", path, error)


def _draw(path: Path, logs: Mapping[str, LogHistory], memory: LogHistory, estimated_bytes: int | None) -> None:
    from matplotlib.figure import Figure

    memory = [entry for entry in memory if _HOST in entry]
    if not memory:  # no loss was logged
        return
    # Panels from the top: losses, learning rates, and a panel for each kind of memory.
    kinds = [kind for kind in (_DEVICE, _HOST) if any(kind in entry for entry in memory)]
    figure = Figure(figsize=(9, 2.5 * (2 + len(kinds))), dpi=100, layout="constrained")
    loss, rate, *others = figure.subplots(2 + len(kinds), 1)
    # A LoRA has the same color in both panels, and one label in each legend.
    for place, (name, log) in enumerate(logs.items()):
        label = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 2]}…{name[-_MAX_NAME // 2 :]}"
        for axes, key, style in ((loss, "loss", "-"), (loss, "eval_loss", "--"), (rate, "learning_rate", "-")):
            points = [(entry["step"], entry[key]) for entry in log if key in entry]
            _plot(axes, points, place, len(logs), "" if style == "--" else label, ls=style)
    is_evaluated = any("eval_loss" in entry for log in logs.values() for entry in log)
    _finish_panel(loss, "Loss (dashed: evaluation)" if is_evaluated else "Loss", "step")
    _finish_panel(rate, "Learning rate", "step")
    for axes, kind in zip(others, kinds, strict=True):
        size = max(len(entry.get(kind, ())) for entry in memory)  # it may have been resumed on other ranks
        for rank in range(size):
            points = [(entry["step"], entry[kind][rank]) for entry in memory if rank < len(entry.get(kind, ()))]
            # Ranks often have the same memory: the wider curves below show at the sides of those above.
            _plot(axes, points, rank, size, f"rank {rank}", lw=1.5 + 3 * (size - 1 - rank) / size)
        title = _TITLES[kind]
        if kind == _DEVICE and estimated_bytes is not None:
            axes.axhline(estimated_bytes / _GIB, color="black", ls="--")
            title += " (dashed: estimate)"
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        _finish_panel(axes, title, "step" if "" in logs else "steps of all LoRAs")
    figure.savefig(path)


def _plot(
    axes: Axes, points: Sequence[tuple[float, float]], place: int, count: int, label: str, **style: Any
) -> None:
    """Plot the curve at a place among several, with a label for the legend, or ""."""
    from matplotlib import colormaps

    # matplotlib's own colors are ten.
    color: Any = f"C{place}" if count <= 10 else colormaps["turbo"](place / count)
    marker = "." if len(points) < _FEW_POINTS else ""
    axes.plot(*zip(*points, strict=True), color=color, marker=marker, label=label, **style)


def _finish_panel(axes: Axes, title: str, x_label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    _, labels = axes.get_legend_handles_labels()
    if 1 < len(labels) <= 2 * _MAX_ROWS:
        columns = 1 if len(labels) <= _MAX_ROWS else 2
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), ncols=columns, fontsize=8, frameon=False)
    elif len(labels) > 1:
        title += f", {len(labels)} curves"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.ticklabel_format(axis="y", useOffset=False, scilimits=(-6, 6))
