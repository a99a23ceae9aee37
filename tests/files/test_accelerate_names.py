"""Names of accelerate's files in a folder."""

from pathlib import Path

import pytest

from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.files.accelerate_saves import MODEL, OPTIMIZER, Distributed, FilePerRank, WholeFile, find_saved


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def test_names() -> None:
    assert [MODEL.file(0), MODEL.file(1)] == ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"]
    assert [OPTIMIZER.file(0), OPTIMIZER.file(2)] == ["optimizer.bin", "optimizer_2.bin"]
    assert MODEL.folder(0) == "pytorch_model_fsdp_0"
    assert OPTIMIZER.rank_file(1, 3) == "optimizer_1_rank3.bin"
    for number, ranks in ((0, [12, 12, None]), (1, [None, None, 12])):
        names = [f"pytorch_model_fsdp{middle}_rank12.bin" for middle in ("", "_0", "_1")]
        assert [MODEL.parse_rank(name, number) for name in names] == ranks
    assert MODEL.parse_rank("pytorch_model_fsdp_0_rankx.bin", 0) is None
    assert MODEL.parse_rank("pytorch_model_fsdp_0_rank1.bin.tmp", 0) is None


@pytest.mark.parametrize("number", [0, 1])
def test_every_form(tmp_path: Path, number: int) -> None:
    whole = made(tmp_path / "whole", MODEL.file(number), OPTIMIZER.file(0), OPTIMIZER.file(1))
    assert find_saved(whole, MODEL, number) == WholeFile(str(whole), MODEL.file(number))
    assert find_saved(whole / MODEL.file(number), MODEL, number) == WholeFile(str(whole), MODEL.file(number))
    folder = made(tmp_path / "folder", f"{MODEL.folder(number)}/.metadata")
    assert find_saved(folder, MODEL, number) == Distributed(str(folder / MODEL.folder(number)))
    assert find_saved(folder / MODEL.folder(number), MODEL, 7) == Distributed(str(folder / MODEL.folder(number)))
    names = tuple(MODEL.rank_file(number, rank) for rank in (2, 0, 1))
    ranks = made(tmp_path / "ranks", *names, "other.bin")
    in_order = FilePerRank(str(ranks), tuple(sorted(names)))
    assert find_saved(ranks, MODEL, number) == in_order
    assert find_saved(ranks / names[0], MODEL, 5) == in_order, "a file of a rank tells its number"


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such file or folder"):
        find_saved(tmp_path / "x", MODEL, 0)
    empty = made(tmp_path / "empty", "kept.txt")
    words = "(?s)no model 1 saved by accelerate.*fsdp_1.bin.*_1_rank0.bin.*files there: kept"
    with pytest.raises(FormatError, match=words):
        find_saved(empty, MODEL, 1)
    (tmp_path / "bare").mkdir()
    with pytest.raises(FormatError, match="files there: nothing"):
        find_saved(tmp_path / "bare", MODEL, 0)
    begun = made(tmp_path / "begun", f"{MODEL.folder(0)}/__0_0.distcp")
    with pytest.raises(FormatError, match=r"begun/pytorch_model_fsdp_0: has no \.metadata"):
        find_saved(begun, MODEL, 0)
    with pytest.raises(FormatError, match=r"begun/pytorch_model_fsdp_0: has no \.metadata"):
        find_saved(begun / MODEL.folder(0), MODEL, 0)
    several = made(tmp_path / "several", MODEL.file(0), MODEL.rank_file(0, 0), f"{MODEL.folder(0)}/.metadata")
    words = r"in several forms: pytorch_model_fsdp.bin, pytorch_model_fsdp_0/, .*1 ranks"
    with pytest.raises(ConfigError, match=words):
        find_saved(several, MODEL, 0)


def test_files_of_ranks_are_all_there_once(tmp_path: Path) -> None:
    gaps = made(tmp_path / "gaps", MODEL.rank_file(0, 0), MODEL.rank_file(0, 3))
    with pytest.raises(FormatError, match="has files of 2 ranks, and none of rank 1, 2."):
        find_saved(gaps, MODEL, 0)
    far = made(tmp_path / "far", MODEL.rank_file(0, 999_999_999))
    words = "has files of 1 ranks, and none of rank 0, 1, 2, 3, 4, 5, 6, 7, 8."
    with pytest.raises(FormatError, match=words):
        find_saved(far, MODEL, 0)
    twice = made(tmp_path / "twice", "optimizer_rank0.bin", "optimizer_0_rank0.bin")
    with pytest.raises(FormatError, match=r"optimizer_0_rank0.bin and optimizer_rank0.bin are both of rank 0"):
        find_saved(twice, OPTIMIZER, 0)


def test_a_file_with_zeros_before_its_number_is_no_file_of_ranks(tmp_path: Path) -> None:
    folder = made(tmp_path / "zeros", "optimizer_00_rank0.bin")
    found = find_saved(folder / "optimizer_00_rank0.bin", OPTIMIZER, 0)
    assert found == WholeFile(str(folder), "optimizer_00_rank0.bin")
