"""Save plans: the file of each tensor, and each byte written once by all ranks together."""

import itertools
import json
import random

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st
from tests.core.random_expressions import Grower, view

from shardwise.core.tensors import Box, DType, Strided, row_blocks
from shardwise.files.storage import WritePolicy
from shardwise.saving.plan import arrange_writes, plan_save
from shardwise.saving.stream_out import plan_blocks
from shardwise.transfer.file_requests import align

DTYPES = (DType.U8, DType.BF16, DType.F32)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=9),
    st.integers(1, 60),
)
def test_files_are_those_of_the_hubs_library(kinds, most):
    tensors = [(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(kinds)]
    nbytes = {key: int(np.prod(shape)) * dtype.itemsize for key, dtype, shape in tensors}
    theirs = split_state_dict_into_shards_factory(
        {key: (key,) for key in nbytes},  # texts would be passed over
        get_storage_size=lambda item: nbytes[item[0]],
        get_storage_id=lambda _: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    plan = plan_save(tensors, max_shard_bytes=most, parameters=7, save_id="0123abcd")
    found = [sorted(entry.key for entry in file.entries) for file in plan.files]
    assert found == [sorted(keys) for keys in theirs.filename_to_tensors.values()]
    assert plan.nbytes == sum(nbytes.values())
    assert {key: entry.nbytes for key, entry in plan.entries.items()} == nbytes
    if len(plan.files) == 1:
        assert (plan.index, plan.names) == (None, ("model.safetensors",))
        assert plan.files[0].name == "model.0123abcd.incomplete"
        return
    count = len(plan.files)
    assert plan.names == tuple(file.name for file in plan.files)
    assert plan.names[-1] == f"model-0123abcd-{count:05d}-of-{count:05d}.safetensors"
    assert plan.names[0] == f"model-0123abcd-00001-of-{count:05d}.safetensors"
    index = json.loads(plan.index)
    assert index["metadata"] == {"total_parameters": 7, "total_size": plan.nbytes}
    assert index["weight_map"] == {key: entry.file for key, entry in plan.entries.items()}


def test_nothing_to_save_is_a_file():
    nothing = plan_save([], max_shard_bytes=1, parameters=0, save_id="t", stem="adapter_model")
    assert (nothing.names, nothing.nbytes, nothing.index) == (("adapter_model.safetensors",), 0, None)
    wanted = ("adapter_model.safetensors", "adapter_model.safetensors.index.json")
    assert (nothing.single_file, nothing.index_file) == wanted


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6),
    st.integers(4, 60),
)
def test_a_file_is_written_in_blocks_that_are_as_full_as_they_can_be(kinds, most):
    tensors = [(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(kinds)]
    plan = plan_save(tensors, max_shard_bytes=1 << 20, parameters=7, save_id="0123abcd")
    blocks = list(plan_blocks(plan, most))
    sizes = [sum(box.numel * plan.entries[key].dtype.itemsize for key, box in block) for block in blocks]
    assert sum(sizes) == plan.nbytes
    assert all(size <= most for size in sizes)
    line = [(key, box) for block in blocks for key, box in block]
    assert line == [
        (entry.key, box)
        for entry in plan.entries.values()
        for box in row_blocks(entry.shape, max(1, most // entry.dtype.itemsize))
    ]
    for block, following in itertools.pairwise(blocks):
        key, box = following[0]
        assert sum(box.numel * plan.entries[key].dtype.itemsize for key, box in [*block, (key, box)]) > most


def dealt(rng, array, ranks):
    """By rank: boxes of the array, and memory of each that begins with padding."""
    found = [[] for _ in range(ranks)]
    if not array.ndim:
        found[rng.randrange(ranks)].append((Box((), ()), array.reshape(-1).copy(), Strided.contiguous(())))
        return found
    dim = rng.randrange(array.ndim)
    edges = sorted(rng.randint(0, array.shape[dim]) for _ in range(ranks - 1))
    for rank, (start, stop) in enumerate(zip([0, *edges], [*edges, array.shape[dim]], strict=True)):
        part = np.take(array, range(start, stop), dim)
        offsets = tuple(start if axis == dim else 0 for axis in range(array.ndim))
        memory = np.concatenate([np.full(3, -1), part.reshape(-1)])
        found[rank].append((Box(offsets, part.shape), memory, Strided.contiguous(part.shape, 3)))
    return found


@given(st.integers(0, 2**32), st.sampled_from([8, 64, 1000]), st.sampled_from([64, 256]), st.booleans())
def test_the_writes_of_all_ranks_make_the_files(seed, request, staging, is_staged):
    rng = random.Random(seed)
    ranks, saved, arrays, held, memories = rng.randint(1, 3), [], {}, [{} for _ in range(3)], {}
    for number in range(2):
        grower = Grower(rng)
        expression, arrays[f"s{number}"] = grower.grow(rng.randint(0, 4))
        names = {key: f"{number} {key}" for key in grower.leaves}
        saved.append((f"s{number}", expression, names))
        for key, leaf in grower.leaves.items():
            for rank, parts in enumerate(dealt(rng, leaf, ranks)):
                for box, memory, place in parts:
                    held[rank].setdefault((number, key), []).append((box, place))
                    memories[rank, number, key] = memory
    plan = plan_save(
        [(key, DType.I64, arrays[key].shape) for key, _, _ in saved],
        max_shard_bytes=2000,
        parameters=0,
        save_id="t",
    )
    files = {file.name: np.zeros(file.nbytes, np.uint8) for file in plan.files}
    times = {name: np.zeros_like(file) for name, file in files.items()}
    policy = WritePolicy(block_bytes=1, request_bytes=request, concurrency=1)
    for rank in range(ranks):
        for number, (key, expression, names) in enumerate(saved):
            mine = {leaf: held[rank][number, leaf] for leaf in names if (number, leaf) in held[rank]}
            numbers = {leaf: index for index, leaf in enumerate(names)}
            staged = list(names) if is_staged else []
            asked = arrange_writes([(plan.entries[key], expression)], mine, numbers, staged, policy, staging)
            places = [(item.file, item.bytes.start) for item in asked]
            assert places == sorted(places)
            for item in asked:
                at, room = item.bytes.start, 0
                assert item.bytes.nbytes <= max(request, 8)
                for segment in item.segments:
                    assert segment.bytes.start == at  # runs that touch
                    at, leaf = segment.bytes.stop, list(names)[segment.target]
                    values = np.ascontiguousarray(view(memories[rank, number, leaf], segment.copy.target))
                    files[item.file][segment.bytes.start : at] = values.reshape(-1).view(np.uint8)
                    times[item.file][segment.bytes.start : at] += 1
                    assert not (segment.is_direct and is_staged)
                    room += 0 if segment.is_direct else align(segment.bytes.nbytes)
                assert at == item.bytes.stop
                assert room <= staging
    for key, entry in plan.entries.items():
        assert (times[entry.file][entry.start : entry.stop] == 1).all()
        assert np.array_equal(files[entry.file][entry.start : entry.stop].view(np.int64), arrays[key].reshape(-1))
    assert sum(int(item.sum()) for item in times.values()) == plan.nbytes
