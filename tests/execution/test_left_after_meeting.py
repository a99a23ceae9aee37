"""Who leaves after a meeting is not missed by those who have not looked at its answer yet."""

from __future__ import annotations

import pytest

from shardwise.errors import RankLostError
from shardwise.execution.ranks.lost_ranks import Talk


def test_an_answer_counts_though_the_first_rank_has_left_since(monkeypatch):
    def heed_verdict(_: Talk) -> None:
        raise RankLostError("rank 0 has left the call")

    monkeypatch.setattr(Talk, "heed_verdict", heed_verdict)
    monkeypatch.setattr(Talk, "_line", None, raising=False)
    talk = object.__new__(Talk)
    talk._watch(0.0, lambda: True)
    with pytest.raises(RankLostError):
        talk._watch(0.0, lambda: False)
