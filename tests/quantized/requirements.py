"""Checks whether FSDP2 of this torch shards packed weights (2.13 and newer)."""

import pytest
import torch

SHARDS_PACKED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_packed_shards = pytest.mark.skipif(
    not SHARDS_PACKED, reason="packed weights on several ranks need torch 2.13"
)
