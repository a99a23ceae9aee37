"""Products of adapters with their rows, forward and backward.

[Note: Segments, not masks] Rows of one adapter are contiguous, and only they are multiplied with its matrices. A
mask would multiply every row with all adapters and then by 0, but 0 times NaN is NaN.

[Note: Straight into the buffer] The matrices are not inputs of the autograd function: their gradients are added to
views of the adapter's flat buffer. A scalar that requires a gradient, the *anchor*, is passed instead, so that the
function has a backward pass in the first layer too, whose input requires no gradient. Ranks without rows of an
adapter pass it as well, because FSDP2 gathers in the backward pass of tensors that require a gradient.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.bank.adapter import LoraWeights
from shardwise.fsdp import torch_private

# SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014): the increment and the two
# multipliers, as signed int64, since torch has no arithmetic of uint64. Products wrap modulo 2**64 in both.
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)

_NUMBERS_AT_ONCE: Final = 1 << 22
"""Elements whose random numbers are computed at once: 17 bytes each, 70 MB."""


def stable_key(*values: object) -> int:
    """Return a key of 63 bits for values with a stable ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little") >> 1


def row_keys(key: int, first: int, count: int) -> Tensor:
    """Return the keys of rows ``first`` to ``first + count``: (count,), int64, on the CPU."""
    return _mix(key + torch.arange(first, first + count, device="cpu") * _INCREMENT)


def drop_elements(
    values: Tensor, keys: Tensor, site_key: int, probability: float, positions: Tensor | None = None
) -> Tensor:
    """Return values after dropout, scaled as by ``nn.Dropout``, by a mask of keys, site and position alone.

    Applied to a gradient, it is its own derivative.

    Example: 2 rows of 3 tokens in a layer of width 4 are ``values`` of shape (6, 4) with ``keys`` of shape (2,).
    Element (4, 1) is in token 1 of row 1, at position 1 * 4 + 1 = 5 of the row. Its random number is
    ``mix((keys[1] ^ site_key) + 5 * increment)``.

    Args:
        values: (rows * tokens, width), or (tokens, width) of any tokens of any rows, with ``positions``.
        keys: (rows,), or of the row of each token, on the same device.
        site_key: key of the layer.
        probability: probability of 0.
        positions: the positions of tokens in their rows.
    """
    width = values.shape[-1]
    if positions is None:
        keys = keys.unsqueeze(1)  # (rows, 1)
        positions = torch.arange(len(values) // max(len(keys), 1), device=values.device)  # of any row: (tokens,)
    # What is mixed into the number of each token's first element: (rows * tokens,).
    first = ((keys ^ site_key) + positions * width * _INCREMENT).flatten()
    increments = torch.arange(width, device=values.device) * _INCREMENT
    dropped, tokens = values / (1 - probability), max(_NUMBERS_AT_ONCE // width, 1)
    for part, first_of_part in zip(dropped.split(tokens), first.split(tokens), strict=True):
        numbers = _mix(first_of_part.unsqueeze(1) + increments)  # (tokens, width)
        # The upper 31 bits are a uniform integer below 2**31: an element is dropped if it is below the probability.
        part.masked_fill_(_shift(numbers, 33) < int(probability * (1 << 31)), 0.0)
    return dropped


def _mix(values: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64, in place."""
    values.bitwise_xor_(_shift(values, 30)).mul_(_MULTIPLIER_1)
    values.bitwise_xor_(_shift(values, 27)).mul_(_MULTIPLIER_2)
    return values.bitwise_xor_(_shift(values, 31))


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift to the right, filling with zeros: ``>>`` alone repeats the sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True)
class RoutedSegment:
    """Rows ``start <= i < stop`` of a layer's input, which belong to one adapter.

    Attributes:
        weights: the matrices of the adapter in this layer.
        keys: the keys of the batch rows, for dropout. None without dropout.
        site_key: key of the layer, for dropout.
        positions: as in :func:`drop_elements`.
        is_trained: False for rows without a backward pass. Their output has no gradient, and neither has their
            input from these matrices. (A gradient of 0, multiplied, would be NaN if a matrix is not finite.)
    """

    weights: LoraWeights
    start: int
    stop: int
    keys: Tensor | None = None
    site_key: int = 0
    positions: Tensor | None = None
    is_trained: bool = True

    def apply_dropout(self, values: Tensor) -> Tensor:
        """Return rows (layer rows of the segment, width) after dropout."""
        if self.keys is None:
            return values
        return drop_elements(values, self.keys, self.site_key, self.weights.dropout, self.positions)


Segments: TypeAlias = Sequence[RoutedSegment]


class SegmentLoop:
    """Computes one adapter after the other, by PEFT's products in PEFT's order: the reference.

    The scale is applied as a Python number, in float32 for any dtype. ``x`` is (rows, in), ``out`` and ``g`` are
    (rows, out), where rows are tokens of all rows of the batch. Segments are in order and do not overlap.

    Example: an adapter of rank 8 with 2 batch rows of 64 tokens, in a layer from width 512 to 1024, has a segment
    of 128 rows. Forward: z (128, 8) = x (128, 512) @ A.T, and out (128, 1024) += z @ B.T * scaling. Backward, with
    scaled = g (128, 1024) * scaling: b_grad (1024, 8) += scaled.T @ z, z_grad (128, 8) = scaled @ B,
    a_grad (8, 512) += z_grad.T @ x, and x_grad (128, 512) += z_grad @ A.
    """

    def forward_rows(self, segments: Segments, x: Tensor, out: Tensor) -> list[Tensor]:
        """Add the adapters to ``out``. Return the values saved for :meth:`backward_rows`."""
        saved = []
        for segment in segments:
            weights, rows = segment.weights, slice(segment.start, segment.stop)
            z = F.linear(segment.apply_dropout(x[rows]), weights.A.to(x.dtype))  # (rows, r)
            out[rows] += F.linear(z, weights.B.to(x.dtype)) * weights.scaling  # (rows, out)
            saved.append(z)
        return saved

    def backward_rows(
        self, segments: Segments, x: Tensor, saved: Sequence[Tensor], g: Tensor, x_grad: Tensor | None
    ) -> None:
        """Add to the gradients of the matrices, and to that of ``x`` if there is one."""
        for segment, z in zip(segments, saved, strict=True):
            if not segment.is_trained:
                continue
            weights, rows = segment.weights, slice(segment.start, segment.stop)
            # Products in g's dtype, added to the matrices' gradients in float32.
            scaled = g[rows] * weights.scaling  # (rows, out)
            weights.b_grad.add_(scaled.T @ z)  # (out, r)
            z_grad = scaled @ weights.B.to(g.dtype)  # (rows, r)
            # The dropout mask is computed again from the keys, and was not saved.
            weights.a_grad.add_(z_grad.T @ segment.apply_dropout(x[rows]))  # (r, in)
            if x_grad is not None:
                x_grad[rows] += segment.apply_dropout(z_grad @ weights.A.to(g.dtype))


class GroupedProducts(SegmentLoop):
    """Computes adjacent segments with equally many rows and one LoRA rank by one batched product, others alone.

    Create one for each pass. It keeps the scales of runs on the device.

    Example: 3 adapters of rank 8 with 128 rows each, in a layer from width 512 to 1024, are a run of 384 rows, seen
    as (3, 128, 512). With A stacked to (3, 8, 512) and B to (3, 1024, 8), z is (3, 128, 8) and the delta
    (3, 128, 1024).
    """

    def __init__(self) -> None:
        self._scales: dict[tuple[float, ...], Tensor] = {}

    def forward_rows(self, segments: Segments, x: Tensor, out: Tensor) -> list[Tensor]:
        """Add the adapters to ``out``. Return the values saved for :meth:`backward_rows`."""
        # One for each run: the backward pass makes the same runs of the segments.
        saved: list[Tensor] = []
        for run in group_into_runs(segments):
            if len(run) == 1:
                saved += super().forward_rows(run, x, out)
                continue
            A, B = _stack_matrices(run, x.dtype)
            z = torch.bmm(_apply_dropout(run, _view_rows(run, x)), A.transpose(1, 2))  # (adapters, rows, r)
            scaled = (z * self._get_scales(run, x.device)).to(x.dtype)
            _view_rows(run, out).baddbmm_(scaled, B.transpose(1, 2))  # (adapters, rows, out), in place
            # With the scale, in contrast to SegmentLoop, which saves z.
            saved.append(scaled)
        return saved

    def backward_rows(
        self, segments: Segments, x: Tensor, saved: Sequence[Tensor], g: Tensor, x_grad: Tensor | None
    ) -> None:
        """Add to the gradients of the matrices, and to that of ``x`` if there is one."""
        for run, scaled in zip(group_into_runs(segments), saved, strict=True):
            if not run[0].is_trained:
                continue
            if len(run) == 1:
                super().backward_rows(run, x, [scaled], g, x_grad)
                continue
            A, B = _stack_matrices(run, g.dtype)
            grad = _view_rows(run, g)  # (adapters, rows, out)
            # (adapters, out, r). Faster than grad.transpose(1, 2) @ scaled.
            b_grads = torch.bmm(scaled.transpose(1, 2), grad).transpose(1, 2)
            z_grad = (torch.bmm(grad, B) * self._get_scales(run, g.device)).to(g.dtype)  # (adapters, rows, r)
            inputs = _apply_dropout(run, _view_rows(run, x))
            a_grads = torch.bmm(z_grad.transpose(1, 2), inputs)  # (adapters, r, in)
            torch_private.add_all([segment.weights.a_grad for segment in run], a_grads)
            torch_private.add_all([segment.weights.b_grad for segment in run], b_grads)
            if x_grad is not None:
                _view_rows(run, x_grad).add_(_apply_dropout(run, torch.bmm(z_grad, A)))

    def _get_scales(self, run: Segments, device: torch.device) -> Tensor:
        """Return the scales of a run, float32 (adapters, 1, 1)."""
        scales = tuple(segment.weights.scaling for segment in run)
        if scales not in self._scales:
            on_device = torch_private.to_device(torch.tensor(scales, dtype=torch.float32, device="cpu"), device)
            self._scales[scales] = on_device.view(-1, 1, 1)
        return self._scales[scales]


class EmbeddingLoop(SegmentLoop):
    """Computes adapters of an embedding: ``x`` is (rows, 1), token ids.

    Args:
        factor: the scale of the layer.
        padding_idx: a token without a gradient, as in ``nn.Embedding``.
    """

    def __init__(self, factor: float, padding_idx: int | None = None) -> None:
        self._factor, self._padding_idx = factor, padding_idx

    def forward_rows(self, segments: Segments, x: Tensor, out: Tensor) -> list[Tensor]:
        """Add the adapters to ``out``."""
        for segment in segments:
            weights, rows = segment.weights, slice(segment.start, segment.stop)
            # A is (r, vocabulary): its column of a token is the row of an embedding.
            products = F.embedding(x[rows, 0], weights.A.T) @ weights.B.T  # (rows, out)
            delta = products * weights.scaling * self._factor
            out[rows] += delta.to(out.dtype)
        return []

    def backward_rows(
        self,
        segments: Segments,
        x: Tensor,
        saved: Sequence[Tensor],  # noqa: ARG002
        g: Tensor,
        x_grad: Tensor | None,  # noqa: ARG002
    ) -> None:
        """Add to the gradients of the matrices."""
        for segment in segments:
            if not segment.is_trained:
                continue
            weights, ids = segment.weights, x[segment.start : segment.stop, 0]
            scaled = g[segment.start : segment.stop].float() * self._factor * weights.scaling  # (rows, out)
            weights.b_grad.add_(scaled.T @ F.embedding(ids, weights.A.T))  # (out, r)
            gradient = scaled @ weights.B  # (rows, r)
            if self._padding_idx is not None:
                gradient.masked_fill_((ids == self._padding_idx).unsqueeze(1), 0)
            if ids.device.type == "cpu":
                weights.a_grad.T.index_add_(0, ids, gradient)
            else:  # on CUDA index_put_ is deterministic, and index_add_ is not
                weights.a_grad.T.index_put_((ids,), gradient, accumulate=True)


def group_into_runs(segments: Segments) -> list[list[RoutedSegment]]:
    """Group segments without a gap, with equally many rows and one LoRA rank, all trained or none."""
    grouped: list[list[RoutedSegment]] = []
    for segment in segments:
        # A run is seen as one tensor (adapters, rows, width), so its segments must be adjacent and equally long.
        last = grouped[-1][-1] if grouped else None
        if (
            last is not None
            and last.stop == segment.start
            and last.stop - last.start == segment.stop - segment.start
            and last.weights.rank == segment.weights.rank
            and last.is_trained == segment.is_trained
        ):
            grouped[-1].append(segment)
        else:
            grouped.append([segment])
    return grouped


def _view_rows(run: Segments, values: Tensor) -> Tensor:
    """View the rows of a run as (adapters, rows, width)."""
    return values[run[0].start : run[-1].stop].view(len(run), -1, values.shape[-1])


def _apply_dropout(run: Segments, rows: Tensor) -> Tensor:
    """Return the rows of a run after dropout, adapter by adapter, because its temporaries are large."""
    if all(segment.keys is None for segment in run):
        return rows
    return torch.stack([segment.apply_dropout(values) for segment, values in zip(run, rows, strict=True)])


def _stack_matrices(run: Segments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stack the matrices of a run: (adapters, r, in) and (adapters, out, r)."""
    A, B = torch.stack([segment.weights.A for segment in run]), torch.stack([segment.weights.B for segment in run])
    return A.to(dtype), B.to(dtype)


BackendChoice: TypeAlias = Literal["auto", "loop"]
"""How adapters are computed: by batched products of adapters with equal sizes, or one adapter after the other."""


def adapt(anchor: Tensor, x: Tensor, y: Tensor, segments: Segments, backend: SegmentLoop) -> Tensor:
    """Return ``y`` (..., out) plus the adapters' delta of each row of ``x`` (..., in).

    Segments are ranges of rows of both. The result is not a view, because FSDP2 warns about views that leave a
    group. Without segments the delta is 0, but the result requires a gradient ([Note: Straight into the buffer]).
    """
    apply: Any = _SegmentedProducts.apply
    out: Tensor = apply(anchor, x, y, tuple(segments), backend)
    return out


class _SegmentedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, x: Tensor, y: Tensor, segments: tuple[RoutedSegment, ...], backend: SegmentLoop
    ) -> Tensor:
        # A contiguous copy, so that flatten() below is a view: the backend adds to ``out`` through it.
        out = y.clone(memory_format=torch.contiguous_format)
        saved = backend.forward_rows(segments, x.contiguous().flatten(0, -2), out.flatten(0, -2))
        ctx.segments, ctx.backend = segments, backend
        ctx.save_for_backward(x, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        # (..., in), and what the backend returned from the forward pass.
        x, *saved_by_backend = ctx.saved_tensors
        # New and contiguous, so that ``flat`` is a view of it.
        x_grad = x.new_zeros(x.shape) if ctx.needs_input_grad[1] else None
        flat = None if x_grad is None else x_grad.flatten(0, -2)
        gradient = outer[0].contiguous().flatten(0, -2)
        ctx.backend.backward_rows(ctx.segments, x.contiguous().flatten(0, -2), saved_by_backend, gradient, flat)
        # ``y`` is only added to, so its gradient is that of the output. Those of the matrices have been added.
        return None, x_grad, outer[0], None, None
