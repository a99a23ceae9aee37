"""``shard``: a model that is live, on meta, or both, becomes one that FSDP2 has sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines.arguments import hints_of, require_meant, world_of
from shardwise.engines.sharding import ShardCall, ShardOptions, carry_out_shard
from shardwise.execution.ranks.progress import Clock
from shardwise.models.four_bits.quantization import FourBit
from shardwise.models.trained_dtype import AsItIs, TrainedDtype
from shardwise.models.view import without_compile
from shardwise.models.wrapping.wrap import Sharding
from shardwise.planning.states.sources import Anyone, ValuesFrom
from shardwise.report.state_report import ShardReport


def shard(
    model: nn.Module,
    sharding: Sharding = Sharding(),  # noqa: B008 - frozen
    *,
    optimizers: Sequence[Optimizer] = (),
    values_from: ValuesFrom = Anyone(),  # noqa: B008
    trained_dtype: TrainedDtype = AsItIs(),  # noqa: B008
    quantization: FourBit | None = None,
    options: ShardOptions = ShardOptions(),  # noqa: B008
) -> ShardReport:
    """Shard a model in place with ``fully_shard``, whatever state it is in, and bind its optimizers to the shards.

    Every tensor may be live (with values) on all ranks, on some, or on none. Where it is live on some, the others
    get their shards, or for buffers the whole, from these; where on none, it stays on meta for
    :func:`~shardwise.verbs.load.load` to fill. A model that is sharded already is left alone.

    Parameters become new objects that keep ``requires_grad``, attributes and ties. Optimizers keep their groups,
    settings and state; schedulers of theirs go on. Parameters on meta that an optimizer holds, or whose gradients
    have to be averaged because they stay whole, get memory at once, filled with NaN, so that ``load`` keeps them.

    Collective: yes, over ``options.process_group`` (default: all ranks), whose ranks are those of the mesh.
    Memory: this rank's shards and ``options.budget_bytes``; beside that, a source holds of its whole tensors what
    it has not given yet. What the caller keeps a reference to is not freed.

    Args:
        model: any module, of the same names, shapes, ties and ``requires_grad`` on every rank; compiled ones are
            seen through.
        sharding: mesh, wrap policy, mixed precision, offload. Without a mesh, all ranks form one; without a process
            group nothing is sharded.
        optimizers: those that were made of the model's parameters, on every rank in the same order.
        values_from: whose values count.
        trained_dtype: ``Upcast(torch.float32)`` keeps trained parameters in a wider dtype.
        quantization: ``Nf4(...)`` or ``Fp4(...)`` puts linear layers and experts into four bits first, in place:
            those with values are packed, those on meta are by ``load``.
        options: budget, process group, machines, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        PlacementError: the policy matches nothing; the model is sharded in part; parameters or optimizer state
            cannot be handed over as they are.
        DisagreementError: ranks have different models, optimizers, arguments, or values where they must not.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. All but the last come before anything is changed; where values differ
    that must not, what ``quantization`` packs has been packed by then.
    """
    asked = ShardCall(sharding, optimizers, values_from, trained_dtype, options, quantization)

    def look() -> nn.Module:
        given = {"model": model, "sharding": sharding, "values_from": values_from}
        given |= {"trained_dtype": trained_dtype, "quantization": quantization, "options": options}
        require_meant(hints_of(shard), given)
        return without_compile(model)

    clock = Clock()
    with world_of(options, "shard") as world, torch.device("cpu"):
        with clock.phase("agree"):
            plain = world.together(look)
        return carry_out_shard(world, plain, asked, clock)
