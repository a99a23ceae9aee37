"""Values that no checkpoint holds: initialised parameters and recomputed buffers.

[Note: Initialisers are traced] A model's initialisers (``_init_weights``, ``reset_parameters``) are run once, on a
model whose tensors are stand-ins: a recording one for each that is missing (:mod:`shardwise.models.initialize`), a
real one on the CPU for each buffer to recompute, and a meta tensor, which no initialiser can harm, for everything
else. A recording tensor notes the in-place operations done to it. They are replayed on fixed blocks of the flat
global tensor, each with a generator seeded by (seed, FQN, block), so that every rank of every world size computes
the same values
and no rank holds the tensor whole. An initialiser that is not element by element (orthogonal, say) runs on the
whole tensor instead, one tensor at a time, within the budget.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.errors import CoverageError
from shardwise.layout import LocalBox, Origin, TensorKind
from shardwise.models import pretrained
from shardwise.models.build import NOTHING_ADDED, Additions
from shardwise.models.torch_words import buffers_of, tree_leaves, tree_map_only, without_data, writes_to
from shardwise.models.view import Held, attributes_on_meta, strided_view
from shardwise.tensors import contiguous_strides

BufferRules = Mapping[str, Callable[[nn.Module], torch.Tensor]]
"""Glob of buffer names to a callable that computes the buffer of the module it is given."""


@contextlib.contextmanager
def stand_ins(held: Sequence[Held], chosen: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """For the time of the block, ``chosen`` tensors by FQN, and for all others harmless ones on meta.

    What is computed meanwhile is computed on the host, whatever the user's default device.
    """
    originals = [item.tensor for item in held]
    try:
        for item in held:
            if item.fqn in chosen:
                item.replace(chosen[item.fqn])
                continue
            stand_in = torch.empty(item.tensor.shape, dtype=item.tensor.dtype, device="meta")
            if item.kind is TensorKind.PARAMETER:
                stand_in = nn.Parameter(stand_in, requires_grad=False)
            pretrained.mark_initialized(stand_in)
            item.replace(stand_in)
        with torch.device("cpu"):
            yield
    finally:
        for item, original in zip(held, originals, strict=True):
            item.replace(original)


@dataclass(frozen=True, slots=True)
class ComputedBuffer:
    """Where the value of a non-persistent buffer comes from, and the value (on the CPU) if it was computed."""

    origin: Origin
    value: torch.Tensor | None = None


@dataclass(frozen=True)
class Initialisers:
    """What initialises a model: initialisers of transformers, ``reset_parameters`` of modules, and of a tuning.

    Attributes:
        model: the model; nothing of it is changed but what :meth:`compute_attributes` says.
        held: all tensors of it.
        additions: what a tuning has added.
    """

    model: nn.Module
    held: Sequence[Held]
    additions: Additions = NOTHING_ADDED

    def origin_of(self, item: Held) -> Origin:
        """Where a parameter or persistent buffer that the checkpoint lacks can come from."""
        if item.fqn in self.additions.begun:
            return Origin.TUNING
        if self.additions.base is not None and item.fqn not in self.additions.known_as:
            return Origin.NOWHERE
        if any(slot.module in self._inside for slot in item.slots):
            return Origin.INIT_WEIGHTS
        if any(callable(getattr(slot.module, "reset_parameters", None)) for slot in item.slots):
            return Origin.RESET_PARAMETERS
        return Origin.NOWHERE

    def programs(self, names: Collection[str]) -> dict[str, Program]:
        """The programs of the tensors to initialise, by FQN; vectors of norms have none, see ``RowNorms``."""
        added = self.additions.initialised.intersection(names)
        others = [name for name in names if name not in self.additions.begun]
        return {
            **self._traced(others, lambda: self._run(others)),
            **self._traced(added, self.additions.initialise),
        }

    def whole(self, item: Held, *, seed: int) -> torch.Tensor:
        """One tensor initialised whole on the CPU, for initialisers that are not element by element.

        Memory: the tensor, whole; see :func:`unfit_programs`.

        Raises:
            CoverageError: when no initialiser writes it, which cannot be foreseen where one could not be traced.
        """
        whole = torch.zeros(item.tensor.shape, dtype=item.tensor.dtype, device="cpu")
        untouched = writes_to(whole)
        with _own_random_state(seed_of(seed, item.fqn, 0)), stand_ins(self.held, {item.fqn: whole}):
            self._run({item.fqn})
        if writes_to(whole) == untouched and whole.numel():
            raise CoverageError(f"{item.fqn} is missing and no initialiser of the model writes it")
        return whole

    def buffers(self, rules: BufferRules, *, seed: int) -> dict[str, ComputedBuffer]:
        """The non-persistent buffers, by FQN.

        For a model of transformers this is what ``from_pretrained`` does: its initialisers write the buffers. Of
        other modules real buffers are kept, and ``reset_parameters`` computes those on meta.
        """
        buffers = [item for item in self.held if item.kind is TensorKind.BUFFER]
        outcome = {
            item.fqn: _by_rule(item, rules) or ComputedBuffer(_buffer_origin(item, self._inside))
            for item in buffers
        }
        by_initialiser = (Origin.INIT_WEIGHTS, Origin.RESET_PARAMETERS)
        chosen = [item for item in buffers if outcome[item.fqn].origin in by_initialiser]
        values = self._written_into(chosen, seed=seed)
        for item in chosen:
            if item.fqn in values:
                outcome[item.fqn] = ComputedBuffer(outcome[item.fqn].origin, values[item.fqn])
            else:
                outcome[item.fqn] = ComputedBuffer(Origin.NOWHERE if item.tensor.is_meta else Origin.AS_IT_IS)
        return outcome

    def compute_attributes(self, device: torch.device) -> tuple[str, ...]:
        """Compute tensors that a transformers model keeps as plain attributes again, where they are on meta.

        transformers leaves them there. They are taken from a second model whose constructor ran outside of meta.
        Returns their names.
        """
        found: list[str] = []
        for prefix, outer in pretrained.outermost_pretrained(self.model):
            slots = attributes_on_meta(outer)
            if not slots:
                continue
            with torch.device("cpu"):
                fresh = pretrained.built_without_weights(outer)
            for slot in slots:
                value = getattr(fresh.get_submodule(slot.fqn.rpartition(".")[0]), slot.name)
                if any(isinstance(item, torch.Tensor) and item.is_meta for item in tree_leaves(value)):
                    continue  # not something the constructor computes; the audit will name it
                setattr(slot.module, slot.name, tree_map_only(torch.Tensor, lambda item: item.to(device), value))
                found.append(f"{prefix}.{slot.fqn}" if prefix else slot.fqn)
        return tuple(found)

    @cached_property
    def _inside(self) -> set[nn.Module]:
        """All modules that belong to a model of transformers."""
        return {
            module
            for _, pretrained in pretrained.outermost_pretrained(self.model)
            for module in pretrained.modules()
        }

    def _run(self, names: Collection[str]) -> None:
        """Run what initialises these tensors.

        Of transformers' initialisers, those of the modules that hold them, and of the modules around: an
        initialiser writes into its module, or into what is in it.
        """
        owners = {slot.module: None for item in self.held if item.fqn in names for slot in item.slots}
        around = _with_all_around(self.model, owners)
        for _, outer in pretrained.outermost_pretrained(self.model):
            pretrained.run_initializers(outer, around)
        for module in owners:
            reset = getattr(module, "reset_parameters", None)
            if module not in self._inside and callable(reset):
                with torch.no_grad():
                    reset()

    def _traced(self, names: Collection[str], run: Callable[[], None]) -> dict[str, Program]:
        if not names:
            return {}
        chosen = {
            item.fqn: Programmed.fresh(tuple(item.tensor.shape), item.tensor.dtype)
            for item in self.held
            if item.fqn in names
        }
        with _own_random_state(0), truncated_normal_as_one_step(), stand_ins(self.held, chosen):
            try:
                run()
            except (RuntimeError, NotImplementedError):
                for tensor in chosen.values():
                    tensor.program.is_elementwise = False
        return {name: tensor.program for name, tensor in chosen.items()}

    def _written_into(self, buffers: Sequence[Held], *, seed: int) -> dict[str, torch.Tensor]:
        """The values that initialisers give to ``buffers``, by FQN; those that none of them writes are left out."""
        if not buffers:
            return {}
        fresh = {
            item.fqn: torch.zeros(item.tensor.shape, dtype=item.tensor.dtype, device="cpu") for item in buffers
        }
        untouched = {name: writes_to(tensor) for name, tensor in fresh.items()}
        values: dict[str, torch.Tensor] = {}
        with _own_random_state(seed), stand_ins(self.held, fresh):
            self._run(fresh)
            for item in buffers:
                slot = item.slots[0]
                made = buffers_of(slot.module)[slot.name]  # an initialiser may have registered another tensor
                if made is None or made.is_meta:
                    continue
                if made is not fresh[item.fqn] or writes_to(made) != untouched[item.fqn]:
                    values[item.fqn] = made.detach().to(item.tensor.dtype)
        return values


def unfit_programs(programs: Mapping[str, Program], budget_bytes: int) -> list[str]:
    """A sentence for each tensor that nothing writes, or that must be initialised whole and exceeds the budget."""
    faults: list[str] = []
    for name, program in programs.items():
        nbytes = math.prod(program.shape) * program.dtype.itemsize
        if program.is_elementwise and not program.steps and nbytes:
            faults.append(f"{name}: no initialiser of the model writes it")
        elif not program.is_elementwise and nbytes > budget_bytes:
            faults.append(
                f"{name}: its initialiser needs it whole, {nbytes:,} bytes, and the budget is {budget_bytes:,}; "
                "raise budget_bytes"
            )
    return faults


def _by_rule(item: Held, rules: BufferRules) -> ComputedBuffer | None:
    rule = next((rules[glob] for glob in rules if fnmatchcase(item.fqn, glob)), None)
    if rule is None:
        return None
    with torch.device("cpu"):
        return ComputedBuffer(Origin.CALLABLE, _checked(rule(item.slots[0].module), item))


def _buffer_origin(item: Held, inside: Collection[nn.Module]) -> Origin:
    module = item.slots[0].module
    if module in inside:
        return Origin.INIT_WEIGHTS
    if not item.tensor.is_meta:
        return Origin.AS_IT_IS
    return Origin.RESET_PARAMETERS if callable(getattr(module, "reset_parameters", None)) else Origin.NOWHERE


def _with_all_around(model: nn.Module, modules: Collection[nn.Module]) -> set[nn.Module]:
    """Modules, and all that they are in, under any name."""
    by_name = dict(model.named_modules(remove_duplicate=False))
    names = {name for name, module in by_name.items() if module in modules}
    ahead = list(names)
    while ahead:
        around = ahead.pop().rpartition(".")[0]
        if around not in names:
            names.add(around)
            ahead.append(around)
    return {by_name[name] for name in names}


def _checked(value: torch.Tensor, item: Held) -> torch.Tensor:
    if value.shape != item.tensor.shape:
        raise CoverageError(
            f"{item.fqn}: the callable given computes shape {tuple(value.shape)}, the buffer has "
            f"{tuple(item.tensor.shape)}"
        )
    return value.detach().to(device="cpu", dtype=item.tensor.dtype)


@contextlib.contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """The CPU's random state seeded for the block, and as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


aten = torch.ops.aten

BLOCK_NUMEL = 1 << 20
"""Elements of a block that is seeded by itself. Part of the result: changing it changes initial values."""


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
    """What an initialiser does to one tensor. ``is_elementwise`` is False when it did more than can be replayed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: list[_InPlaceStep] = field(default_factory=list)
    is_elementwise: bool = True

    def add(self, step: _InPlaceStep, *, overwrites: bool) -> None:
        if overwrites and step.stop - step.start == math.prod(self.shape):
            self.steps.clear()
        self.steps.append(step)


class Programmed(torch.Tensor):
    """A tensor without data that records the in-place operations done to it, or to some of its first rows."""

    program: Program
    rows: tuple[int, int]

    @staticmethod
    def __new__(cls, program: Program, shape: Sequence[int], rows: tuple[int, int]) -> Programmed:
        made: Programmed = without_data(cls, shape, program.dtype)
        made.program = program
        made.rows = rows
        return made

    @classmethod
    def fresh(cls, shape: Sequence[int], dtype: torch.dtype) -> Programmed:
        program = Program(tuple(shape), dtype)
        return cls(program, shape, (0, shape[0] if shape else 1))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "generator"}
        target = args[0] if args and isinstance(args[0], Programmed) else None
        others = [item for item in tree_leaves((args[1:], kwargs)) if isinstance(item, torch.Tensor)]
        if target is not None and func in _SAME:
            return target
        if target is not None and func in _ROWS and target.ndim == len(target.program.shape):
            return _take_rows(target, func, *args[1:])
        replayable = func in _OVERWRITES or func in _UPDATES
        if target is not None and replayable and not any(isinstance(item, Programmed) for item in others):
            target.record(func, args[1:], kwargs)
            return target
        # Something else: its values are not followed, only its shapes, so that the initialiser can go on.
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, Programmed):
                item.program.is_elementwise = False
        args, kwargs = tree_map_only(
            Programmed, lambda item: torch.empty(item.shape, dtype=item.dtype, device="meta"), (args, kwargs)
        )
        return func(*args, **kwargs)

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        row = math.prod(self.program.shape[1:])
        if args and isinstance(args[0], torch.Tensor):
            # The values may be random, drawn by the initialiser itself; they are to follow from the FQN.
            self.program.is_elementwise = False
            args = (args[0].expand(self.shape).reshape(-1), *args[1:])
        step = _InPlaceStep(func, args, kwargs, self.rows[0] * row, self.rows[1] * row)
        self.program.add(step, overwrites=func in _OVERWRITES or func is _TRUNCATED_NORMAL)


_SAME = {aten.detach.default, aten.alias.default}
_ROWS = {aten.select.int, aten.slice.Tensor}
_OVERWRITES = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.copy_.default,
    aten.exponential_.default,
    aten.log_normal_.default,
}
_TRUNCATED_NORMAL = nn.init.trunc_normal_
_RANDOM = {
    _TRUNCATED_NORMAL,
    aten.normal_.default,
    aten.uniform_.default,
    aten.exponential_.default,
    aten.log_normal_.default,
}
_UPDATES = {
    aten.add_.Scalar,
    aten.add_.Tensor,
    aten.sub_.Scalar,
    aten.sub_.Tensor,
    aten.mul_.Scalar,
    aten.mul_.Tensor,
    aten.div_.Scalar,
    aten.div_.Tensor,
    aten.pow_.Scalar,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.erfinv_.default,
    aten.exp_.default,
    aten.log_.default,
    aten.neg_.default,
    aten.sqrt_.default,
}


def _take_rows(target: Programmed, func: Any, *args: Any) -> Any:
    """A view of some rows, where it is one; recorded steps on it count from its first row."""
    dim = args[0] if args else 0
    first, last = target.rows
    if dim == 0 and func is aten.select.int:
        row = first + args[1] % (last - first)
        return Programmed(target.program, target.shape[1:], (row, row + 1))
    if dim == 0 and (len(args) < 4 or args[3] == 1):
        start, stop, _ = slice(*args[1:3]).indices(last - first)
        return Programmed(target.program, (max(stop - start, 0), *target.shape[1:]), (first + start, first + stop))
    target.program.is_elementwise = False
    return func(torch.empty(target.shape, dtype=target.dtype, device="meta"), *args)


def fill_from_program(
    program: Program, local: torch.Tensor, boxes: Sequence[LocalBox], *, seed: int, fqn: str
) -> None:
    """Compute the values of this rank's boxes into ``local``. Memory: one block of ``BLOCK_NUMEL`` elements."""
    for item in boxes:
        for start, flat, where in _pieces(program.shape, item):
            block = _block(program, start, seed, fqn)
            target = strided_view(local, item.local)
            if isinstance(where, slice):
                target.view(-1)[where] = block[flat].to(local.device)
            else:
                target[where] = block[flat].to(local.device)


def _pieces(shape: tuple[int, ...], item: LocalBox) -> Iterator[tuple[int, Any, Any]]:
    """(first element of a block, which of its elements, where in the box they go), block by block."""
    box = item.box
    strides = contiguous_strides(shape)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    if item.local.is_contiguous and box.sizes[1:] == shape[1:]:
        last = first + box.numel
        for start in range(first - first % BLOCK_NUMEL, last, BLOCK_NUMEL):
            low, high = max(first, start), min(last, start + BLOCK_NUMEL)
            yield start, slice(low - start, high - start), slice(low - first, high - first)
        return
    last = first + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True)) + 1
    for start in range(first - first % BLOCK_NUMEL, last, BLOCK_NUMEL):
        flat = torch.arange(start, min(start + BLOCK_NUMEL, math.prod(shape)), device="cpu")
        inside = torch.ones_like(flat, dtype=torch.bool)
        places: list[torch.Tensor] = []
        for offset, size, bound, stride in zip(box.offsets, box.sizes, shape, strides, strict=True):
            place = flat // stride % bound - offset
            inside &= (place >= 0) & (place < size)
            places.append(place)
        yield start, flat[inside] - start, tuple(place[inside] for place in places)


def _block(program: Program, start: int, seed: int, fqn: str) -> torch.Tensor:
    stop = min(start + BLOCK_NUMEL, math.prod(program.shape))
    block = torch.zeros(stop - start, dtype=program.dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed_of(seed, fqn, start // BLOCK_NUMEL))
    for step in program.steps:
        low, high = max(step.start, start), min(step.stop, stop)
        if low < high:
            args = step.args
            if args and isinstance(args[0], torch.Tensor):
                args = (args[0][low - step.start : high - step.start], *args[1:])
            extra = {"generator": generator} if step.func in _RANDOM else {}
            step.func(block[low - start : high - start], *args, **step.kwargs, **extra)
    return block


def seed_of(seed: int, fqn: str, block: int) -> int:
    """The seed of one block of a tensor."""
    digest = hashlib.sha256(f"{seed}/{fqn}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextlib.contextmanager
def truncated_normal_as_one_step() -> Iterator[None]:
    """Let ``trunc_normal_`` be recorded as a whole: it draws until nothing is rejected, which needs values."""

    def record(
        tensor: torch.Tensor,
        mean: float = 0.0,
        std: float = 1.0,
        a: float = -2.0,
        b: float = 2.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not isinstance(tensor, Programmed):
            return _TRUNCATED_NORMAL(tensor, mean, std, a, b, generator)
        tensor.record(_TRUNCATED_NORMAL, (mean, std, a, b), {})
        return tensor

    with pretrained.init_function("trunc_normal_", record):
        nn.init.trunc_normal_ = record
        try:
            yield
        finally:
            nn.init.trunc_normal_ = _TRUNCATED_NORMAL


def program_of(whole: torch.Tensor) -> Program:
    """The program that copies a tensor already computed."""
    step = _InPlaceStep(aten.copy_.default, (whole.reshape(-1),), {}, 0, whole.numel())
    return Program(tuple(whole.shape), whole.dtype, [step])
