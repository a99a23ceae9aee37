"""Turns fused experts, on meta, into ones whose stacked weights are in four bits; and knows them again.

[Note: Experts in four bits] The module keeps its place, its name and its class's methods. A stack of weights
(experts, out, in) is a uint8 parameter (experts, out, in / 2) of the same name, with its scales beside it, as the
bytes of float32: ``<name>_scales`` (experts, out, 4 * in / block). Both are frozen, and sharded in the group of the
module's block as other parameters are. What computes is the class's own forward pass, expert by expert: instead of
the module it is given what looks like it, whose stacks give the weight of one expert at a time; and that is bytes,
until ``linear`` multiplies by it. So of all experts one is there as numbers, and nothing of it is kept for the way
back but its bytes. Products of all experts at once (``experts_implementation``) would need all of their numbers;
they are not used here, whatever the config says.

Scales are plain ones, also where those of linear layers are nested. Stacks that are stored as MXFP4 have their
exponents as scales, (experts, out, in / 32). A stack that the model has as (experts, in, out) is kept as
(experts, out, in / 2), too, as it is stored: blocks run along what comes in.

A LoRA of PEFT's on a stack has its product added to that of the weight, instead of its matrices to the weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.models.four_bit_linear import (
    COMPUTED_IN,
    KeptForm,
    KeptScales,
    Packing,
    form_name,
    frozen_bytes,
    product,
)
from shardwise.models.torch_words import parameters_of

_SCALES = "_scales"


class ExpertsInFourBits(nn.Module):
    """What experts in four bits are beside fused ones; see [Note: Experts in four bits].

    Attributes:
        packings: how each stack in four bits is kept, by its local name.
        compute_dtype: of the products; None for that of what comes in.
        deltas: LoRAs on stacks, by local name, while the module is called with them.
    """

    kept_as: ClassVar[str] = "four bits"

    packings: Mapping[str, Packing]
    compute_dtype: torch.dtype | None
    deltas: dict[str, list[StackDelta]]

    _eager: Callable[..., torch.Tensor]
    """Of the class; computes expert by expert."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made anew where it is read."""
        _, _, kind, *_ = type(self).__mro__
        if type(self) is not _class(kind):  # with FSDP2's in front
            return super().__reduce_ex__(protocol)
        return _without_values, (kind,), self.__dict__

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        return type(self)._eager(_Lookalike(self), *args, **keywords)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name} in {form_name(packing.form).lower()} in blocks of {packing.block_size}"
            for name, packing in self.packings.items()
        )


@dataclass(frozen=True, slots=True)
class StackDelta:
    """A LoRA on a stack: ``scaling * rows @ first[expert] @ second[expert]`` is added to the product.

    ``first`` is (experts, in, r), ``second`` (experts, r, out).
    """

    first: torch.Tensor
    second: torch.Tensor
    scaling: float


class _Lookalike:
    """A module of experts whose stacks in four bits give the weights of single experts."""

    def __init__(self, experts: ExpertsInFourBits) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        experts = self._experts
        return _WeightsOfExperts(experts, name) if name in experts.packings else getattr(experts, name)


@dataclass(frozen=True, slots=True)
class _WeightsOfExperts:
    """The weights of all experts, one of which can be taken."""

    experts: ExpertsInFourBits
    name: str

    def __getitem__(self, expert: int | torch.Tensor) -> _WeightOfOne:
        packed, scales = (getattr(self.experts, local)[expert] for local in (self.name, scales_of(self.name)))
        packing = self.experts.packings[self.name]
        deltas = tuple(
            StackDelta(delta.first[expert], delta.second[expert], delta.scaling)
            for delta in self.experts.deltas.get(self.name, ())
        )
        return _WeightOfOne(packed, KeptScales(scales), packing, self.experts.compute_dtype, deltas)


@dataclass(frozen=True, slots=True)
class _WeightOfOne:
    """The weight of one expert: ``torch.nn.functional.linear`` takes it, or ``@`` where it is transposed."""

    packed: torch.Tensor
    scales: KeptScales
    packing: Packing
    compute_dtype: torch.dtype | None
    deltas: tuple[StackDelta, ...]

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(keywords or {})
        weight = given.get("weight")
        if isinstance(weight, cls) and function in (_MATMUL if weight.packing.is_transposed else (F.linear,)):
            return weight.product(given["input"], given.get("bias"))
        raise TypeError(
            f"weights of experts in four bits are multiplied as their class does it, not by {function.__name__}(); "
            'leave them as they are: quantization=Nf4(stay=("experts",)), or "dequantize"'
        )

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``rows (.., in) @ weight (out, in).T + bias``, in the dtype of ``rows``."""
        dtype = self.compute_dtype or rows.dtype
        own_bias = None if bias is None else bias.to(dtype)
        own = rows.to(dtype)
        found = product(own, self.packed, self.scales, own_bias, self.packing)
        for delta in self.deltas:
            found = found + delta.scaling * (own @ delta.first.to(dtype) @ delta.second.to(dtype))
        return found.to(rows.dtype)


_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@contextlib.contextmanager
def with_deltas(experts: ExpertsInFourBits, name: str, deltas: list[StackDelta]) -> Iterator[None]:
    """Have a module of experts compute with LoRAs on a stack, in addition to any that are there."""
    before = experts.deltas
    experts.deltas = {**before, name: [*before.get(name, ()), *deltas]}
    try:
        yield
    finally:
        experts.deltas = before


@contextlib.contextmanager
def shown_as_numbers(model: nn.Module) -> Iterator[None]:
    """Have the stacks in four bits of a model on meta be, for a while, tensors on meta of the numbers' shape.

    PEFT puts a LoRA on a parameter by its shape and its dtype.
    """
    kept: list[tuple[dict[str, nn.Parameter], str, nn.Parameter]] = []
    try:
        for module in [module for module in model.modules() if are_experts_in_four_bits(module)]:
            registry: Any = parameters_of(module)
            for name, packing in module.packings.items():
                stack = module.get_parameter(name)
                *outer, half = stack.shape
                numbers = torch.empty(*outer, 2 * half, dtype=packing.dtype, device="meta")
                kept.append((registry, name, stack))
                registry[name] = nn.Parameter(numbers.mT if packing.is_transposed else numbers, requires_grad=False)
        yield
    finally:
        for registry, name, stack in kept:
            registry[name] = stack


def weight_of_expert(module: nn.Module, name: str, expert: int) -> Any:
    """The weight of one expert, of gathered parameters: a tensor, or what is multiplied like one."""
    if are_experts_in_four_bits(module) and name in module.packings:
        return _WeightsOfExperts(module, name)[expert]
    return getattr(module, name)[expert]


def scales_of(name: str) -> str:
    """The local name of the scales of a stack."""
    return f"{name}{_SCALES}"


def are_experts_in_four_bits(module: nn.Module) -> TypeGuard[ExpertsInFourBits]:
    """Whether a module is one of experts of which some weights are in four bits."""
    return isinstance(module, ExpertsInFourBits)


def stacks_of(fqn: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The stacked weights of a mixture's experts, by local name; none of any other module."""
    if not are_fused_experts(module) and fqn.rpartition(".")[2] != "experts":
        return
    for name, parameter in parameters_of(module).items():
        if parameter is not None and parameter.ndim == 3 and parameter.is_floating_point():
            yield name, parameter


def why_they_stay(module: nn.Module, stack: nn.Parameter, quantization: KeptForm, *, is_stored: bool) -> str | None:
    """Why a stack of weights cannot be kept in four bits; None where it can.

    ``is_stored``: the checkpoint has it in this very form.
    """
    if not are_fused_experts(module):
        return "belongs to experts that are not computed one after the other in a way that is known"
    if stack.dtype not in COMPUTED_IN:
        return f"is of {stack.dtype}, of which nothing is packed"
    if module.is_transposed and not is_stored:
        return "is stored with what comes in before what comes out, so that no row is whole blocks"
    if are_parted_experts(module):
        return "belongs to experts that are on ranks of their own"
    if not is_stored and stack.shape[-1] % quantization.block_size:
        return f"has {stack.shape[-1]} columns, no multiple of the block of {quantization.block_size}"
    return None


def put_experts_into_four_bits(module: nn.Module, names: Mapping[str, KeptForm]) -> None:
    """Keep stacks of a module on meta in four bits; in place, so that hooks and names stay.

    ``names`` are those of the stacks, each with how it is to be kept.
    """
    packings: dict[str, Packing] = {}
    for name, quantization in names.items():
        stack: nn.Parameter = getattr(module, name)
        is_transposed = bool(module.is_transposed)
        *outer, columns = stack.mT.shape if is_transposed else stack.shape
        packing = Packing(quantization.form, quantization.block_size, stack.dtype, is_transposed)
        packings[name] = packing
        delattr(module, name)
        module.register_parameter(name, frozen_bytes(*outer, columns // 2))
        module.register_parameter(
            scales_of(name), frozen_bytes(*outer, packing.scale_bytes * (columns // packing.block_size))
        )
    kind: Any = type(module)
    module.__class__ = _class(kind)
    experts: Any = module
    experts.packings, experts.deltas = packings, {}
    experts.compute_dtype = next(iter(names.values())).compute_dtype
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(False)


@cache
def _class(kind: Any) -> type[nn.Module]:
    eager = staticmethod(eager_experts(kind))
    return type(f"{kind.__name__}InFourBits", (ExpertsInFourBits, kind), {"_eager": eager})


def _without_values(kind: Any) -> nn.Module:
    made = _class(kind)
    return made.__new__(made)


def are_fused_experts(module: nn.Module) -> bool:
    """Whether this is what transformers makes of a mixture's experts: stacked weights, and one way to gate."""
    facts = [getattr(module, fact, None) for fact in ("has_gate", "has_bias", "is_transposed")]
    return None not in facts and hasattr(module, "_apply_gate")


def eager_experts(kind: type[nn.Module]) -> Callable[..., torch.Tensor]:
    """How a class of fused experts computes one after the other, whatever the config would have computed."""
    forward: Any = kind.forward
    found: Callable[..., torch.Tensor] = getattr(forward, "__wrapped__", forward)  # use_experts_implementation
    return found


def are_parted_experts(module: nn.Module) -> bool:
    """Whether ranks have experts of their own."""
    return bool(getattr(module, "_is_expert_parallel", False))


def activated(experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What fused experts make of the first product, (tokens, 2 * width) or (tokens, width): (tokens, width)."""
    found: torch.Tensor = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    return found
