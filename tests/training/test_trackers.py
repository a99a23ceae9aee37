"""An experiment tracker that fails ends no training."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from shardwise.training.train_model import guard_trackers


class Tracker(TrainerCallback):
    def __init__(self) -> None:
        self.calls = 0

    def on_log(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise OSError("the tracker is gone")


def test_a_tracker_that_fails_is_reported_once_and_called_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = Tracker()
    monkeypatch.setattr(Tracker, "__module__", "transformers.integrations.integration_utils")
    tracker = Tracker()
    guard_trackers(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[tracker])))
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            tracker.on_log(None, None, None)
    assert tracker.calls == 2
    wanted = ["Tracker: failed, the tracker is gone. The training continues without it."]
    assert [record.getMessage() for record in caplog.records] == wanted
    monkeypatch.undo()
    guard_trackers(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[own])))
    own.on_log(None, None, None)
    with pytest.raises(OSError, match="gone"):  # a callback of the user's own
        own.on_log(None, None, None)
