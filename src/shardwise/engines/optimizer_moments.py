"""Moments in blocks on their way into optimizers: what is asked of those given, and which have to be made anew.

See [Note: Moments in blocks] in :mod:`~shardwise.models.optimizers.blockwise`. Where a moment was in the blocks
that it is to have, its codes and scales are taken bit by bit. Otherwise (on another number of ranks, or of another
mesh) codes are numbers for a moment, by the scales of the old blocks, and then codes of the new ones: a number then
differs by what rounding does to it, which is as much as in a step. So are numbers that are to be in blocks, and the
other way round, as of parameters whose shards are small on many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.errors import CoverageError
from shardwise.models.optimizers.block_codec import Cuts, counts_of_shards, decoded, scales_kept
from shardwise.models.optimizers.blockwise import (
    BLOCKS,
    SCALE,
    BlockwiseOptimizer,
    blockwise,
    codes_of,
    halves,
    moment_of,
    numbers_of,
    packed,
    scale_of,
    text_of,
)
from shardwise.models.optimizers.rebind import Bound, Scalar, label, state_like
from shardwise.models.view import local_boxes, local_tensor
from shardwise.planning.states.matching import few
from shardwise.tensors import DType


@dataclass(frozen=True)
class GivenMoment:
    """A moment of a state that is to be set.

    Of parameters on meta as well, in whose place others are by the time that values come: those are handed in.

    Attributes:
        given: how it was kept when it was saved; None: as numbers.
        wanted: how it is to be kept here; None: as numbers.
    """

    name: str
    keeper: BlockwiseOptimizer
    given: str | None
    wanted: str | None

    @property
    def is_as_it_was(self) -> bool:
        return self.given == self.wanted

    @property
    def is_in_blocks(self) -> bool:
        """Whether it was, or is to be."""
        return self.given is not None or self.wanted is not None

    def shape_of(self, parameter: nn.Parameter, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a value of it must have; of scales, which are known already, the one that they have."""
        if part == SCALE:
            return shape
        per_byte = 1 if self.given is None else self.keeper.codec(self.name).per_byte
        return packed(parameter.shape, per_byte)

    def dtype_of(self, part: str, dtype: DType) -> DType:
        """The dtype that it must have, or be cast to."""
        if self.given is not None and part != SCALE:
            return DType.U8
        return dtype if dtype.kind == "float" and dtype.bits >= 16 and part != SCALE else DType.F32

    def target(
        self, parameter: nn.Parameter, part: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Memory for it as it was given."""
        if self.given is None:
            return state_like(parameter, dtype)
        codec = self.keeper.codec(self.name)
        if part == SCALE:
            if self.is_as_it_was:
                return scale_of(parameter, codec, None)
            return torch.empty(shape, dtype=dtype, device=local_tensor(parameter).device)
        own = local_tensor(parameter)
        codes = torch.zeros(packed(own.shape, codec.per_byte), dtype=torch.uint8, device=own.device)
        return codes_of(parameter, codes, codec.per_byte)

    def settled(
        self, parameter: nn.Parameter, values: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes and scales as they are to be, or numbers and None."""
        if self.is_as_it_was:
            return values, scale
        codec = self.keeper.codec(self.name)
        own = local_tensor(values)
        boxes = [part.box for part in local_boxes(parameter, self.name) if part.box.numel]
        if scale is not None and self.given is not None and boxes:
            before, shape = Cuts.parse(_cut(self.given)), tuple(parameter.shape)
            scales = local_tensor(scale)
            kept = None if self.wanted is None else scales_kept(codec, boxes[0], scales, shape, before)
            if kept is not None:
                return values, scale_of(parameter, codec, kept)
            numbers = decoded(codec, own, boxes[0], scales, shape, before)
        else:
            numbers = own.float()
        if self.wanted is None:
            return numbers_of(parameter, numbers.view(local_tensor(parameter).shape)), None
        shape = packed(local_tensor(parameter).shape, codec.per_byte)
        codes = torch.zeros(shape, dtype=torch.uint8, device=own.device)
        scales = torch.zeros(codec.blocks(numbers.numel()), dtype=torch.float32, device=own.device)
        flat = codes.view(-1)
        codec.encode(numbers.contiguous().view(-1), flat, scales)
        return codes_of(parameter, codes, codec.per_byte), scale_of(parameter, codec, scales)


class GivenMoments:
    """The moments of a state, by parameter and name; of optimizers that can keep them in blocks."""

    def __init__(
        self,
        bounds: Sequence[Bound],
        parameters: Mapping[str, nn.Parameter],
        keys: Mapping[str, tuple[str, str]],
        scalars: Mapping[str, Scalar],
    ) -> None:
        self._keepers = {
            name: keeper
            for bound in bounds
            if (keeper := blockwise(bound.optimizer)) is not None
            for names in bound.groups
            for name in names
        }
        self._found: dict[tuple[str, str], GivenMoment] = {}
        for parameter, entry in keys.values():
            keeper = self._keepers.get(parameter)
            moment = moment_of(entry)
            if keeper is None or not keeper.is_moment(moment):
                continue
            told = scalars.get(label(parameter, moment + BLOCKS))
            own = parameters[parameter]
            self._found[parameter, moment] = GivenMoment(
                moment, keeper, None if told is None else str(told), _wanted(own, moment, keeper)
            )

    def find(self, parameter: str, entry: str) -> GivenMoment | None:
        return self._found.get((parameter, moment_of(entry)))

    def is_derived(self, parameter: str, entry: str) -> bool:
        """Whether a value is there, or not, by how a moment is kept."""
        keeper = self._keepers.get(parameter)
        return keeper is not None and entry != moment_of(entry) and keeper.is_moment(moment_of(entry))

    def require_known(
        self,
        keys: Mapping[str, tuple[str, str]],
        scalars: Mapping[str, Scalar],
        shapes: Mapping[str, tuple[int, ...]],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Raise for blocks that these optimizers do not keep, or that contradict themselves.

        ``shapes`` are of the tensors given, by label.

        Raises:
            CoverageError: naming them.
        """
        faults: list[str] = []
        for name, (parameter, entry) in keys.items():
            moment = moment_of(entry)
            if entry != moment + BLOCKS or parameter not in parameters:
                continue
            found = self._found.get((parameter, moment))
            told = str(scalars.get(name))
            if found is None:
                faults.append(
                    f"{label(parameter, moment)}: saved in blocks ({told}), and this optimizer keeps numbers"
                )
                continue
            if label(parameter, moment) not in shapes:
                faults.append(f"{label(parameter, moment)}: its codes are missing; it is damaged")
            faults += [
                f"{label(parameter, moment)}: {why}"
                for why in _faults_of(
                    parameters[parameter], found, told, shapes.get(label(parameter, moment + SCALE))
                )
            ]
        if faults:
            shown = "\n  ".join(few(faults))
            raise CoverageError(
                f"the state is of other optimizers than these:\n  {shown}\nMake the optimizers as they were made "
                "when it was saved."
            )


def _faults_of(parameter: nn.Parameter, found: GivenMoment, told: str, scale: tuple[int, ...] | None) -> list[str]:
    codec = found.keeper.codec(found.name)
    how = told.partition("; shards ")[0]
    if how != codec.label:
        return [f"saved with {how}, and this optimizer has {codec.label}"]
    if not halves(parameter, codec.per_byte):
        return [f"{codec.per_byte} codes in a byte are not cut where the parameter is; take an optimizer of 8 bits"]
    here, before = Cuts.of(parameter), Cuts.parse(_cut(told))
    is_same = told == text_of(parameter, codec)
    if not is_same and (before.cuts is None or here.cuts is None):
        other = before if before.cuts is None else here
        return [f"blocks are not made anew of, or for, shards {other.text}; go on with the mesh it was saved on"]
    largest = max(counts_of_shards(parameter)) if is_same else _largest(before, tuple(parameter.shape))
    sizes = here.sizes if is_same else before.sizes
    is_whole = largest is not None and scale is not None and scale[-1:] == (codec.blocks(largest),)
    if not is_whole or (before.cuts is not None and scale is not None and scale[:-1] != sizes):
        return [f"saved of shards {before.text}, and its scales are {scale}; it is damaged"]
    return []


def _largest(cuts: Cuts, shape: tuple[int, ...]) -> int | None:
    """Elements of the largest shard, which is the first; None where there is no such dimension."""
    sizes = list(shape)
    for dim, count in cuts.cuts or ():
        if dim >= len(sizes) or count < 1:
            return None
        sizes[dim] = -(-sizes[dim] // count)
    return math.prod(sizes)


def _wanted(parameter: nn.Parameter, moment: str, keeper: BlockwiseOptimizer) -> str | None:
    codec = keeper.codec(moment)
    return text_of(parameter, codec) if keeper.keeps_blocks(counts_of_shards(parameter)) else None


def _cut(told: str) -> str:
    return told.partition("; shards ")[2]
