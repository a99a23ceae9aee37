"""Loads a checkpoint into a model that is there already: what is asked for, and the way from it to the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.engines.base_forms import BaseForms, forms_of
from shardwise.engines.load_options import LoadOptions, load_words
from shardwise.engines.load_plan import LoadRequest, tie_declared
from shardwise.engines.loading import carry_out
from shardwise.engines.opening import Source, open_source
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.layout import Origin
from shardwise.models import pretrained
from shardwise.models.additions import Additions
from shardwise.models.conversions.key_conversions import bind
from shardwise.models.initialize import BufferRules
from shardwise.models.view import layout_of, look_inside
from shardwise.planning.loads.load_plan import Consent
from shardwise.planning.loads.stored import stored_tensors
from shardwise.report.load_report import LoadReport
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import HubOptions, is_url


@dataclass(frozen=True, slots=True)
class LoadCall:
    """What :func:`~shardwise.verbs.load.load` is asked for, beside the model."""

    checkpoint: Source
    consent: Consent
    key_mapping: Mapping[str, str] | None = None
    buffers: BufferRules = field(default_factory=dict)
    hub: HubOptions = field(default_factory=HubOptions)
    options: LoadOptions = field(default_factory=LoadOptions)

    def words(self) -> dict[str, str]:
        """What of it ranks must have in common, in words."""
        kind = "a reader" if isinstance(self.checkpoint, StorageReader) else "a path or a hub id"
        return {
            "the kind of checkpoint": "a URL" if is_url(self.checkpoint) else kind,
            "key_mapping": repr(self.key_mapping),
            **load_words(self.consent, self.buffers, self.options),
        }


def load_checkpoint(world: World, model: nn.Module, call: LoadCall, clock: Clock) -> LoadReport:
    """Open a checkpoint and fill a model from it; ranks have agreed on the call. Collective: yes."""
    options = call.options
    transforms: list[Any] = []
    base = BaseForms(())
    with clock.phase("index"):
        source = open_source(world, call.checkpoint, call.hub, options.copies, options.budget_bytes)

    def ask() -> LoadRequest:
        nonlocal base
        base = forms_of(model)
        transforms.extend(pretrained.conversion_transforms(model, call.key_mapping))
        held = look_inside(model)
        layout = base.in_numbers(layout_of(held, lambda item: Origin.NOWHERE), held)
        bindings = bind(model, stored_tensors(source.index), layout, transforms)
        tie_declared(model, held, bindings)
        bindings = base.with_room(model, base.offered(model, bindings))
        additions = Additions(nested=base.made_later(model))
        return LoadRequest(bindings, call.consent, dict(call.buffers), options, additions=additions)

    try:
        with source.closing():
            report = carry_out(world, model, source, ask, clock)
    finally:
        base.let_go(model)
    pretrained.record_conversions(model, transforms)
    return report
