"""Fills in what no checkpoint holds, and what a base adds to a load that is not kept as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn

from shardwise._face import found_at
from shardwise.conversion import Bindings, rows_stored
from shardwise.engines.load_plan import PreparedLoad
from shardwise.errors import ConfigError, PlacementError
from shardwise.execution.memory.garbage import collected_later
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.audit import audit
from shardwise.layout import LocalBox, ModelLayout, TensorKind, TensorLayout, first_rows, last_rows
from shardwise.models.additions import MeanOfRows, RowNorms
from shardwise.models.pretrained import mark_loaded
from shardwise.models.programs import fill_from_program, program_of
from shardwise.models.torch_words import modules_in
from shardwise.models.view import Held, meta_leftovers, strided_view
from shardwise.planning.loads.load_plan import Init, LoadPlan, Read
from shardwise.tensors import Box

_NORM_BLOCK_NUMEL = 1 << 22
"""Elements of a matrix whose rows' norms are computed at a time."""


@collected_later()
def finish(
    model: nn.Module,
    ready: PreparedLoad,
    means: Mapping[str, torch.Tensor],
    read: Mapping[str, int],
    clock: Clock,
) -> tuple[str, ...]:
    """Fill what comes from no checkpoint, and prove that nothing is left; names of attributes computed again.

    ``read`` counts the elements that have been written, by FQN.
    """
    written = dict(read)
    with clock.phase("fill"):
        fill(ready, means, written)
        attributes = ready.initialisers.compute_attributes(ready.home)
    with clock.phase("audit"):
        audit(ready.plan, written, meta_leftovers(model))
        mark_loaded(model, (item.tensor for item in ready.held))
    return attributes


def average_rows(world: World, ready: PreparedLoad) -> dict[str, torch.Tensor]:
    """The mean of the stored rows of each tensor whose further rows begin as that, on every rank the same.

    In float64; another number of ranks adds up in another order. Collective: yes, where there are such tensors.
    """
    if not isinstance(ready.request.additions.new_rows, MeanOfRows):
        return {}
    by_name = {item.fqn: item for item in ready.held}
    rows = {name: count for name, read in ready.plan.reads().items() if (count := rows_stored(read.expression))}

    def sums() -> dict[tuple[str, Box], torch.Tensor]:
        return {
            (name, part.box): strided_view(by_name[name].local, part.local).double().sum(0).cpu()
            for name, count in rows.items()
            for part in first_rows(ready.plan.layout.by_name[name].boxes, count)
        }

    def add_up(told: Sequence[Mapping[tuple[str, Box], torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = {part: total for sums in told for part, total in sums.items()}  # replicas tell of the same boxes
        means = {
            name: torch.zeros(by_name[name].tensor.shape[1:], dtype=torch.float64, device="cpu") for name in rows
        }
        for (name, box), total in sorted(found.items(), key=lambda entry: (entry[0][0], entry[0][1].offsets)):
            columns = tuple(
                slice(start, start + size) for start, size in zip(box.offsets[1:], box.sizes[1:], strict=True)
            )
            means[name][columns] += total / rows[name]
        return means

    return world.all_reduce(sums, add_up)


def fill(ready: PreparedLoad, means: Mapping[str, torch.Tensor], written: dict[str, int]) -> None:
    """Values that come from no checkpoint: initialised tensors and recomputed buffers."""
    layout, additions, seed = ready.plan.layout, ready.request.additions, ready.request.options.seed
    by_name = {name: item for item in ready.held for name in item.names}
    for item in ready.held:
        tensor = layout.by_name[item.fqn]
        if item.fqn in ready.programs:
            program = ready.programs[item.fqn]
            first = by_name[additions.copies.get(item.fqn, item.fqn)]  # a copy begins as what it is a copy of
            if not program.is_elementwise:
                whole = ready.initialisers.whole(first, seed=seed)
                program = program_of(whole)
            boxes = boxes_to_fill(ready.plan, item.fqn)
            fill_from_program(program, item.local, boxes, seed=seed, fqn=first.fqn)
            written[item.fqn] = written.get(item.fqn, 0) + sum(part.box.numel for part in boxes)
        elif item.fqn in means:
            for part in boxes_to_fill(ready.plan, item.fqn):
                start, size = part.box.offsets[1:], part.box.sizes[1:]
                mean = means[item.fqn][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
                strided_view(item.local, part.local).copy_(mean.expand(part.box.sizes))
                written[item.fqn] = written.get(item.fqn, 0) + part.box.numel
        elif item.fqn in additions.norms and isinstance(ready.plan.fills[item.fqn], Init):
            norms = additions.norms[item.fqn]
            fill_with_norms(item, tensor, by_name[norms.matrix], layout.by_name[norms.matrix], norms)
            written[item.fqn] = tensor.local_numel
        elif item.kind is TensorKind.BUFFER and (value := ready.computed[item.fqn].value) is not None:
            give_value(item, value)


def boxes_to_fill(plan: LoadPlan, name: str) -> Sequence[LocalBox]:
    """What this rank holds of a tensor that no checkpoint has: all of it, or its last rows."""
    boxes, fill = plan.layout.by_name[name].boxes, plan.fills[name]
    count = rows_stored(fill.expression) if isinstance(fill, Read) else None
    return boxes if count is None else last_rows(boxes, count)


def fill_with_norms(item: Held, tensor: TensorLayout, matrix: Held, rows: TensorLayout, norms: RowNorms) -> None:
    """The norms of the rows of a matrix, which is loaded already. Memory: a block of rows.

    Raises:
        PlacementError: this rank does not hold whole rows where it holds the vector.
    """
    held = [(box.box.offsets[:1], box.box.sizes[:1]) for box in tensor.boxes]
    if held != [(box.box.offsets[:1], box.box.sizes[:1]) for box in rows.boxes] or any(
        box.box.sizes[1:] != rows.shape[1:] for box in rows.boxes
    ):
        raise PlacementError(
            f"{item.fqn} begins as the norms of the rows of {matrix.fqn}, which is {rows.placement}, and it is "
            f"{tensor.placement}: this rank lacks rows it needs; use another initialisation than DoRA's, or shard "
            "both on their first dimension"
        )
    step = max(1, _NORM_BLOCK_NUMEL // max(1, math.prod(rows.shape[1:])))
    for start in range(0, item.local.shape[0], step):
        block = matrix.local[start : start + step]
        item.local[start : start + step] = norms.of(block).to(item.local.dtype)


def give_value(item: Held, value: torch.Tensor) -> None:
    """Give a buffer that has memory its value."""
    if _is_dense(item.local):
        item.local.copy_(value)
    else:  # an expanded view: its elements share memory
        item.install(value.to(item.local.device))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether every element has memory of its own."""
    return all(size < 2 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class BaseForm(Protocol):
    """A way in which layers keep their weights. Asked in this order, for all layers of a model."""

    def in_numbers(self, layout: ModelLayout, held: Sequence[Held]) -> ModelLayout:
        """The tensors that a checkpoint's keys are bound to: numbers, in place of what is kept of them."""
        ...

    def offered(self, model: nn.Module, bindings: Bindings) -> Bindings:
        """What is offered for what is kept, of what a checkpoint offers for numbers."""
        ...

    def with_room(self, model: nn.Module, bindings: Bindings) -> Bindings:
        """Give the sharded model room for what is read on the way, and offer that, too."""
        ...

    def made_later(self, model: nn.Module) -> frozenset[str]:
        """Names of the tensors that nothing is read into, since :meth:`complete` makes them."""
        ...

    def complete(self, world: World, model: nn.Module, *, budget_bytes: int) -> dict[str, int]:
        """Make them of what has been read, and let that go; by name, how many elements were written.

        Collective: yes, where there are such tensors.
        """
        ...

    def let_go(self, model: nn.Module) -> None:
        """Of a load that has failed: the model has what it had before."""
        ...


FORMS: Final[dict[str, str]] = {"four bits": "shardwise.engines.nesting:FOUR_BITS"}
"""By what classes of layers say as ``kept_as``, where their form is, as ``package.module:name``."""


@dataclass(frozen=True, slots=True)
class BaseForms:
    """All forms that there are in a model, as one; none for a model of numbers."""

    forms: tuple[BaseForm, ...]

    def in_numbers(self, layout: ModelLayout, held: Sequence[Held]) -> ModelLayout:
        for form in self.forms:
            layout = form.in_numbers(layout, held)
        return layout

    def offered(self, model: nn.Module, bindings: Bindings) -> Bindings:
        for form in self.forms:
            bindings = form.offered(model, bindings)
        return bindings

    def with_room(self, model: nn.Module, bindings: Bindings) -> Bindings:
        for form in self.forms:
            bindings = form.with_room(model, bindings)
        return bindings

    def made_later(self, model: nn.Module) -> frozenset[str]:
        return frozenset[str]().union(*(form.made_later(model) for form in self.forms))

    def complete(self, world: World, model: nn.Module, *, budget_bytes: int) -> dict[str, int]:
        written: dict[str, int] = {}
        for form in self.forms:
            written |= form.complete(world, model, budget_bytes=budget_bytes)
        return written

    def let_go(self, model: nn.Module) -> None:
        for form in self.forms:
            form.let_go(model)


def forms_of(model: nn.Module) -> BaseForms:
    """The forms that layers of a model are kept in.

    Raises:
        ConfigError: a class of layers says one that has no line in :data:`FORMS`.
    """
    kinds = {type(module) for module in modules_in(model)}
    said = {kind.__name__: getattr(kind, "kept_as", None) for kind in kinds}
    kept = {form: name for name, form in said.items() if isinstance(form, str)}
    if unknown := sorted(f"{kept[form]} ({form!r})" for form in kept.keys() - FORMS.keys()):
        raise ConfigError(
            f"layers are kept in a form that nobody knows: {', '.join(unknown)}; add a line for it to FORMS"
        )
    return BaseForms(tuple(found_at(place) for form, place in FORMS.items() if form in kept))
