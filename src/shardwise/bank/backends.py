"""Computes the products of adapters with the rows of their tenants, forward and backward.

[Note: Segments, not masks] Rows of one tenant lie side by side, and only they meet its matrices. A mask would
multiply every row with all adapters and then by 0, but 0 times NaN is NaN.

[Note: Straight into the buffer] The matrices are no inputs of the autograd function: their gradients are added to
views of the tenant's flat buffer. A scalar that requires a gradient, the *anchor*, is passed instead, so that the
function has a backward pass also in the first layer, whose input requires no gradient. Every rank passes it, also
one without rows of a tenant, because FSDP2 gathers in the backward pass of tensors that require a gradient.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F

from shardwise.bank.tenant import LoraWeights
from shardwise.models import torch_api

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def key_of(*parts: object) -> int:
    """63 bits of whatever has a ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def row_keys(key: int, first: int, count: int) -> torch.Tensor:
    """A key for each of some rows: (count,), int64, on the CPU."""
    return _mixed(key + torch.arange(first, first + count) * _GOLDEN)


def dropped(values: torch.Tensor, keys: torch.Tensor, site: int, probability: float) -> torch.Tensor:
    """Values with some of them 0 and the others scaled, as ``nn.Dropout`` has it in training.

    It is its own derivative: of a gradient it gives that of the values. ``values`` is (rows * n, width), ``keys``
    (rows,), on the same device.
    """
    places = torch.arange(values.numel() // max(len(keys), 1), device=values.device)
    hashed = _mixed((keys ^ site).unsqueeze(1) + places * _GOLDEN)
    kept = (_shifted(hashed, 33) >= int(probability * (1 << 31))).view(values.shape)
    return torch.where(kept, values / (1 - probability), 0.0)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, filled up with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True)
class RoutedSegment:
    """The rows ``start <= i < stop`` of a layer's input are a tenant's."""

    pair: LoraWeights
    start: int
    stop: int
    keys: torch.Tensor | None = None
    """Of its rows, for its dropout; None where it has none."""
    site: int = 0

    def dropped(self, values: torch.Tensor) -> torch.Tensor:
        if self.keys is None:
            return values
        return dropped(values, self.keys, self.site, self.pair.dropout)


class SegmentLoop:
    """One tenant after the other, by the products that PEFT takes, in its order: the reference.

    The scale is applied as a number of Python's, in float32 whatever the dtype. ``x`` is (rows, in), ``out`` and
    ``g`` are (rows, out). Parts are in order and do not overlap.
    """

    def add(self, parts: Sequence[RoutedSegment], x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        """Add the adapters to ``out``. Return the values saved for :meth:`lead_back`."""
        kept = []
        for part in parts:
            pair, rows = part.pair, slice(part.start, part.stop)
            z = F.linear(part.dropped(x[rows]), pair.A.to(x.dtype))
            out[rows] += F.linear(z, pair.B.to(x.dtype)) * pair.scaling
            kept.append(z)
        return kept

    def lead_back(
        self,
        parts: Sequence[RoutedSegment],
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],
        g: torch.Tensor,
        x_grad: torch.Tensor | None,
    ) -> None:
        """Add to the gradients of the matrices, and to that of ``x`` if there is one."""
        for part, z in zip(parts, kept, strict=True):
            pair, rows = part.pair, slice(part.start, part.stop)
            scaled = g[rows] * pair.scaling
            pair.b_grad.add_(scaled.T @ z)
            z_grad = scaled @ pair.B.to(g.dtype)
            pair.a_grad.add_(z_grad.T @ part.dropped(x[rows]))
            if x_grad is not None:
                x_grad[rows] += part.dropped(z_grad @ pair.A.to(g.dtype))


class GroupedProducts(SegmentLoop):
    """Computes adjacent parts with equally many rows and one rank by one batched product.

    One object serves a pass. It keeps the scales of runs on the device.
    """

    def __init__(self) -> None:
        self._scales: dict[tuple[float, ...], torch.Tensor] = {}

    def add(self, parts: Sequence[RoutedSegment], x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        """Add the adapters to ``out``. Return the values saved for :meth:`lead_back`."""
        kept: list[torch.Tensor] = []
        for run in runs(parts):
            if len(run) == 1:
                kept += super().add(run, x, out)
                continue
            A, B = _packed(run, x.dtype)
            z = torch.bmm(_by_tenant(run, _dropped(run, _rows_of(run, x))), A.transpose(1, 2))
            scaled = (z * self._scales_of(run, x.device)).to(x.dtype)
            _by_tenant(run, _rows_of(run, out)).baddbmm_(scaled, B.transpose(1, 2))
            kept.append(scaled)
        return kept

    def lead_back(
        self,
        parts: Sequence[RoutedSegment],
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],
        g: torch.Tensor,
        x_grad: torch.Tensor | None,
    ) -> None:
        """Add to the gradients of the matrices, and to that of ``x`` if there is one."""
        for run, scaled in zip(runs(parts), kept, strict=True):
            if len(run) == 1:
                super().lead_back(run, x, [scaled], g, x_grad)
                continue
            A, B = _packed(run, g.dtype)
            own = _by_tenant(run, _rows_of(run, g))
            b_grads = torch.bmm(scaled.transpose(1, 2), own).transpose(1, 2)  # faster than the other way round
            z_grad = (torch.bmm(own, B) * self._scales_of(run, g.device)).to(g.dtype)
            a_grads = torch.bmm(z_grad.transpose(1, 2), _by_tenant(run, _dropped(run, _rows_of(run, x))))
            torch_api.add_all([part.pair.a_grad for part in run], a_grads)
            torch_api.add_all([part.pair.b_grad for part in run], b_grads)
            if x_grad is not None:
                _rows_of(run, x_grad).add_(_dropped(run, torch.bmm(z_grad, A).flatten(0, 1)))

    def _scales_of(self, run: Sequence[RoutedSegment], device: torch.device) -> torch.Tensor:
        """Return the scales of a run, float32 (tenants, 1, 1)."""
        scales = tuple(part.pair.scaling for part in run)
        if scales not in self._scales:
            self._scales[scales] = torch_api.sent(torch.tensor(scales, dtype=torch.float32), device).view(-1, 1, 1)
        return self._scales[scales]


class EmbeddingLoop(SegmentLoop):
    """The same for an embedding: ``x`` is (rows, 1), token ids. ``factor`` is the scale of the layer."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def add(self, parts: Sequence[RoutedSegment], x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        """Add the adapters to ``out``."""
        for part in parts:
            pair, rows = part.pair, slice(part.start, part.stop)
            found = F.embedding(x[rows, 0], pair.A.T) @ pair.B.T * pair.scaling * self._factor
            out[rows] += found.to(out.dtype)
        return []

    def lead_back(
        self,
        parts: Sequence[RoutedSegment],
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],  # noqa: ARG002
        g: torch.Tensor,
        x_grad: torch.Tensor | None,  # noqa: ARG002
    ) -> None:
        """Add to the gradients of the matrices."""
        for part in parts:
            pair, ids = part.pair, x[part.start : part.stop, 0]
            scaled = g[part.start : part.stop].float() * self._factor * pair.scaling
            pair.b_grad.add_(scaled.T @ F.embedding(ids, pair.A.T))
            # Sorted by torch, not added up by whoever comes first: the same sum each time, on CUDA too.
            pair.a_grad.T.index_put_((ids,), scaled @ pair.B, accumulate=True)


def runs(parts: Sequence[RoutedSegment]) -> list[list[RoutedSegment]]:
    """Group parts that follow each other without a gap, with as many rows and one rank."""
    found: list[list[RoutedSegment]] = []
    for part in parts:
        last = found[-1][-1] if found else None
        if (
            last is not None
            and last.stop == part.start
            and last.stop - last.start == part.stop - part.start
            and last.pair.rank == part.pair.rank
        ):
            found[-1].append(part)
        else:
            found.append([part])
    return found


def _rows_of(run: Sequence[RoutedSegment], values: torch.Tensor) -> torch.Tensor:
    """View the rows of a run."""
    return values[run[0].start : run[-1].stop]


def _by_tenant(run: Sequence[RoutedSegment], rows: torch.Tensor) -> torch.Tensor:
    """View the rows of a run as (tenants, rows, width)."""
    return rows.view(len(run), -1, rows.shape[-1])


def _dropped(run: Sequence[RoutedSegment], rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a run with dropout: tenant by tenant, as it takes memory several times theirs."""
    if all(part.keys is None for part in run):
        return rows
    return torch.cat([part.dropped(own) for part, own in zip(run, rows.chunk(len(run)), strict=True)])


def _packed(run: Sequence[RoutedSegment], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the matrices of a run: (tenants, rank, in) and (tenants, out, rank)."""
    A, B = torch.stack([part.pair.A for part in run]), torch.stack([part.pair.B for part in run])
    return A.to(dtype), B.to(dtype)


BackendChoice: TypeAlias = Literal["auto", "loop"]
"""How adapters are computed: by batched products where tenants are alike, or always one after the other."""


def choose_backend(
    choice: BackendChoice,
    parts: Sequence[RoutedSegment],
    x: torch.Tensor,
    out: torch.Tensor,
    grouped: GroupedProducts | None = None,
) -> tuple[SegmentLoop, str]:
    """The backend of one layer, and why in a few words. Arithmetic alone: nothing is timed.

    ``grouped`` is that of the pass.
    """
    if choice == "loop":
        return SegmentLoop(), "loop: as asked"
    if x.dtype != out.dtype:
        return SegmentLoop(), f"loop: no batched product of {x.dtype} to {out.dtype}"
    if len(runs(parts)) == len(parts):
        return SegmentLoop(), "loop: no two neighbors alike"
    return grouped or GroupedProducts(), "grouped: fewer products"


def adapt(
    anchor: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    parts: Sequence[RoutedSegment],
    backend: SegmentLoop,
) -> torch.Tensor:
    """Return ``y`` (..., out) with the adapters' delta of each row of ``x`` (..., in).

    Parts count the rows of both.

    The result is not a view, because FSDP2 warns about views that leave a group.
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
        parts: tuple[RoutedSegment, ...],
        backend: SegmentLoop,
    ) -> torch.Tensor:
        out = y.clone(memory_format=torch.contiguous_format)
        kept = backend.add(parts, x.contiguous().flatten(0, -2), out.flatten(0, -2))
        ctx.parts, ctx.backend = parts, backend
        ctx.save_for_backward(x, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        x, *kept = ctx.saved_tensors
        x_grad = x.new_zeros(x.shape) if ctx.needs_input_grad[1] else None
        flat = None if x_grad is None else x_grad.flatten(0, -2)
        gradient = outer[0].contiguous().flatten(0, -2)
        ctx.backend.lead_back(ctx.parts, x.contiguous().flatten(0, -2), kept, gradient, flat)
        return None, x_grad, outer[0], None, None
