"""Slabs of powers of two for blocks of any sizes."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.tensors import Box
from shardwise.fsdp import torch_private
from shardwise.transfer.distributed_chunks import ArchivedChunk, ChunkStaging, pack_slabs


@given(st.lists(st.integers(0, 300).map(lambda number: 64 * number), max_size=40))
def test_every_block_has_a_place_of_its_own(sizes):
    slabs, places = pack_slabs(sizes)
    assert all(slab & (slab - 1) == 0 for slab in slabs)
    taken = sorted((slab, start, start + size) for size, (slab, start) in zip(sizes, places, strict=True) if size)
    assert all(stop <= slabs[slab] for slab, _, stop in taken)
    for (slab, _, stop), (other, start, _) in itertools.pairwise(taken):
        assert slab != other or stop <= start


@pytest.mark.parametrize("mebibytes", [[1.25] * 30, [129] * 40, [500, 500, 33, 33, 0.5]])
def test_little_is_lost(mebibytes):
    """One slab for all would be half empty where their sum is just more than a power of two."""
    sizes = [int(number * (1 << 20)) for number in mebibytes]
    assert sum(pack_slabs(sizes)[0]) <= 1.13 * sum(sizes)


@pytest.mark.parametrize(("kind", "expected"), [("cuda", [True]), ("npu", [])])
def test_pinned_slabs_are_given_back_to_the_system(monkeypatch, kind, expected):
    """Once they are free. Extensions may lack what torch's call needs, and crash."""
    staging = ChunkStaging()
    chunk = ArchivedChunk("weight", Box((0,), (4,)), torch.float32, 0)
    assert staging.copy({chunk: torch.arange(4.0)})[chunk].tolist() == [0, 1, 2, 3]
    slab, are_free = weakref.ref(staging._slabs[0]), []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(torch_private, "accelerator", lambda: SimpleNamespace(type=kind))
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", lambda: are_free.append(slab() is None), raising=False
    )
    staging.release()
    assert are_free == expected
