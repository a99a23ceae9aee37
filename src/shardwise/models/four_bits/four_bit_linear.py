"""Turns linear layers, on meta, into ones whose weights are in four bits; and knows them again.

[Note: A layer in four bits] The layer keeps its place, its name and its class's methods; its weight is a uint8
parameter (out, in / 2), beside which its scales are, as the bytes of float32: a parameter ``weight_scales`` (out, 4
* in / block) of uint8. Both are frozen, and sharded by rows in the group of the layer's block. FSDP2 casts floats
to the dtype of the mixed precision, and leaves integers alone: that is why scales are bytes. Where bitsandbytes is
installed the layer is one of its ``Linear4bit``, by which PEFT chooses its own 4-bit layers; what that class does
with a ``quant_state`` is not used.

Nested scales are codes, a uint8 parameter ``weight_scales`` (out, in / block); what they are scaled by is whole on
every rank: the buffers ``weight_nested_scales`` (float32, one for 256) and ``weight_nested_offset`` (float32, one).
While such a layer is loaded, its scales are there as they are for a moment, as ``weight_whole_scales``
(``engines/nesting.py``).
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn

from shardwise.conversion import Expression
from shardwise.conversion.nested_scales import NESTED_BLOCK
from shardwise.models.four_bits.four_bit_product import (
    KeptScales,
    Packing,
    has_bitsandbytes,
    product,
    unnested_scales,
)
from shardwise.models.four_bits.quantization import COMPUTED_IN, KeptForm, NestedScales, form_name

WEIGHT = "weight"
SCALES = "weight_scales"
NESTED = "weight_nested_scales"
OFFSET = "weight_nested_offset"
WHOLE_SCALES = "weight_whole_scales"

_SUFFIX = "InFourBits"


class InFourBits:
    """What a layer in four bits is beside a linear one; see [Note: A layer in four bits].

    Attributes:
        packing: how its weight is kept.
        quantization: what was asked for.
        whole_scales: while it is loaded, what its scales are read from before they are nested.
    """

    kept_as: ClassVar[str] = "four bits"

    weight: nn.Parameter
    weight_scales: nn.Parameter
    weight_nested_scales: torch.Tensor
    weight_nested_offset: torch.Tensor
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    packing: Packing
    quantization: KeptForm
    compute_dtype: torch.dtype | None
    whole_scales: tuple[Expression, ...]

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight (out, in), of gathered parameters; in the dtype it had, if no other is given."""
        return self.packing.numbers(self.weight, self.scales(), dtype or self.packing.dtype)

    def scales(self) -> torch.Tensor:
        """The scales, float32 (out, in / block), of gathered parameters."""
        return self._kept_scales().floats(self.packing.form)

    def scales_of(self, kept: torch.Tensor, row: int) -> torch.Tensor:
        """The scales, float32, of rows of ``weight_scales``, the first of which is the matrix' ``row``-th."""
        if not self.is_nested:
            return kept.view(torch.float32)
        start = row * (self.in_features // self.packing.block_size)
        made: torch.Tensor = unnested_scales(kept, start, self.weight_nested_scales, self.weight_nested_offset)
        return made

    def _kept_scales(self) -> KeptScales:
        if not self.is_nested:
            return KeptScales(self.weight_scales)
        return KeptScales(self.weight_scales, self.weight_nested_scales, self.weight_nested_offset)

    @property
    def is_nested(self) -> bool:
        """Whether its scales are kept in a byte each."""
        return isinstance(self.quantization.scales, NestedScales)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype or rows.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return product(rows.to(dtype), self.weight, self._kept_scales(), bias, self.packing).to(rows.dtype)

    def tell_peft(self) -> None:
        """Put down what PEFT asks the weight of a 4-bit layer for, before it is sharded."""
        self.weight.compress_statistics = self.is_nested  # type: ignore[attr-defined]
        self.weight.quant_type = form_name(self.packing.form).lower()  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        """Of a copy: torch copies parameters without what is put on them."""
        super().__setstate__(state)  # type: ignore[misc]
        self.tell_peft()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made anew where it is read: of bitsandbytes there, if that is installed there."""
        kind: type = type(self)
        if kind is not _class():  # with FSDP2's in front
            return super().__reduce_ex__(protocol)
        return _without_values, (), self.__dict__

    def extra_repr(self) -> str:
        form, block = form_name(self.packing.form).lower(), self.packing.block_size
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{form} in blocks of {block}"
        )

    def _apply(self, function: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - as torch has it
        """What moves a model moves it all; a cast to another dtype passes over what numbers are made of."""
        own: Any = self
        floats = {name: own._buffers.pop(name) for name in (NESTED, OFFSET) if name in own._buffers}
        super()._apply(function, recurse)  # type: ignore[misc]
        for name, buffer in floats.items():
            own._buffers[name] = function(buffer.view(torch.uint8)).view(buffer.dtype)
        return self

    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict


@cache
def _class() -> type[nn.Linear]:
    """The class of the layers: of bitsandbytes where that is installed, which PEFT asks for."""
    if has_bitsandbytes():
        from bitsandbytes.nn import Linear4bit

        return type("Linear4bitInFourBits", (InFourBits, Linear4bit), {})
    return type("LinearInFourBits", (InFourBits, nn.Linear), {})


def _without_values() -> nn.Module:
    kind = _class()
    return kind.__new__(kind)


def is_in_four_bits(module: nn.Module) -> TypeGuard[Any]:
    """Whether a module is a layer in four bits."""
    return isinstance(module, InFourBits)


def why_it_stays(module: nn.Linear, quantization: KeptForm) -> str | None:
    """Why a linear layer cannot be kept in four bits; None where it can."""
    if module.weight.dtype not in COMPUTED_IN:
        return f"is of {module.weight.dtype}, of which nothing is packed"
    if module.in_features % quantization.block_size:
        return f"has {module.in_features} columns, no multiple of the block of {quantization.block_size}"
    return None


def put_into_four_bits(module: nn.Linear, quantization: KeptForm) -> None:
    """Make a linear layer on meta one whose weight is in four bits; in place, so that hooks and names stay."""
    form, block, dtype = quantization.form, quantization.block_size, module.weight.dtype
    rows, columns = module.weight.shape
    is_nested = isinstance(quantization.scales, NestedScales)
    weight = _frozen(rows, columns // 2)
    del module.weight
    module.__class__ = _class()
    layer: Any = module
    layer.register_parameter(WEIGHT, weight)
    blocks = columns // block
    layer.register_parameter(SCALES, _frozen(rows, blocks if is_nested else 4 * blocks))
    if is_nested:
        nested = torch.empty(-(-rows * blocks // NESTED_BLOCK), dtype=torch.float32, device="meta")
        layer.register_buffer(NESTED, nested)
        layer.register_buffer(OFFSET, torch.empty(1, dtype=torch.float32, device="meta"))
    layer.packing = Packing(form, block, dtype)
    layer.quantization = quantization
    layer.compute_dtype = quantization.compute_dtype
    layer.quant_state = None
    layer.whole_scales = ()
    layer.tell_peft()
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad_(False)


def _frozen(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns, dtype=torch.uint8, device="meta"), requires_grad=False)
