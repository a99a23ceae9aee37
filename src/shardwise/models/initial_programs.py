"""Initializers as programs: operations that are recorded on a tensor, and replayed on blocks of it.

See [Note: Initializers are traced] in ``models/initialize.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.layout import LocalBox
from shardwise.core.regions import Region, flatten
from shardwise.core.tensors import Box
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import strided_view
from shardwise.models import pretrained
from shardwise.models.pretrained import not_initializing

aten = torch.ops.aten


BLOCK_NUMEL = 1 << 20
"""Elements of a block with a seed of its own. Changing it changes initial values."""


@dataclass(frozen=True, slots=True)
class _InPlaceStep:
    """An in-place operation on the flat elements ``start <= i < stop`` of the tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    start: int
    stop: int


@dataclass(slots=True)
class Program:
    """Recorded operations of an initializer on one tensor.

    ``is_elementwise`` is False if they cannot be replayed in blocks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: list[_InPlaceStep] = field(default_factory=list)
    is_elementwise: bool = True

    def add(self, step: _InPlaceStep, *, overwrites: bool) -> None:
        # Earlier steps have no effect any more. If they were replayed, they would consume random numbers.
        if overwrites and step.stop - step.start == math.prod(self.shape):
            self.steps.clear()
        self.steps.append(step)


class ProgramTensor(torch.Tensor):
    """A tensor without data, or rows of one, that records in-place operations."""

    program: Program
    rows: tuple[int, int]

    @staticmethod
    def __new__(cls, program: Program, shape: Sequence[int], rows: tuple[int, int]) -> ProgramTensor:
        tensor: ProgramTensor = torch_private.make_without_memory(cls, shape, program.dtype)
        tensor.program = program
        tensor.rows = rows
        return tensor

    @classmethod
    def fresh(cls, shape: Sequence[int], dtype: torch.dtype) -> ProgramTensor:
        program = Program(tuple(shape), dtype)
        return cls(program, shape, (0, shape[0] if shape else 1))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The generator is that of the block when the operation is replayed.
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "generator"}
        # An operation is an alias, a view of rows, a step of the program, or anything else, which makes the program
        # one that cannot be replayed in blocks.
        target = args[0] if args and isinstance(args[0], ProgramTensor) else None
        others = [item for item in torch_private.tree_leaves((args[1:], kwargs)) if isinstance(item, torch.Tensor)]
        if target is not None and func in _ALIASES:
            return target
        if target is not None and func in _ROWS and target.ndim == len(target.program.shape):
            return _take_rows(target, func, *args[1:])
        replayable = func in _OVERWRITES or func in _UPDATES
        if target is not None and replayable and not any(isinstance(item, ProgramTensor) for item in others):
            target.record(func, args[1:], kwargs)
            return target
        # Other operations are run on meta tensors, so that the initializer can continue.
        for item in torch_private.tree_leaves((args, kwargs)):
            if isinstance(item, ProgramTensor):
                item.program.is_elementwise = False
        args, kwargs = torch_private.tree_map_only(
            ProgramTensor, lambda item: torch.empty(item.shape, dtype=item.dtype, device="meta"), (args, kwargs)
        )
        return func(*args, **kwargs)

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        row = math.prod(self.program.shape[1:])
        if args and isinstance(args[0], torch.Tensor):
            # The values may be random, and must depend on the FQN only.
            self.program.is_elementwise = False
            args = (args[0].expand(self.shape).reshape(-1), *args[1:])
        # For example rows 1 and 2 of a tensor (4, 3) are the elements 3 to 8.
        step = _InPlaceStep(func, args, kwargs, self.rows[0] * row, self.rows[1] * row)
        self.program.add(step, overwrites=func in _OVERWRITES or func is _TRUNCATED_NORMAL)


_ALIASES = {aten.detach.default, aten.alias.default}


_ROWS = {aten.select.int, aten.slice.Tensor}


_TRUNCATED_NORMAL = nn.init.trunc_normal_

_DRAWN = {getattr(aten, name).default for name in ("normal_", "uniform_", "exponential_", "log_normal_")}

_RANDOM = {_TRUNCATED_NORMAL, *_DRAWN}

_OVERWRITES = {*_DRAWN, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default}

_ARITHMETIC = [getattr(aten, name) for name in ("add_", "sub_", "mul_", "div_")]

_UPDATES = {
    aten.pow_.Scalar,
    *(operator.Scalar for operator in _ARITHMETIC),
    *(operator.Tensor for operator in _ARITHMETIC),
    *(getattr(aten, name).default for name in ("clamp_", "clamp_min_", "clamp_max_", "neg_")),
    *(getattr(aten, name).default for name in ("erfinv_", "exp_", "log_", "sqrt_")),
}


def _take_rows(target: ProgramTensor, func: Any, *args: Any) -> Any:
    """Return a view of consecutive rows, or a meta tensor for any other view."""
    dim = args[0] if args else 0
    first, last = target.rows
    if dim == 0 and func is aten.select.int:
        row = first + args[1] % (last - first)
        return ProgramTensor(target.program, target.shape[1:], (row, row + 1))
    if dim == 0 and (len(args) < 4 or args[3] == 1):
        start, stop, _ = slice(*args[1:3]).indices(last - first)
        shape = (max(stop - start, 0), *target.shape[1:])
        return ProgramTensor(target.program, shape, (first + start, first + stop))
    target.program.is_elementwise = False
    return func(torch.empty(target.shape, dtype=target.dtype, device="meta"), *args)


def values_from_program(
    program: Program, local: torch.Tensor, boxes: Sequence[LocalBox], *, seed: int, fqn: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of ``local`` that make up this rank's boxes, with their values on the CPU.

    Memory: one block of ``BLOCK_NUMEL`` elements.
    """
    # For example rows 1 and 2 of a tensor (4, 3) are the elements 3 to 8 of the flat tensor. With blocks of 4, they
    # are in the blocks 0 (element 3), 1 (4 to 7) and 2 (8), which are computed one after the other, each in full:
    # a random number depends on how many were drawn before it in its block.
    for item in boxes:
        region = flatten(Region.from_box(item.box, item.local), program.shape)
        (first,), (stop,) = region.origin, region.bounds.stops
        for start in range(first - first % BLOCK_NUMEL, stop, BLOCK_NUMEL):
            pieces = list(region.within(Box((start,), (BLOCK_NUMEL,))))
            if not pieces:
                continue
            block = _block(program, start, seed, fqn)
            for piece in pieces:
                source, target = piece.to_strided((1,))
                yield strided_view(local, target), strided_view(block, source)


def _block(program: Program, start: int, seed: int, fqn: str) -> torch.Tensor:
    stop = min(start + BLOCK_NUMEL, math.prod(program.shape))
    block = torch.zeros(stop - start, dtype=program.dtype, device="cpu")
    generator = torch.Generator().manual_seed(derive_seed(seed, fqn, start // BLOCK_NUMEL))
    # In order: each step draws from the generator where the step before has left it.
    for step in program.steps:
        low, high = max(step.start, start), min(step.stop, stop)  # the part of the step in this block
        if low < high:
            args = step.args
            if args and isinstance(args[0], torch.Tensor):
                args = (args[0][low - step.start : high - step.start], *args[1:])
            extra = {"generator": generator} if step.func in _RANDOM else {}
            step.func(block[low - start : high - start], *args, **step.kwargs, **extra)
    return block


def derive_seed(seed: int, fqn: str, block: int) -> int:
    """Return the seed of one block of a tensor."""
    digest = hashlib.sha256(f"{seed}/{fqn}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits, which a signed 64-bit integer has room for


@contextlib.contextmanager
def record_truncated_normal() -> Iterator[None]:
    """Record ``trunc_normal_`` as one step inside of this context, because its rejection sampling needs values."""

    def record(
        tensor: torch.Tensor,
        mean: float = 0.0,
        std: float = 1.0,
        a: float = -2.0,
        b: float = 2.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not isinstance(tensor, ProgramTensor):
            return _TRUNCATED_NORMAL(tensor, mean, std, a, b, generator)
        tensor.record(_TRUNCATED_NORMAL, (mean, std, a, b), {})
        return tensor

    with pretrained.replace_init_function("trunc_normal_", record):
        nn.init.trunc_normal_ = record
        try:
            yield
        finally:  # torch's own, and not what was found: blocks of two threads may overlap
            nn.init.trunc_normal_ = _TRUNCATED_NORMAL


def copy_program(whole: torch.Tensor) -> Program:
    """Return the program that copies a tensor."""
    step = _InPlaceStep(aten.copy_.default, (whole.reshape(-1),), {}, 0, whole.numel())
    return Program(tuple(whole.shape), whole.dtype, [step])


def built_without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Build another model of the same class and config, with parameters on meta and computed buffers.

    Memory: buffers. One parameter at a time is allocated, but not written.
    """
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        # The method is the class's, so other threads that build modules call this one, too.
        if parameter is not None and threading.get_ident() == thread:
            torch_private.get_parameters(module)[name] = nn.Parameter(
                parameter.to("meta"), requires_grad=parameter.requires_grad
            )

    model_class: Any = torch_private.original_class(model)
    with mock.patch.object(nn.Module, "register_parameter", register_on_meta), not_initializing():
        fresh: PreTrainedModel = pretrained.build_from_config(model_class, model.config)
    return fresh
