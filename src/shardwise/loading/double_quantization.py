"""Nests the scales of a base in four bits, once all of them have been read.

A code needs the mean of all scales of its matrix, and the maximum of 256 scales that continue from row to row. So
each rank reads the float32 scales of its rows. They are gathered matrix by matrix, a sixteenth of a byte for each
weight. The mean is the first rank's, because its last bit depends on the order of additions. A rank then keeps the
codes of its rows, and the second-level scales.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.computed import Bindings
from shardwise.core.layout import ModelLayout
from shardwise.files.four_bit_blocks import compute_offset, nested_codes, quantize_scales
from shardwise.fsdp.named_tensors import TensorRef, canonical, local_boxes, local_tensor
from shardwise.loading.prepare import BaseForm
from shardwise.models.four_bit.base import quantize_bindings
from shardwise.models.four_bit.files import dequantize_layout
from shardwise.models.four_bit.layers import NESTED, OFFSET, SCALES, WHOLE_SCALES, is_in_four_bits
from shardwise.ranks.world import World
from shardwise.transfer.move import gather

_AT_ONCE_BYTES = 32 << 20
"""Of scales that are whole on every rank."""


def _quantize_batch(world: World, layers: Mapping[str, Any], budget_bytes: int) -> dict[str, int]:
    """Nest the scales of a few layers. Collective: yes."""
    raw = {name: layer.weight_whole_scales.detach() for name, layer in layers.items()}
    device = next(iter(raw.values())).device
    gathered = gather(world, raw, "full_on_all_ranks", budget_bytes=budget_bytes, device=device)
    wholes = {name: found.view(torch.float32) for name, found in gathered.items()}
    with world.broadcast("compute offsets") as exchange:
        if world.rank == 0:
            exchange.local = {name: float(compute_offset(whole)) for name, whole in wholes.items()}
    offsets = exchange.result
    with world.collective("quantize layers"):
        return _quantize_layers(layers, wholes, offsets)


def _quantize_layers(
    layers: Mapping[str, Any], wholes: dict[str, torch.Tensor], offsets: Mapping[str, float]
) -> dict[str, int]:
    """Nest the scales of layers, and free the whole ones. Return the number of elements written by name."""
    written: dict[str, int] = {}
    for name, layer in layers.items():
        counts = _quantize_scales(layer, wholes.pop(name), offsets[name])
        written |= {f"{name}.{local}": count for local, count in counts.items()}
        _free_full_scales(layer)
    return written


def _free_full_scales(layer: Any) -> None:
    layer._parameters.pop(WHOLE_SCALES, None)
    layer.whole_scales = ()


def _unquantized_scales(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return (
        (canonical(name), module)
        for name, module in model.named_modules()
        if is_in_four_bits(module) and module.whole_scales
    )


def _batches(layers: Sequence[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    batch: dict[str, Any] = {}
    used = 0
    for name, layer in layers:
        nbytes = 4 * layer.weight_scales.numel()
        if batch and used + nbytes > _AT_ONCE_BYTES:
            yield batch
            batch, used = {}, 0
        batch[name] = layer
        used += nbytes
    if batch:
        yield batch


def _quantize_scales(layer: Any, whole: torch.Tensor, offset: float) -> dict[str, int]:
    """Write codes, their scales, and the offset. Return the number of elements of each."""
    mean = torch.tensor(offset, dtype=torch.float32)
    _, nested = quantize_scales(whole, mean)
    layer.weight_nested_scales.copy_(nested)
    layer.weight_nested_offset.fill_(offset)
    local, count = local_tensor(layer.weight_scales), 0
    for piece in local_boxes(layer.weight_scales, SCALES):
        rows = slice(piece.box.offsets[0], piece.box.offsets[0] + piece.box.sizes[0])
        codes = nested_codes(whole[rows], rows.start * whole.shape[1], nested, mean)
        local.copy_(codes[:, piece.box.offsets[1] : piece.box.offsets[1] + piece.box.sizes[1]])
        count += piece.box.numel
    return {SCALES: count, NESTED: nested.numel(), OFFSET: 1}


class _FourBitBases(BaseForm):
    """Layers in four bits, and experts."""

    def logical_layout(self, layout: ModelLayout, held: Sequence[TensorRef]) -> ModelLayout:
        return dequantize_layout(layout, held)

    def update_bindings(self, model: nn.Module, bindings: Bindings) -> Bindings:
        return quantize_bindings(model, bindings)

    def allocate_staging(self, model: nn.Module, bindings: Bindings) -> Bindings:
        """Add a parameter to each layer for its scales as stored, sharded like its codes, and bind it."""
        matched = dict(bindings.matched)
        for name, layer in _unquantized_scales(model):
            codes = layer.weight_scales
            columns = 4 * codes.shape[1]
            local = torch.empty(local_tensor(codes).shape[0], columns, dtype=torch.uint8, device="meta")
            whole: torch.Tensor = local
            if isinstance(codes, DTensor):
                shape, stride = torch.Size((codes.shape[0], columns)), (columns, 1)
                whole = DTensor.from_local(
                    local, codes.device_mesh, codes.placements, run_check=False, shape=shape, stride=stride
                )
            layer.register_parameter(WHOLE_SCALES, nn.Parameter(whole, requires_grad=False))
            matched[f"{name}.{WHOLE_SCALES}"] = layer.whole_scales
        return replace(bindings, matched=matched)

    def deferred_names(self, model: nn.Module) -> frozenset[str]:
        return frozenset(
            f"{name}.{local}" for name, _ in _unquantized_scales(model) for local in (SCALES, NESTED, OFFSET)
        )

    def complete(self, world: World, model: nn.Module, *, budget_bytes: int) -> dict[str, int]:
        """Nest the scales that have been read, and free them. Return the numbers of written elements by name.

        Collective: yes.
        Memory: ``budget_bytes``, and all scales of the larger of one matrix and 32 MiB.
        """
        written: dict[str, int] = {}
        for batch in _batches(list(_unquantized_scales(model))):
            written |= _quantize_batch(world, batch, budget_bytes)
        return written

    def rollback(self, model: nn.Module) -> None:
        for _, layer in list(_unquantized_scales(model)):
            _free_full_scales(layer)


FOUR_BITS: Final = _FourBitBases()
