"""Activations of a training step, measured on fake tensors."""

import inspect
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.core.layout import Activations, TensorKind
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.fsdp.torch_private import dispatch_mode, fake_mode, storage_key, tree_leaves

aten = torch.ops.aten


def trace_activations(
    model: nn.Module,
    base: nn.Module,
    blocks: Sequence[str],
    size: tuple[int, int],
    *,
    param_dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    in_root: Iterable[str] = (),
) -> Activations:
    """Run a model on fake tensors and measure its activations. The model must be on meta, and is changed.

    Logits are computed for one token of each row if the model can do that.

    Args:
        model: the model to train, in PEFT's wrapper if there is an adapter.
        base: the transformers model in it.
        blocks: names of the repeated blocks in ``base``.
        size: the number of rows, and of tokens in each row.
        param_dtype: dtype of gathered parameters. None for their own.
        autocast: dtype of autocast, if it is used.
        in_root: names of parameters whose gradients are kept until the end of the backward pass.

    Raises:
        Exception: whatever the model raises if it cannot run without data.
    """
    roots = set(in_root)
    mode = fake_mode()
    with mode:
        _make_fake(model, param_dtype)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in roots:
            parameter.register_post_accumulate_grad_hook(_free_gradient)
    model.train()
    live_bytes = _LiveBytes((*model.parameters(), *model.buffers()))
    passes = _Passes(live_bytes, [base.get_submodule(name) for name in blocks])
    with mode, live_bytes, torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        ids = torch.zeros(size, dtype=torch.int64, device="cpu")
        parameters = inspect.signature(base.forward).parameters
        keywords = {
            name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in parameters
        }
        output = next(leaf for leaf in tree_leaves(model(input_ids=ids, **keywords)) if _needs_gradient(leaf))
        output.float().sum().backward()
    return passes.result()


def _free_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _needs_gradient(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _make_fake(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace tensors on meta by fake ones on the CPU. Ties are kept."""
    for item in collect_tensors(model):
        tensor = item.tensor
        is_parameter = item.kind is TensorKind.PARAMETER
        is_cast = dtype is not None and is_parameter and tensor.is_floating_point()
        fake = torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device="cpu")
        item.replace(nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake)


class _LiveBytes(dispatch_mode()):  # type: ignore[misc]
    """Counts the bytes of live storages that operations create. Reading a value (``.item()``) returns 1."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}
        for tensor in known:
            self._count(tensor, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._run(func, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, tensor.untyped_storage().nbytes())
        # Autograd sums two gradients of a tensor in place, except under a mode.
        if func is not aten.add.Tensor or torch.is_grad_enabled():
            self.peak = max(self.peak, self.live)
        return result

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = max(self.peak, self.live), self.live
        return peak

    @staticmethod
    def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.nonzero.default:  # its size depends on data: assume all elements
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if func is aten._local_scalar_dense.default:
            return 1
        if func is aten._grouped_mm.default:  # torch's fake implementation is for bfloat16 only
            left, right = args[:2]
            shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
            if left.ndim == 3:  # (groups, rows, in) @ (groups, in, out)
                shape = (left.shape[0], *shape)
            elif left.ndim == right.ndim:  # (rows, in) @ (in, out), with one product for each range of "in"
                shape = (len(args[2]), *shape)
            return left.new_empty(shape)
        return func(*args, **kwargs)

    def _count(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._known:
            return

        def forget(_: object) -> None:
            self._known.pop(key, None)
            self.live -= nbytes

        self._known[key] = weakref.ref(storage, forget)
        self.live += nbytes


class _Passes:
    """Measures the forward and backward passes with hooks on the first and last blocks."""

    def __init__(self, watch: _LiveBytes, blocks: Sequence[nn.Module]) -> None:
        self.watch = watch
        self.kept = self.loss = self.backward = 0
        self.is_back = False
        if blocks:
            blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True)
            blocks[-1].register_forward_hook(self._leave)

    def _enter(self, _: nn.Module, args: Any, keywords: Any) -> None:
        for leaf in filter(_needs_gradient, () if self.is_back else tree_leaves((args, keywords))):
            leaf.register_hook(self._end_blocks)

    def _leave(self, _: nn.Module, _args: Any, output: Any) -> None:
        if self.is_back:  # recomputation
            return
        self.kept = self.watch.live
        self.watch.take_peak()
        if (leaf := next(filter(_needs_gradient, tree_leaves(output)), None)) is not None:
            leaf.register_hook(self._end_loss)

    def _end_loss(self, _: torch.Tensor) -> None:
        if not self.is_back:
            self.is_back = True
            self.loss = self.watch.take_peak() - self.kept

    def _end_blocks(self, _: torch.Tensor) -> None:
        self.backward = max(self.watch.take_peak() - self.kept, self.backward)

    def result(self) -> Activations:
        peak = self.watch.take_peak()
        if not self.is_back:  # only the head is trained
            self.loss = peak - self.kept
        elif not self.backward:  # nothing before the blocks is trained
            self.backward = max(peak - self.kept, 0)
        return Activations(self.kept, self.loss, self.backward, peak if self.backward else 0)
