"""``load``: a checkpoint into a model, each rank reading only its own bytes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardwise.engines.arguments import agree_on_call, hints_of, require_meant, world_of
from shardwise.engines.load_options import LoadOptions
from shardwise.engines.loading import LoadCall, load_checkpoint
from shardwise.engines.opening import Source
from shardwise.execution.ranks.progress import Clock
from shardwise.models.initialize import BufferRules
from shardwise.models.view import without_compile
from shardwise.planning.loads.load_plan import Consent, OnMissing, OnUnexpected, Refuse
from shardwise.report.load_report import LoadReport
from shardwise.storage.names import HubOptions


def load(
    model: nn.Module,
    checkpoint: Source,
    *,
    key_mapping: Mapping[str, str] | None = None,
    buffers: BufferRules | None = None,
    on_missing: OnMissing = Refuse(),  # noqa: B008 - frozen
    on_mismatched: OnMissing = Refuse(),  # noqa: B008
    on_unexpected: OnUnexpected = Refuse(),  # noqa: B008
    hub: HubOptions = HubOptions(),  # noqa: B008
    options: LoadOptions = LoadOptions(),  # noqa: B008
) -> LoadReport:
    """Fill a model from a checkpoint (safetensors, ``.bin``, DCP), bitwise as transformers would.

    The model may be any ``nn.Module``: on meta or real, sharded by ``fully_shard`` or not, of transformers or not.
    Tensors on meta get memory for this rank's shard; real ones have their values replaced. Each tensor keeps its
    dtype and ``requires_grad``.

    Collective: yes, over ``options.process_group``.
    Memory: this rank's shards, and ``options.budget_bytes``.

    Args:
        model: the model, in the same state on every rank.
        checkpoint: a directory, a file of tensors, an index file, a hub id, a URL, or a storage reader.
        key_mapping: regex to replacement, applied to the checkpoint's keys before the model's own renames.
        buffers: glob of buffer names to a callable that computes the buffer of the module it is given, for
            non-persistent buffers that neither the model's class nor a ``reset_parameters`` computes.
        on_missing: what to do about tensors the checkpoint lacks.
        on_mismatched: what to do about tensors stored in another shape.
        on_unexpected: what to do about keys that lead to nothing in the model.
        hub: revision, cache and token, for a hub id.
        options: seed, memory budget, device, progress, process group.

    Raises:
        ConfigError: an argument is not what is meant.
        CoverageError: checkpoint and model do not cover each other; all faults at once, before any byte is read.
        FormatError: the checkpoint's files contradict their format.
        StorageError: bytes could not be read; some tensors may have been written.
        PlacementError: the model's sharding cannot be understood.
        DisagreementError: ranks ask for different things, have other files, plan differently, or hold different
            non-persistent buffers.

    Every error is the same on every rank.
    """
    clock = Clock()
    call = LoadCall(
        checkpoint, Consent(on_missing, on_mismatched, on_unexpected), key_mapping, buffers or {}, hub, options
    )

    def look() -> tuple[nn.Module, dict[str, str]]:
        consents = {"on_missing": on_missing, "on_mismatched": on_mismatched, "on_unexpected": on_unexpected}
        given = {"model": model, "checkpoint": checkpoint, **consents, "hub": hub, "options": options}
        require_meant(hints_of(load), given)
        return without_compile(model), call.words()

    with world_of(options, "load") as world:
        model = agree_on_call(world, look)
        return load_checkpoint(world, model, call, clock)
