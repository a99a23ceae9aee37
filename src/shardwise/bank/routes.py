"""Routes: which rows of a pass belong to which adapter.

[Note: A route] A micro-batch owns its route, which does not change. The route is active during the forward and the
backward pass of this micro-batch, both of which the bank runs. So recomputed activations use the same rows as the
first time, in any thread, and whatever other micro-batches have run meanwhile. Without an active route, the base
computes as if there were no bank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from shardwise.bank.adapter import BankAdapter
from shardwise.bank.kernels import (
    BackendChoice,
    GroupedProducts,
    RoutedSegment,
    SegmentLoop,
    adapt,
    stable_key,
)
from shardwise.core.errors import TrainingError
from shardwise.fsdp.torch_private import to_device


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows ``start <= i < stop`` of a pass, which belong to one adapter.

    ``keys`` are those of the rows, for dropout: (rows,), on the device. None without a backward pass. For rows that
    are single positions, ``positions`` are those in their rows of tokens.
    """

    adapter: BankAdapter
    start: int
    stop: int
    keys: torch.Tensor | None
    positions: torch.Tensor | None = None


def group_rows(
    adapters: Sequence[BankAdapter | None], keys: Sequence[int | None], device: torch.device
) -> tuple[AdapterRows, ...]:
    """Group the rows of a pass by adapter, and those with a backward pass apart. Such rows are adjacent.

    Args:
        adapters: of each row.
        keys: of each row, for dropout. None without a backward pass.
        device: to which the keys are sent, in one transfer.
    """
    on_device = to_device(torch.tensor([key or 0 for key in keys], dtype=torch.int64, device="cpu"), device)
    adapter_rows, start = [], 0
    # Rows of one adapter with and without a backward pass are two entries.
    for (adapter, is_trained), group in groupby(zip(adapters, [key is not None for key in keys], strict=True)):
        stop = start + len(list(group))
        if adapter is not None:
            keys_of_rows = on_device[start:stop] if is_trained else None
            adapter_rows.append(AdapterRows(adapter, start, stop, keys_of_rows))
        start = stop
    return tuple(adapter_rows)


@dataclass(slots=True)
class Route:
    """The adapters of the rows of a micro-batch.

    Attributes:
        rows: number of rows.
        tokens: tokens of a row, with padding.
        adapter_rows: rows of each adapter, in order. Rows without an adapter come last.
        adapters: all of the call, on any rank. Layers that none of them targets compute as without a route.
        backend_choice: how adapters are computed.
        anchor: see [Note: Straight into the buffer] in ``bank/kernels.py``.
        grouped: batched products of this micro-batch.
        forward_sites: sites that the forward pass has reached with rows that are trained.
        backward_sites: sites that the backward pass has reached.
        is_after_decoder: True after the decoder. The model goes on with one position, whose output is not used.
    """

    rows: int
    tokens: int
    adapter_rows: tuple[AdapterRows, ...]
    adapters: Collection[BankAdapter]
    backend_choice: BackendChoice
    anchor: torch.Tensor
    grouped: GroupedProducts = field(default_factory=GroupedProducts)
    forward_sites: set[str] = field(default_factory=set)
    backward_sites: set[str] = field(default_factory=set)
    is_after_decoder: bool = False

    def is_target(self, site: str) -> bool:
        """Return whether an adapter of the call has matrices at a site. Equal on all ranks."""
        return any(site in adapter.weights_by_site for adapter in self.adapters)

    def segments(self, site: str, step: int) -> list[RoutedSegment]:
        """Return the rows with an adapter at a site, whose input has ``step`` rows (tokens) for each batch row.

        Batch rows 2 and 3 of an adapter are rows 128 to 256 of a linear layer's input if rows have 64 tokens.
        """
        segments = []
        for of_adapter in self.adapter_rows:
            weights = of_adapter.adapter.weights_by_site.get(site)
            if weights is not None and of_adapter.stop > of_adapter.start:
                start, stop = of_adapter.start * step, of_adapter.stop * step
                is_trained, keys = of_adapter.keys is not None, of_adapter.keys if weights.dropout else None
                segments.append(
                    RoutedSegment(weights, start, stop, keys, stable_key(site), of_adapter.positions, is_trained)
                )
        return segments

    def of_positions(self, rows: torch.Tensor, positions: torch.Tensor) -> Route:
        """Return the route of a layer whose input is single positions of the rows, in order: (positions, 1, width).

        Args:
            rows: the row of each position, on the CPU. Positions after those of all adapters have none.
            positions: on the device.
        """
        # Rows [0, 0, 1, 2, 2, 3] of positions, and adapters with rows 0 to 2 and 2 to 3: the bounds [0, 2, 2, 3]
        # are at [0, 3, 3, 5], so the adapters have positions 0 to 3 and 3 to 5. Position 5 is padding.
        bounds = [bound for of_adapter in self.adapter_rows for bound in (of_adapter.start, of_adapter.stop)]
        # Even cuts are starts, odd ones stops.
        cuts = torch.searchsorted(rows, rows.new_tensor(bounds)).tolist()
        adapter_rows = []
        for of_adapter, start, stop in zip(self.adapter_rows, cuts[::2], cuts[1::2], strict=True):
            keys = of_adapter.keys
            if keys is not None:  # of the row of each position
                keys = keys[to_device(rows[start:stop] - of_adapter.start, keys.device)]
            adapter_rows.append(AdapterRows(of_adapter.adapter, start, stop, keys, positions[start:stop]))
        return replace(self, rows=len(rows), tokens=1, adapter_rows=tuple(adapter_rows), is_after_decoder=False)

    def add_adapters(
        self, site: str, x: torch.Tensor, y: torch.Tensor, backend: SegmentLoop | None = None
    ) -> torch.Tensor:
        """Return the output ``y`` (..., out) of a layer plus the adapters' deltas of its input ``x`` (..., in).

        Without ``backend``, one is selected.
        """
        # The output of the one position that the model goes on with is replaced, see [Note: Logits in chunks] in
        # ``bank/passes.py``.
        if not self.is_target(site) or (self.is_after_decoder and x.shape[:2] == (1, 1)):
            return y
        self.require_rows(site, x)
        if not isinstance(y, torch.Tensor):  # a router may be a linear layer that returns experts and weights
            raise TrainingError(f"{site} returns a {type(y).__name__}, not a tensor. Remove it from the targets")
        # A layer sees all tokens of each row, or one (rows, 1, ...).
        segments = self.segments(site, x.shape[:-1].numel() // self.rows)
        if backend is None:
            may_group = self.backend_choice == "auto" and x.dtype == y.dtype
            backend = self.grouped if may_group else SegmentLoop()
        is_trained = any(segment.is_trained for segment in segments)
        return self.record_site(site, adapt(self.anchor, x, y, segments, backend), is_trained=is_trained)

    def record_site(self, site: str, y: torch.Tensor, *, is_trained: bool) -> torch.Tensor:
        """Record that the forward pass has reached a site with trained rows, and when the backward pass does."""
        if is_trained:
            self.forward_sites.add(site)
        if y.requires_grad:
            # Called in the backward pass. It returns None, so the gradient is not replaced.
            y.register_hook(lambda _gradient: self.backward_sites.add(site))
        return y

    def require_rows(self, site: str, x: torch.Tensor) -> None:
        """Raise TrainingError unless an input is (rows, tokens or 1, ...) or (rows * tokens, width)."""
        shapes = (self.rows, self.tokens), (self.rows, 1)
        if tuple(x.shape[:2]) not in shapes and (x.ndim != 2 or len(x) != self.rows * self.tokens):
            raise TrainingError(
                f"{site} is called with a tensor of shape {tuple(x.shape)}, in which the {self.rows} rows of "
                f"{self.tokens} tokens cannot be identified. Remove it from the targets"
            )

    def require_reached(self) -> None:
        """Check that the backward pass has reached every adapter that the forward pass has.

        Raises:
            TrainingError: it has not. The message has the sites.
        """
        if missed := sorted(self.forward_sites - self.backward_sites):
            more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
            raise TrainingError(
                f"the backward pass has not reached {', '.join(missed[:3])}{more}: the loss does not depend on "
                "its output, or activations are recomputed with use_reentrant=True. Remove it from the "
                "targets, or recompute with use_reentrant=False"
            )


@dataclass(slots=True)
class ActiveRoute:
    """The active route, if any. Autograd reads it from other threads, so it is not a context variable."""

    route: Route | None = None

    @contextmanager
    def on(self, route: Route) -> Iterator[None]:
        before, self.route = self.route, route
        try:
            yield
        finally:
            self.route = before
