"""Streams a sharded model's tensors, whole, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from shardwise.conversion import Stored, computes
from shardwise.engines.save_options import HubNames, InternalNames, WrittenNames
from shardwise.engines.saved_in_four_bits import four_bits_of
from shardwise.errors import ConfigError, CoverageError
from shardwise.execution.memory.host_memory import is_common
from shardwise.execution.memory.materialize import home_of
from shardwise.execution.ranks.line import Patience
from shardwise.execution.ranks.world import World
from shardwise.execution.states.assemble import CommonRooms, assemble, part_of, put_together
from shardwise.execution.states.given_parts import Giver, MergingGiver, PackedRows, agree_on_shares, in_numbers
from shardwise.layout import ModelLayout, Origin
from shardwise.models.conversions.revert import Output, revert
from shardwise.models.four_bits.four_bit_files import (
    held_as_stored,
    held_in_files,
    in_shapes_of_files,
    layout_in_numbers,
    packed_for_files,
    refuse_experts,
    refuse_without_scales,
)
from shardwise.models.four_bits.four_bit_linear import SCALES, WEIGHT, is_in_four_bits
from shardwise.models.four_bits.quantization import FourBit
from shardwise.models.lora_weights import MergedAdapter, without_adapter
from shardwise.models.selection import AdapterOnly, Everything, Selection, has_adapters, names_outside
from shardwise.models.torch_words import saved_dtype, to_torch
from shardwise.models.view import Held, layout_of, look_inside
from shardwise.planning.loads.load_plan import OnDiffering
from shardwise.planning.moves.assembly import Boxes, WantedTensor, plan_assembly
from shardwise.planning.states.sources import EveryRank, FirstRank
from shardwise.report.names import collapse
from shardwise.tensors import Box, numel

_SMALLEST_BUCKET_BYTES = 4096

_NOT_MERGED = "no adapter is merged into them; merge its files with shardwise.merge_adapter"


Targets: TypeAlias = EveryRank | FirstRank


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How tensors are brought together; none of it changes their values.

    Attributes:
        bucket_bytes: what a rank sends or gets at once. Larger tensors travel in several parts.
        device: where the tensors are to be; None is where the model computes.
        process_group: the ranks that go through the tensors together: all that hold a part of the model.
        patience: how long ranks wait for each other.
    """

    bucket_bytes: int = 64 << 20
    device: torch.device | None = None
    process_group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if self.bucket_bytes < _SMALLEST_BUCKET_BYTES:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes} is less than {_SMALLEST_BUCKET_BYTES}")


def walk_tensors(
    model: nn.Module,
    to: Targets,
    names: WrittenNames,
    only: Selection | MergedAdapter,
    dtype: torch.dtype | None,
    on_differing_buffers: OnDiffering,
    options: StreamOptions,
) -> Iterator[tuple[str, torch.Tensor]]:
    with World.current(options.process_group, options.patience, call="iter_hf_tensors") as world:
        arguments = (to, names, only, str(dtype), options.bucket_bytes)
        held, supply = _agreed_supply(world, model, names, only, arguments, on_differing_buffers, options)
        outputs = supply.outputs
        targets = (0,) if isinstance(to, FirstRank) else tuple(range(world.size))
        dtypes = {key: to_torch(saved_dtype(output.dtype, dtype)) for key, output in outputs.items()}
        shapes = {key: output.shape for key, output in outputs.items()}
        wanted = [
            WantedTensor(key, output.expression, dtypes[key].itemsize, targets) for key, output in outputs.items()
        ]
        rounds = world.together(
            lambda: plan_assembly([wanted], supply.shares, world.size, options.bucket_bytes // 4)
        )
        home = _home(held)
        is_target = world.rank in targets
        device = options.device or home
        rooms: CommonRooms | None = None
        if _is_on_one_host(world, home, device):
            rooms = CommonRooms(rounds, shapes, dtypes, is_target=is_target, spare_bytes=options.bucket_bytes)

        def memory_of(key: str) -> torch.Tensor:
            if rooms is not None and is_target and numel(shapes[key]):
                return rooms.take(key)
            return torch.empty(shapes[key], dtype=dtypes[key], device=device if is_target else "meta")

        hall = _Hall(shapes, memory_of)
        if rooms is not None:
            arrivals = put_together(world, rounds, supply.giver, rooms)
        else:
            arrivals = assemble(world, rounds, supply.giver, hall.room, dtypes, home)
        with contextlib.closing(arrivals), _told_when_left():
            for items in arrivals:
                yield from supply.packing.each(hall.complete(items.boxes()))
            yield from supply.packing.each(hall.rest())


def _agreed_supply(
    world: World,
    model: nn.Module,
    names: WrittenNames,
    only: Selection | MergedAdapter,
    arguments: tuple[object, ...],
    on_differing_buffers: OnDiffering,
    options: StreamOptions,
) -> tuple[list[Held], _StreamSupply]:
    """What of the model is wanted, and what the ranks give for it, which are all called alike. Collective: yes."""
    held = world.together(lambda: _looked_at(model, names, only))
    world.require_equal(arguments, "the list of arguments (targets, names, selection, dtype, bucket)")
    chosen: dict[str, str] = {}
    if isinstance(only, AdapterOnly):
        chosen = world.from_first(lambda: names_outside(model, held, only))
        wanted = set(chosen.values())
        held = [item for item in held if wanted.intersection(item.names)]
    shares = agree_on_shares(world, held, on_differing_buffers).by_name
    supply = _supply(world, model, held, shares, names, only, chosen, options)
    world.require_equal(list(supply.outputs), "the list of keys")
    return held, supply


def _is_on_one_host(world: World, *devices: torch.device) -> bool:
    """Whether all ranks have and want the tensors in memory that all of them see. Collective: yes."""
    if world.size == 1:
        return False
    return all(world.each(lambda: {device.type for device in devices} == {"cpu"})) and is_common(world)


def _looked_at(model: nn.Module, names: WrittenNames, only: Selection | MergedAdapter) -> list[Held]:
    held = look_inside(model)
    if not isinstance(only, AdapterOnly):
        refuse_without_scales(held)
    if not isinstance(only, Everything):
        return held
    return held_in_files(held) if isinstance(names, HubNames) else held_as_stored(held)


@dataclass(frozen=True)
class _PackedAgain:
    """Layers that are in four bits in the model, and are to be so again once an adapter is merged; by key."""

    keys: frozenset[str] = frozenset()
    quantization: FourBit | None = None

    @classmethod
    def of(cls, only: MergedAdapter, outputs: Mapping[str, Output], packed: Collection[str]) -> _PackedAgain:
        """``packed`` are names of weights in four bits.

        Raises:
            ConfigError: there are none; or they cannot be packed so.
        """
        quantization = four_bits_of(only.quantization)
        if quantization is None:
            return cls()
        made = {key: item.expression for key, item in outputs.items()}
        keys = {key for key, item in made.items() if isinstance(item, Stored) and item.key in packed}
        if not keys:
            raise ConfigError("MergedAdapter(quantization=...): nothing of the base is in four bits; leave it out")
        if odd := [key for key in keys if made[key].shape[-1] % quantization.block_size]:
            raise ConfigError(f"{min(odd)}: its rows are not of whole blocks of {quantization.block_size}")
        return cls(frozenset(keys), quantization)

    def each(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, with what files of bitsandbytes have in the place of each layer; raises FormatError."""
        for key, tensor in tensors:
            if self.quantization is not None and key in self.keys:
                yield from packed_for_files(key, tensor, self.quantization)
            else:
                yield key, tensor


@dataclass(frozen=True)
class _StreamSupply:
    """The tensors that are wanted, and what the ranks give for them."""

    outputs: Mapping[str, Output]
    shares: Mapping[str, Sequence[Boxes]]
    giver: Giver
    packing: _PackedAgain = _PackedAgain()


def _supply(
    world: World,
    model: nn.Module,
    held: list[Held],
    shares: Mapping[str, Sequence[Boxes]],
    names: WrittenNames,
    only: Selection | MergedAdapter,
    chosen: Mapping[str, str],
    options: StreamOptions,
) -> _StreamSupply:
    """``chosen`` are an adapter's names, outside and in the model. Collective: yes."""
    layout = layout_of(held, lambda item: Origin.NOWHERE)
    by_name = {name: item for item in held for name in item.names}
    giver = Giver(by_name, shares, world.rank)
    if isinstance(only, AdapterOnly):
        return _StreamSupply(
            {key: Output.of(key, layout.by_name[name]) for key, name in chosen.items()}, shares, giver
        )
    if isinstance(only, MergedAdapter):
        world.together(lambda: refuse_experts(held, _NOT_MERGED))
        adapted = world.together(lambda: without_adapter(model, list(by_name), only.adapter))
        outputs = world.together(
            lambda: _outputs(adapted.base, adapted.layout(layout_in_numbers(layout, held)), names)
        )
        needed = [name for item in adapted.factors.values() for name in (item.lora_A, item.lora_B)]
        matrices = _whole(world, [Output.of(name, layout.by_name[name]) for name in needed], shares, giver, options)
        base_held = {name: by_name[fqn] for name, fqn in adapted.inside.items()}
        base_shares = {name: shares[fqn] for name, fqn in adapted.inside.items() if fqn in shares}
        packed = packed_rows(base_held)
        base_shares |= {name: tuple(map(in_numbers, base_shares[name])) for name in packed}
        merging = MergingGiver(base_held, base_shares, world.rank, adapted.factors, matrices, packed)
        again = world.together(lambda: _PackedAgain.of(only, outputs, packed))
        return _StreamSupply(outputs, base_shares, merging, again)
    world.together(lambda: _refuse_adapters(model, names))
    return _StreamSupply(
        world.together(lambda: in_shapes_of_files(held, _outputs(model, layout, names))), shares, giver
    )


def packed_rows(held: Mapping[str, Held]) -> dict[str, PackedRows]:
    """Weights in four bits, by name, with what tells their numbers."""
    layers = {name: item.slots[0] for name, item in held.items() if is_in_four_bits(item.slots[0].module)}
    scales = {id(slot.module): held[name] for name, slot in layers.items() if slot.name == SCALES}
    return {
        name: PackedRows(held[name], scales[id(slot.module)], slot.module)
        for name, slot in layers.items()
        if slot.name == WEIGHT
    }


def tensors_to_come(
    model: nn.Module, names: WrittenNames, only: Everything | MergedAdapter, dtype: torch.dtype | None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """By key, dtype and shape of what :func:`walk_tensors` goes through, in its order. Nothing is moved.

    Raises:
        ConfigError, CoverageError, PlacementError: as for going through them.
    """
    held = _looked_at(model, names, only)
    layout = layout_of(held, lambda item: Origin.NOWHERE)
    if isinstance(only, MergedAdapter):
        refuse_experts(held, _NOT_MERGED)
        adapted = without_adapter(model, [name for item in held for name in item.names], only.adapter)
        outputs = _outputs(adapted.base, adapted.layout(layout_in_numbers(layout, held)), names)
        by_name = {name: item for item in held for name in item.names}
        packed = packed_rows({name: by_name[fqn] for name, fqn in adapted.inside.items()})
        packing = _PackedAgain.of(only, outputs, packed)
    else:
        _refuse_adapters(model, names)
        outputs, packing = in_shapes_of_files(held, _outputs(model, layout, names)), _PackedAgain()
    empty = (
        (key, torch.empty(output.shape, dtype=to_torch(saved_dtype(output.dtype, dtype)), device="meta"))
        for key, output in outputs.items()
    )
    return {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in packing.each(empty)}


def _refuse_adapters(model: nn.Module, names: WrittenNames) -> None:
    if isinstance(names, HubNames) and has_adapters(model):
        raise ConfigError(
            f"{type(model).__name__} has adapters of PEFT's, and the hub has no names for both together; pass "
            "only=MergedAdapter() or only=AdapterOnly(), or names=InternalNames() for all tensors as the model "
            "names them"
        )


def _home(held: Sequence[Held]) -> torch.device:
    return home_of(held, held[0].local.device if held else None)


def _whole(
    world: World,
    outputs: Sequence[Output],
    shares: Mapping[str, Sequence[Boxes]],
    giver: Giver,
    options: StreamOptions,
) -> dict[str, torch.Tensor]:
    """Tensors of the model, whole on every rank. Collective: yes."""
    everybody = tuple(range(world.size))
    wanted = [WantedTensor(item.key, item.expression, item.dtype.itemsize, everybody) for item in outputs]
    dtypes = {item.key: to_torch(item.dtype) for item in outputs}
    home = _home(list(giver.held.values()))
    found = {item.key: torch.empty(item.shape, dtype=dtypes[item.key], device=home) for item in outputs}
    rounds = world.together(lambda: plan_assembly([wanted], shares, world.size, options.bucket_bytes))
    for _ in assemble(world, rounds, giver, lambda key, box: part_of(found[key], box), dtypes, home):
        pass
    return found


def _outputs(model: nn.Module, layout: ModelLayout, names: WrittenNames) -> Mapping[str, Output]:
    made = revert(model, layout, internal_names=isinstance(names, InternalNames))
    if keys := [key for key, output in made.items() if computes(output.expression)]:
        raise CoverageError(
            f"{', '.join(pattern for pattern, _ in collapse(keys))}: transformers computes these from whole "
            "tensors of the model when it saves it; they cannot be put together in parts. Pass "
            "names=InternalNames() for the model's own tensors"
        )
    return made


@contextlib.contextmanager
def _told_when_left() -> Iterator[None]:
    """Others, who may wait for this rank, are told why it has left."""
    try:
        yield
    except GeneratorExit:
        raise GeneratorExit("its loop over the tensors ended before the last one") from None


class _Hall:
    """Tensors that are being put together, and those that are complete, in order.

    ``memory_of`` gives a tensor's memory: before its first box, or once it is complete, put together elsewhere.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], memory_of: Callable[[str], torch.Tensor]) -> None:
        self._shapes = shapes
        self._memory_of = memory_of
        self._waiting = list(shapes)[::-1]
        self._begun: dict[str, torch.Tensor] = {}

    def room(self, key: str, box: Box) -> torch.Tensor:
        """The elements of a box in its tensor."""
        if key not in self._begun:
            self._begun[key] = self._memory_of(key)
        return part_of(self._begun[key], box)

    def complete(self, boxes: Sequence[tuple[str, Box]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of which these are the last boxes, and those without elements before them."""
        for key, box in boxes:
            ends = (at + size for at, size in zip(box.offsets, box.sizes, strict=True))
            if tuple(ends) == self._shapes[key]:
                yield from self._until(key)

    def rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors without elements, behind all others."""
        while self._waiting:
            yield self._next()

    def _until(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            found, tensor = self._next()
            yield found, tensor
            if found == key:
                return

    def _next(self) -> tuple[str, torch.Tensor]:
        key = self._waiting.pop()
        return key, self._begun.pop(key) if key in self._begun else self._memory_of(key)
