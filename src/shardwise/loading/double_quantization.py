"""Double quantization: quantizes the scales of 4-bit weights, once all scales have been read.

Double quantization needs the mean of all scales of a matrix, and the maximum of each block of 256 scales. Both span
ranks. So each rank reads the float32 scales of its rows, and the scales are gathered matrix by matrix: 4 bytes for
each 64 weights. The mean is the first rank's, because its last bit depends on the order of additions. A rank then
keeps the 8-bit codes of its rows, and all scales of the second level.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.core.expression import Bindings
from shardwise.core.formatting import canonical_name
from shardwise.files.four_bit_blocks import compute_nested_codes, compute_nested_scales, compute_offset
from shardwise.fsdp.named_tensors import local_boxes, local_tensor, place_like
from shardwise.models.four_bit.layers import FULL_SCALES, NESTED, OFFSET, SCALES, is_in_four_bits
from shardwise.ranks.world import World
from shardwise.transfer.move import gather

_AT_ONCE_BYTES = 32 << 20
"""Bytes of full scales that every rank holds at once."""


def _quantize_batch(world: World, layers: Mapping[str, Any], budget_bytes: int) -> dict[str, int]:
    """Quantize the scales of a few layers. Return the number of elements written by name. Collective: yes."""
    raw = {name: layer.weight_full_scales.detach() for name, layer in layers.items()}
    device = next(iter(raw.values())).device
    gathered = gather(world, raw, "full_on_all_ranks", budget_bytes=budget_bytes, device=device)
    # Staged as uint8 of shape (rows, 4 * columns).
    scales = {name: raw_bytes.view(torch.float32) for name, raw_bytes in gathered.items()}  # (rows, columns)
    with world.broadcast("compute offsets") as exchange:
        if world.rank == 0:
            exchange.local = {name: float(compute_offset(full)) for name, full in scales.items()}
    offsets = exchange.result
    written: dict[str, int] = {}
    with world.collective("quantize layers"):
        for name, layer in layers.items():
            counts = _quantize_layer(layer, scales.pop(name), offsets[name])
            written |= {f"{name}.{local}": count for local, count in counts.items()}
            _free_full_scales(layer)
    return written


def _free_full_scales(layer: Any) -> None:
    layer._parameters.pop(FULL_SCALES, None)
    layer.full_scales = ()


def _find_unquantized(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers whose scales have not been quantized yet, with their FQNs."""
    for name, module in model.named_modules():
        if is_in_four_bits(module) and module.full_scales:
            yield canonical_name(name), module


def _iter_batches(layers: Sequence[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the layers in batches whose full scales take at most 32 MiB. A batch has at least one layer."""
    batch: dict[str, Any] = {}
    used = 0
    for name, layer in layers:
        # A float32 for each code of a scale.
        nbytes = 4 * layer.weight_scales.numel()
        if batch and used + nbytes > _AT_ONCE_BYTES:
            yield batch
            batch, used = {}, 0
        batch[name] = layer
        used += nbytes
    if batch:
        yield batch


def _quantize_layer(layer: Any, full: torch.Tensor, offset: float) -> dict[str, int]:
    """Write codes, their scales, and the offset. Return the number of elements written of each.

    ``full`` are the scales of the full matrix. For a weight of shape (4096, 11008): (4096, 172), whose codes have
    2,752 second-level scales. On a rank with the rows from 1000 on, the first code is number 172,000 of the
    matrix, inside of block 671.
    """
    mean = torch.tensor(offset, dtype=torch.float32, device="cpu")
    nested = compute_nested_scales(full, mean)
    layer.weight_nested_scales.copy_(nested)
    layer.weight_nested_offset.fill_(offset)
    local, count = local_tensor(layer.weight_scales), 0
    for piece in local_boxes(layer.weight_scales, SCALES):
        rows = slice(piece.box.offsets[0], piece.box.offsets[0] + piece.box.sizes[0])
        # Blocks of 256 continue from row to row, so the position of the first code in the matrix is needed.
        codes = compute_nested_codes(full[rows], rows.start * full.shape[1], nested, mean)
        local.copy_(codes[:, piece.box.offsets[1] : piece.box.offsets[1] + piece.box.sizes[1]])
        count += piece.box.numel
    return {SCALES: count, NESTED: nested.numel(), OFFSET: 1}


def add_scale_parameters(model: nn.Module, bindings: Bindings) -> Bindings:
    """Add a parameter to each layer for its float32 scales, sharded like its codes. Return the new bindings."""
    matched = dict(bindings.matched)
    for name, layer in _find_unquantized(model):
        codes = layer.weight_scales
        rows, columns = local_tensor(codes).shape[0], 4 * codes.shape[1]  # bytes of float32
        local = torch.empty(rows, columns, dtype=torch.uint8, device="meta")
        full = nn.Parameter(place_like(codes, local, columns), requires_grad=False)
        layer.register_parameter(FULL_SCALES, full)
        matched[f"{name}.{FULL_SCALES}"] = layer.full_scales
    return replace(bindings, matched=matched)


def deferred_names(model: nn.Module) -> frozenset[str]:
    """Return names of tensors that nothing is read into, because :func:`quantize_scales` makes them."""
    names: set[str] = set()
    for name, _ in _find_unquantized(model):
        names.update(f"{name}.{local}" for local in (SCALES, NESTED, OFFSET))
    return frozenset(names)


def quantize_scales(world: World, model: nn.Module, *, budget_bytes: int) -> dict[str, int]:
    """Quantize the scales that have been read, and free them. Return the numbers of written elements by name.

    Collective: yes.
    Memory: ``budget_bytes``, and all scales of the larger of one matrix and 32 MiB.
    """
    written: dict[str, int] = {}
    for batch in _iter_batches(list(_find_unquantized(model))):
        written |= _quantize_batch(world, batch, budget_bytes)
    return written


def remove_scale_parameters(model: nn.Module) -> None:
    """Remove what a load that has failed, or does not take place, left on the model. No effect after a load."""
    for _, layer in list(_find_unquantized(model)):
        _free_full_scales(layer)
