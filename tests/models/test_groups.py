"""Along which dimension a parameter is dealt."""

import pytest

from shardwise.models.policies import shard_dim


@pytest.mark.parametrize(
    ("shape", "ranks", "expected"),
    [
        ((128, 3072, 4096), 128, 0),
        ((128, 3072, 4096), 64, 0),
        ((128, 3072, 4096), 1024, 1),
        ((128, 3072, 4096), 96, 1),  # two experts on 64 ranks and none on 32, by FSDP2's own way
        ((128, 4096, 1536), 96, 0),  # only the last dimension is even: pieces of 16 columns
        ((60, 2816, 2048), 48, 0),  # the same, but no other dimension is even
        ((60, 2816, 2048), 8, 0),  # 7.5 a rank, padded to 8: near enough
        ((128, 100, 4096), 1024, 2),
        ((512, 4096), 1024, 0),
        ((10,), 16, 0),
    ],
)
def test_the_dimension_that_is_dealt(shape, ranks, expected):
    assert shard_dim(shape, ranks) == expected
