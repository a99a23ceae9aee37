"""Linear layers and fused experts with 4-bit weights: conversion on meta, and detection.

[Note: A layer in four bits] The layer keeps its name and its class's methods. Its weight is a uint8 parameter (out,
in / 2). Its scales are a uint8 parameter ``weight_scales`` (out, 4 * in / block), the bytes of float32, because
FSDP2 casts floats, but not integers, to the dtype of the mixed precision. Both are frozen, and sharded by rows in
the group of the layer's block. If bitsandbytes is installed, the layer is a subclass of its ``Linear4bit``, by
which PEFT chooses its own 4-bit layers. That class's ``quant_state`` is not used.

Nested scales are codes, a uint8 parameter ``weight_scales`` (out, in / block). Their own scales are unsharded
buffers: ``weight_nested_scales`` (float32, one for 256) and ``weight_nested_offset`` (float32, one). While such a
layer is loaded, it has its float32 scales as ``weight_full_scales`` (``loading/double_quantization.py``).

[Note: Experts in four bits] The module keeps its name and its class's methods. A stack of weights (experts, out,
in) is a uint8 parameter (experts, out, in / 2) of the same name. Its scales are the bytes of float32,
``<name>_scales`` (experts, out, 4 * in / block). Both are frozen, and sharded in the group of the module's block.
The class's own forward function computes expert by expert. It runs on a proxy of the module, whose stacks return
the weight of one expert, which is dequantized by ``linear``. So the weights of one expert at a time are
dequantized, and only codes and scales are kept for the backward pass. Kernels for all experts at once
(``experts_implementation``) would need all weights dequantized, and are not used.

Scales of experts are never nested. Stacks that are stored as MXFP4 have exponents as scales, (experts, out, in /
32). A stack that the model has as (experts, in, out) is stored and kept as (experts, out, in / 2): blocks run along
the input dimension.

The product of a PEFT LoRA on a stack is added to that of the weight. The weight itself is not changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.expression import Expression
from shardwise.core.tensors import Code
from shardwise.files.four_bit_blocks import NESTED_BLOCK
from shardwise.fsdp.torch_private import get_parameters
from shardwise.models.four_bit.config import (
    COMPUTED_IN,
    KeptForm,
    LocalScales,
    Packing,
    frozen_bytes,
    has_bitsandbytes,
    product,
    quant_type_name,
)

WEIGHT = "weight"
SCALES = "weight_scales"
NESTED = "weight_nested_scales"
OFFSET = "weight_nested_offset"
FULL_SCALES = "weight_full_scales"


class FourBitLinear:
    """Mixin of linear layers in 4 bits. See [Note: A layer in four bits].

    Attributes:
        packing: form of its weight.
        is_nested: whether its scales are quantized to 8 bits.
        full_scales: until a load ends, or is left out, the expressions of the scales before they are nested.
    """

    weight: nn.Parameter
    weight_scales: nn.Parameter
    weight_nested_scales: torch.Tensor
    weight_nested_offset: torch.Tensor
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    packing: Packing
    is_nested: bool
    compute_dtype: torch.dtype | None
    full_scales: tuple[Expression, ...]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weight (out, in) of gathered parameters, by default in its original dtype."""
        scales = self.get_scales(self.weight_scales, 0)
        return self.packing.dequantize(self.weight, scales, dtype or self.packing.dtype)

    def get_scales(self, stored: torch.Tensor, row: int) -> torch.Tensor:
        """Return the float32 scales of rows of ``weight_scales``, beginning with the ``row``-th of the weight."""
        start = row * (self.in_features // self.packing.block_size)
        return self._local_scales(stored).floats(self.packing.form, start)

    def _local_scales(self, stored: torch.Tensor) -> LocalScales:
        if not self.is_nested:
            return LocalScales(stored)
        return LocalScales(stored, self.weight_nested_scales, self.weight_nested_offset)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # Switch, LongT5 and others cast to the dtype of the weight, which is bytes.
        if not rows.is_floating_point():
            raise ConfigError(
                f"4 bits: a layer of ({self.in_features}, {self.out_features}) gets {rows.dtype} rows, because the "
                "model casts them to the dtype of its weight. Name it in skip_modules, as 'wo' of the T5 family"
            )
        dtype = self.compute_dtype or rows.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        scales = self._local_scales(self.weight_scales)
        return product(rows.to(dtype), self.weight, scales, bias, self.packing).to(rows.dtype)

    def mark_for_peft(self) -> None:
        """Set the attributes that PEFT reads from the weight of a 4-bit layer, before it is sharded."""
        self.weight.compress_statistics = self.is_nested  # type: ignore[attr-defined]
        self.weight.quant_type = quant_type_name(self.packing.form).lower()  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        """Restore a copy, because torch copies parameters without their Python attributes."""
        super().__setstate__(state)  # type: ignore[misc]
        self.mark_for_peft()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle without the class, which depends on whether bitsandbytes is installed."""
        kind: type = type(self)
        if kind is not _class():  # a class of FSDP2
            return super().__reduce_ex__(protocol)
        return _without_values, (_class,), self.__dict__

    def _apply(self, function: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - as torch has it
        """Move all tensors to a device. Casts to another dtype skip codes and scales."""
        layer: Any = self
        # Module.half() and .to(dtype) cast all float tensors, but nested scales have to stay float32. So they leave
        # the registry, and are moved as bytes.
        floats = {name: layer._buffers.pop(name) for name in (NESTED, OFFSET) if name in layer._buffers}
        try:
            super()._apply(function, recurse)  # type: ignore[misc]
        finally:  # also if the memory of the device does not suffice
            layer._buffers.update(floats)
        for name, buffer in floats.items():
            layer._buffers[name] = function(buffer.view(torch.uint8)).view(buffer.dtype)
        return self

    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict


@cache
def _class() -> type[nn.Linear]:
    """Return the class of the layers, a subclass of ``Linear4bit`` for PEFT if bitsandbytes is installed."""
    if has_bitsandbytes():
        from bitsandbytes.nn import Linear4bit

        return type("Linear4bitInFourBits", (FourBitLinear, Linear4bit), {})
    return type("LinearInFourBits", (FourBitLinear, nn.Linear), {})


def _without_values(make_class: Callable[..., type[nn.Module]], *base: Any) -> nn.Module:
    kind = make_class(*base)
    return kind.__new__(kind)


def is_in_four_bits(module: nn.Module) -> TypeGuard[Any]:
    """Return whether a module is a layer in four bits."""
    return isinstance(module, FourBitLinear)


def skip_reason(dtype: torch.dtype, columns: int, quantization: KeptForm) -> str | None:
    """Return the reason why a weight of these columns cannot be kept in 4 bits, or None."""
    if dtype not in COMPUTED_IN:
        return f"is of {dtype}, which cannot be quantized to 4 bits"
    if columns % quantization.block_size:
        return f"has {columns} columns, not a multiple of block_size={quantization.block_size}"
    return None


def convert_to_four_bits(module: nn.Linear, quantization: KeptForm) -> None:
    """Convert a linear layer on meta to 4 bits, in place, so that hooks and names stay."""
    # For example Linear(128, 64) in blocks of 64: codes (64, 64), two elements in a byte, and two scales for each
    # row, as bytes of float32 (64, 8). Nested, these are codes (64, 2), and each 256 of them have one float32.
    form, block, dtype = quantization.form, quantization.block_size, module.weight.dtype
    rows, columns = module.weight.shape
    weight = frozen_bytes(rows, columns // 2)
    del module.weight
    module.__class__ = _class()
    layer: Any = module
    layer.register_parameter(WEIGHT, weight)
    blocks = columns // block
    layer.is_nested = quantization.double_quant
    layer.register_parameter(SCALES, frozen_bytes(rows, blocks if layer.is_nested else 4 * blocks))
    if layer.is_nested:
        nested = torch.empty(-(-rows * blocks // NESTED_BLOCK), dtype=torch.float32, device="meta")
        layer.register_buffer(NESTED, nested)
        layer.register_buffer(OFFSET, torch.empty(1, dtype=torch.float32, device="meta"))
    layer.packing = Packing(form, block, dtype)
    layer.compute_dtype = quantization.compute_dtype
    layer.quant_state = None
    layer.full_scales = ()
    layer.mark_for_peft()
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad_(False)


def get_packings(module: nn.Module) -> Mapping[str, Packing]:
    """Return the form of each weight in four bits of a linear layer or of experts, by its local name."""
    if is_in_four_bits(module):
        return {WEIGHT: module.packing}
    return module.packings if are_experts_in_four_bits(module) else {}


def get_scales(module: nn.Module, name: str, stored: torch.Tensor, row: int) -> torch.Tensor:
    """Return the float32 scales of rows of a weight, beginning with its ``row``-th, from those of its scales."""
    if is_in_four_bits(module):
        scales: torch.Tensor = module.get_scales(stored, row)
        return scales
    return LocalScales(stored).floats(get_packings(module)[name].form)


_SCALES = "_scales"


class FourBitExperts(nn.Module):
    """Mixin of fused experts in 4 bits. See [Note: Experts in four bits].

    Attributes:
        packings: form of each stack in four bits, by its local name.
        compute_dtype: of the products. None for that of the input.
        deltas: active LoRAs, each the local name of a stack and two matrices for each expert, (experts, in, r) and
            (experts, r, out).
    """

    packings: Mapping[str, Packing]
    compute_dtype: torch.dtype | None
    deltas: tuple[tuple[str, torch.Tensor, torch.Tensor], ...] = ()

    _eager: Callable[..., torch.Tensor]
    """Forward function of the class that computes expert by expert."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the original class instead of this one, which is created at run time."""
        _, _, kind, *_ = type(self).__mro__
        if type(self) is not _experts_class(kind):  # a class of FSDP2
            return super().__reduce_ex__(protocol)
        return _without_values, (_experts_class, kind), self.__dict__

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        return type(self)._eager(_ExpertsProxy(self), *args, **keywords)


class _ExpertsProxy:
    """A module of experts whose stacks in four bits return the weights of single experts."""

    def __init__(self, experts: FourBitExperts) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        experts = self._experts
        return ExpertWeights(experts, name) if name in experts.packings else getattr(experts, name)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a stack in four bits, gathered, which can be indexed by expert.

    What it returns is not a tensor, but multiplies like one.
    """

    experts: FourBitExperts
    name: str

    def __getitem__(self, expert: int | torch.Tensor) -> _ExpertWeight:
        # (out, in / 2), and the bytes of the scales, (out, ..).
        packed, scales = (getattr(self.experts, local)[expert] for local in (self.name, scales_name(self.name)))
        deltas = [
            (first[expert], second[expert]) for name, first, second in self.experts.deltas if name == self.name
        ]
        packing = self.experts.packings[self.name]
        return _ExpertWeight(packed, LocalScales(scales), packing, self.experts.compute_dtype, deltas)


@dataclass(frozen=True, slots=True)
class _ExpertWeight:
    """The weight of one expert, for ``torch.nn.functional.linear``, or for ``@`` if it is transposed."""

    packed: torch.Tensor
    scales: LocalScales
    packing: Packing
    compute_dtype: torch.dtype | None
    deltas: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        # linear(input, weight, bias) with a weight (out, in), or input @ weight with a weight (in, out).
        arguments = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(keywords or {})
        weight = arguments.get("weight")
        if isinstance(weight, cls) and function in (_MATMUL if weight.packing.is_transposed else (F.linear,)):
            return weight.product(arguments["input"], arguments.get("bias"))
        raise TypeError(
            f"4-bit expert weights support only the matmul of their own class; {function.__name__}() was called. "
            'Pass quantization=Nf4(skip_modules=("experts",)) or "dequantize"'
        )

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``rows (.., in) @ weight (out, in).T + bias``, in the dtype of ``rows``."""
        dtype = self.compute_dtype or rows.dtype
        bias_in_dtype = None if bias is None else bias.to(dtype)
        inputs = rows.to(dtype)
        outputs = product(inputs, self.packed, self.scales, bias_in_dtype, self.packing)
        for first, second in self.deltas:  # (in, r) and (r, out), scaled
            outputs = outputs + inputs @ first.to(dtype) @ second.to(dtype)
        return outputs.to(rows.dtype)


_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@contextlib.contextmanager
def patch_shapes(model: nn.Module) -> Iterator[None]:
    """Show PEFT stacks in four bits of a model on meta as tensors of the weights' shape and dtype."""
    stacks: list[tuple[Any, str, nn.Parameter]] = []
    try:
        for module in filter(are_experts_in_four_bits, model.modules()):
            for name, packing in module.packings.items():
                # A byte has two codes: (experts, out, in / 2) is shown as (experts, out, in), or transposed.
                stack, registry = module.get_parameter(name), get_parameters(module)
                shape = (*stack.shape[:-1], 2 * stack.shape[-1])
                weights = torch.empty(shape, dtype=packing.dtype, device="meta")
                stacks.append((registry, name, stack))
                registry[name] = nn.Parameter(weights.mT if packing.is_transposed else weights, requires_grad=False)
        yield
    finally:
        for registry, name, stack in stacks:
            registry[name] = stack


def scales_name(name: str) -> str:
    """Return the local name of a stack's scales."""
    return f"{name}{_SCALES}"


def are_experts_in_four_bits(module: nn.Module) -> TypeGuard[FourBitExperts]:
    """Return whether a module is fused experts with weights in four bits."""
    return isinstance(module, FourBitExperts)


def iter_stacks(fqn: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the stacked weights of fused experts by local name. Nothing for other modules."""
    if not are_fused_experts(module) and fqn.rpartition(".")[2] != "experts":
        return
    for name, parameter in get_parameters(module).items():
        if parameter is not None and parameter.ndim == 3 and parameter.is_floating_point():
            yield name, parameter


def experts_skip_reason(
    module: nn.Module, stack: nn.Parameter, quantization: KeptForm, *, is_stored: bool
) -> str | None:
    """Return the reason why a stack of weights cannot be kept in 4 bits, or None.

    ``is_stored`` is True if the checkpoint has it in this form.
    """
    if not are_fused_experts(module):
        return "belongs to an experts implementation that shardwise does not support"
    if module.is_transposed and not is_stored:
        return "is stored transposed, as (experts, in, out), so quantization blocks would cross rows"
    if are_expert_parallel(module):
        return "is sharded by expert parallelism"
    return skip_reason(stack.dtype, 0 if is_stored else stack.shape[-1], quantization)


def convert_experts_to_four_bits(module: nn.Module, names: Mapping[str, KeptForm]) -> None:
    """Convert stacks of a module on meta to 4 bits, in place, so that hooks and names stay.

    ``names`` has the form of each stack by local name.
    """
    packings: dict[str, Packing] = {}
    for name, quantization in names.items():
        stack: nn.Parameter = getattr(module, name)
        is_transposed = bool(module.is_transposed)
        # Whatever the order in the model, codes are kept with the input dimension last, along which blocks run.
        *outer, columns = stack.mT.shape if is_transposed else stack.shape  # (experts, out, in)
        packing = Packing(quantization.form, quantization.block_size, stack.dtype, is_transposed)
        packings[name] = packing
        delattr(module, name)
        module.register_parameter(name, frozen_bytes(*outer, columns // 2))
        scale_bytes = 1 if isinstance(packing.form, Code) else 4
        scales = frozen_bytes(*outer, scale_bytes * (columns // packing.block_size))
        module.register_parameter(scales_name(name), scales)
    kind: Any = type(module)
    module.__class__ = _experts_class(kind)
    vars(module).pop("forward", None)  # of a kernel such as Liger's, which would read codes as weights
    experts: Any = module
    experts.packings = packings
    experts.compute_dtype = next(iter(names.values())).compute_dtype
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(False)


@cache
def _experts_class(kind: Any) -> type[nn.Module]:
    eager = staticmethod(eager_experts(kind))
    return type(f"{kind.__name__}FourBitLinear", (FourBitExperts, kind), {"_eager": eager})


def are_fused_experts(module: nn.Module) -> bool:
    """Return whether a module has transformers' fused experts: stacked weights and one gating function."""
    attributes = [getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")]
    return None not in attributes and hasattr(module, "_apply_gate")


def eager_experts(kind: type[nn.Module]) -> Callable[..., torch.Tensor]:
    """Return the forward function of fused experts that computes expert by expert, regardless of the config."""
    forward: Any = kind.forward
    function: Callable[..., torch.Tensor] = getattr(forward, "__wrapped__", forward)  # use_experts_implementation
    return function


def are_expert_parallel(module: nn.Module) -> bool:
    """Return whether the experts are distributed over ranks (expert parallelism)."""
    return bool(getattr(module, "_is_expert_parallel", False))


def apply_activation(experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the activation of fused experts to (tokens, 2 * width) or (tokens, width). Return (tokens, width)."""
    result: torch.Tensor = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    return result
