"""What ranks do in the tests of files that one rank each writes."""

from pathlib import Path

import torch
import torch.distributed as dist
from tests import zoo
from tests.verbs.streaming import sharded

from shardwise.errors import ShardwiseError, StorageError
from shardwise.execution.replicas import ShardSender, agree_on_shares
from shardwise.execution.world import World
from shardwise.execution.write import write_by_owners
from shardwise.models.revert import revert
from shardwise.models.view import collect_tensors, layout_of
from shardwise.planning.fingerprints import fingerprint
from shardwise.planning.save_plan import plan_save
from shardwise.storage.contract import WritePolicy
from shardwise.storage.writing import LocalWriter

POLICY = WritePolicy(has_random_writes=False, can_rename=False, block_bytes=1, request_bytes=10_000, concurrency=1)


class InOrder(LocalWriter):
    """A folder that takes a file from one writer, without gaps, and does not see the end of it before the sync."""

    def __init__(self, root: str, fails_at: int | None = None) -> None:
        super().__init__(root, policy=POLICY)
        self.places: dict[str, int] = {}
        self.synced: list[str] = []
        self.fails_at = fails_at

    def create(self, file: str, nbytes: int) -> None:
        assert not set(self.places) - set(self.synced), "another file is not complete yet"
        super().create(file, nbytes)
        self.places[file] = 0

    def write(self, file, start, buffers) -> None:
        nbytes = sum(len(buffer) for buffer in buffers)
        assert start == self.places[file], f"{file} has a gap at {start}"
        assert nbytes <= POLICY.request_bytes or start == 0
        self.places[file] += nbytes
        if self.fails_at is not None and sum(self.places.values()) > self.fails_at:
            raise StorageError(f"{file}: the disk is full")
        super().write(file, start, buffers)

    def sync(self, file: str) -> None:
        super().sync(file)
        self.synced.append(file)


class Silent:
    def __init__(self) -> None:
        self.nbytes = 0

    def advance(self, nbytes: int) -> None:
        self.nbytes += nbytes


def write(
    name: str, folder: str, mesh: str, max_shard_bytes: int, budget_bytes: int, failing: int | None = None
) -> tuple[list[str], dict[str, int]]:
    """(files this rank has written, fingerprints of what it wrote), or the error's type and text."""
    specimen = next(item for item in zoo.causal_lm_specimens() if item.name == name)
    model = sharded(specimen, mesh)
    held = collect_tensors(model)
    with World.current() as world:
        shares = agree_on_shares(world, held, "first_rank").by_name
        made = revert(model, layout_of(held))
        tensors = [(key, output.dtype, output.shape) for key, output in made.items()]
        plan = plan_save(tensors, max_shard_bytes=max_shard_bytes, parameters=1, save_id="t")
        expressions = {key: output.expression for key, output in made.items()}
        progress = Silent()
        with InOrder(folder, 50_000 if failing == world.rank else None) as writer:
            try:
                written = write_by_owners(
                    world,
                    writer,
                    plan.files,
                    expressions,
                    ShardSender({name: item for item in held for name in item.names}, shares, world.rank),
                    shares,
                    budget_bytes=budget_bytes,
                    device=torch.device("cpu"),
                    progress=progress,
                )
            except ShardwiseError as error:
                return [type(error).__name__, str(error)], {}
            assert progress.nbytes == sum(written.bytes_by_file.values())
            assert sorted(writer.synced) == sorted(writer.places)
            assert all(writer.places[file.name] == file.nbytes for file in plan.files if file.name in writer.places)
            return writer.synced, written.fingerprints


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def fingerprints_of(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {
        key: fingerprint(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
        for key, tensor in tensors.items()
        if tensor.numel()
    }


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: value for file in sorted(folder.iterdir()) for key, value in load_file(file).items()}
