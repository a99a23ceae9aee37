"""Ranks that open different copies of a checkpoint: equal ones are used, others refused."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests import truth
from tests.small_checkpoints import small_qwen3
from tests.support.memory_storage import MemoryReader
from tests.support.world import agreed, attempt
from torch import nn

import shardwise
from shardwise.files import local_reader
from shardwise.files.local_reader import LocalReader
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.storage import NETWORK_FILE_SYSTEM
from shardwise.loading.one_checkpoint import require_one_checkpoint
from shardwise.ranks.world import World
from shardwise.state import model_states

FSDP_FILE = "pytorch_model_fsdp.bin"
_FILE = "model-00002-of-00004.safetensors"


def copies(source: Path, place: Path) -> dict[str, str]:
    """Folders beside a checkpoint that are copies of it, or are taken for copies."""
    made = {}
    for name in ("same", "metadata", "padded", "header", "values", "missing"):
        shutil.copytree(source, place / name)
        made[name] = str(place / name)
    longer = _metadata_of(place / "metadata" / _FILE)
    _rewrite(place / "metadata" / _FILE, longer | {"note": "x" * 69})
    assert (place / "metadata" / _FILE).stat().st_size == (source / _FILE).stat().st_size + 80
    _rewrite(place / "header" / _FILE, {"tamrof": "pt"})
    assert (place / "header" / _FILE).stat().st_size == (source / _FILE).stat().st_size
    for file in (place / "values").glob("*.safetensors"):
        save_file({key: value + 1 for key, value in load_file(file).items()}, file, metadata=_metadata_of(file))
    with (place / "padded" / _FILE).open("ab") as stream:
        stream.write(b"\0" * 8)
    (place / "missing" / _FILE).unlink()
    return made


def one_tensor(place: Path) -> str:
    """A checkpoint of one large tensor."""
    save_file({"weight": torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256)}, place / "model.safetensors")
    return str(place)


def _metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata())


def _rewrite(file: Path, metadata: dict[str, str]) -> None:
    save_file(load_file(file), file, metadata=metadata)


def loads(first: str, others: dict[str, str]) -> dict[str, tuple[str, str]]:
    """The outcome where rank 0 has ``first`` and the other ranks one of ``others``, by name of the latter."""
    return {name: attempt(_load, first, other) for name, other in others.items()}


def _load(first: str, other: str) -> None:
    shardwise.from_pretrained(first if dist.get_rank() == 0 else other)


def equal_copies(first: str, other: str) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """Whole values of a load from two equal copies, and the notes of loads from two and from one."""
    mine = first if dist.get_rank() == 0 else other
    model, report = shardwise.from_pretrained(mine, output_loading_info=True)
    _, alone = shardwise.from_pretrained(first, output_loading_info=True)
    return truth.snapshot(model)["values"], list(report.notes), list(alone.notes)


def in_memory(folder: str) -> list[tuple[str, str]]:
    """Readers of memory: every rank has a copy of its own, and on the last rank a byte is another."""
    files = {file.name: file.read_bytes() for file in Path(folder).glob("*.safetensors")}

    def load(spoiled: bool) -> None:
        content = dict(files)
        if spoiled and dist.get_rank() == dist.get_world_size() - 1:
            name = sorted(content)[0]
            content[name] = content[name][:-1] + b"\x7f"
        with torch.device("meta"):
            model = nn.Linear(256, 256, bias=False)
        shardwise.load(model, MemoryReader(content))

    return [attempt(load, spoiled) for spoiled in (False, True)]


def on_a_network(first: str, other: str) -> tuple[tuple[str, str], int]:
    """The outcome of a comparison on two machines with a network file system, and its number of reads."""
    machine = mock.patch.object(local_reader, "boot_id", return_value=f"machine {dist.get_rank()}")
    reader = LocalReader(first if dist.get_rank() == 0 else other, policy=NETWORK_FILE_SYSTEM)
    with World.current(call="load") as world, reader, machine:
        index = open_checkpoint(first)
        return attempt(require_one_checkpoint, world, reader, index), reader.reads


def adapters(base: str, one: str, other: str) -> tuple[str, str]:
    """An adapter of which rank 0 has another copy than the others."""
    mine = one if dist.get_rank() == 0 else other
    return attempt(lambda: shardwise.from_pretrained(base, tuning=shardwise.ExistingLora(mine)))


def torch_files(one: str, other: str) -> list[tuple[str, str]]:
    """A checkpoint of torch's of which rank 0 has another copy than the others; loaded, and set as a state."""
    mine = one if dist.get_rank() == 0 else other
    loaded = attempt(shardwise.from_pretrained, mine)
    read = model_states.LocalReader  # the path of all ranks leads to another folder on each one's machine
    with mock.patch.object(model_states, "LocalReader", side_effect=lambda _: read(mine)):
        return [loaded, attempt(shardwise.load_accelerate_model, small_qwen3(), f"{one}/{FSDP_FILE}")]


def hub_cache(place: Path, snapshots: dict[str, str], main: str) -> str:
    """A cache of the hub with snapshots of org/name, by commit, of which the branch main is one."""
    repository = place / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(main)
    for commit, folder in snapshots.items():
        (repository / "snapshots").mkdir(exist_ok=True)
        (repository / "snapshots" / commit).symlink_to(folder)
    return str(place)


def from_the_hub(caches: list[str]) -> Any:
    """Whole values of org/name, of which every rank has a cache of its own."""
    hub = shardwise.options.HubOptions(cache_dir=caches[dist.get_rank()])
    try:
        model = shardwise.from_pretrained("org/name", hub=hub)
    except shardwise.ShardwiseError as error:
        return str(error)
    return truth.snapshot(model)["values"]


def test_copies_that_differ_are_refused_on_all_ranks(worlds, qwen3, tmp_path):
    made = copies(qwen3, tmp_path)
    first = agreed(worlds(3), loads, str(qwen3), made)
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
    assert all("Copy the checkpoint to the machines of these ranks again" in text for text in said.values())


def test_equal_copies_are_loaded_and_reported(worlds, qwen3, tmp_path):
    shutil.copytree(qwen3, tmp_path / "copy")
    expected = truth.snapshot(small_qwen3())["values"]
    for values, notes, alone in worlds(3).run(equal_copies, str(qwen3), str(tmp_path / "copy")):
        truth.require_equal(values, expected)
        assert "the ranks read 2 copies of the checkpoint" in notes[0]
        assert alone == []


def test_readers_of_memory_are_compared(worlds, tmp_path):
    for plain, (kind, text) in worlds(3).run(in_memory, one_tensor(tmp_path)):
        assert plain == ("", "")
        assert (kind, "on rank 2 is not that" in text) == ("RankMismatchError", True)


def test_machines_with_a_network_file_system_read_some_tensors_of_each_file(worlds, tmp_path):
    for name, last in (("one", "t999"), ("other", "u999")):
        keys = [*(f"t{number}" for number in range(999)), last]
        (tmp_path / name).mkdir()
        save_file({key: torch.ones(1) for key in keys}, tmp_path / name / "model.safetensors")
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    for outcome, reads in worlds(2).run(on_a_network, one, one):
        assert outcome == ("", "")
        assert 0 < reads <= 2 * 16 + 2
    for (kind, text), _ in worlds(2).run(on_a_network, one, other):
        assert (kind, "its header on rank 1 is not that on rank 0" in text) == ("RankMismatchError", True)


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
    for kind, text in world.run(adapters, str(qwen3), *folders["adapter"]):
        assert (kind, "adapter_model.safetensors" in text) == ("RankMismatchError", True)
    for found in world.run(torch_files, *folders["torch"]):
        for kind, text in found:
            assert (kind, "on rank 1 is not that on rank 0" in text) == ("RankMismatchError", True)


def test_a_revision_is_the_first_rank_s_commit_on_every_machine(worlds, qwen3, tmp_path):
    """On the second machine the branch has moved on; the commit is in its cache, too, or the load is refused."""
    old, new = "0" * 40, "1" * 40
    other = small_qwen3()
    for parameter in other.parameters():
        parameter.data += 1
    other.save_pretrained(tmp_path / "new")
    both = {old: str(qwen3), new: str(tmp_path / "new")}
    first = hub_cache(tmp_path / "first", {old: str(qwen3)}, old)
    moved = hub_cache(tmp_path / "moved", both, new)
    expected = truth.snapshot(small_qwen3())["values"]
    for values in worlds(2).run(from_the_hub, [first, moved]):
        truth.require_equal(values, expected)
    lacking = hub_cache(tmp_path / "lacking", {new: str(tmp_path / "new")}, new)
    told = f"rank 1: org/name at revision {old}: is not a local directory"
    assert told in agreed(worlds(2), from_the_hub, [first, lacking])
