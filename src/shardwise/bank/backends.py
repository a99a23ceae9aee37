"""Adds the adapters of many tenants to what a layer of the base gives, and leads gradients back: two ways to do it.

[Note: Segments, not masks] Rows of one tenant lie side by side, and only they meet its matrices. A mask would have
every row meet all of them, times 0; but 0 times NaN is NaN.

[Note: Straight into the buffer] The matrices are no inputs of the autograd function: their gradients are added to
views of the tenant's flat buffer. A scalar that requires a gradient, the *anchor*, stands for them, so that the
function has a backward pass in the first layer, too, whose input requires none; on every rank alike, also one that
has no rows of a tenant, as FSDP2 gathers for the backward pass of what requires a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from shardwise.bank import dropout
from shardwise.planning.forecasts.tenants import padded_rank


@dataclass(frozen=True, slots=True)
class TenantPair:
    """A tenant's matrices at one site, float32: views of its flat buffer, and of that of its gradient."""

    A: torch.Tensor
    """(r, in)"""
    B: torch.Tensor
    """(out, r)"""
    a_grad: torch.Tensor
    b_grad: torch.Tensor
    scaling: float
    dropout: float = 0.0

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True, slots=True)
class SitePart:
    """The rows ``start <= i < stop`` of a layer's input are a tenant's."""

    pair: TenantPair
    start: int
    stop: int
    keys: torch.Tensor | None = None
    """Of its rows, for its dropout; None where it has none."""
    site: int = 0

    def dropped(self, values: torch.Tensor) -> torch.Tensor:
        if self.keys is None:
            return values
        return dropout.dropped(values, self.keys, self.site, self.pair.dropout)


class Backend(Protocol):
    """How the adapters of a layer are computed; all of these agree but for rounding.

    ``x`` is (rows, in), ``out`` and ``g`` are (rows, out); parts are in order and do not overlap.
    """

    def add(self, parts: Sequence[SitePart], x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        """Add the adapters to ``out``; returns what :meth:`lead_back` wants to have again."""
        ...

    def lead_back(
        self,
        parts: Sequence[SitePart],
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],
        g: torch.Tensor,
        x_grad: torch.Tensor | None,
    ) -> None:
        """Add to the gradients of the matrices, and to that of ``x``, where it is wanted."""
        ...


@dataclass(frozen=True, slots=True)
class SegmentLoop:
    """One tenant after the other, by the products that PEFT takes, in its order: the reference.

    The scale is applied as a number of Python's, in float32 whatever the dtype.
    """

    def add(self, parts: Sequence[SitePart], x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        kept = []
        for part in parts:
            pair, rows = part.pair, slice(part.start, part.stop)
            z = F.linear(part.dropped(x[rows]), pair.A.to(x.dtype))
            out[rows] += F.linear(z, pair.B.to(x.dtype)) * pair.scaling
            kept.append(z)
        return kept

    def lead_back(
        self,
        parts: Sequence[SitePart],
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],
        g: torch.Tensor,
        x_grad: torch.Tensor | None,
    ) -> None:
        for part, z in zip(parts, kept, strict=True):
            pair, rows = part.pair, slice(part.start, part.stop)
            scaled = g[rows] * pair.scaling
            pair.b_grad.add_(scaled.T @ z)
            z_grad = scaled @ pair.B.to(g.dtype)
            pair.a_grad.add_(z_grad.T @ part.dropped(x[rows]))
            if x_grad is not None:
                x_grad[rows] += part.dropped(z_grad @ pair.A.to(g.dtype))


@dataclass(frozen=True, slots=True)
class GroupedProducts:
    """Tenants side by side whose ranks are alike once rounded up, by one product for all of them.

    That is a batched product where each has as many rows, as tenants of one length have, and else a grouped one.
    Matrices are padded with zeros to that rank for the time of the product; the padding has no place in a buffer.
    """

    def add(self, parts: Sequence[SitePart], x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        for run in runs(parts, x.dtype):
            if len(run) == 1:
                kept += SegmentLoop().add(run, x, out)
                continue
            products = _Products(run, x.device)
            packed_lora_A, packed_lora_B = _packed(run, x.dtype)
            z = products.of_rows(_dropped(run, x), packed_lora_A.transpose(-2, -1))
            scaled = products.scaled(z)
            products.add_of_rows(out[products.rows], scaled, packed_lora_B.transpose(-2, -1))
            kept.append(scaled)
        return kept

    def lead_back(
        self,
        parts: Sequence[SitePart],
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],
        g: torch.Tensor,
        x_grad: torch.Tensor | None,
    ) -> None:
        for run, scaled in zip(runs(parts, x.dtype), kept, strict=True):
            if len(run) == 1:
                SegmentLoop().lead_back(run, x, [scaled], g, x_grad)
                continue
            products = _Products(run, x.device)
            rows, own = products.rows, g[products.rows].contiguous()
            packed_lora_A, packed_lora_B = _packed(run, g.dtype)
            b_grads = products.over_rows(scaled, own).transpose(1, 2)  # quicker by half than over_rows(own, scaled)
            z_grad = products.scaled(products.of_rows(own, packed_lora_B))
            a_grads = products.over_rows(z_grad, _dropped(run, x))
            for part, a_grad, b_grad in zip(run, a_grads, b_grads, strict=True):
                part.pair.a_grad.add_(a_grad[: part.pair.rank])
                part.pair.b_grad.add_(b_grad[:, : part.pair.rank])
            if x_grad is None:
                continue
            if all(part.keys is None for part in run):
                products.add_of_rows(x_grad[rows], z_grad, packed_lora_A)
                continue
            found = products.of_rows(z_grad, packed_lora_A)
            for part in run:
                x_grad[part.start : part.stop] += part.dropped(
                    found[part.start - rows.start : part.stop - rows.start]
                )


class _Products:
    """Products of the rows of several tenants, each with its own matrix.

    Offsets of a grouped product end where the rows do: what it leaves behind them is garbage.
    """

    def __init__(self, run: Sequence[SitePart], device: torch.device) -> None:
        self.rows = slice(run[0].start, run[-1].stop)
        lengths = [part.stop - part.start for part in run]
        self._shape = (len(run), lengths[0])
        self._are_alike = len(set(lengths)) == 1
        scales = torch.tensor([part.pair.scaling for part in run], dtype=torch.float32, device=device)
        if self._are_alike:
            self._scales = scales.view(-1, 1, 1)
            return
        stops = [part.stop - self.rows.start for part in run]
        self._offsets = torch.tensor(stops, dtype=torch.int32, device=device)
        counts = torch.tensor(lengths, device=device)
        self._scales = scales.repeat_interleave(counts, output_size=stops[-1]).unsqueeze(1)

    def of_rows(self, values: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """(rows, in) and (tenants, in, out): (rows, out)."""
        if self._are_alike:
            return torch.bmm(self._by_tenant(values), matrices).flatten(0, 1)
        return F.grouped_mm(values, matrices, offs=self._offsets)

    def add_of_rows(self, out: torch.Tensor, values: torch.Tensor, matrices: torch.Tensor) -> None:
        """Adds :meth:`of_rows` to ``out``, (rows, out), contiguous."""
        if self._are_alike:
            self._by_tenant(out).baddbmm_(self._by_tenant(values), matrices)
        else:
            out += F.grouped_mm(values, matrices, offs=self._offsets)

    def over_rows(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """(rows, a) and (rows, b): (tenants, a, b), the sums of outer products over each tenant's rows."""
        if self._are_alike:
            return torch.bmm(self._by_tenant(left).transpose(1, 2), self._by_tenant(right))
        return F.grouped_mm(left.T, right, offs=self._offsets)

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Times each tenant's scaling, in float32."""
        if self._are_alike:
            return (self._by_tenant(values) * self._scales).to(values.dtype).flatten(0, 1)
        return (values * self._scales).to(values.dtype)

    def _by_tenant(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(*self._shape, values.shape[-1])


def runs(parts: Sequence[SitePart], dtype: torch.dtype) -> list[list[SitePart]]:
    """Parts that follow each other without a gap and have one padded rank."""
    found: list[list[SitePart]] = []
    for part in parts:
        last = found[-1][-1] if found else None
        if (
            last is not None
            and last.stop == part.start
            and padded_rank(last.pair.rank, dtype.itemsize) == padded_rank(part.pair.rank, dtype.itemsize)
        ):
            found[-1].append(part)
        else:
            found.append([part])
    return found


def _dropped(run: Sequence[SitePart], x: torch.Tensor) -> torch.Tensor:
    if all(part.keys is None for part in run):
        return x[run[0].start : run[-1].stop].contiguous()
    return torch.cat([part.dropped(x[part.start : part.stop]) for part in run])


def _packed(run: Sequence[SitePart], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(tenants, rank, in) and (tenants, out, rank), padded with zeros."""
    first = run[0].pair
    rank = padded_rank(first.rank, dtype.itemsize)
    if all(part.pair.rank == rank for part in run):
        A, B = torch.stack([part.pair.A for part in run]), torch.stack([part.pair.B for part in run])
        return A.to(dtype), B.to(dtype)
    A = first.A.new_zeros((len(run), rank, first.A.shape[1]), dtype=dtype)
    B = first.B.new_zeros((len(run), first.B.shape[0], rank), dtype=dtype)
    for number, part in enumerate(run):
        A[number, : part.pair.rank] = part.pair.A
        B[number, :, : part.pair.rank] = part.pair.B
    return A, B


@dataclass(frozen=True, slots=True)
class LoopedAlways:
    """Tenants one after the other: exact, and as many products as tenants."""


@dataclass(frozen=True, slots=True)
class GroupedAlways:
    """Grouped products wherever torch can take them."""


@dataclass(frozen=True, slots=True)
class FewestProducts:
    """Grouped products where they are fewer, and what is padded costs no more than twice."""


BackendChoice: TypeAlias = LoopedAlways | GroupedAlways | FewestProducts


def choose_backend(
    choice: BackendChoice, parts: Sequence[SitePart], x: torch.Tensor, out: torch.Tensor
) -> tuple[Backend, str]:
    """The backend of one layer, and why in a few words. Arithmetic alone: nothing is timed."""
    if isinstance(choice, LoopedAlways):
        return SegmentLoop(), "loop: as asked"
    if why := _why_not_grouped(x, out):
        return SegmentLoop(), f"loop: {why}"
    found = runs(parts, x.dtype)
    if len(found) == len(parts):
        return SegmentLoop(), "loop: no two neighbours of one rank"
    if isinstance(choice, FewestProducts):
        needed = sum((part.stop - part.start) * part.pair.rank for part in parts)
        taken = sum((part.stop - part.start) * padded_rank(part.pair.rank, x.dtype.itemsize) for part in parts)
        if taken > 2 * needed:
            return SegmentLoop(), "loop: padded ranks would cost more than twice"
    return GroupedProducts(), "grouped: fewer products"


def _why_not_grouped(x: torch.Tensor, out: torch.Tensor) -> str:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or out.dtype != x.dtype:
        return f"no grouped product of {x.dtype} to {out.dtype}"
    if x.device.type == "cuda" and x.dtype is not torch.bfloat16:
        return f"no grouped product of {x.dtype} on CUDA"
    step = 16 // x.dtype.itemsize
    if x.shape[-1] % step or out.shape[-1] % step:
        return f"widths that are no multiples of {step}"
    return ""


def adapt(
    anchor: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    parts: Sequence[SitePart],
    backend: Backend,
) -> torch.Tensor:
    """``y`` (..., out) with the adapters' part of each row, of ``x`` (..., in); parts count the rows of both.

    What is returned is no view: FSDP2 would warn of one that leaves a group.
    """
    apply: Any = _SegmentedProducts.apply
    out: torch.Tensor = apply(anchor, x, y, tuple(parts), backend)
    return out


class _SegmentedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _anchor: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        parts: tuple[SitePart, ...],
        backend: Backend,
    ) -> torch.Tensor:
        out = y.clone(memory_format=torch.contiguous_format)
        kept = backend.add(parts, x.flatten(0, -2), out.flatten(0, -2))
        ctx.parts, ctx.backend = parts, backend
        ctx.save_for_backward(x, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        x, *kept = ctx.saved_tensors
        x_grad = x.new_zeros(x.shape) if ctx.needs_input_grad[1] else None
        flat = None if x_grad is None else x_grad.flatten(0, -2)
        ctx.backend.lead_back(ctx.parts, x.flatten(0, -2), kept, outer[0].flatten(0, -2), flat)
        return None, x_grad, outer[0], None, None


def adapt_embedding(
    anchor: torch.Tensor, ids: torch.Tensor, y: torch.Tensor, parts: Sequence[SitePart], factor: float
) -> torch.Tensor:
    """``y`` (..., width) with the adapters' part; ``ids`` is (...), ``factor`` the scale of the layer's own."""
    apply: Any = _AdaptedEmbedding.apply
    out: torch.Tensor = apply(anchor, ids, y, tuple(parts), factor)
    return out


class _AdaptedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _anchor: torch.Tensor,
        ids: torch.Tensor,
        y: torch.Tensor,
        parts: tuple[SitePart, ...],
        factor: float,
    ) -> torch.Tensor:
        out = y.clone(memory_format=torch.contiguous_format)
        flat, ids = out.flatten(0, -2), ids.flatten()
        for part in parts:
            pair, rows = part.pair, slice(part.start, part.stop)
            found = F.embedding(ids[rows], pair.A.T) @ pair.B.T * pair.scaling * factor
            flat[rows] += found.to(out.dtype)
        ctx.parts, ctx.factor = parts, factor
        ctx.save_for_backward(ids)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        gradient = outer[0].flatten(0, -2)
        for part in ctx.parts:
            pair, rows = part.pair, slice(part.start, part.stop)
            scaled = gradient[rows].float() * ctx.factor * pair.scaling
            pair.b_grad.add_(scaled.T @ F.embedding(ids[rows], pair.A.T))
            # Sorted by torch, not added up by whoever comes first: the same sum each time, on CUDA too.
            pair.a_grad.T.index_put_((ids[rows],), scaled @ pair.B, accumulate=True)
        return None, None, outer[0], None, None
