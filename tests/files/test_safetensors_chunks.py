"""Safetensors files that hold chunks of tensors: put together by what their metadata tell, or refused."""

import json

import pytest
import torch
from safetensors.torch import save
from tests.files.building import refusal_of as refusal
from tests.files.torch_building import same, values_of
from tests.support.memory_storage import MemoryReader

from shardwise.files.open_checkpoint import open_checkpoint

GRID = torch.arange(48.0).reshape(6, 8)


def file_of_chunks(tensors: dict[str, torch.Tensor], told: object) -> bytes:
    text = told if isinstance(told, str) else json.dumps(told)
    metadata = {"DCP_SHARDING_INFO": text, "DCP_VERSION": "1.0", "format": "pt"}
    return save({key: value.contiguous() for key, value in tensors.items()}, metadata=metadata)


def at(*offsets: int) -> dict[str, list[int]]:
    return {"saved_offsets": list(offsets)}


def files_of(*chunks: tuple[torch.Tensor, object]) -> MemoryReader:
    return MemoryReader(
        {
            f"shard-{number:05d}-model-00001-of-00001.safetensors": file_of_chunks({"g": chunk}, {"g": told})
            for number, (chunk, told) in enumerate(chunks, 1)
        }
    )


def test_chunks_are_put_together() -> None:
    for reader in (
        files_of((GRID[:2], at(0, 0)), (GRID[2:], at(2, 0))),
        files_of((GRID[:, 5:], at(0, 5)), (GRID[:, :5], at(0, 0))),
        files_of((GRID[:2, :3], at(0, 0)), (GRID[:2, 3:], at(0, 3)), (GRID[2:], at(2, 0))),
        files_of((GRID, at(0, 0))),
    ):
        index = open_checkpoint(reader)
        assert same(values_of(index, reader)["g"], GRID)
        assert [item.key for item in index.tensors()] == ["g"]
        assert index.metadata == {"DCP_VERSION": "1.0", "format": "pt"}


def test_tensors_without_dimensions_and_those_of_which_nothing_is_reported() -> None:
    tensors = {"scalar": torch.tensor(3.5), "plain": torch.ones(2)}
    reader = MemoryReader({"shard-1.safetensors": file_of_chunks(tensors, {"scalar": at()})})
    found = values_of(open_checkpoint(reader), reader)
    assert same(found["scalar"], torch.tensor(3.5))
    assert same(found["plain"], torch.ones(2))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([(GRID[:2], at(0, 0)), (GRID[3:], at(3, 0))], "chunks overlap or leave gaps"),
        ([(GRID[:3], at(0, 0)), (GRID[2:], at(2, 0))], "chunks overlap or leave gaps"),
        ([(GRID[:2], at(0, 0)), (GRID[:2], at(0, 0)), (GRID[4:], at(4, 0))], "chunks overlap or leave gaps"),
        ([(GRID[2:], at(2, 0))], "chunks overlap or leave gaps"),
        ([(GRID[:2], at(0))], "has no valid offsets of the chunk of g of shape (2, 8)"),
        ([(GRID[:2], at(0, -1))], "has no valid offsets of the chunk of g"),
        ([(GRID[:2], at(0, 2**63))], "has no valid offsets of the chunk of g"),
        ([(GRID[:2], {"saved_offsets": [0, True]})], "has no valid offsets of the chunk of g"),
        ([(GRID[:2], [])], "has no valid offsets of the chunk of g"),
        ([(GRID[:2], at(0, 0)), (GRID[2:].int(), at(2, 0))], "The folder mixes two saves"),
        ([(GRID[:2], at(0, 0)), (GRID[2], at(2))], "The folder mixes two saves"),
    ],
)
def test_chunks_that_do_not_belong_together(chunks: list[tuple[torch.Tensor, object]], words: str) -> None:
    assert words in refusal(files_of(*chunks))


def test_metadata_that_are_no_json() -> None:
    for told in ("", "[]", "{", '{"g": 1, "g": 2}'):
        assert "DCP_SHARDING_INFO" in refusal(MemoryReader({"x.safetensors": file_of_chunks({"g": GRID}, told)}))


def test_a_tensor_that_is_there_in_chunks_and_whole_is_there_twice() -> None:
    chunks = {
        "b.safetensors": file_of_chunks({"g": GRID[:2]}, {"g": at(0, 0)}),
        "c.safetensors": file_of_chunks({"g": GRID[2:]}, {"g": at(2, 0)}),
    }
    for name in ("a.safetensors", "z.safetensors"):
        text = refusal(MemoryReader({**chunks, name: save({"g": GRID})}))
        assert "keys held twice" in text
        assert f"g: in chunks, and whole in {name}" in text
