"""Rows as batches: padded, packed or put end to end, each row blind to the others; and those only looked at.

[Note: Packed rows] A packed row holds whole rows one after the other, with ``position_ids`` that begin at 0 with
each, and no attention mask. transformers takes that as its sign for packed rows: the masks it then makes for
``sdpa``, ``eager`` and ``flex_attention`` are block-diagonal (within sliding windows too, which a mask of ours
would switch off), and flash attention gets the boundaries, for which it wants all in one row. A model that mixes
tokens by other means than attention (a convolution, a recurrence) may know nothing of it, so that whether rows
are blind to each other is tried on the model itself before it is trained
(:func:`~shardwise.training.prepare.require_blind_rows`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.execution.ranks.world import World
from shardwise.training.data.read_once import TrainData
from shardwise.training.data.train_data import ByWeight, Mixing, OnceEach, RowOrder
from shardwise.training.texts.masking import Example


def pack_rows(lengths: NDArray[np.int64] | Sequence[int], capacity: int) -> list[list[int]]:
    """Deal rows into packs of at most ``capacity`` tokens; each row is in one.

    The longest row comes first, and each goes where it leaves the least room (best fit, decreasing): the same
    packs for the same lengths, wherever it is called. Rows of a pack are in ascending order, and packs by their
    first row.

    Time: ``n log n`` for n rows; ``lengths`` are at most ``capacity``.
    """
    sizes = np.asarray(lengths)
    packs: list[list[int]] = []
    open_packs: dict[int, list[int]] = {}
    """Numbers of packs by the room that is left in them."""
    rooms: list[int] = []
    """The keys of ``open_packs``, ascending."""
    for row in np.argsort(-sizes, kind="stable").tolist():
        length = int(sizes[row])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            number, left = len(packs), capacity - length
            packs.append([row])
        else:
            room = rooms[place]
            number, left = open_packs[room].pop(), room - length
            packs[number].append(row)
            if not open_packs[room]:
                del open_packs[room]
                rooms.pop(place)
        if left:
            if left not in open_packs:
                open_packs[left] = []
                bisect.insort(rooms, left)
            open_packs[left].append(number)
    return sorted(sorted(pack) for pack in packs)


IGNORED = -100
"""The label of a token that is not learned; what torch's cross entropy passes over."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where rows begin and end in one long row, as flash attention wants to be told: (rows + 1,), int32."""

    cumulative: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length, padded at the end or packed; tensors are (rows, tokens) and int64."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    """None where rows are packed: the positions say where each begins."""
    labels: torch.Tensor
    """``input_ids`` where a token is learned, else -100. Not shifted, as transformers has it."""
    tokens: int
    """Those of rows: without padding, and none where there is no row."""
    position_ids: torch.Tensor | None = None
    """None where rows are not packed, and begin at 0 by themselves."""
    boundaries: Boundaries | None = None
    lines: tuple[int, ...] = ()
    """The places of its rows where they were read."""

    @property
    def supervised_tokens(self) -> int:
        return int((self.labels[:, 1:] != IGNORED).sum())

    def inputs(self) -> dict[str, Any]:
        """What a model of transformers is called with."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids
        if self.boundaries is not None:
            inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.boundaries.cumulative)
            inputs |= dict.fromkeys(("max_length_q", "max_length_k"), self.boundaries.longest)
        return inputs

    def to(self, device: torch.device) -> Batch:
        boundaries = self.boundaries
        return Batch(
            self.input_ids.to(device),
            None if self.attention_mask is None else self.attention_mask.to(device),
            self.labels.to(device),
            self.tokens,
            None if self.position_ids is None else self.position_ids.to(device),
            None if boundaries is None else Boundaries(boundaries.cumulative.to(device), boundaries.longest),
            self.lines,
        )


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows of a batch are padded to the longest of them."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows are put together to packs of up to ``length`` tokens, each a row of a batch. See [Note: Packed rows]."""

    length: int


@dataclass(frozen=True, slots=True)
class Flattened:
    """As :class:`Packed`, and the packs of a batch are put end to end, for flash attention."""

    length: int


BatchLayout: TypeAlias = Padded | Packed | Flattened


def pad(examples: Sequence[Example], pad_token_id: int, lines: tuple[int, ...] = ()) -> Batch:
    """Examples as a batch. Of none, a batch of one token that teaches nothing: every rank takes part in a step."""
    length = max((len(example.tokens) for example in examples), default=1)
    shape = (max(len(examples), 1), length)
    input_ids = torch.full(shape, pad_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED)
    for row, example in enumerate(examples):
        tokens, wanted = _tensors(example)
        input_ids[row, : len(tokens)] = tokens
        attention_mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = wanted
    if not examples:
        attention_mask[:] = 1
    return Batch(input_ids, attention_mask, labels, sum(len(example.tokens) for example in examples), lines=lines)


def pack(packs: Sequence[Sequence[Example]], pad_token_id: int, lines: tuple[int, ...] = ()) -> Batch:
    """Packs of examples, each a row of the batch; padding counts as one more example. See [Note: Packed rows]."""
    tokens = [sum(len(example.tokens) for example in members) for members in packs]
    length = max(tokens, default=1)
    shape = (max(len(packs), 1), length)
    input_ids = torch.full(shape, pad_token_id)
    labels = torch.full(shape, IGNORED)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    for row, members in enumerate(packs):
        start = 0
        for example in members:
            end = start + len(example.tokens)
            input_ids[row, start:end], labels[row, start:end] = _tensors(example)
            position_ids[row, start:end] = torch.arange(end - start)
            start = end
        position_ids[row, start:] = torch.arange(length - start)
    return Batch(input_ids, None, labels, sum(tokens), position_ids, lines=lines)


def flatten(examples: Sequence[Example], pad_token_id: int, lines: tuple[int, ...] = ()) -> Batch:
    """Examples end to end in one row, without padding, and where each begins. See [Note: Packed rows]."""
    whole = pack([examples] if examples else [], pad_token_id, lines)
    lengths = [len(example.tokens) for example in examples] or [1]
    cumulative = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    return Batch(
        whole.input_ids,
        None,
        whole.labels,
        whole.tokens,
        whole.position_ids,
        Boundaries(cumulative, max(lengths)),
        lines,
    )


def _tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels."""
    tokens = torch.from_numpy(example.tokens).long()
    return tokens, tokens.masked_fill(~torch.from_numpy(example.supervised), IGNORED)


def batch_of(
    packs: Sequence[Sequence[Example]], layout: BatchLayout, pad_token_id: int, lines: tuple[int, ...]
) -> Batch:
    """Packs of examples as a batch; of one example each, where rows are padded."""
    match layout:
        case Padded():
            return pad([example for [example] in packs], pad_token_id, lines)
        case Packed():
            return pack(packs, pad_token_id, lines)
        case Flattened():
            return flatten([example for members in packs for example in members], pad_token_id, lines)
        case _:
            assert_never(layout)


def packs_of_each(
    lengths: NDArray[np.int64], capacity: int, mixing: Mixing
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Packs of rows, and how many each data set has: where they have weights, no pack has rows of two."""
    if isinstance(mixing, OnceEach):
        packs = pack_rows(lengths, capacity)
        return packs, (len(packs),)
    packs, counts, first = [], [], 0
    for count in mixing.counts:
        own = pack_rows(lengths[first : first + count], capacity)
        packs += [[row + first for row in pack] for pack in own]
        counts.append(len(own))
        first += count
    return packs, tuple(counts)


class Batches:
    """Any rows, by their numbers, as a batch; where rows are packed, the numbers are those of packs."""

    def __init__(self, data: TrainData, layout: BatchLayout) -> None:
        self.data = data
        self.layout = layout
        self.order = RowOrder(len(data.examples), data.mixing)
        """Of rows, or of packs."""
        if isinstance(layout, Padded):
            self.packs = None
        else:
            self.packs, packs_of = packs_of_each(data.examples.lengths, layout.length, data.mixing)
            mixing = data.mixing
            if isinstance(mixing, ByWeight):
                mixing = ByWeight(mixing.weights, packs_of)
            self.order = RowOrder(len(self.packs), mixing)

    def __len__(self) -> int:
        return len(self.data.examples) if self.packs is None else len(self.packs)

    def make(self, numbers: Sequence[int]) -> Batch:
        data = self.data
        packs = [[number] for number in numbers] if self.packs is None else [self.packs[n] for n in numbers]
        examples = [[data.examples[row] for row in pack] for pack in packs]
        lines = tuple(int(data.examples.lines[row]) for pack in packs for row in pack)
        return batch_of(examples, self.layout, data.pad_token_id, lines)


class EvaluationBatches:
    """This rank's part of all rows, in their order, in as many batches on every rank; made when asked for."""

    def __init__(self, data: TrainData, layout: BatchLayout, batch_size: int, *, rank: int, size: int) -> None:
        self.batches = Batches(data, layout)
        self.batch_size = batch_size
        self.rank = rank
        self.size = size

    def __len__(self) -> int:
        return -(-len(self.batches) // (self.batch_size * self.size))

    def __iter__(self) -> Iterator[Batch]:
        rows = range(self.rank, len(self.batches), self.size)
        for number in range(len(self)):
            yield self.batches.make(rows[number * self.batch_size : (number + 1) * self.batch_size])


def evaluation_batches(data: TrainData, layout: BatchLayout, batch_size: int) -> EvaluationBatches:
    """The rows of data that is only looked at. Collective: no; the ranks are those of the default group."""
    world = World.current()
    return EvaluationBatches(data, layout, batch_size, rank=world.rank, size=world.size)
