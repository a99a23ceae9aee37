"""Ranks that open different files: found to be equal, or refused, before a number is read."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tests import truth
from tests.verbs import copying
from tests.verbs.conftest import small_qwen3

from shardwise.formats.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.planning.loads.comparing import BLOCK_BYTES, SampledBlocks, WholeFiles, portions
from shardwise.tensors.dtypes import dtype_named


@pytest.mark.distributed
def test_copies_that_differ_are_refused_on_all_ranks(worlds, qwen3, tmp_path):
    made = copying.copies(qwen3, tmp_path)
    del made["one_number"]
    first, *others = worlds(3).run(copying.loads, str(qwen3), made)
    assert all(found == first for found in others)
    assert first.pop("same") == ("", "")
    kind, missing = first.pop("missing")
    assert kind == "StorageError"
    assert "rank 1: model-00002-of-00004.safetensors" in missing
    assert {kind for kind, _ in first.values()} == {"DisagreementError"}
    said = {name: text for name, (_, text) in first.items()}
    for name in ("metadata", "padded"):
        assert "model-00002-of-00004.safetensors has " in said[name]
        assert "bytes on rank 1, 2, and " in said[name]
    assert "the header of model-00002-of-00004.safetensors is another" in said["header"]
    assert "on rank 1, 2 not what it is on rank 0" in said["values"]
    assert "that were looked at have other values, lm_head.weight first" in said["values"]
    assert all("copy the checkpoint anew" in text for text in said.values())


@pytest.mark.distributed
def test_equal_copies_are_loaded_and_told_of(worlds, qwen3, tmp_path):
    shutil.copytree(qwen3, tmp_path / "copy")
    expected = truth.snapshot(small_qwen3())["values"]
    for values, notes, alone in worlds(3).run(copying.equal_copies, str(qwen3), str(tmp_path / "copy")):
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert "the ranks read 2 copies of the checkpoint" in notes[0]
        assert alone == []


@pytest.mark.distributed
def test_whole_files_are_compared_on_request(worlds, qwen3, tmp_path):
    one, other = copying.with_one_other_number(qwen3, tmp_path)
    for sampled, (kind, text) in worlds(3).run(copying.whole_files, one, other):
        assert sampled == ("", "")
        assert kind == "DisagreementError"
        assert "weight first" in text
    for plain, (kind, _) in worlds(3).run(copying.in_memory, one):
        assert plain == ("", "")
        assert kind == "DisagreementError"


@pytest.mark.distributed
def test_adapters_files_of_torch_and_configs_are_compared_too(worlds, qwen3, tmp_path):
    for seed in (0, 1):
        base, model = small_qwen3(), small_qwen3()
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        adapted = get_peft_model(base, config)
        adapted.save_pretrained(tmp_path / f"adapter{seed}", save_embedding_layers=False)
        folder = tmp_path / f"torch{seed}"
        model.config.save_pretrained(folder)
        state = {name: value + seed for name, value in model.state_dict().items()}
        for file in ("pytorch_model.bin", "pytorch_model_fsdp.bin"):
            torch.save(state, folder / file)
    shutil.copytree(qwen3, tmp_path / "copy")
    folders = {name: [str(tmp_path / f"{name}{seed}") for seed in (0, 1)] for name in ("adapter", "torch")}
    world = worlds(2)
    for kind, text in world.run(copying.adapters, str(qwen3), *folders["adapter"]):
        assert (kind, "q_proj" in text) == ("DisagreementError", True)
    for found in world.run(copying.torch_files, *folders["torch"]):
        for kind, text in found:
            assert (kind, "tensors that were looked at have other values" in text) == ("DisagreementError", True)
    for kind, text in world.run(copying.settings_differ, str(qwen3), str(tmp_path / "copy")):
        assert kind == "DisagreementError"
        assert "hidden_act" in text


_SIZES = st.lists(st.integers(0, 20 * BLOCK_BYTES), max_size=6)


@given(_SIZES, st.integers(0, 3 * BLOCK_BYTES), st.integers(0, 5000), st.integers(2, 12))
def test_what_is_looked_at(sizes: list[int], header: int, rest: int, count: int) -> None:
    """Blocks lie in their tensors, both ends among them; pieces of whole files tile the files."""
    dtype = dtype_named("U8")
    assert dtype is not None
    entries, position = {}, header
    for number, size in enumerate(sizes):
        entries[f"t{number}"] = TensorEntry(f"t{number}", dtype, (size,), "f", position, position + size)
        position += size
    index = CheckpointIndex("root", {"f": position + rest}, entries, {}, "single file")
    for portion in portions(index, SampledBlocks(count)):
        entry = entries.get(portion.key)
        start, stop = (0, position + rest) if entry is None else (entry.start, entry.stop)
        assert all(start <= low < high <= stop for low, high in portion.ranges)
        assert sum(high - low for low, high in portion.ranges) <= count * BLOCK_BYTES or entry is None
        if entry is not None:
            assert portion.ranges[0][0] == entry.start
            assert portion.ranges[-1][1] == entry.stop
    looked_at = [portion.ranges[0] for portion in portions(index, WholeFiles())]
    assert all(len(portion.ranges) == 1 for portion in portions(index, WholeFiles()))
    edges = [0, *(stop for _, stop in looked_at)]
    assert [start for start, _ in looked_at] == edges[:-1]
    assert edges[-1] == position + rest
    of_tensors = {portion.key for portion in portions(index, WholeFiles())} - {""}
    assert of_tensors == {key for key, entry in entries.items() if entry.nbytes}


@pytest.mark.distributed
def test_a_revision_is_the_first_rank_s_commit_on_every_machine(worlds, qwen3, tmp_path):
    """On the second machine the branch has moved on; the commit is in its cache, too, or the load is refused."""
    old, new = "0" * 40, "1" * 40
    other = small_qwen3()
    for parameter in other.parameters():
        parameter.data += 1
    other.save_pretrained(tmp_path / "new")
    both = {old: str(qwen3), new: str(tmp_path / "new")}
    first = copying.hub_cache(tmp_path / "first", {old: str(qwen3)}, old)
    moved = copying.hub_cache(tmp_path / "moved", both, new)
    expected = truth.snapshot(small_qwen3())["values"]
    for values in worlds(2).run(copying.from_the_hub, [first, moved]):
        assert all(torch.equal(values[name], expected[name]) for name in expected)
    lacking = copying.hub_cache(tmp_path / "lacking", {new: str(tmp_path / "new")}, new)
    mine, others = worlds(2).run(copying.from_the_hub, [first, lacking])
    assert mine == others
    assert f"rank 1: org/name at revision {old}: not in the cache {lacking}" in mine
