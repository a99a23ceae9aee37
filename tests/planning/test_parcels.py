"""A round is the same to all ranks: what one packs for another, the other takes from the same places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.moves.parcels import ALIGNMENT_BYTES, Parcel, Piece, Round, ToAll, ToEach
from shardwise.tensors import Box, Strided

ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def rounds(draw):
    """Parcels of some ranks: to others, to the source itself, or all of them to all."""
    size = draw(st.integers(1, 5))
    is_gathered = draw(st.booleans()) and size > 1
    parcels = []
    for number in range(draw(st.integers(1, 8))):
        source = draw(st.integers(0, size - 1))
        some = draw(st.sets(st.integers(0, size - 1), min_size=1))
        targets = tuple(range(size)) if is_gathered else tuple(sorted(some))
        box = Box((number,), (draw(st.integers(1, 40)),))
        strided = Strided(0, (draw(st.integers(1, 9)),), (2,))
        pieces = (Piece(0, 0, strided, strided),) * draw(st.integers(0, 3))
        parcels.append(Parcel(f"t{number}", source, targets, box, draw(ITEMSIZES), pieces=pieces))
    if is_gathered:
        return size, Round(tuple(parcels), moves=True, is_gathered=True)
    return size, Round.of_all(parcels)


@given(rounds())
def test_what_is_packed_for_a_rank_is_where_it_looks(made):
    size, items = made
    parts = [items.part(rank, size) for rank in range(size)]
    for source, part in enumerate(parts):
        for target in range(size):
            if items.is_gathered:
                packed = [(parcel, start) for parcel, ways in part.sends for _, start in ways]
                nbytes = part.load.parts[source]
                assert parts[target].load == part.load
            else:
                packed = [(parcel, start) for parcel, ways in part.sends for rank, start in ways if rank == target]
                nbytes = part.load.sent[target]
                assert parts[target].load.received[source] == nbytes
            assert packed == [item for item in parts[target].receives if item[0].source == source]
            stop = 0
            for parcel, start in packed:  # side by side, none over another
                assert start >= stop
                assert start % ALIGNMENT_BYTES == 0
                stop = start + parcel.nbytes
            assert stop <= nbytes < stop + ALIGNMENT_BYTES


@given(rounds())
def test_each_parcel_comes_to_each_of_its_targets_once(made):
    size, items = made
    for rank in range(size):
        part = items.part(rank, size)
        got = [*part.keeps, *(parcel for parcel, _ in part.receives)]
        if not items.is_gathered:  # what a rank sends to others and takes itself
            got += [parcel for parcel, _ in part.sends if rank in parcel.targets]
        assert sorted(got, key=items.parcels.index) == [p for p in items.parcels if rank in p.targets]
        assert all(parcel.source == rank for parcel in part.keeps)
        idle = part.load == ToEach((0,) * size, (0,) * size)
        assert items.moves or idle


@given(rounds())
def test_what_is_kept_moves_nothing(made):
    size, items = made
    for rank in range(size):
        own = items.kept_by(rank)
        assert not own.moves
        part = own.part(rank, size)
        assert [(parcel.tensor, parcel.box) for parcel in part.keeps] == [
            (parcel.tensor, parcel.box) for parcel in items.parcels if parcel.source == rank
        ]
        assert not part.sends
        assert not part.receives


def test_parts_of_one_size_are_sent_where_little_is_wasted():
    def gathered(*numels: int) -> Round:
        parcels = (Parcel("t", rank, (0, 1), Box((0,), (numel,)), 1) for rank, numel in enumerate(numels))
        return Round(tuple(parcels), moves=True, is_gathered=True)

    assert gathered(100, 80).part(0, 2).load == ToAll((112, 80), is_padded=True)
    assert gathered(100, 16).part(0, 2).load == ToAll((112, 16), is_padded=False)
