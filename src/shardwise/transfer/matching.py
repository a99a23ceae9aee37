"""Pure matching of the tensors and parameter groups of a state with a model, collecting all errors in one.

A rank provides either all names of the state or none. A tensor is described by name, shape, dtype and boxes: a full
tensor is one box, and a sharded one is several. The result is the same on every rank.

This module also chooses the ranks from which a model's values are copied. On a rank, a tensor is either *live*,
with values, or on meta, without. Every tensor is handled separately, so models that are live on all ranks, on one
rank, in part or nowhere need no special cases.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwise.core.consents import Consent, OnUnexpected, allows, describe_faults
from shardwise.core.errors import KeyMismatchError, RankMismatchError
from shardwise.core.formatting import ALL_RANKS, abbreviate, format_ranks
from shardwise.core.tensors import Box, DType, follows
from shardwise.transfer.move_plan import Boxes, find_incomplete

OnFault: TypeAlias = OnUnexpected


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor as provided by one rank. ``boxes`` are the boxes of its elements on that rank."""

    shape: tuple[int, ...]
    dtype: DType
    boxes: tuple[Box, ...]

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype.label}"


SourceTensors: TypeAlias = tuple[SourceTensor | None, ...]
"""A tensor as each rank provides it, or None, by rank."""


def collect_sources(provided_by_rank: Sequence[Mapping[str, SourceTensor]]) -> dict[str, SourceTensors]:
    """Return each tensor as the ranks provide it, by name: one object for all tensors with the same layout."""
    # By identity: equal tensors of a rank are one object (describe_tensors), and models have many.
    layouts: dict[tuple[int, ...], SourceTensors] = {}
    collected: dict[str, SourceTensors] = {}
    for name in dict.fromkeys(itertools.chain(*provided_by_rank)):
        tensors = tuple(provided.get(name) for provided in provided_by_rank)
        collected[name] = layouts.setdefault(tuple(map(id, tensors)), tensors)
    return collected


def find_providers(provided: Mapping[str, SourceTensors]) -> list[int]:
    """Return the ranks that provide a state."""
    layouts = {id(tensors): tensors for tensors in provided.values()}
    return sorted(
        {rank for tensors in layouts.values() for rank, tensor in enumerate(tensors) if tensor is not None}
    )


@dataclass(frozen=True, slots=True)
class StateSlot:
    """A tensor to fill, which a state may contain under one or several of its names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype.label}"


@dataclass(frozen=True, slots=True)
class MatchedTensor:
    """A tensor to fill, with the name, dtype and boxes of its source in the state."""

    slot: StateSlot
    name: str
    dtype: DType
    source_boxes: tuple[Boxes, ...]
    """By rank: one object for all tensors with the same layout."""


@dataclass(frozen=True, slots=True)
class Match:
    """The tensors that are filled, and the differences that are ignored."""

    tensors: tuple[MatchedTensor, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    @property
    def cast(self) -> dict[str, tuple[str, str]]:
        """First names of slots mapped to (dtype in the state, dtype of the slot), for those that differ."""
        dtypes: dict[str, tuple[str, str]] = {}
        for item in self.tensors:
            if item.dtype is not item.slot.dtype:
                dtypes[item.slot.names[0]] = (item.dtype.label, item.slot.dtype.label)
        return dtypes


def match(
    slots: Sequence[StateSlot],
    provided: Mapping[str, SourceTensors],
    consent: Consent,
    global_ranks: Sequence[int] = ALL_RANKS,
) -> Match:
    """Find the source of every slot. ``provided`` is what the ranks provide, by name (:func:`collect_sources`).

    Raises:
        RankMismatchError: ranks that provide a state have different names, or their boxes do not form full tensors.
        KeyMismatchError: there are missing, unexpected or mismatched tensors that are not tolerated. The error
            lists all of them.
    """
    _require_same_names(provided, global_ranks)
    names = {name for slot in slots for name in slot.names}
    unexpected = [name for name in provided if name not in names]
    faults: dict[str, list[str]] = {
        "mismatched": [],
        "missing": [],
        "unexpected": [name for name in unexpected if not allows(consent.unexpected, name)],
    }
    boxes: dict[int, tuple[Boxes, ...]] = {}  # by id of the tensors of all ranks
    matched: list[MatchedTensor] = []
    missing: list[str] = []
    mismatched: list[str] = []
    for slot in slots:
        present = [name for name in slot.names if name in provided]
        if not present:
            missing.append(slot.names[0])
            if not any(allows(consent.missing, name) for name in slot.names):
                faults["missing"].append(slot.names[0])
            continue
        mismatch = _find_mismatch(slot, present, provided, global_ranks)
        if mismatch is not None:
            name, text = mismatch
            mismatched.append(name)
            if not allows(consent.mismatched, name):
                faults["mismatched"].append(text)
            continue
        # A state may have a tied tensor under several names. They have been compared, so any of them will do.
        name = present[0]
        tensors = provided[name]
        if id(tensors) not in boxes:
            boxes[id(tensors)] = tuple(tensor.boxes if tensor else () for tensor in tensors)
        dtype = next(tensor.dtype for tensor in tensors if tensor)
        matched.append(MatchedTensor(slot, name, dtype, boxes[id(tensors)]))
    if any(faults.values()):
        raise KeyMismatchError(describe_faults("the state does not fit:", faults, STATE_REMEDIES))
    if incomplete := find_incomplete((item.name, item.slot.shape, item.source_boxes) for item in matched):
        shown = "\n  ".join(abbreviate(incomplete))
        raise RankMismatchError(
            f"the ranks together do not provide each element once:\n  {shown}\nPass full tensors, or on every "
            "rank its own shards of one sharding"
        )
    return Match(tuple(matched), tuple(missing), tuple(unexpected), tuple(mismatched))


def _require_same_names(provided: Mapping[str, SourceTensors], global_ranks: Sequence[int]) -> None:
    # Only ranks that provide a state are compared. The others pass None, and receive.
    providers = find_providers(provided)
    layouts = {id(tensors): tensors for tensors in provided.values()}.values()
    differing = [
        rank
        for rank in providers
        if any((tensors[rank] is None) != (tensors[providers[0]] is None) for tensors in layouts)
    ]
    if not differing:
        return
    first, other = providers[0], differing[0]
    lines: list[str] = []
    for lacking, having in ((other, first), (first, other)):
        for name, tensors in provided.items():
            if tensors[lacking] is None and tensors[having] is not None:
                lines.append(f"{name} is not on rank {global_ranks[lacking]}")
    shown = "\n  ".join(abbreviate(lines))
    raise RankMismatchError(
        f"ranks {global_ranks[first]} and {global_ranks[other]} provide different states:\n  {shown}\nPass the "
        "same state on every rank, or all of it on some ranks and None on the others"
    )


def _find_mismatch(
    slot: StateSlot, present: Sequence[str], provided: Mapping[str, SourceTensors], global_ranks: Sequence[int]
) -> tuple[str, str] | None:
    """Return the first name of a slot whose tensor does not fit, and a description. None if all fit."""
    for name in present:
        for rank, tensor in enumerate(provided[name]):
            if tensor and (tensor.shape != slot.shape or not follows(tensor.dtype, slot.dtype)):
                return name, f"{name}: {tensor} on rank {global_ranks[rank]}, expected {slot}"
    return None


STATE_REMEDIES = {
    "mismatched": "on_mismatched=Ignore(only=...) for what may keep its values",
    "missing": "on_missing=Ignore(only=...) for what may keep its values",
    "unexpected": "on_unexpected=Ignore(only=...) for what may be left out",
}


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """For each parameter group of the optimizer, the index of the state's group with its settings, or None.

    ``missing`` are parameters that no group of the state contains. ``unexpected`` are parameters of the state that
    no group of the optimizer contains.
    """

    source_groups: tuple[int | None, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match_groups(
    present: Sequence[Sequence[str]], source: Sequence[Sequence[str]], stateful: Sequence[str], consent: Consent
) -> GroupMatch:
    """Find the group of the state with the same parameters for each present group, pairing empty groups in order.

    ``stateful`` are parameters with optimizer state in the state, in a group or not.

    Parameters that may be missing or unexpected are excluded from the comparison.

    Raises:
        KeyMismatchError: parameters are missing, unexpected or in two groups, or a group has no counterpart. The
            error lists them.
    """
    # Groups are matched by their parameters, not by position.
    here = {name for names in present for name in names}
    there = {name for names in source for name in names}
    missing = [name for names in present for name in names if name not in there]
    unexpected = [name for name in dict.fromkeys([*itertools.chain(*source), *stateful]) if name not in here]
    faults = {
        "missing": [name for name in missing if not allows(consent.missing, name)],
        "unexpected": [name for name in unexpected if not allows(consent.unexpected, name)],
        "twice": [name for name, count in Counter(itertools.chain(*source)).items() if count > 1],
    }
    if any(faults.values()):
        raise KeyMismatchError(
            describe_faults("the parameter groups of the state do not fit:", faults, STATE_REMEDIES)
        )
    # By the parameters that both sides have. What only one side has was allowed above.
    positions: dict[frozenset[str], list[int]] = {}
    for position, names in enumerate(source):
        common = frozenset(names) & here
        if common or not names:
            positions.setdefault(common, []).append(position)
    source_groups: list[int | None] = []
    for number, names in enumerate(present):
        common = frozenset(names) & there
        if common in positions and (common or not names):
            # Several groups have the same names only if they are empty: they are paired in order.
            candidates = positions[common]
            source_groups.append(candidates[0])
            if len(candidates) > 1:
                del candidates[0]
        elif common:
            # The parameters are in the state, but grouped in another way: there is no choice of settings.
            others = [position for position, group in enumerate(source) if common & frozenset(group)]
            raise KeyMismatchError(
                f"no group of the state has the parameters of group {number} "
                f"({', '.join(abbreviate(sorted(common)))}); there they are in group "
                f"{' and '.join(map(str, others))}, with others or fewer. Create the optimizer with the "
                "parameter groups that it had when the state was saved"
            )
        else:
            source_groups.append(None)
    return GroupMatch(tuple(source_groups), tuple(missing), tuple(unexpected))


FileForm: TypeAlias = Literal["full", "sharded", "local"]
"""Form of a state in files, named as FSDP's state dict types.

``"full"``: whole tensors in one file of ``torch.save``, which the first rank writes. ``"sharded"``: a folder of
``torch.distributed.checkpoint``, in which every rank writes its own. ``"local"``: a file for every rank with what
it holds, readable only by the same number of ranks with the same sharding.
"""


NO_SOURCES: tuple[int, ...] = ()
"""In place of the sources of a tensor that is on meta everywhere."""


def select_sources(live_by_rank: Sequence[Sequence[bool]]) -> list[tuple[int, ...]]:
    """Return the source rank of each rank for every tensor, or ``NO_SOURCES``.

    A rank with values is its own source. The others get those of the lowest rank that has the most of the model.
    """
    live_counts = [sum(live) for live in live_by_rank]
    sources: list[tuple[int, ...]] = []
    for live in zip(*live_by_rank, strict=True):  # by tensor
        live_ranks = [rank for rank, is_live in enumerate(live) if is_live]
        if not live_ranks:
            sources.append(NO_SOURCES)
            continue
        leader = select_leader(live_ranks, live_counts)
        sources.append(tuple(rank if is_live else leader for rank, is_live in enumerate(live)))
    return sources


def select_leader(ranks: Sequence[int], counts: Sequence[int]) -> int:
    """Return the rank whose values are used if ranks differ: the one with the most of the model, or the lowest.

    ``counts`` are the tensors with values on each rank.
    """
    return min(ranks, key=lambda rank: (-counts[rank], rank))


def resolve_differences(
    names: Sequence[str],
    chosen: Sequence[tuple[int, ...]],
    sums_by_rank: Sequence[Mapping[str, int]],
    counts: Sequence[int],
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """Return the sources with one single rank for each tensor whose values differ, and that rank by name.

    ``sums_by_rank`` contains each rank's checksums of the tensors that it shares with other sources. ``counts`` are
    the tensors with values on each rank.
    """
    resolved: list[tuple[int, ...]] = []
    differing: dict[str, int] = {}
    for name, source_ranks in zip(names, chosen, strict=True):
        sources = sorted(set(source_ranks))
        if len(sources) > 1 and len({sums_by_rank[rank][name] for rank in sources}) > 1:
            differing[name] = select_leader(sources, counts)
            source_ranks = (differing[name],) * len(source_ranks)
        resolved.append(source_ranks)
    return resolved, differing


def select_dtypes(
    names: Sequence[str],
    chosen: Sequence[tuple[int, ...]],
    dtypes_by_rank: Sequence[Sequence[str]],
    global_ranks: Sequence[int] = ALL_RANKS,
) -> list[str]:
    """Return the dtype of every tensor on all ranks.

    It is the dtype on the ranks that receive the tensor, to which the source casts. 8-bit floats, integers and
    booleans are never cast because their bits are their meaning. Dtypes have torch's names.

    Raises:
        RankMismatchError: ranks have a tensor in dtypes for which there is no common choice.
    """
    selected: list[str] = []
    errors: list[str] = []
    for index, (name, source_ranks) in enumerate(zip(names, chosen, strict=True)):
        by_rank = [dtypes[index] for dtypes in dtypes_by_rank]
        # On meta everywhere: all ranks have to agree, as if each were a source.
        sources = set(source_ranks) or set(range(len(by_rank)))
        stored = {by_rank[rank] for rank in sources}
        received = {by_rank[rank] for rank in range(len(by_rank)) if rank not in sources} or stored
        if len(stored) == 1 and (is_exact(*stored) or stored == received):
            selected.append(*stored)
        elif len(stored) == 1 and len(received) == 1 and not is_exact(*received):
            selected.append(*received)
        else:
            texts: list[str] = []
            for dtype in sorted(set(by_rank)):
                ranks = [rank for rank, other in enumerate(by_rank) if other == dtype]
                texts.append(f"{dtype} on rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks, global_ranks)}")
            errors.append(f"{name} is {', '.join(texts)}")
    if errors:
        shown = "\n  ".join(abbreviate(errors))
        raise RankMismatchError(f"the ranks have tensors in different dtypes:\n  {shown}\nBuild them in one dtype")
    return selected


def is_exact(dtype: str) -> bool:
    """Return True for dtypes that are never cast: all but floating and complex dtypes of 16 bits and more."""
    return dtype.startswith(("float8", "float4")) or not dtype.startswith(("float", "bfloat", "complex"))
