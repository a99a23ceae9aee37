"""Who leaves after a meeting is not missed by those who have not looked at its answer yet."""

from __future__ import annotations

import pytest

from shardwise.errors import RankLostError
from shardwise.execution.ranks.lost_ranks import Talk


class Told:
    """Keys of a line on which the first rank has said that it left."""

    def find(self, _: str) -> bytes:
        return b"lost\nrank 0 has left the call"


def test_an_answer_counts_though_the_first_rank_has_left_since(monkeypatch):
    def follow(_: Talk, verdict: bytes) -> None:
        raise RankLostError(verdict.decode())

    monkeypatch.setattr(Talk, "_follow", follow)
    talk = object.__new__(Talk)
    talk._keys, talk._line = Told(), None
    talk._watch(0.0, lambda: True)
    with pytest.raises(RankLostError, match="has left"):
        talk._watch(0.0, lambda: False)
