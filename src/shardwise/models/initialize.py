"""Values that the checkpoint lacks: initialized parameters and recomputed buffers.

[Note: Initializers are traced] A model's initializers (``_init_weights``, ``reset_parameters``) run once, on a
model whose tensors are replaced: missing ones by recording tensors (:mod:`shardwise.models.initial_programs`),
buffers to recompute by real tensors on the CPU, and all others by meta tensors. A recording tensor records the
in-place operations on it. They are replayed on fixed blocks of the flat global tensor, each with a generator seeded
by (seed, FQN, block), so that values do not depend on the number of ranks and no rank has the full tensor. An
initializer that is not elementwise (orthogonal, for example) runs on full tensors, one at a time, within the
budget.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.core.errors import KeyMismatchError
from shardwise.core.formatting import join_names
from shardwise.core.layout import Origin, TensorKind
from shardwise.fsdp.named_tensors import TensorRef, attributes_on_meta, raw_bytes
from shardwise.fsdp.torch_private import get_buffers, get_version, to_device, tree_leaves, tree_map_only
from shardwise.models import pretrained

if TYPE_CHECKING:
    from shardwise.models.initial_programs import Program

BufferRules = Mapping[str, Callable[[nn.Module], torch.Tensor]]
"""Functions that compute a buffer of a module, by glob of buffer names."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Additions:
    """Modules that were added to a model. The default is none.

    Attributes:
        base: the transformers model inside, whose class's rules apply. None for the model itself.
        base_names: names in the base by names in the model. A copy has its original's name, added tensors none.
        initialized: names of the tensors that ``initialize`` writes.
        initialize: runs the initializers of added modules on their present tensors.
        copies: names of originals by names of parameters that are initialized with their values.
        norms: names of matrices whose row norms initialize a vector (the magnitude of DoRA), by its name.
        nested: names of scales of 4-bit weights that are computed after all scales are read.
    """

    base: nn.Module | None = None
    base_names: Mapping[str, str] = field(default_factory=dict)
    initialized: frozenset[str] = frozenset()
    initialize: Callable[[], None] = _nothing
    copies: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=dict)
    nested: frozenset[str] = frozenset()

    @property
    def from_tuning(self) -> frozenset[str]:
        """Names of the tensors that the tuning initializes."""
        return self.initialized.union(self.norms, self.nested)


NOTHING_ADDED = Additions()


@contextlib.contextmanager
def replace_tensors(tensors: Sequence[TensorRef], chosen: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace tensors within the block: by those in ``chosen``, by FQN, or by meta tensors.

    The default device within the block is the CPU.
    """
    originals = [item.tensor for item in tensors]
    try:
        for item in tensors:
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
        for item, original in zip(tensors, originals, strict=True):
            item.replace(original)


@dataclass(frozen=True, slots=True)
class ComputedBuffer:
    """Source of a non-persistent buffer, and its value on the CPU if it is computed."""

    origin: Origin
    value: torch.Tensor | None = None


@dataclass(frozen=True)
class Initializers:
    """Initializers of a model: those of transformers, ``reset_parameters`` of modules, and those of a tuning.

    Attributes:
        model: the model. Only :meth:`compute_attributes` changes it.
        tensors: those of the model.
        additions: modules added by a tuning.
    """

    model: nn.Module
    tensors: Sequence[TensorRef]
    additions: Additions = NOTHING_ADDED

    def find_origin(self, item: TensorRef) -> Origin:
        """Return the source of a parameter or persistent buffer that is missing in the checkpoint."""
        if item.fqn in self.additions.from_tuning:
            return Origin.TUNING
        if self.additions.base is not None and item.fqn not in self.additions.base_names:
            return Origin.NOWHERE
        # Without a tuning: _init_weights would make lora_B normal, and PEFT has zeros in it.
        if self.additions.base is None and any(slot.module in self._adapter_modules for slot in item.slots):
            return Origin.NOWHERE
        if any(slot.module in self._transformers_modules for slot in item.slots):
            return Origin.INIT_WEIGHTS
        if any(callable(getattr(slot.module, "reset_parameters", None)) for slot in item.slots):
            return Origin.RESET_PARAMETERS
        return Origin.NOWHERE

    def programs(self, names: Collection[str]) -> dict[str, Program]:
        """Return the programs of the tensors to initialize, by FQN. There are none for norms of rows."""
        added = self.additions.initialized.intersection(names)
        others = [name for name in names if name not in self.additions.from_tuning]
        return {
            **self._trace(others, partial(self._run, others)),
            **self._trace(added, self.additions.initialize),
        }

    def initialize_whole(self, item: TensorRef, *, seed: int) -> torch.Tensor:
        """Initialize one full tensor on the CPU, for initializers that are not elementwise.

        Memory: the full tensor. See :func:`list_unfit_programs`.

        Raises:
            KeyMismatchError: no initializer writes it.
        """
        from shardwise.models.initial_programs import derive_seed

        whole = torch.zeros(item.tensor.shape, dtype=item.tensor.dtype, device="cpu")
        untouched = get_version(whole)
        with _seed_random_state(derive_seed(seed, item.fqn, 0)), replace_tensors(self.tensors, {item.fqn: whole}):
            self._run({item.fqn})
        if whole.numel() and not _is_written(whole, untouched):
            raise KeyMismatchError(f"{item.fqn}: is missing, and no initializer of the model writes it")
        return whole

    def buffers(self, rules: BufferRules, *, seed: int) -> dict[str, ComputedBuffer]:
        """Compute the non-persistent buffers, by FQN.

        Initializers of a transformers model write its buffers, as in ``from_pretrained``. Real buffers of other
        modules are kept, and ``reset_parameters`` computes those on meta.
        """
        buffers = [item for item in self.tensors if item.kind is TensorKind.NON_PERSISTENT_BUFFER]
        # The source of each buffer: a rule of the caller, otherwise the initializers, or its present value.
        outcome = {
            item.fqn: _by_rule(item, rules) or ComputedBuffer(_buffer_origin(item, self._transformers_modules))
            for item in buffers
        }
        by_initializer = (Origin.INIT_WEIGHTS, Origin.RESET_PARAMETERS)
        chosen = [item for item in buffers if outcome[item.fqn].origin in by_initializer]
        # One run of the initializers writes all of these. What it leaves unwritten keeps its values, if it has any.
        values = self._compute_buffers(chosen, seed=seed)
        for item in chosen:
            if item.fqn in values:
                outcome[item.fqn] = ComputedBuffer(outcome[item.fqn].origin, values[item.fqn])
            else:
                outcome[item.fqn] = ComputedBuffer(Origin.NOWHERE if item.tensor.is_meta else Origin.AS_IT_IS)
        return outcome

    @torch.inference_mode(mode=False)  # a forward pass could not save them for the backward pass
    def compute_attributes(self, device: torch.device) -> tuple[str, ...]:
        """Recompute tensors on meta that a transformers model has as plain attributes. Return their names.

        They are taken from a second model, whose constructor runs outside of meta.
        """
        names: list[str] = []
        for prefix, outer in pretrained.outermost_pretrained(self.model):
            slots = attributes_on_meta(outer)
            if not slots:
                continue
            from shardwise.models.initial_programs import built_without_weights

            with torch.device("cpu"):
                fresh = built_without_weights(outer)
            for slot in slots:
                value = getattr(fresh.get_submodule(slot.fqn.rpartition(".")[0]), slot.name)
                if any(isinstance(item, torch.Tensor) and item.is_meta for item in tree_leaves(value)):
                    continue  # the constructor does not compute it: an error of the audit
                value = tree_map_only(torch.Tensor, partial(to_device, device=device), value)
                setattr(slot.module, slot.name, value)
                names.append(join_names(prefix, slot.fqn))
        return tuple(names)

    @cached_property
    def _transformers_modules(self) -> set[nn.Module]:
        """All modules in models of transformers."""
        return {module for _, outer in pretrained.outermost_pretrained(self.model) for module in outer.modules()}

    @cached_property
    def _adapter_modules(self) -> set[nn.Module]:
        """Modules that PEFT has added: of adapters, and trained copies."""
        added: set[nn.Module] = set()
        for module in self.model.modules():
            # Of PEFT's layers: ("lora_A", "lora_B", ...), ("modules_to_save",).
            for name in getattr(module, "adapter_layer_names", ()):
                added.update(module.get_submodule(name).modules())
        return added

    def _run(self, names: Collection[str]) -> None:
        """Run the initializers of these tensors.

        An initializer of transformers writes to its module and its descendants, so those of all parents are run.
        """
        # A dict, because reset_parameters of modules draws random values in its order.
        owners = {slot.module: None for item in self.tensors if item.fqn in names for slot in item.slots}
        around = _add_parents(self.model, owners)
        for _, outer in pretrained.outermost_pretrained(self.model):
            pretrained.run_initializers(outer, around)
        for module in owners:
            reset = getattr(module, "reset_parameters", None)
            if module not in self._transformers_modules and callable(reset):
                with torch.no_grad():
                    reset()

    def _trace(self, names: Collection[str], run: Callable[[], None]) -> dict[str, Program]:
        if not names:
            return {}
        from shardwise.models.initial_programs import ProgramTensor, record_truncated_normal

        chosen: dict[str, ProgramTensor] = {}
        for item in self.tensors:
            if item.fqn in names:
                chosen[item.fqn] = ProgramTensor.fresh(tuple(item.tensor.shape), item.tensor.dtype)
        # The seed is for random numbers that the initializers draw outside of the recorded tensors.
        with _seed_random_state(0), record_truncated_normal(), replace_tensors(self.tensors, chosen):
            try:
                run()
            except (RuntimeError, NotImplementedError):
                # An initializer has read values, which recording tensors do not have. It is run again on a full
                # tensor later, for each of these tensors.
                for tensor in chosen.values():
                    tensor.program.is_elementwise = False
        return {name: tensor.program for name, tensor in chosen.items()}

    @torch.inference_mode(mode=False)  # tensors of the mode have no versions
    def _compute_buffers(self, buffers: Sequence[TensorRef], *, seed: int) -> dict[str, torch.Tensor]:
        """Return the values that initializers write to ``buffers``, by FQN."""
        if not buffers:
            return {}
        fresh = {
            item.fqn: torch.zeros(item.tensor.shape, dtype=item.tensor.dtype, device="cpu") for item in buffers
        }
        untouched = {name: get_version(tensor) for name, tensor in fresh.items()}
        values: dict[str, torch.Tensor] = {}
        with _seed_random_state(seed), replace_tensors(self.tensors, fresh):
            self._run(fresh)
            for item in buffers:
                slot = item.slots[0]
                buffer = get_buffers(slot.module)[slot.name]  # an initializer may have registered another tensor
                if buffer is None or buffer.is_meta:
                    continue
                if buffer is not fresh[item.fqn] or _is_written(buffer, untouched[item.fqn]):
                    values[item.fqn] = buffer.detach().to(item.tensor.dtype)
        return values


def _is_written(zeros: torch.Tensor, untouched: int) -> bool:
    """Return whether an initializer has written a tensor of zeros, which had the version ``untouched`` before."""
    # Zeros change the version only, and what is written through .data changes the values only. Zeros that are
    # written through .data are not seen.
    return get_version(zeros) != untouched or bool(raw_bytes(zeros).any())


def list_unfit_programs(programs: Mapping[str, Program], budget_bytes: int) -> list[str]:
    """Return a sentence for each tensor that no initializer writes, or whose initialization exceeds the budget."""
    errors: list[str] = []
    for name, program in programs.items():
        nbytes = math.prod(program.shape) * program.dtype.itemsize
        if program.is_elementwise and not program.steps and nbytes:
            errors.append(f"{name}: no initializer of the model writes it")
        elif not program.is_elementwise and nbytes > budget_bytes:
            errors.append(
                f"{name}: its initializer needs the full tensor, {nbytes:,} bytes, but the budget is "
                f"{budget_bytes:,}. Raise budget_bytes"
            )
    return errors


def _by_rule(item: TensorRef, rules: BufferRules) -> ComputedBuffer | None:
    rule = next((rules[glob] for glob in rules if fnmatchcase(item.fqn, glob)), None)
    if rule is None:
        return None
    with torch.device("cpu"):
        value = rule(item.slots[0].module)
    if value.shape != item.tensor.shape:
        raise KeyMismatchError(
            f"{item.fqn}: the function in buffers= computes shape {tuple(value.shape)}, but the buffer has "
            f"{tuple(item.tensor.shape)}. Return a tensor of this shape"
        )
    return ComputedBuffer(Origin.CALLABLE, value.detach().to(device="cpu", dtype=item.tensor.dtype))


def _buffer_origin(item: TensorRef, inside: Collection[nn.Module]) -> Origin:
    module = item.slots[0].module
    if module in inside:
        return Origin.INIT_WEIGHTS
    if not item.tensor.is_meta:
        return Origin.AS_IT_IS
    return Origin.RESET_PARAMETERS if callable(getattr(module, "reset_parameters", None)) else Origin.NOWHERE


def _add_parents(model: nn.Module, modules: Collection[nn.Module]) -> set[nn.Module]:
    """Return modules and all of their parents, under any name."""
    by_name = dict(model.named_modules(remove_duplicate=False))
    names = {name for name, module in by_name.items() if module in modules}
    # The parents of a.b.c are a and a.b.
    parents = {parent for name in names for parent in accumulate(name.split("."), "{}.{}".format)}
    return {model, *(by_name[name] for name in parents)} if names else set()


@contextlib.contextmanager
def _seed_random_state(seed: int) -> Iterator[None]:
    """Seed the CPU's random state within the block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
