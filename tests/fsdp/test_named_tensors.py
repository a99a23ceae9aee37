"""Boxes that a rank holds, compared with torch's own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.core.errors import ShardingError
from shardwise.core.formatting import canonical_name
from shardwise.core.layout import TensorKind
from shardwise.core.tensors import contiguous_strides, numel
from shardwise.fsdp.named_tensors import boxes_at, build_layout, collect_tensors, meta_leftovers
from shardwise.models.selection import names_outside


@given(
    shape=st.lists(st.integers(0, 11), min_size=1, max_size=3),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dims=st.lists(st.integers(-1, 2), min_size=3, max_size=3),
)
def test_boxes_are_those_torch_computes_and_tile_the_tensor(shape, mesh, dims):
    placements = [Shard(dim) if 0 <= dim < len(shape) else Replicate() for dim in dims[: len(mesh)]]
    count = np.zeros(shape, dtype=int)
    for coordinate in np.ndindex(*mesh):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        boxes = boxes_at(tuple(shape), tuple(placements), tuple(mesh), coordinate, contiguous_strides(sizes))
        if numel(sizes) == 0:
            assert boxes == ()
            continue
        (found,) = boxes
        assert (found.box.offsets, found.box.sizes) == (tuple(offsets), tuple(sizes))
        assert found.local.is_contiguous
        assert found.local.offset == 0
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    copies = numel([size for size, placement in zip(mesh, placements, strict=False) if placement.is_replicate()])
    assert (count == copies).all()


def test_strided_shards_are_several_boxes():
    """FSDP over tensor parallelism on one dimension: rows are dealt to tp first, then to dp."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    held = {}
    for coordinate in np.ndindex(2, 2):
        boxes = boxes_at((8, 3), placements, (2, 2), coordinate, (3, 1))
        held[coordinate] = [(part.box.offsets[0], part.box.sizes[0], part.local.offset) for part in boxes]
    assert held == {(0, 0): [(0, 2, 0)], (0, 1): [(4, 2, 0)], (1, 0): [(2, 2, 0)], (1, 1): [(6, 2, 0)]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 10) for _ in range(2)])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = nn.Parameter(torch.empty(7, 6, dtype=torch.bfloat16), requires_grad=False)
        self.again = self.head
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3), persistent=False)


def test_temporary_buffers_have_an_order_that_their_registration_does_not_change():
    def made(names: list[str]) -> nn.Module:
        model = nn.Linear(2, 2)
        for name in names:
            model.register_buffer(name, torch.zeros(1), persistent=name.startswith("kept"))
        return model

    names = [item.fqn for item in collect_tensors(made(["kept_z", "b", "kept_a", "a"]))]
    assert names == ["weight", "bias", "kept_z", "kept_a", "a", "b"]
    assert names == [item.fqn for item in collect_tensors(made(["a", "kept_z", "b", "kept_a"]))]


def test_every_tensor_is_seen_once_with_all_its_names():
    found = collect_tensors(Model())
    layout = build_layout(found)
    assert [tensor.fqn for tensor in layout.tensors] == [
        "steps",
        "table",
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "head.weight",
    ]
    assert layout.by_name["again.weight"].names == ("head.weight", "again.weight")
    assert layout.by_name["steps"].kind is TensorKind.PERSISTENT_BUFFER
    assert layout.by_name["steps"].local_numel == 1
    assert layout.by_name["table"].kind is TensorKind.NON_PERSISTENT_BUFFER
    assert layout.by_name["head.weight"].dtype.label == "BF16"
    assert not layout.by_name["head.weight"].requires_grad


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module._orig_mod.a", "a"),
        ("my_orig_mod.a", "my_orig_mod.a"),
    ],
)
def test_canonical_names(name, expected):
    assert canonical_name(name) == expected


def test_leftovers_on_meta_are_found_wherever_they_hide():
    model = Model()
    model.cache = {"keys": torch.zeros(2, device="meta")}
    model.layers[0].scales = [torch.zeros(1), torch.zeros(1, device="meta")]
    model.layers[1].bias = nn.Parameter(torch.zeros(10, device="meta"))
    assert meta_leftovers(model) == ["layers.1.bias", "cache", "layers.0.scales"]


def test_two_tensors_of_one_name_are_refused():
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.layer = nn.Linear(2, 2, bias=False)
    model.inner._orig_mod = nn.ModuleDict({"layer": nn.Linear(2, 2, bias=False)})
    with pytest.raises(ShardingError, match=r"another tensor is named inner\.layer\.weight"):
        names_outside(model, collect_tensors(model), None)
