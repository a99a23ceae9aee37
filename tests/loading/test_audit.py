"""The audit finds what was left out."""

import pytest
import torch
from torch import nn

from shardwise.core.consents import Consent
from shardwise.core.errors import KeyMismatchError
from shardwise.core.expression import Bindings
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.files.stored_tensors import stored_tensors
from shardwise.fsdp.named_tensors import build_layout, collect_tensors, meta_leftovers
from shardwise.loading.audit import audit
from shardwise.loading.plan import ModelRules, plan_load


@pytest.fixture
def planned():
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(3, 2))
    model.two = nn.Parameter(torch.zeros(5))
    shapes = {"one": (3, 2), "two": (5,)}
    entries = {key: TensorEntry(key, DType.F32, shape, "m", 0, 4) for key, shape in shapes.items()}
    index = CheckpointIndex("somewhere", {"m": 100}, entries, {}, "single file")
    layout = build_layout(collect_tensors(model))
    matched = {key: (leaf,) for key, leaf in stored_tensors(index).items()}
    return model, plan_load(index, layout, Bindings(matched), ModelRules(), Consent())


def test_full_coverage_passes(planned):
    audit(planned[1], {"one": 6, "two": 5}, [])


@pytest.mark.parametrize("written", [{"one": 6}, {"one": 6, "two": 4}, {"one": 6, "two": 6}])
def test_one_element_too_few_or_too_many_is_an_error(planned, written):
    count = written.get("two", 0)
    with pytest.raises(KeyMismatchError, match=f"two: {count} of 5 elements written"):
        audit(planned[1], written, [])


def test_tensors_left_on_meta_are_an_error(planned):
    model, plan = planned
    model.two = nn.Parameter(torch.zeros(5, device="meta"))
    model.cache = torch.zeros(2, device="meta")
    with pytest.raises(KeyMismatchError, match=r"two: still on meta\n  cache: still on meta"):
        audit(plan, {"one": 6, "two": 5}, meta_leftovers(model))
