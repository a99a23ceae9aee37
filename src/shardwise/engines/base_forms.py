"""What a base adds to a load that is not kept as numbers: who knows it is in one table, by form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from torch import nn

from shardwise._face import found_at
from shardwise.conversion import Bindings
from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.layout import ModelLayout
from shardwise.models.torch_words import modules_in
from shardwise.models.view import Held


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
