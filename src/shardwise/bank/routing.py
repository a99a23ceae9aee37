"""Which rows of a micro-batch are whose, and what a layer of the base does about it.

[Note: A route] A micro-batch owns its route, which does not change. It is on the bank's switch while the forward
pass of this micro-batch goes on, and while its backward pass does, which the bank runs, too. So activations that
are computed again meet the rows they met at first, whoever recomputes them, in whatever thread, and however many
other micro-batches have been run meanwhile. With no route on the switch, the base is as if there were no bank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.bank.backends import (
    BackendChoice,
    SegmentLoop,
    SitePart,
    TenantPair,
    adapt,
    adapt_embedding,
    choose_backend,
)
from shardwise.bank.dropout import key_of
from shardwise.bank.tenant import Tenant
from shardwise.errors import TrainingError


@dataclass(frozen=True, slots=True)
class TenantRows:
    """The rows ``start <= i < stop`` of a micro-batch are a tenant's."""

    tenant: Tenant
    start: int
    stop: int
    keys: torch.Tensor
    """Of its rows, for dropout: (rows,)."""


@dataclass(slots=True)
class Route:
    """The rows of a micro-batch: (rows, tokens), and whose they are, in order. Rows of nobody come last.

    ``is_training`` is off for evaluation: there is no dropout, and no backward pass to wait for.
    """

    rows: int
    tokens: int
    members: tuple[TenantRows, ...]
    choice: BackendChoice
    anchor: torch.Tensor
    is_training: bool = True
    chosen: Counter[str] = field(default_factory=Counter)
    passed: set[str] = field(default_factory=set)
    """Sites that the forward pass has come to, and those that the backward pass has."""
    reached: set[str] = field(default_factory=set)

    def parts(self, site: str, step: int) -> list[SitePart]:
        """The tenants that have an adapter there. ``step``: how many rows of the input each row has there."""
        found = []
        for member in self.members:
            pair = member.tenant.pairs.get(site)
            if pair is not None and member.stop > member.start:
                keys = member.keys if pair.dropout and self.is_training else None
                found.append(SitePart(pair, member.start * step, member.stop * step, keys, key_of(site)))
        return found

    def linear(self, site: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.require_rows(site, x)
        parts = self.parts(site, x.shape[:-1].numel() // self.rows)
        backend, why = choose_backend(self.choice, parts, x, y) if parts else (SegmentLoop(), "no rows")
        self.chosen[why] += 1
        return self.note(site, adapt(self.anchor, x, y, parts, backend))

    def embedding(self, site: str, ids: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
        self.require_rows(site, ids.unsqueeze(-1))
        parts = self.parts(site, ids.numel() // self.rows)
        return self.note(site, adapt_embedding(self.anchor, ids, y, parts, factor))

    def bounds(self) -> list[int]:
        """Where the rows of each member begin, and where those of the last end."""
        return [member.start for member in self.members] + [member.stop for member in self.members[-1:]]

    def pairs(self, site: str) -> list[TenantPair | None]:
        """What each member has at a site."""
        return [member.tenant.pairs.get(site) for member in self.members]

    def note(self, site: str, y: torch.Tensor) -> torch.Tensor:
        """Have it written down when the gradient of ``y`` comes."""
        if self.is_training:
            self.passed.add(site)
        if y.requires_grad:
            y.register_hook(lambda _gradient: self.reached.add(site))
        return y

    def require_rows(self, site: str, x: torch.Tensor) -> None:
        """Refuse an input in which rows cannot be told apart: batch first, or rows and tokens in one dimension."""
        if tuple(x.shape[:2]) != (self.rows, self.tokens) and (x.ndim != 2 or len(x) != self.rows * self.tokens):
            raise TrainingError(
                f"{site} is called with a tensor of shape {tuple(x.shape)}, in which the {self.rows} rows of "
                f"{self.tokens} tokens cannot be told apart; take it out of the targets"
            )

    def require_reached(self) -> None:
        """Refuse a backward pass that has passed an adapter by: it would train on nothing, without a word.

        Raises:
            TrainingError: naming the sites.
        """
        if missed := sorted(self.passed - self.reached):
            more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
            raise TrainingError(
                f"the backward pass has not come to {', '.join(missed[:3])}{more}: the loss does not depend on "
                "what comes out there, or activations are recomputed with use_reentrant=True; take it out of the "
                "targets, or recompute with use_reentrant=False"
            )


@dataclass(slots=True)
class RouteSwitch:
    """The route that is on, if any. Autograd may look from a thread of its own, so this is no context variable."""

    route: Route | None = None

    @contextmanager
    def on(self, route: Route) -> Iterator[None]:
        before, self.route = self.route, route
        try:
            yield
        finally:
            self.route = before


def hook_linear(module: nn.Module, site: str, switch: RouteSwitch) -> RemovableHandle:
    """Have a linear layer add adapters; what is returned takes the hook away again (``remove()``).

    The hook comes before FSDP2's own, where the layer is a group by itself: it belongs to the layer.
    """

    def add(_: nn.Module, args: Sequence[Any], keywords: dict[str, Any], output: torch.Tensor) -> Any:
        if switch.route is None:
            return None
        return switch.route.linear(site, _first(args, keywords), output)

    return module.register_forward_hook(add, prepend=True, with_kwargs=True)


def hook_embedding(module: nn.Module, site: str, switch: RouteSwitch) -> RemovableHandle:
    """The same for an embedding."""

    def add(own: nn.Module, args: Sequence[Any], keywords: dict[str, Any], output: torch.Tensor) -> Any:
        if switch.route is None:
            return None
        factor = float(getattr(own, "embed_scale", 1.0))
        return switch.route.embedding(site, _first(args, keywords), output, factor)

    return module.register_forward_hook(add, prepend=True, with_kwargs=True)


def _first(args: Sequence[Any], keywords: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = args[0] if args else next(iter(keywords.values()))
    return found
