"""The curves of a training, from its log."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from shardwise.training import curves
from shardwise.training.curves import draw_curves

pytest.importorskip("matplotlib")


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The panels of the pictures that are drawn."""
    from matplotlib.figure import Figure

    found: list[Any] = []
    save = Figure.savefig

    def keep(figure: Figure, *positional: Any, **keywords: Any) -> None:
        found.extend(figure.axes)
        save(figure, *positional, **keywords)

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def entries(losses: list[float], ranks: int) -> list[dict[str, Any]]:
    memory = {"memory/host_gib": [1.0] * ranks, "memory/device_peak_gib": [2.0] * ranks}
    log: list[dict[str, Any]] = []
    for step, loss in enumerate(losses, 1):
        log += [{"step": step, "loss": loss, "learning_rate": 0.1, **memory}, {"step": step, "eval_loss": loss + 1}]
    return log


def labels(panel: Any) -> list[str]:
    return [] if panel.get_legend() is None else [text.get_text() for text in panel.get_legend().get_texts()]


def test_a_training_has_curves_of_each_rank_beside_the_estimate(axes: list[Any], tmp_path: Path) -> None:
    log = [*entries([3.0, math.nan, math.inf, 2.0], 2), *entries([1.0], 3), {"step": 5, "train_runtime": 1.0}]
    draw_curves(tmp_path, {"": log}, log, 3 << 30)
    assert [panel.get_title(loc="left") for panel in axes] == [
        "Loss (dashed: evaluation)",
        "Learning rate",
        "Peak of accelerator memory so far, GiB (dashed: estimate)",
        "Host memory, GiB",
    ]
    assert [len(panel.lines) for panel in axes] == [2, 1, 3 + 1, 3]
    assert set(axes[2].lines[-1].get_ydata()) == {3}
    assert [labels(panel) for panel in axes] == [[], [], *2 * [["rank 0", "rank 1", "rank 2"]]]
    assert axes[2].get_ylim()[0] == 0 < 3 < axes[2].get_ylim()[1]


@pytest.mark.parametrize("count", [2, 40])
def test_each_lora_has_a_curve(axes: list[Any], tmp_path: Path, count: int) -> None:
    logs = {f"{'long' * 20}-{number:02}": entries([2.0, 1.0], 0) for number in range(count)}
    draw_curves(tmp_path, logs, [{"step": 2 * count, "memory/host_gib": [1.0]}])
    assert [len(panel.lines) for panel in axes] == [2 * count, count, 1]
    assert [panel.get_xlabel() for panel in axes] == ["step", "step", "steps of all LoRAs"]
    if count == 2:
        assert labels(axes[0]) == ["longlonglong…glonglong-00", "longlonglong…glonglong-01"]
    else:
        assert axes[0].get_title(loc="left") == "Loss (dashed: evaluation), 40 curves"


def test_the_log_has_the_memory_of_no_more_ranks_than_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved with each checkpoint, so a thousand ranks would make it grow by megabytes."""
    memory = {"memory/host_gib": [float(rank) for rank in range(1000)]}
    monkeypatch.setattr(curves, "gather_memory", lambda world: memory)
    state, seen = TrainerState(log_history=[{"step": 1, "loss": 2.0}]), []
    tracker: Any = SimpleNamespace(on_log=lambda *_, logs, **__: seen.append(logs))
    curves.MemoryCallback([tracker]).on_log(None, state, None, logs={"loss": 2.0})  # type: ignore[arg-type]
    assert state.log_history[0]["memory/host_gib"] == memory["memory/host_gib"][:64]
    assert len(seen[0]) == 1000


def test_a_picture_that_cannot_be_drawn_is_one_line(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    log = entries([1.0], 1)
    with caplog.at_level(logging.WARNING):
        draw_curves(tmp_path, {"": [{"step": 1, "train_runtime": 1.0}]}, [])
        assert list(tmp_path.iterdir()) == caplog.messages == []
        draw_curves(tmp_path / "nowhere", {"": log}, log)
    [message] = caplog.messages
    assert message.startswith(f"{tmp_path / 'nowhere' / 'curves.png'}: cannot be drawn, ")
