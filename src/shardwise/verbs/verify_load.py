"""``verify_load``: load a checkpoint on all ranks and compare it with an independent path."""

from __future__ import annotations

import time
from typing import Unpack

from shardwise.engines.arguments import agree_on_call, world_of
from shardwise.engines.bringing_up import bring_up, settle_call
from shardwise.engines.load_options import LoadOptions
from shardwise.engines.pretrained_options import PretrainedOptions
from shardwise.engines.verifying import compare_with_reference
from shardwise.execution.ranks.progress import Clock
from shardwise.models.torch_words import original_class
from shardwise.report.verify_report import VerifyReport


def verify_load(name_or_path: str, **keywords: Unpack[PretrainedOptions]) -> VerifyReport:
    """Load with :func:`~shardwise.verbs.pretrained.from_pretrained` and compare every element on every rank.

    The reference is made of whole tensors, read by the safetensors library or torch and converted by transformers,
    one conversion at a time, and of the buffers that the model class's own constructor computes.

    Collective: yes. Memory: as for the load, and the largest conversion, whole.
    """
    start = time.perf_counter()
    with world_of(keywords.get("options", LoadOptions()), "verify_load") as world:
        keywords = agree_on_call(world, lambda: settle_call(name_or_path, keywords, asks_for_report=True))
        model, report = bring_up(world, name_or_path, keywords, Clock())
        assert report is not None, "weights that are loaded later have been refused"
        found = compare_with_reference(world, model, report, keywords)
    return VerifyReport(
        checkpoint=report.checkpoint,
        model_class=original_class(model).__name__,
        dtype=str(model.config.dtype).removeprefix("torch."),
        world_size=report.world_size,
        tensors=found.tensors,
        buffers=found.buffers,
        elements=found.elements,
        unequal=found.unequal,
        initialized=report.initialized,
        seconds=time.perf_counter() - start,
    )
