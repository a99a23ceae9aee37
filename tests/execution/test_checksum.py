from __future__ import annotations

import pytest
import torch
from tests.execution.exchanging import DTYPES, noise

from shardwise.execution.checksum import checksum


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_changed_bit_changes_it(dtype):
    tensor = noise((5, 3), dtype, 1)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    raw = tensor.view(-1).view(torch.uint8)
    for index in range(raw.numel()):
        raw[index] ^= 1
        assert checksum(tensor) != before
        raw[index] ^= 1


def test_order_counts_within_blocks_and_between_them(monkeypatch):
    monkeypatch.setattr("shardwise.execution.checksum._BLOCK", 4)
    tensor = torch.arange(40.0)
    swapped = {checksum(tensor.roll(shift)) for shift in range(40)}
    assert len(swapped) == 40


def test_views_count_their_own_elements_only():
    whole = torch.arange(24, dtype=torch.int16).view(4, 6)
    for part in (whole[1:3], whole[:, 1:2], whole[0, 1:]):
        assert checksum(part) == checksum(part.clone())
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(4.0))
