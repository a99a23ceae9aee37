"""What a forecast is asked about: the options of a load, and the ranks and machines that there would be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.engines.pretrained_options import FilledOptions
from shardwise.errors import ConfigError
from shardwise.layout import MeshShape
from shardwise.models.wrapping.wrap import Sharding
from shardwise.planning.moves.sharing_choice import SharedReads
from shardwise.storage.contract import ReadPolicy
from shardwise.tuning.modes import Lora


class PlanOptions(FilledOptions, total=False):
    """Keyword arguments of :func:`plan`, each optional; also those of :class:`FilledOptions`.

    Attributes:
        mesh: axes of the mesh and their sizes, as in ``{"replicate": 2, "shard": 4}``; default: all ranks in one.
            There are no ranks, so that of ``sharding`` is None.
        nodes: machines that the ranks are dealt to, in order.
        device: "cpu", or the kind of accelerator that the shards will go to (default "cuda").
        budget_bytes: as ``budget_bytes`` of :class:`~shardwise.engines.load_options.LoadOptions`.
        read_policy: how the storage is read; by default as the folder of the checkpoint is.
        shared_reads: as ``shared_reads`` of :class:`~shardwise.engines.load_options.LoadOptions`.
        tenants: adapters of an ``AdapterBank`` on this base, which takes no ``tuning`` then.
        tokens_per_pass: that a rank takes through the base at once, of all tenants, padding included (4096).
    """

    mesh: Mapping[str, int]
    nodes: int
    device: str
    budget_bytes: int
    read_policy: ReadPolicy
    shared_reads: SharedReads
    tenants: Sequence[Lora]
    tokens_per_pass: int


def mesh_of(ranks: int, options: PlanOptions) -> MeshShape:
    """The mesh that is asked for.

    Raises:
        ConfigError: so many ranks make none, or are dealt to no nodes.
    """
    nodes = options.get("nodes", 1)
    count: object = ranks
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"ranks={ranks!r}: a model is loaded on one rank at least; pass a number of ranks")
    if nodes < 1 or ranks % nodes:
        fitting = [count for count in range(1, ranks + 1) if ranks % count == 0]
        nearest = min(fitting, key=lambda count: abs(count - nodes))
        raise ConfigError(
            f"{ranks} ranks cannot be dealt evenly to {nodes} nodes; take nodes={nearest}, or ranks="
            f"{max(1, round(ranks / max(nodes, 1))) * max(nodes, 1)}"
        )
    if options.get("sharding", Sharding()).mesh is not None:
        raise ConfigError(
            "sharding has a mesh of real ranks, and a plan is for any number of them; give its axes as mesh="
            '{"replicate": 2, "shard": 4}'
        )
    axes = options.get("mesh")
    return MeshShape.flat(ranks) if axes is None else MeshShape.of(ranks, axes)
