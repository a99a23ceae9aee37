"""Compares a loaded model with what an independent path makes of the same files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from shardwise.engines.pretrained_options import PretrainedOptions
from shardwise.execution.ranks.world import World
from shardwise.layout import TensorKind
from shardwise.models import pretrained
from shardwise.models.conversions.reference import reference_buffers, reference_values
from shardwise.models.view import Held, local_boxes, look_inside, raw_bytes, strided_view
from shardwise.report.load_report import LoadReport


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """How many tensors and buffers have been compared, elements on all ranks, and what differs where."""

    tensors: int
    buffers: int
    elements: int
    unequal: tuple[str, ...]


def compare_with_reference(
    world: World, model: PreTrainedModel, report: LoadReport, keywords: PretrainedOptions
) -> ComparedModel:
    """Compare every element on every rank. Collective: yes.

    Memory: the largest conversion, whole.
    """
    held = look_inside(model)
    tensors, elements, unequal = world.together(lambda: _compare_stored(model, held, report, keywords))
    buffers, buffer_elements, unequal_buffers = world.together(lambda: _compare_buffers(model, held))
    found = [f"{fault} on rank {world.rank}" for fault in unequal + unequal_buffers]
    everywhere = world.gather((elements + buffer_elements, found))
    return ComparedModel(
        tensors,
        buffers,
        sum(count for count, _ in everywhere),
        tuple(fault for _, faults in everywhere for fault in faults),
    )


def _compare_stored(
    model: PreTrainedModel, held: Sequence[Held], report: LoadReport, keywords: PretrainedOptions
) -> tuple[int, int, list[str]]:
    """(tensors, elements of this rank, names that differ)."""
    by_name = {name: item for item in held for name in item.names if item.kind.is_saved}
    dtypes = {name: item.tensor.dtype for name, item in by_name.items()}
    transforms = pretrained.conversion_transforms(model, keywords.get("key_mapping"))
    files = [Path(report.checkpoint) / file for file in report.files]
    compared: set[str] = set()
    elements = 0
    unequal: list[str] = []
    for name, whole in reference_values(model, files, transforms, dtypes, report.wrapper):
        item = by_name[name]
        if item.fqn in report.mismatched_keys:
            continue
        compared.add(item.fqn)
        count, equal = _compare(item, whole)
        elements += count
        if not equal:
            unequal.append(name)
    initialized = {*report.initialized, *report.mismatched_keys}
    unequal += [
        f"{item.fqn} (in no source)"
        for item in held
        if item.kind.is_saved and item.fqn not in compared and item.fqn not in initialized
    ]
    return len(compared), elements, unequal


def _compare_buffers(model: PreTrainedModel, held: Sequence[Held]) -> tuple[int, int, list[str]]:
    buffers = [item for item in held if item.kind is TensorKind.BUFFER]
    if not buffers:
        return 0, 0, []
    reference = reference_buffers(model)
    unequal: list[str] = []
    elements = 0
    for item in buffers:
        count, equal = _compare(item, reference[item.fqn])
        elements += count
        if not equal:
            unequal.append(item.fqn)
    return len(buffers), elements, unequal


def _compare(item: Held, whole: torch.Tensor) -> tuple[int, bool]:
    """(elements compared, whether this rank's boxes are bitwise those of the whole tensor)."""
    if whole.shape != item.tensor.shape or whole.dtype != item.tensor.dtype:
        return 0, False
    local = item.local
    count = 0
    for part in local_boxes(item.tensor, item.fqn):
        where = tuple(
            slice(offset, offset + size) for offset, size in zip(part.box.offsets, part.box.sizes, strict=True)
        )
        held = strided_view(local, part.local)
        count += part.box.numel
        if not torch.equal(raw_bytes(held.cpu()), raw_bytes(whole[where])):
            return count, False
    return count, True
