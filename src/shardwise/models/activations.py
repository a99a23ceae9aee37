"""Activations of a training step, measured on fake tensors."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.layout import Activations, TensorKind
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.fsdp.torch_private import dispatch_mode_class, fake_mode, storage_key, tree_leaves, tree_map_only
from shardwise.models.four_bit.config import scratch_bytes

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
    # Without memory, and parameters in the dtype in which FSDP2 gathers them.
    roots = set(in_root)
    mode = fake_mode()
    with mode:
        _make_fake(model, param_dtype)
    # FSDP2 reduces the gradients of a block after its backward pass, and frees them. Those of the root group stay.
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in roots:
            parameter.register_post_accumulate_grad_hook(_free_gradient)
    # A classifier needs a padding token for more than one row. TRL sets that of the tokenizer.
    text_config = base.config.get_text_config() if isinstance(base, PreTrainedModel) else None
    if text_config is not None and getattr(text_config, "pad_token_id", None) is None:
        text_config.pad_token_id = 0
    model.train()
    # The model's own tensors count as 0 bytes. What operations create is measured.
    live_bytes = _LiveBytes((*model.parameters(), *model.buffers()))
    modules = [base.get_submodule(name) for name in blocks]
    passes = _Passes(live_bytes, modules)
    root_parameters = {parameter for name, parameter in model.named_parameters() if name in roots}
    if root_parameters.isdisjoint(parameter for module in modules for parameter in module.parameters()):
        _Repeats(live_bytes, modules)
    with mode, live_bytes, torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        # (rows, tokens). Autocast is that of the CPU, where the fake tensors are.
        ids = torch.zeros(size, dtype=torch.int64, device="cpu")
        parameters = inspect.signature(base.forward).parameters
        keywords = {"use_cache": False, "logits_to_keep": 1}
        keywords = {name: value for name, value in keywords.items() if name in parameters}
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
        if is_parameter:
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        item.replace(fake)


class _LiveBytes(dispatch_mode_class()):  # type: ignore[misc]
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
        if func is torch.ops.shardwise.dequantize_four_bits.default:
            self.peak = max(self.peak, self.live + scratch_bytes(args[0]))
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


@dataclass(frozen=True, slots=True)
class _Like:
    """Describes a tensor of an input or output."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)


class _Repeats:
    """Has blocks take the memory of an equal block before them, without its operations.

    An operation on fake tensors takes a third of a millisecond, a block has hundreds, and a model dozens of equal
    blocks. Run are the first two (the model keeps the input of the first one in any case) and, since both passes
    have their peaks there, the last of its kind. Blocks whose gradients stay until the end cannot be repeated.
    """

    def __init__(self, watch: _LiveBytes, blocks: Sequence[nn.Module]) -> None:
        self.watch = watch
        self.known: dict[object, tuple[int, Any]] = {}  # bytes kept by a block and its output, by description
        self.previous: tuple[object, int, Any] | None = None  # of a block that ran: live bytes before it, output
        kinds = [_describe(block, index) for index, block in enumerate(blocks)]
        last = {kind: index for index, kind in enumerate(kinds)}
        for index, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
            call = partial(self._call, block.forward, kind if index else None, 1 < index < last[kind])
            block.forward = update_wrapper(call, block.forward)

    def _call(
        self,
        forward: Callable[..., Any],
        kind: object,
        may_repeat: bool,  # noqa: FBT001
        /,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
        key = (kind, *map(_Like.of, inputs))
        live = self.watch.live
        if self.previous is not None:  # only now the input of the block before is freed, if nothing keeps it
            earlier, before, output = self.previous
            self.known.setdefault(earlier, (live - before, output))
            self.previous = None
        # What the block saves for its backward pass is what memory has grown by, without the output.
        trained = [leaf for leaf in inputs if leaf.requires_grad]
        if may_repeat and key in self.known:
            grown, output = self.known[key]
            likes = [like for like in tree_leaves(output) if isinstance(like, _Like)]
            saved_bytes = grown - sum(like.shape.numel() * like.dtype.itemsize for like in likes)
            if trained and saved_bytes >= 0:
                tensors = iter(_Repeated.apply(saved_bytes, likes, *trained))  # type: ignore[no-untyped-call]
                return tree_map_only(_Like, lambda _: next(tensors), output)
        output = forward(*args, **keywords)
        self.previous = (key, live, tree_map_only(torch.Tensor, _Like.of, output))
        return output


class _Repeated(torch.autograd.Function):
    """Outputs of a block that keeps its inputs and some bytes more for the backward pass."""

    @staticmethod
    def forward(ctx: Any, saved: int, likes: Sequence[_Like], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(inputs[0].new_empty(saved, dtype=torch.uint8), *inputs)
        outputs = tuple(inputs[0].new_empty(like.shape, dtype=like.dtype) for like in likes)
        pairs = zip(outputs, likes, strict=True)
        ctx.mark_non_differentiable(*(output for output, like in pairs if not like.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors[1:])


def _describe(block: nn.Module, index: int) -> object:
    """Describe what decides the memory of a block: classes, settings but its number, and parameters."""
    modules = []
    for name, module in block.named_modules():
        settings: list[tuple[str, str]] = []
        for key, value in vars(module).items():
            if isinstance(value, (str, int, float, tuple)) and not (key in _NUMBER_OF_BLOCK and value == index):
                settings.append((key, repr(value)))
        # A recomputed block has a forward of its own.
        modules.append((name, type(module), type(vars(module).get("forward")), *settings))
    tensors = (*block.named_parameters(), *block.named_buffers())
    return tuple(modules), tuple((name, _Like.of(tensor)) for name, tensor in tensors)


_NUMBER_OF_BLOCK = frozenset({"layer_idx", "layer_id", "layer_number", "idx", "block_idx"})


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
        # The hook runs in the backward pass, when the gradient of the input of the first block is known. A
        # recomputed block enters again there, and gets no second hook.
        for leaf in filter(_needs_gradient, () if self.is_back else tree_leaves((args, keywords))):
            leaf.register_hook(self._end_blocks)

    def _leave(self, _: nn.Module, _args: Any, output: Any) -> None:
        if self.is_back:  # recomputation
            return
        self.kept = self.watch.live
        self.watch.take_peak()
        # The hook runs between the backward passes of the loss and of the last block.
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
