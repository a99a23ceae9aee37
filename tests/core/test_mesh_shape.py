"""Meshes without processes, and what cannot be one."""

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.layout import MeshShape


def test_positions_of_ranks_on_a_mesh():
    mesh = MeshShape(("replicate", "shard"), (2, 4))
    assert (mesh.ranks, mesh.shard_size) == (8, 4)
    assert [mesh.position(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert str(mesh) == "replicate=2, shard=4"


def test_axes_have_a_fixed_order():
    assert MeshShape.from_axes(8, {"shard": 4, "replicate": 2}) == MeshShape(("replicate", "shard"), (2, 4))
    assert MeshShape.from_axes(8, {"shard": 8}) == MeshShape(("shard",), (8,))
    assert MeshShape.from_axes(8, {"replicate": 1, "shard": 8}).sizes == (1, 8)
    assert MeshShape.from_axes(1, {"shard": 1}).sizes == (1,)
    assert MeshShape.flat(8).sizes == (8,)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"shards": 8}, "no axis 'shards'. Use replicate and shard"),
        ({"replicate": 2}, "needs an axis shard"),
        ({}, "needs an axis shard"),
        ({"replicate": 0, "shard": 8}, "a rank or more in every axis"),
        ({"shard": -8}, "a rank or more in every axis"),
        ({"replicate": 2, "shard": 8}, "has 16 ranks, not 8"),
        ({"shard": 6}, "has 6 ranks, not 8"),
    ],
)
def test_axes_that_make_no_mesh_of_eight_ranks(axes, message):
    with pytest.raises(ConfigError, match=message):
        MeshShape.from_axes(8, axes)
