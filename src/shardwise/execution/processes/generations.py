"""Gives the ranks that a launcher has started together a part of its store that no others have.

torchrun keeps one store for all generations of ranks that it starts: what an earlier one has left there (addresses,
messages) is found by the next. Numbers of restarts do not tell them apart, as each machine counts its own. So the
first rank of a generation draws a name, and hands it to whoever asks, by a word that the asking rank has drawn.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.errors import RankLostError

_BETWEEN_LOOKS_S = 0.05


def store_of_generation(store: Store, rank: int, size: int, *, patience_s: float = 600.0) -> Store:
    """The part of a store that ranks of this generation have for themselves.

    Collective: yes, over all ranks; nothing else is there yet by which they could meet.

    Raises:
        RankLostError: ranks have not come for so long.
    """
    if rank == 0:
        name = _named_by_first(store, size, patience_s)
    else:
        word = uuid.uuid4().hex
        store.set(f"{_ASKED}/{rank}", word)
        try:
            store.wait([f"{_NAMED}/{word}"], timedelta(seconds=patience_s))
        except RuntimeError as error:  # of the store, whose class of errors is torch's own
            raise RankLostError(
                f"rank {rank} has waited {patience_s:.0f} s for the first of this generation, which did not come"
            ) from error
        name = store.get(f"{_NAMED}/{word}").decode()
        store.add(f"{_COME}/{name}", 1)
    return PrefixStore(f"{_GENERATION}/{name}", store)


_GENERATION = "shardwise generation"
_ASKED, _NAMED, _COME = (f"{_GENERATION}/{word}" for word in ("asked", "named", "come"))


def _named_by_first(store: Store, size: int, patience_s: float) -> str:
    """Draw a name, and tell it to all; words that ranks of earlier generations have left are answered as well."""
    name = uuid.uuid4().hex
    answered: dict[int, bytes] = {}
    end = time.monotonic() + patience_s
    while store.add(f"{_COME}/{name}", 0) < size - 1:
        for rank in range(1, size):
            key = f"{_ASKED}/{rank}"
            if store.check([key]) and answered.get(rank) != (word := store.get(key)):
                store.set(f"{_NAMED}/{word.decode()}", name)
                answered[rank] = word
        if time.monotonic() > end:
            raise RankLostError(
                f"not all of the {size} ranks of this generation have come within {patience_s:.0f} s"
            )
        time.sleep(_BETWEEN_LOOKS_S)
    return name
