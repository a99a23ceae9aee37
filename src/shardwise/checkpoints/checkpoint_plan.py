"""The plan of a checkpoint: the writes of all ranks, and this rank's tensors for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.checkpoints.train_state import CollectedState
from shardwise.core.tensors import Box
from shardwise.fsdp.named_tensors import local_tensor
from shardwise.ranks.world import World
from shardwise.transfer.checksums import as_bytes
from shardwise.transfer.distributed_chunks import TensorsPlan, Views, chunk_views, flat_key, plan_tensors
from shardwise.transfer.move_plan import SharedBoxes, find_shared_boxes
from shardwise.transfer.replicas import Replicas
from shardwise.transfer.tensor_metadata import describing_tensors, metadata_by_name


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The plan of a checkpoint, which later ones reuse while every rank has the same tensors in the same memory.

    Attributes:
        collected: the state that it was made for.
        memory: where its tensors were then, of :meth:`CollectedState.memory`.
        ranks: this rank, and the ranks of the group in the default group.
        tensors: the writes of all ranks, on the first one, else of this rank.
        chunks: views of this rank's chunks.
        common: boxes that this rank has in common with others, with their ranks.
        replicated: the tensors that this rank has in common with others.
    """

    collected: CollectedState
    memory: Sequence[Sequence[object]]
    ranks: tuple[int, ...]
    tensors: TensorsPlan
    chunks: Views
    common: Mapping[str, SharedBoxes]
    replicated: Replicas

    def is_for(self, world: World, collected: CollectedState) -> bool:
        """Return whether the plan is valid for the state as it is now."""
        planned = self.collected
        # As lists: the order of the tensors is that of the chunks in the files.
        return (
            self.ranks == (world.rank, *world.global_ranks)
            and planned.signature == collected.signature
            and list(planned.tensors) == list(collected.tensors)
            and self.memory == collected.memory()
        )

    def replicas(self, collected: CollectedState) -> Replicas:
        """Return the tensors and numbers that this rank has in common with others."""
        # Two ranks are this one, and itself as the only one of the group.
        if not collected.numbers or len(self.ranks) == 2:
            return self.replicated
        # Numbers are other objects at each step, so they are not part of the plan. Every rank has those of
        # optimizers.
        numbers = {flat_key(path): as_bytes(value) for path, value in collected.numbers.items()}
        everyone = tuple(range(len(self.ranks) - 1))
        # By name, the boxes with ranks of the group (not global ranks).
        common = {name: ((Box.whole(value.shape), everyone),) for name, value in numbers.items()}
        return Replicas.among({**self.collected.by_key, **numbers}, {**self.common, **common}, collected.buffers)


def plan_checkpoint(world: World, collected: CollectedState) -> CheckpointPlan:
    """Plan the writes of all ranks. Collective: yes."""
    tensors = collected.by_key
    with describing_tensors(world) as exchange:
        memory = collected.memory()
        exchange.local = metadata_by_name(tensors)
    boxes = exchange.result
    with world.collective("plan the tensors"):
        plan = plan_tensors(
            collected.tensors, boxes, world.rank, world.size, collected.buffers, collected.alias_keys
        )
    # What this rank has in common with others is compared at each save, whoever writes it.
    common = find_shared_boxes(boxes, world.rank)
    local = {key: local_tensor(tensor) for key, tensor in tensors.items()}
    with world.collective("plan the chunks"):
        chunks = chunk_views(plan.by_rank[world.rank], tensors, local)
        replicated = Replicas.among(tensors, common, collected.buffers)
    ranks = (world.rank, *world.global_ranks)
    return CheckpointPlan(collected, memory, ranks, plan, chunks, common, replicated)
