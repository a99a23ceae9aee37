"""Ranks that open different files: found to be equal, or refused, before a number is read."""

import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests import truth
from tests.verbs import copying
from tests.verbs.conftest import small_qwen3


@pytest.mark.distributed
def test_copies_that_differ_are_refused_on_all_ranks(worlds, qwen3, tmp_path):
    made = copying.copies(qwen3, tmp_path)
    first, *others = worlds(3).run(copying.loads, str(qwen3), made)
    assert all(found == first for found in others)
    assert first.pop("same") == ("", "")
    kind, missing = first.pop("missing")
    assert kind == "StorageError"
    assert "rank 1: model-00002-of-00004.safetensors" in missing
    assert {kind for kind, _ in first.values()} == {"RankMismatchError"}
    said = {name: text for name, (_, text) in first.items()}
    words = {"metadata": "size", "padded": "size", "header": "header", "values": "values of tensors"}
    for name, word in words.items():
        assert f"its {word} on rank 1, 2 is not that on rank 0" in said[name]
    assert all("model-00002-of-00004.safetensors" in said[name] for name in ("metadata", "padded", "header"))
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
def test_readers_of_memory_are_compared(worlds, tmp_path):
    for plain, (kind, text) in worlds(3).run(copying.in_memory, copying.one_tensor(tmp_path)):
        assert plain == ("", "")
        assert (kind, "on rank 2 is not that" in text) == ("RankMismatchError", True)


@pytest.mark.distributed
def test_adapters_and_files_of_torch_are_compared_too(worlds, qwen3, tmp_path):
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
    folders = {name: [str(tmp_path / f"{name}{seed}") for seed in (0, 1)] for name in ("adapter", "torch")}
    world = worlds(2)
    for kind, text in world.run(copying.adapters, str(qwen3), *folders["adapter"]):
        assert (kind, "adapter_model.safetensors" in text) == ("RankMismatchError", True)
    for found in world.run(copying.torch_files, *folders["torch"]):
        for kind, text in found:
            assert (kind, "on rank 1 is not that on rank 0" in text) == ("RankMismatchError", True)


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
    assert f"rank 1: org/name at revision {old}: is no directory here" in mine
