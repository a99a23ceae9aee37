"""Shares of a model's tensors with an adapter merged in, which stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.core.layout import LoraFactors
from shardwise.core.tensors import Box
from shardwise.fsdp.named_tensors import TensorRef, local_boxes
from shardwise.models.four_bit.config import Packing
from shardwise.models.four_bit.layers import get_packings, get_scales, scales_name
from shardwise.transfer.move_plan import Boxes
from shardwise.transfer.replicas import ShardSender


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a 4-bit weight (out, in), or of stacked experts (experts, out, in), on this rank.

    Attributes:
        weight: packed bytes.
        scales: of the same rows: bytes of float32, or codes.
        packing: form of the weight.
    """

    weight: TensorRef
    scales: TensorRef
    packing: Packing

    def dequantize(self, box: Box) -> torch.Tensor:
        """Return a box of the weight as the model has it, rounded to the dtype before quantization."""
        *rows, columns = _stored_order(self.packing, [*zip(box.offsets, box.sizes, strict=True)])
        first = local_boxes(self.weight.tensor, self.weight.fqn)[0].box.offsets
        # Rows in this rank's memory. Whole ones, also for a part of the columns: scales are of blocks along them.
        # shard_dim() never splits the columns of packed weights.
        local = tuple(slice(at - start, at - start + size) for (at, size), start in zip(rows, first, strict=False))
        slot = self.weight.slots[0]
        scales = get_scales(slot.module, slot.name, self.scales.local[local].contiguous(), rows[-1][0])
        packed = self.weight.local[local].contiguous()
        whole = self.packing.dequantize(packed, scales, self.packing.dtype)  # (.., rows, in)
        values = whole[..., columns[0] : sum(columns)]
        return (values.mT if self.packing.is_transposed else values).contiguous()

    def logical_boxes(self, boxes: Boxes) -> Boxes:
        """Return boxes of packed bytes as boxes of the 4-bit values, two in each byte."""
        logical = []
        for box in boxes:
            *rows, (start, size) = zip(box.offsets, box.sizes, strict=True)
            offsets, sizes = zip(*_stored_order(self.packing, [*rows, (2 * start, 2 * size)]), strict=True)
            logical.append(Box(offsets, sizes))
        return tuple(logical)


def _stored_order(packing: Packing, dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Exchange the last two dims of a box if the model has a matrix that is stored as (out, in) as (in, out)."""
    *outer, rows, columns = dims
    return [*outer, columns, rows] if packing.is_transposed else [*outer, rows, columns]


def find_packed_rows(refs: Mapping[str, TensorRef]) -> dict[str, PackedRows]:
    """Return weights in 4 bits by name, with their dequantization."""
    packed = {}
    for name, item in refs.items():
        slot = item.slots[0]
        if packing := get_packings(slot.module).get(slot.name):
            packed[name] = PackedRows(item, refs[scales_name(name)], packing)
    return packed


@dataclass
class MergingShardSender(ShardSender):
    """Source of shares of the base's tensors plus the adapter's delta. All mappings are by name in the base.

    Attributes:
        factors: of the weights that the adapter changes.
        matrices: all matrices of the adapter, in full, by FQN.
        packed: 4-bit weights, which are dequantized. Their shares are boxes of dequantized values.

    Memory: ``matrices`` and twice the largest share, in float32 for adapted weights.
    """

    factors: Mapping[str, LoraFactors]
    matrices: Mapping[str, torch.Tensor]
    packed: Mapping[str, PackedRows]

    def values(self, name: str, box: Box) -> torch.Tensor:
        values = self.packed[name].dequantize(box) if name in self.packed else super().values(name, box)
        if name not in self.factors:
            return values
        factors = self.factors[name]
        lora_A, lora_B = self.matrices[factors.lora_A], self.matrices[factors.lora_B]  # (r, in), (out, r)
        *experts, rows, columns = (slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        # PEFT stores the matrices of stacked experts flat: lora_A as (experts * r, in), with the expert
        # outside, and lora_B as (out, r * experts), with the expert inside.
        if factors.experts:
            lora_A = lora_A.unflatten(0, (factors.experts, -1))[experts[0]]  # (experts, r, in)
            lora_B = lora_B.unflatten(1, (-1, factors.experts)).movedim(2, 0)[experts[0]]  # (experts, out, r)
        if factors.is_transposed:  # the box is (experts, in, out)
            delta = _delta(lora_A[..., rows], lora_B[..., columns, :], factors.scaling).mT
        else:
            delta = _delta(lora_A[..., columns], lora_B[..., rows, :], factors.scaling)
        return values.add(delta.to(values.device)).to(values.dtype)


def _delta(lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the delta (.., out, in) of a part of a weight. ``lora_A`` is (.., r, in), ``lora_B`` (.., out, r).

    As in ``get_delta_weight`` of PEFT, 16-bit matrices are multiplied in float32 on a CPU.
    """
    # The product is rounded to the dtype of the matrices before it is added to the weight.
    dtype = lora_B.dtype
    if dtype in (torch.float16, torch.bfloat16) and lora_B.device.type == "cpu":
        lora_A, lora_B = lora_A.float(), lora_B.float()
    return ((lora_B @ lora_A) * scaling).to(dtype)
