"""How a load is carried out, as values."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist

from shardwise.execution.memory.free import require_budget
from shardwise.execution.ranks.line import Patience
from shardwise.models.initialize import BufferRules
from shardwise.planning.forecasts.own_forecast import MemoryCheck, RequireMemory
from shardwise.planning.loads.comparing import CompareCopies, SampledBlocks
from shardwise.planning.loads.load_plan import Consent
from shardwise.planning.loads.pages import MeasuredPages, Pages
from shardwise.planning.moves.sharing_choice import SharedReads, Weighed


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a load is carried out; none of it changes which values are loaded, but for ``seed``.

    Attributes:
        seed: for tensors that are initialised, together with their FQN.
        budget_bytes: host memory, beyond the shards, that one rank may use for staging and for conversions that
            compute.
        device: where an unsharded model on meta is brought up; sharded ones go to the device of their mesh.
        progress: show a bar on the first rank (where there is a terminal, and transformers' bars are not off).
        process_group: the ranks that load together; None is the default group, or this process alone.
        patience: how long ranks wait for each other.
        shared_reads: what several ranks need (replicas; columns of the same rows) is read once and shared:
            ``Weighed()`` when that is quicker, ``OncePerGroup()``, or ``Alone()``. ``InIntervals()``: every rank
            reads one interval of the checkpoint, and hands it to those that hold it, so that few files are opened.
        copies: how the files of ranks that do not open the same ones, on several machines say, are found to be
            equal: ``SampledBlocks()`` compares sizes, headers and blocks of every tensor, ``WholeFiles()`` every
            byte. Where all ranks open the same files, nothing is read for it.
        memory_check: what to do when the forecast is more than the memory that is free: ``RequireMemory()`` refuses
            before anything is read, ``TryAnyway()`` goes on.
        pages: in which pages fresh host memory is taken: ``MeasuredPages()``, whichever cost less of late,
            ``HugePages()``, or ``SmallPages()``.
    """

    seed: int = 0
    budget_bytes: int = 256 << 20
    device: torch.device | None = None
    progress: bool = True
    process_group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)
    shared_reads: SharedReads = field(default_factory=Weighed)
    copies: CompareCopies = field(default_factory=SampledBlocks)
    memory_check: MemoryCheck = field(default_factory=RequireMemory)
    pages: Pages = field(default_factory=MeasuredPages)

    def __post_init__(self) -> None:
        require_budget(self.budget_bytes)


def load_words(consent: Consent, buffers: BufferRules, options: LoadOptions) -> dict[str, str]:
    """What ranks must have in common of how a load is carried out, in words, by name."""
    alone = ("device", "pages", "progress", "process_group", "patience")
    return {
        "on_missing": repr(consent.missing),
        "on_mismatched": repr(consent.mismatched),
        "on_unexpected": repr(consent.unexpected),
        "buffers": repr(sorted(buffers)),
        **{
            f"options.{item.name}": repr(getattr(options, item.name))
            for item in fields(options)
            if item.name not in alone
        },
    }
