"""``iter_hf_tensors``: a sharded model's tensors, whole, one after the other, as its checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwise.engines.save_options import HubNames, WrittenNames
from shardwise.engines.streaming import StreamOptions, Targets, walk_tensors
from shardwise.errors import ConfigError
from shardwise.models.lora_weights import MergedAdapter
from shardwise.models.selection import Everything, Selection
from shardwise.models.view import without_compile
from shardwise.planning.loads.load_plan import OnDiffering, TakeFirst
from shardwise.planning.states.sources import EveryRank


def iter_hf_tensors(
    model: nn.Module,
    *,
    to: Targets = EveryRank(),  # noqa: B008 - frozen
    names: WrittenNames = HubNames(),  # noqa: B008
    only: Selection | MergedAdapter = Everything(),  # noqa: B008
    dtype: torch.dtype | None = None,
    on_differing_buffers: OnDiffering = TakeFirst(),  # noqa: B008
    options: StreamOptions = StreamOptions(),  # noqa: B008
) -> Iterator[tuple[str, torch.Tensor]]:
    """Go through a model's tensors, whole, in the order in which transformers saves them.

    ::

        for key, tensor in shardwise.iter_hf_tensors(model):
            engine.load_weight(key, tensor)

    All ranks go through the tensors together: each must take the next one as often as the others, and may leave
    the loop early where all do so after the same tensor. A loop that ends early on one rank alone, by an exception
    perhaps, makes the others raise. Parameters must not change meanwhile. Each tensor is the caller's own.

    Collective: yes, from the first tensor to the last.
    Memory: two buckets, or one tensor that is larger and a bucket; on a machine whose ranks have the model on the
    CPU, that much for all of them together.

    Args:
        model: sharded or not, of transformers or not, with values on every rank; in the same state on every rank.
        to: ``EveryRank()``; or ``FirstRank()``: the others go through the same keys, and get tensors on meta.
        names: as the checkpoint has them, ``HubNames()``, or the model's own, ``InternalNames()``.
        only: ``Everything()``; or, of a PEFT model, ``AdapterOnly()``: an adapter under the names that PEFT's files
            have; or ``MergedAdapter()``: the base with a LoRA of linear layers merged in, under the base's names.
            For that every rank holds the adapter whole. The names of a PEFT model as it is are its own,
            ``InternalNames()``: no hub has it like that.
        dtype: of the floating-point tensors; they travel in it. None leaves every tensor its own.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are the first rank's, ``TakeFirst()``, or an error, ``Refuse()``.
        options: bucket, device, process group, patience.

    Raises:
        ConfigError: the arguments cannot be honoured.
        PlacementError: tensors have no values, or the ranks do not hold all of the model.
        CoverageError: the checkpoint has tensors that are computed from the model's.
        CheckpointError: (or a subclass) what befell one rank.
        DisagreementError: the ranks have different models or arguments, or different values of parameters that
            several of them hold.
        RankLostError: a rank has been lost, or has left its loop.

    Every error is the same on every rank.
    """
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise ConfigError(f"dtype={dtype} is not a floating dtype of 16 bits or more; pass torch.bfloat16, say")
    return walk_tensors(without_compile(model), to, names, only, dtype, on_differing_buffers, options)
