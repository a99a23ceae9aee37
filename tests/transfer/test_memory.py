"""Free memory, as the system and its control groups tell it."""

import pytest
import torch

import shardwise
from shardwise.transfer.memory import available_memory, host_memory

GIB = 1 << 30


@pytest.fixture
def system(tmp_path):
    """A folder that looks like the system's files; 8 GiB are available."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "groups").mkdir()

    def ask() -> int | None:
        return host_memory(tmp_path / "meminfo", tmp_path / "own", tmp_path / "groups")

    return tmp_path, ask


def group(folder, limit, used, *, cache=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 0\n")


def test_without_limits_all_free_memory_of_the_system_counts(system):
    _, ask = system
    assert ask() == 8 * GIB


def test_a_group_s_limit_counts_and_its_page_cache_gives_way(system):
    folder, ask = system
    (folder / "own").write_text("0::/job/part\n")
    group(folder / "groups/job/part", "max", 3 * GIB)
    group(folder / "groups/job", 4 * GIB, 3 * GIB, cache=2 * GIB)
    assert ask() == 3 * GIB


def test_a_full_group_has_nothing_left(system):
    folder, ask = system
    (folder / "own").write_text("0::/job\n")
    group(folder / "groups/job", GIB, 2 * GIB)
    assert ask() == 0


def test_a_system_that_does_not_tell(tmp_path):
    assert host_memory(tmp_path / "absent", tmp_path / "absent", tmp_path / "absent") is None


def test_a_device_of_another_kind_is_refused_by_name():
    with pytest.raises(shardwise.ShardingError, match="device mps:0: .* types: cuda, xpu, npu. Load on the CPU"):
        available_memory(torch.device("mps", 0))
