"""Several rows in one, each blind to the others.

[Note: Packed rows] A packed row holds whole rows one after the other, with ``position_ids`` that begin at 0 with
each, and no attention mask. transformers takes that as its sign for packed rows: the masks it then makes for
``sdpa``, ``eager`` and ``flex_attention`` are block-diagonal (within sliding windows too, which a mask of ours
would switch off), and flash attention gets the boundaries, for which it wants all in one row. A model that mixes
tokens by other means than attention (a convolution, a recurrence) may know nothing of it, so that whether rows
are blind to each other is tried on the model itself before it is trained
(:func:`~shardwise.training.prepare.require_blind_rows`).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack_rows(lengths: NDArray[np.int64] | Sequence[int], capacity: int) -> list[list[int]]:
    """Deal rows into packs of at most ``capacity`` tokens; each row is in one.

    The longest row comes first, and each goes where it leaves the least room (best fit, decreasing): the same
    packs for the same lengths, wherever it is called. Rows of a pack are in ascending order, and packs by their
    first row.

    Time: ``n log n`` for n rows; ``lengths`` are at most ``capacity``.
    """
    sizes = np.asarray(lengths)
    packs: list[list[int]] = []
    open_packs: dict[int, list[int]] = {}
    """Numbers of packs by the room that is left in them."""
    rooms: list[int] = []
    """The keys of ``open_packs``, ascending."""
    for row in np.argsort(-sizes, kind="stable").tolist():
        length = int(sizes[row])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            number, left = len(packs), capacity - length
            packs.append([row])
        else:
            room = rooms[place]
            number, left = open_packs[room].pop(), room - length
            packs[number].append(row)
            if not open_packs[room]:
                del open_packs[room]
                rooms.pop(place)
        if left:
            if left not in open_packs:
                open_packs[left] = []
                bisect.insort(rooms, left)
            open_packs[left].append(number)
    return sorted(sorted(pack) for pack in packs)
