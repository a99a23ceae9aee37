"""Optimizers of others that keep moments in blocks of 8 or 4 bits: bitsandbytes' and torchao's.

[Note: Moments in blocks] Such a moment is told in three values. Its codes have the name of the moment and the shape
of the parameter (half as long in the last dimension where two are in a byte), and are sharded as the parameter is.
``NAME.scale`` has one row for each shard, as long as the longest has blocks. ``NAME.blocks`` says how numbers
became codes, and how the parameter was cut. Where codes are constant functions of numbers (the map of values) there
is nothing to keep: the map is known by its checksum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from shardwise.models._torch_private import splitting_dim
from shardwise.models.optimizers.block_codec import BlockCodec, Cuts, counts_of_shards
from shardwise.models.view import local_tensor

SCALE, BLOCKS = ".scale", ".blocks"


@dataclass(frozen=True, slots=True)
class CodedMoment:
    """A rank's own part of a moment: codes (bytes), and the scale of each block."""

    codes: torch.Tensor
    scale: torch.Tensor


LocalMoment: TypeAlias = torch.Tensor | CodedMoment
"""Numbers, or blocks of them."""


class BlockwiseOptimizer(Protocol):
    """What an optimizer that keeps moments in blocks is asked."""

    def is_moment(self, entry: str) -> bool:
        """Whether a value of state is one, by its name."""
        ...

    def codec(self, moment: str) -> BlockCodec:
        """How it keeps one."""
        ...

    def keeps_blocks(self, counts: frozenset[int]) -> bool:
        """Whether it does, of a parameter whose shards have so many elements."""
        ...

    def apart(self, entries: Mapping[str, Any]) -> tuple[dict[str, LocalMoment], dict[str, Any]]:
        """What it has of a parameter: moments, on this rank, and the rest. What is constant is left out."""
        ...

    def together(self, parameter: torch.Tensor, moment: str, value: LocalMoment) -> dict[str, Any]:
        """A moment as the optimizer has it in its state."""
        ...


def blockwise(optimizer: Optimizer) -> BlockwiseOptimizer | None:
    """How an optimizer keeps moments in blocks; None of one that does not."""
    homes = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if "bitsandbytes" in homes and hasattr(optimizer, "name2qmap"):
        options: Any = vars(optimizer).get("args")
        return OfBitsandbytes(optimizer) if options.optim_bits == 8 else OfBitsandbytes32(optimizer)
    if "torchao" in homes and isinstance(getattr(optimizer, "block_size", None), int):
        return OfTorchao(optimizer)
    return None


def moment_of(entry: str) -> str:
    """The moment that a value belongs to."""
    return entry.removesuffix(SCALE).removesuffix(BLOCKS)


class OfTorchao:
    """torchao's: a moment is a tensor of a class of its own, whose shards each rank makes for itself."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def is_moment(self, entry: str) -> bool:
        return entry in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def codec(self, moment: str) -> BlockCodec:
        sample = self._sample(moment)
        return BlockCodec(self._block, getattr(sample, "qmap", None), self._block // sample.codes.numel())

    def keeps_blocks(self, counts: frozenset[int]) -> bool:
        filled = counts - {0}
        return bool(filled) and all(count >= 4096 and count % self._block == 0 for count in filled)

    def apart(self, entries: Mapping[str, Any]) -> tuple[dict[str, LocalMoment], dict[str, Any]]:
        moments: dict[str, LocalMoment] = {}
        rest: dict[str, Any] = {}
        for entry, value in entries.items():
            if not self.is_moment(entry):
                rest[entry] = value
                continue
            local: Any = local_tensor(value)
            if hasattr(local, "codes"):
                codes = local.codes.view(torch.uint8)
                moments[entry] = CodedMoment(
                    codes.view(packed(local.shape, local.numel() // codes.numel())), local.scale
                )
            else:
                moments[entry] = local
        return moments, rest

    def together(self, parameter: torch.Tensor, moment: str, value: LocalMoment) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            return {moment: numbers_of(parameter, value)}
        own = local_tensor(parameter)
        if not own.numel():
            return {moment: numbers_of(parameter, torch.zeros_like(own))}
        sample = self._sample(moment)
        names, context = sample.__tensor_flatten__()
        codes = value.codes.view(sample.codes.dtype)
        if hasattr(sample, "_shape"):  # two in a byte: codes are flat, and the shape is told
            codes, context = codes.flatten(), [context[0], own.shape, context[2]]
        inner = {"codes": codes, "scale": value.scale}
        if "qmap" in names:
            inner["qmap"] = sample.qmap.to(codes.device)
        made = type(sample).__tensor_unflatten__(inner, context)
        return {moment: numbers_of(parameter, made)}

    @property
    def _block(self) -> int:
        block: int = self._optimizer.block_size
        return block

    def _sample(self, moment: str) -> Any:
        """One block, of zeros."""
        zeros = torch.zeros(self._block, device="cpu")
        return self._optimizer._subclass_zeros(zeros, moment == "exp_avg", self._block)


class OfBitsandbytes32:
    """bitsandbytes' with 32 bits: what it has of a shard are plain tensors."""

    _BLOCK = 256

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def is_moment(self, entry: str) -> bool:
        return entry in ("state1", "state2")

    def codec(self, moment: str) -> BlockCodec:
        maps = self._optimizer.name2qmap
        if not maps:
            self._optimizer.fill_qmap()
        return BlockCodec(self._BLOCK, maps[_MAPS[moment]].to("cpu"))

    def keeps_blocks(self, counts: frozenset[int]) -> bool:  # noqa: ARG002 - as of any
        return False

    def apart(self, entries: Mapping[str, Any]) -> tuple[dict[str, LocalMoment], dict[str, Any]]:
        moments: dict[str, LocalMoment] = {}
        rest: dict[str, Any] = {}
        for entry, value in entries.items():
            if not self.is_moment(entry):
                if not entry.startswith(("qmap", "absmax")):
                    rest[entry] = value
            elif value.dtype is torch.uint8:
                moments[entry] = CodedMoment(local_tensor(value), entries[f"absmax{entry[-1]}"])
            else:
                moments[entry] = local_tensor(value)
        return moments, rest

    def together(self, parameter: torch.Tensor, moment: str, value: LocalMoment) -> dict[str, Any]:
        own = local_tensor(parameter)
        if isinstance(value, torch.Tensor):
            return {moment: self._kept(own, value)}
        number = moment[-1]
        return {
            moment: self._kept(own, value.codes),
            f"absmax{number}": value.scale,
            f"qmap{number}": self._optimizer.name2qmap[_MAPS[moment]].to(own.device),
        }

    def _kept(self, own: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Where the optimizer would have it: a paged one, on an accelerator, in memory of its own kind."""
        if not self._optimizer.is_paged or own.device.type == "cpu":
            return values
        memory: torch.Tensor = self._optimizer.get_state_buffer(own, dtype=values.dtype)
        return memory.copy_(values)


class OfBitsandbytes(OfBitsandbytes32):
    """The same with 8 bits. Small parameters have numbers; on shards, all ranks do as the largest shard does."""

    def keeps_blocks(self, counts: frozenset[int]) -> bool:
        smallest: int = self._optimizer.args.min_8bit_size
        return max(counts) >= smallest


_MAPS = {"state1": "dynamic", "state2": "udynamic"}
"""bitsandbytes' maps of values."""


def packed(shape: torch.Size | tuple[int, ...], per_byte: int) -> tuple[int, ...]:
    """The shape of codes."""
    return (*shape[:-1], shape[-1] // per_byte) if per_byte > 1 else tuple(shape)


def halves(parameter: torch.Tensor, per_byte: int) -> bool:
    """Whether codes of which several are in a byte are cut where the parameter is."""
    if per_byte == 1:
        return True
    last = parameter.ndim - 1
    cut = isinstance(parameter, DTensor) and any(splitting_dim(each) == last for each in parameter.placements)
    return not cut and parameter.shape[-1] % per_byte == 0


def codes_of(parameter: torch.Tensor, codes: torch.Tensor, per_byte: int) -> torch.Tensor:
    """A rank's codes as a tensor that is sharded as its parameter is."""
    shape = packed(parameter.shape, per_byte)
    if not local_tensor(parameter).numel():
        codes = codes.new_empty(packed(local_tensor(parameter).shape, per_byte), dtype=torch.uint8)
    return _placed(parameter, codes, shape)


def scale_of(parameter: torch.Tensor, codec: BlockCodec, scale: torch.Tensor | None) -> torch.Tensor:
    """A rank's scales as its row of those of all shards, which are as long as the longest; None: zeros.

    In the memory of ``scale`` where that is as long.
    """
    length = codec.blocks(max(counts_of_shards(parameter)))
    if scale is None or scale.numel() != length:
        row = torch.zeros(length, dtype=torch.float32, device=local_tensor(parameter).device)
        if scale is not None:
            row[: scale.numel()] = scale
        scale = row
    if not isinstance(parameter, DTensor):
        return scale
    mesh = parameter.device_mesh
    sizes = [
        int(size)
        for placement, size in zip(parameter.placements, mesh.shape, strict=True)
        if splitting_dim(placement) is not None
    ]
    axes = iter(range(len(sizes)))
    placements = [
        Replicate() if splitting_dim(placement) is None else Shard(next(axes)) for placement in parameter.placements
    ]
    shape = (*sizes, length)
    return DTensor.from_local(
        scale.view((1,) * len(sizes) + (length,)),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
    )


def own_blocks(parameter: torch.Tensor, codec: BlockCodec, codes: torch.Tensor, scale: torch.Tensor) -> CodedMoment:
    """This rank's part of codes and scales that are sharded."""
    count = codec.blocks(local_tensor(parameter).numel())
    return CodedMoment(local_tensor(codes), local_tensor(scale).flatten()[:count])


def text_of(parameter: torch.Tensor, codec: BlockCodec) -> str:
    """How a moment of this parameter is kept: what must be equal for codes to be taken as they are."""
    return f"{codec.label}; shards {Cuts.of(parameter).text}"


def numbers_of(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A rank's own part as a tensor that is sharded as its parameter is."""
    return _placed(parameter, local, tuple(parameter.shape))


def _placed(parameter: torch.Tensor, local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    made: torch.Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
    )
    return made.to(parameter.device)
