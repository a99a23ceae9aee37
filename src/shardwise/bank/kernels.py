"""Products of adapters with their rows, forward and backward.

[Note: Segments, not masks] Rows of one adapter are contiguous, and only they are multiplied with its matrices. A
mask would multiply every row with all adapters and then by 0, but 0 times NaN is NaN.

[Note: Straight into the buffer] The matrices are not inputs of the autograd function: their gradients are added to
views of the adapter's flat buffer. A scalar that requires a gradient, the *anchor*, is passed instead, so that the
function has a backward pass in the first layer too, whose input requires no gradient. Ranks without rows of a
adapter pass it as well, because FSDP2 gathers in the backward pass of tensors that require a gradient.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F

from shardwise.bank.adapter import LoraWeights
from shardwise.fsdp import torch_private

# SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014), as signed int64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def stable_key(*segments: object) -> int:
    """Return a key of 63 bits for values with a stable ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(segments).encode()).digest()[:8], "little") >> 1


def row_keys(key: int, first: int, count: int) -> torch.Tensor:
    """Return a key for each of ``count`` rows: (count,), int64, on the CPU."""
    return _mixed(key + torch.arange(first, first + count) * _GOLDEN)


def apply_dropout(values: torch.Tensor, keys: torch.Tensor, site: int, probability: float) -> torch.Tensor:
    """Return values after dropout, scaled as by ``nn.Dropout``, by a mask of keys, site and position alone.

    Applied to a gradient, it is its own derivative. ``values`` is (rows * n, width), ``keys`` (rows,), on the same
    device.
    """
    # A number for each element of a row of the batch: (n * width,). The hash of it and the key: (rows, n * width).
    places = torch.arange(values.numel() // max(len(keys), 1), device=values.device)
    hashed = _mixed((keys ^ site).unsqueeze(1) + places * _GOLDEN)
    # The upper 31 bits are a uniform number: an element is kept if it is not below the probability.
    kept = (_shifted(hashed, 33) >= int(probability * (1 << 31))).view(values.shape)
    return torch.where(kept, values / (1 - probability), 0.0)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, filling with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True)
class RoutedSegment:
    """Rows ``start <= i < stop`` of a layer's input, which belong to one adapter.

    ``keys`` are those of the rows, for dropout, or None without dropout.
    """

    pair: LoraWeights
    start: int
    stop: int
    keys: torch.Tensor | None = None
    site: int = 0

    def apply_dropout(self, values: torch.Tensor) -> torch.Tensor:
        if self.keys is None:
            return values
        return apply_dropout(values, self.keys, self.site, self.pair.dropout)


class SegmentLoop:
    """Computes one adapter after the other, by PEFT's products in PEFT's order: the reference.

    The scale is applied as a Python number, in float32 for any dtype. ``x`` is (rows, in), ``out`` and ``g`` are
    (rows, out). Segments are in order and do not overlap.
    """

    def forward_rows(
        self, segments: Sequence[RoutedSegment], x: torch.Tensor, out: torch.Tensor
    ) -> list[torch.Tensor]:
        """Add the adapters to ``out``. Return the values saved for :meth:`backward_rows`."""
        saved = []
        for segment in segments:
            pair, rows = segment.pair, slice(segment.start, segment.stop)
            z = F.linear(segment.apply_dropout(x[rows]), pair.A.to(x.dtype))  # (rows, r)
            out[rows] += F.linear(z, pair.B.to(x.dtype)) * pair.scaling
            saved.append(z)
        return saved

    def backward_rows(
        self,
        segments: Sequence[RoutedSegment],
        x: torch.Tensor,
        saved: Sequence[torch.Tensor],
        g: torch.Tensor,
        x_grad: torch.Tensor | None,
    ) -> None:
        """Add to the gradients of the matrices, and to that of ``x`` if there is one."""
        for segment, z in zip(segments, saved, strict=True):
            pair, rows = segment.pair, slice(segment.start, segment.stop)
            # Products in g's dtype, added to the matrices' gradients in float32.
            scaled = g[rows] * pair.scaling
            pair.b_grad.add_(scaled.T @ z)
            z_grad = scaled @ pair.B.to(g.dtype)
            pair.a_grad.add_(z_grad.T @ segment.apply_dropout(x[rows]))
            if x_grad is not None:
                x_grad[rows] += segment.apply_dropout(z_grad @ pair.A.to(g.dtype))


class GroupedProducts(SegmentLoop):
    """Computes adjacent segments with equally many rows and one LoRA rank by one batched product.

    Create one for each pass. It keeps the scales of runs on the device.
    """

    def __init__(self) -> None:
        self._scales: dict[tuple[float, ...], torch.Tensor] = {}

    def forward_rows(
        self, segments: Sequence[RoutedSegment], x: torch.Tensor, out: torch.Tensor
    ) -> list[torch.Tensor]:
        """Add the adapters to ``out``. Return the values saved for :meth:`backward_rows`."""
        saved: list[torch.Tensor] = []
        for run in runs(segments):
            if len(run) == 1:
                saved += super().forward_rows(run, x, out)
                continue
            A, B = _stacked(run, x.dtype)
            inputs = _by_adapter(run, _apply_dropout(run, _view_rows(run, x)))
            z = torch.bmm(inputs, A.transpose(1, 2))  # (adapters, rows, r)
            scaled = (z * self._get_scales(run, x.device)).to(x.dtype)
            _by_adapter(run, _view_rows(run, out)).baddbmm_(scaled, B.transpose(1, 2))
            # With the scale, in contrast to SegmentLoop, which saves z.
            saved.append(scaled)
        return saved

    def backward_rows(
        self,
        segments: Sequence[RoutedSegment],
        x: torch.Tensor,
        saved: Sequence[torch.Tensor],
        g: torch.Tensor,
        x_grad: torch.Tensor | None,
    ) -> None:
        """Add to the gradients of the matrices, and to that of ``x`` if there is one."""
        for run, scaled in zip(runs(segments), saved, strict=True):
            if len(run) == 1:
                super().backward_rows(run, x, [scaled], g, x_grad)
                continue
            A, B = _stacked(run, g.dtype)
            grad = _by_adapter(run, _view_rows(run, g))  # (adapters, rows, out)
            b_grads = torch.bmm(scaled.transpose(1, 2), grad).transpose(1, 2)  # faster than grad.T @ scaled
            z_grad = (torch.bmm(grad, B) * self._get_scales(run, g.device)).to(g.dtype)
            a_grads = torch.bmm(z_grad.transpose(1, 2), _by_adapter(run, _apply_dropout(run, _view_rows(run, x))))
            torch_private.add_all([segment.pair.a_grad for segment in run], a_grads)
            torch_private.add_all([segment.pair.b_grad for segment in run], b_grads)
            if x_grad is not None:
                _view_rows(run, x_grad).add_(_apply_dropout(run, torch.bmm(z_grad, A).flatten(0, 1)))

    def _get_scales(self, run: Sequence[RoutedSegment], device: torch.device) -> torch.Tensor:
        """Return the scales of a run, float32 (adapters, 1, 1)."""
        scales = tuple(segment.pair.scaling for segment in run)
        if scales not in self._scales:
            self._scales[scales] = torch_private.sent(torch.tensor(scales, dtype=torch.float32), device).view(
                -1, 1, 1
            )
        return self._scales[scales]


class EmbeddingLoop(SegmentLoop):
    """Computes adapters of an embedding: ``x`` is (rows, 1), token ids. ``factor`` is the scale of the layer."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def forward_rows(
        self, segments: Sequence[RoutedSegment], x: torch.Tensor, out: torch.Tensor
    ) -> list[torch.Tensor]:
        """Add the adapters to ``out``."""
        for segment in segments:
            pair, rows = segment.pair, slice(segment.start, segment.stop)
            found = F.embedding(x[rows, 0], pair.A.T) @ pair.B.T * pair.scaling * self._factor
            out[rows] += found.to(out.dtype)
        return []

    def backward_rows(
        self,
        segments: Sequence[RoutedSegment],
        x: torch.Tensor,
        saved: Sequence[torch.Tensor],  # noqa: ARG002
        g: torch.Tensor,
        x_grad: torch.Tensor | None,  # noqa: ARG002
    ) -> None:
        """Add to the gradients of the matrices."""
        for segment in segments:
            pair, ids = segment.pair, x[segment.start : segment.stop, 0]
            scaled = g[segment.start : segment.stop].float() * self._factor * pair.scaling
            pair.b_grad.add_(scaled.T @ F.embedding(ids, pair.A.T))
            if ids.device.type == "cpu":
                pair.a_grad.T.index_add_(0, ids, scaled @ pair.B)
            else:  # on CUDA index_put_ is deterministic, and index_add_ is not
                pair.a_grad.T.index_put_((ids,), scaled @ pair.B, accumulate=True)


def runs(segments: Sequence[RoutedSegment]) -> list[list[RoutedSegment]]:
    """Group segments that follow each other without a gap, with equally many rows and one LoRA rank."""
    grouped: list[list[RoutedSegment]] = []
    for segment in segments:
        last = grouped[-1][-1] if grouped else None
        if (
            last is not None
            and last.stop == segment.start
            and last.stop - last.start == segment.stop - segment.start
            and last.pair.rank == segment.pair.rank
        ):
            grouped[-1].append(segment)
        else:
            grouped.append([segment])
    return grouped


def _view_rows(run: Sequence[RoutedSegment], values: torch.Tensor) -> torch.Tensor:
    """View the rows of a run."""
    return values[run[0].start : run[-1].stop]


def _by_adapter(run: Sequence[RoutedSegment], rows: torch.Tensor) -> torch.Tensor:
    """View the rows of a run as (adapters, rows, width)."""
    return rows.view(len(run), -1, rows.shape[-1])


def _apply_dropout(run: Sequence[RoutedSegment], rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a run after dropout, adapter by adapter, because its temporaries are large."""
    if all(segment.keys is None for segment in run):
        return rows
    return torch.cat([segment.apply_dropout(own) for segment, own in zip(run, rows.chunk(len(run)), strict=True)])


def _stacked(run: Sequence[RoutedSegment], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the matrices of a run: (adapters, rank, in) and (adapters, out, rank)."""
    A, B = torch.stack([segment.pair.A for segment in run]), torch.stack([segment.pair.B for segment in run])
    return A.to(dtype), B.to(dtype)


BackendChoice: TypeAlias = Literal["auto", "loop"]
"""How adapters are computed: by batched products of adapters with equal sizes, or one adapter after the other."""


def select_backend(
    choice: BackendChoice,
    segments: Sequence[RoutedSegment],
    x: torch.Tensor,
    out: torch.Tensor,
    grouped: GroupedProducts,
) -> tuple[SegmentLoop, str]:
    """Return the backend for one layer, ``grouped`` or a loop, and the reason in a few words."""
    if not segments:
        return SegmentLoop(), "no rows"
    if choice == "loop":
        return SegmentLoop(), "loop: as asked"
    if x.dtype != out.dtype:
        return SegmentLoop(), f"loop: no batched product of {x.dtype} to {out.dtype}"
    if len(runs(segments)) == len(segments):
        return SegmentLoop(), "loop: no two equal segments adjacent"
    return grouped, "grouped: fewer products"


def adapt(
    anchor: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    segments: Sequence[RoutedSegment],
    backend: SegmentLoop,
) -> torch.Tensor:
    """Return ``y`` (..., out) plus the adapters' delta of each row of ``x`` (..., in).

    Segments are ranges of rows of both. The result is not a view, because FSDP2 warns about views that leave a
    group.
    """
    apply: Any = _SegmentedProducts.apply
    out: torch.Tensor = apply(anchor, x, y, tuple(segments), backend)
    return out


class _SegmentedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _anchor: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        segments: tuple[RoutedSegment, ...],
        backend: SegmentLoop,
    ) -> torch.Tensor:
        # A contiguous copy, so that flatten() below is a view: the backend adds to ``out`` through it.
        out = y.clone(memory_format=torch.contiguous_format)
        saved = backend.forward_rows(segments, x.contiguous().flatten(0, -2), out.flatten(0, -2))
        ctx.segments, ctx.backend = segments, backend
        ctx.save_for_backward(x, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        # New and contiguous, so that ``flat`` is a view of it.
        x_grad = x.new_zeros(x.shape) if ctx.needs_input_grad[1] else None
        flat = None if x_grad is None else x_grad.flatten(0, -2)
        gradient = outer[0].contiguous().flatten(0, -2)
        ctx.backend.backward_rows(ctx.segments, x.contiguous().flatten(0, -2), saved, gradient, flat)
        return None, x_grad, outer[0], None, None
