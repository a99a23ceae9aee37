"""Fresh memory of a load: in which pages it is taken, and that the values are the same whichever they are."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise.execution.memory import first_touch
from shardwise.execution.memory.host_memory import HostMemory
from shardwise.models.view import local_tensor
from shardwise.storage.reading.local import LocalReader

PORTION = 2 << 20
ALL = (shardwise.options.MeasuredPages(), shardwise.options.HugePages(), shardwise.options.SmallPages())

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are chosen on Linux only")


class Matrices(nn.Module):
    """24 MiB: two of ten mebibytes, and some that are smaller than a page."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.wide = nn.Linear(1024, 2560, dtype=dtype)
        self.tall = nn.Linear(2560, 1024, dtype=dtype)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    values = {name: torch.randn_like(tensor) for name, tensor in Matrices().state_dict().items()}
    folder = tmp_path_factory.mktemp("matrices")
    save_file(values, folder / "weights.safetensors")
    return str(folder), values


def on_meta(dtype: torch.dtype = torch.float32) -> Matrices:
    with torch.device("meta"):
        return Matrices(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pages", ALL, ids=lambda pages: type(pages).__name__)
def test_pages_are_those_asked_for_and_values_those_stored(stored, pages, dtype) -> None:
    folder, values = stored
    model = on_meta(dtype)
    report = shardwise.load(model, folder, options=shardwise.options.LoadOptions(pages=pages, progress=False))
    for name, value in values.items():
        assert torch.equal(model.state_dict()[name], value.to(dtype))
    found = report.pages
    if not first_touch.can_populate():
        pytest.skip("this kernel does not touch pages when told to")
    whole = report.placed_bytes // PORTION * PORTION
    assert whole - PORTION <= found.huge_bytes + found.small_bytes <= whole
    match pages:
        case shardwise.options.HugePages():
            assert found.small_bytes == 0
        case shardwise.options.SmallPages():
            assert found.huge_bytes == 0
        case _:
            assert min(found.huge_bytes, found.small_bytes) >= PORTION  # both were looked at
            assert f"{found.huge_bytes / (1 << 20):.2f} MiB in huge pages" in str(report)


def test_what_is_cast_comes_straight_from_the_page_cache(stored) -> None:
    """No byte is copied into a buffer first; the index took its own reads."""
    folder, values = stored
    with LocalReader(folder) as reader:
        if reader.cached("weights.safetensors", 0, 1000) is None:
            pytest.skip("this file system does not tell what is in the page cache")
    with LocalReader(folder) as reader:
        shardwise.load(on_meta(), reader, options=shardwise.options.LoadOptions(progress=False))
        in_calls = reader.reads
    with LocalReader(folder) as reader:
        model = on_meta(torch.float64)
        shardwise.load(model, reader, options=shardwise.options.LoadOptions(progress=False))
        assert reader.reads < in_calls
    assert all(torch.equal(model.state_dict()[name], value.double()) for name, value in values.items())


def load_on_ranks(folder: str) -> tuple[dict[str, torch.Tensor], int]:
    model = on_meta()
    for child in model.children():
        fully_shard(child)
    options = shardwise.options.LoadOptions(pages=ALL[dist.get_rank() % len(ALL)], progress=False)
    report = shardwise.load(fully_shard(model), folder, options=options)
    return {
        name: local_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()
    }, report.pages.huge_bytes + report.pages.small_bytes


@pytest.mark.distributed
def test_each_rank_chooses_for_itself(worlds, stored) -> None:
    """What pages a rank takes is no matter of the others: nothing is agreed upon, and no value depends on it."""
    folder, values = stored
    found = worlds(3).run(load_on_ranks, folder)
    for name, value in values.items():
        assert torch.equal(torch.cat([parts[name] for parts, _ in found]), value)
    assert min(touched for _, touched in found) >= 3 * PORTION


def test_a_portion_is_touched_once_and_only_when_it_is_due(monkeypatch) -> None:
    memory = HostMemory([5 * PORTION, 64, 3 * PORTION])
    first, small, last = (memory.take((size,), torch.uint8) for size in (5 * PORTION, 64, 3 * PORTION))
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "_populate", lambda address, nbytes: touched.append((address, nbytes)))
    start = first.data_ptr()
    assert start % PORTION == 0
    memory.touch(start + PORTION + 1, PORTION)
    memory.touch(start + PORTION, 10)
    assert touched == [(start + PORTION, PORTION), (start + 2 * PORTION, PORTION)]
    memory.touch(torch.zeros(8).data_ptr(), 32)  # of others
    assert len(touched) == 2
    memory.touch(small.data_ptr(), 64)
    memory.touch_rest()
    assert sorted(address - start for address, _ in touched) == [number * PORTION for number in range(9)]
    assert sum(nbytes for _, nbytes in touched) == 8 * PORTION + 64
    assert last.data_ptr() == small.data_ptr() + 64


def test_a_kernel_that_cannot_touch_is_advised_huge_pages(stored, monkeypatch) -> None:
    monkeypatch.setattr(first_touch, "MADV_POPULATE_WRITE", 999)
    first_touch.can_populate.cache_clear()
    try:
        folder, values = stored
        model = on_meta()
        report = shardwise.load(model, folder, options=shardwise.options.LoadOptions(progress=False))
    finally:
        monkeypatch.undo()
        first_touch.can_populate.cache_clear()
    assert report.pages.small_bytes == 0
    assert "since this kernel cannot tell what they cost" in str(report)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    assert mmap.MADV_HUGEPAGE == first_touch.MADV_HUGEPAGE
