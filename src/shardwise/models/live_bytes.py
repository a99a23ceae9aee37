"""How many bytes of tensors are alive while something is run, on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.models._torch_private import TorchDispatchMode, is_in_backward, storage_key, tree_leaves

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make, as long as they live, and floating operations.

    Where a number is read from a tensor, it is 1; of elements that are not zero there are as many as can be.

    Args:
        known: tensors that were there before, which do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.flops = 0.0
        self._known: dict[int, Any] = {}
        self._sum: tuple[int, int] | None = None
        for tensor in known:
            self._know(tensor, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.settle()
        result = self.answer(func, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._know(tensor, tensor.untyped_storage().nbytes())
        if func is aten.add.Tensor and is_in_backward() and args[0].is_contiguous() and not args[0]._is_view():
            self._sum = (storage_key(args[0].untyped_storage()), self.live)
        else:
            self.peak = max(self.peak, self.live)
        self.flops += _flops(func, args, result)
        return result

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives."""
        if func is aten.nonzero.default:  # how many there are is in the data: all
            found = args[0]
            return found.new_empty((found.numel(), found.ndim), dtype=torch.int64)
        if func is aten._local_scalar_dense.default:
            return 1
        if func is aten._grouped_mm.default:  # torch's own answer without data is for bfloat16 alone
            return _grouped(*args, **kwargs)
        return func(*args, **kwargs)

    def settle(self) -> None:
        """Take what the last operation left into the peak: before each one, and when the peak is asked for.

        [Note: Sums of gradients] Of two gradients of one tensor (tied weights, a residual) torch adds the later to
        the earlier in place, where that is contiguous, no view and held by nobody else (``accumulate`` in
        torch/csrc/autograd/input_buffer.cpp), but not while a mode like this one looks on. So a sum in the backward
        pass counts as made in place if what is added to is gone when the next operation begins.
        """
        added_to, live = self._sum or (0, 0)
        self._sum = None
        self.peak = max(self.peak, live if added_to in self._known else self.live)

    def _know(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._known:
            return

        def forget(_: object) -> None:
            self._known.pop(key, None)
            self.live -= nbytes

        self._known[key] = weakref.ref(storage, forget)
        self.live += nbytes


def _grouped(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """What a grouped product is like: of rows by stacked matrices, or a matrix for each group."""
    rows, columns = left.shape[-2], right.shape[-1]
    is_stacked = left.ndim == right.ndim
    count = left.shape[0] if left.ndim == 3 else 0 if offs is None else offs.shape[0]
    return left.new_empty((count, rows, columns) if is_stacked else (rows, columns))


def _flops(func: Any, args: Sequence[Any], result: Any) -> float:
    """Of products of matrices, two for each product of two numbers; all else is little beside them."""
    name = func.__name__.partition(".")[0]
    found = 0.0
    if name in ("mm", "bmm"):
        found = 2.0 * result.numel() * args[0].shape[-1]
    elif name in ("addmm", "baddbmm"):
        found = 2.0 * result.numel() * args[1].shape[-1]
    elif name == "_grouped_mm":
        # Of stacked matrices each row meets one; where the groups are in the inner dimension, each column does.
        found = 2.0 * args[0].numel() * args[1].shape[-1]
    elif name.startswith("_scaled_dot_product"):
        is_back = "backward" in name
        query, key = args[1 if is_back else 0], args[2 if is_back else 1]
        found = (10.0 if is_back else 4.0) * query.numel() * key.shape[-2]
    elif name == "convolution":
        found = 2.0 * result.numel() * args[1][0].numel()
    return found
