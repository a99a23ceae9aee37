from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.transfer import checksums
from shardwise.transfer.fingerprints import fingerprint


def checksum(tensor: torch.Tensor) -> int:
    return checksums.checksums([tensor])[0]


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_changed_bit_changes_it(dtype):
    generator = torch.Generator().manual_seed(1)
    tensor = (
        torch.randint(0, 2, (15 * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype).view(5, 3)
    )
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    raw = tensor.view(-1).view(torch.uint8)
    for index in range(raw.numel()):
        raw[index] ^= 1
        assert checksum(tensor) != before
        raw[index] ^= 1


def test_order_counts():
    tensor = torch.arange(40.0)
    swapped = {checksum(tensor.roll(shift)) for shift in range(40)}
    assert len(swapped) == 40


@given(
    numel=st.sampled_from([0, 1, 3, 8, (1 << 17) - 1, 1 << 17, (1 << 17) + 5, (5 << 17) + 3]),
    skipped=st.integers(0, 9),
    block_bytes=st.sampled_from([1 << 10, 100_003, 1 << 17, 3 << 17, 1 << 26]),
)
@settings(max_examples=60, deadline=None)
def test_checks_on_an_accelerator_equal_those_of_the_host(numel, skipped, block_bytes):
    flat = torch.randint(0, 256, (numel + skipped,), dtype=torch.uint8)[skipped:]
    with mock.patch.object(checksums, "_CHUNK_BYTES", block_bytes), torch.device("meta"):
        elsewhere = int(checksums._on_device(flat)) % (1 << 64)
    assert elsewhere == checksum(flat) == fingerprint(memoryview(flat.numpy()))


def test_strided_tensors_are_taken_in_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", 64)
    tensor = torch.arange(3 * 50 * 7, dtype=torch.int16).view(3, 50, 7)
    for view in (tensor.transpose(0, 2), tensor[:, 1:44:3, 2:], tensor[1].t()):
        assert checksum(view) == checksum(view.contiguous())


def test_views_count_their_own_elements_only():
    whole = torch.arange(24, dtype=torch.int16).view(4, 6)
    for part in (whole[1:3], whole[:, 1:2], whole[0, 1:]):
        assert checksum(part) == checksum(part.clone())
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(4.0))
