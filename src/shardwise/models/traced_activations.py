"""What a step keeps for its backward pass, found by running it on tensors without data.

[Note: Traced activations] What a block saves depends on what is trained in it, on what its input needs, on how
attention is computed, on what is computed again, and on code of others. So it is not listed but run: one forward
and backward pass on fake tensors (shapes and dtypes, no memory), during which each storage that comes and goes is
counted. The passes are cut into *stretches* where groups of FSDP2 and blocks begin and end; in each, what matters
is how far memory rises and what is left. Blocks that are alike (same modules, shapes, dtypes, plain attributes,
trained or not, and with or without something trained before them) are run once, and their stretches stand for all
of them.

Memory that a kernel takes for itself is not seen. Fake tensors are on the CPU, whatever the device: attention
then is what keeps its inputs, its output and a sum for each row, as flash attention does elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.layout import PassPart, Stretch
from shardwise.models._torch_private import (
    FakeTensorMode,
    buffers_of,
    parameters_of,
    tree_leaves,
    tree_map_only,
    walk,
)
from shardwise.models.alike_blocks import kinds_of, lists_of, only, repeated
from shardwise.models.live_bytes import LiveBytes


class TracedModel:
    """A model whose tensors have no data, and which can be run. It is changed for good: it was on meta.

    Args:
        model: on meta, as it is trained; with what is put around it (PEFT's model, say).
        base: what is sharded of it; names of groups and blocks are those in it.
        groups: for each group of FSDP2 the names of its modules, the root's ("",) last.
        blocks: names of the repeated blocks.
        computed_in: the dtype that groups are gathered in; None for each parameter's own.
        whole: parameters that are in no group, and keep their dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        groups: Sequence[tuple[str, ...]],
        blocks: Sequence[str],
        computed_in: torch.dtype | None,
        whole: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        self.model = model
        self.base = base
        self.groups = groups
        self.blocks = blocks
        self.mode = FakeTensorMode()
        self.kinds = kinds_of(base, blocks)
        self._computed_in = computed_in
        self._whole = whole
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def trace(self, loss_of: Callable[[], torch.Tensor]) -> tuple[Stretch, ...]:
        """The stretches of one forward and one backward pass of all blocks, in their order.

        ``loss_of`` runs the model on a batch that it makes itself; the loss it returns is 0-d.

        Raises:
            whatever the model raises where it cannot be run without data.
        """
        first_of = {kind: index for index, kind in reversed([*enumerate(self.kinds)])}
        chosen = sorted(first_of.values())
        lists = lists_of(self.base, self.blocks)
        if lists and len(chosen) < len(self.blocks):
            # A model that cannot do with some of its blocks is run as a whole.
            with contextlib.suppress(Exception), only(self.base, self.blocks, chosen):
                found = self._run(loss_of, chosen)
                return repeated(found, [first_of[kind] for kind in self.kinds], self.groups, self.blocks)
        return self._run(loss_of, range(len(self.blocks)))

    def _run(self, loss_of: Callable[[], torch.Tensor], present: Sequence[int]) -> tuple[Stretch, ...]:
        with self.mode:  # only what is there: of a model of a hundred blocks, one
            _without_memory(self.model, self._computed_in, self._whole, self._made)
        names = {self.blocks[index]: index for index in present}
        watch = LiveBytes((*self.model.parameters(), *self.model.buffers()))
        passes = _Passes(watch, self.base, self.groups, names)
        try:
            with self.mode, watch:
                loss = loss_of()
                passes.turn()
                loss.backward()
                passes.end()
        finally:
            passes.remove()
            for parameter in self.model.parameters():
                parameter.grad = None
        return tuple(passes.stretches)


class _Passes:
    """Cuts the passes into stretches, as hooks on groups and blocks tell where these begin and end."""

    def __init__(
        self, watch: LiveBytes, base: nn.Module, groups: Sequence[tuple[str, ...]], blocks: Mapping[str, int]
    ) -> None:
        self.watch = watch
        self.stretches: list[Stretch] = []
        self.root = len(groups) - 1
        self.way = PassPart.FORWARD
        self.block = -1
        self.is_back = False
        self._opens: tuple[int, ...] = (self.root,)
        self._start = self._flops = 0.0
        self._open_back: set[tuple[int, int]] = set()
        self._closed_back: set[int] = set()
        self._handles: list[Any] = []
        group_of = {name: index for index, names in enumerate(groups) for name in names}
        modules = dict(walk(base))
        self._members = [len(names) for names in groups]
        self._entered: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._own: list[list[nn.Parameter]] = [[] for _ in groups]
        for name, module in modules.items():
            owner = _owner(name, group_of)
            self._own[group_of.get(owner, self.root)] += [
                p for p in parameters_of(module).values() if p is not None
            ]
        for name, module in modules.items():
            group, block = group_of.get(name, self.root), blocks.get(name, -1)
            if name and (group != self.root or block >= 0):
                self._watch(module, group, block)
        self._begin()

    def _watch(self, module: nn.Module, group: int, block: int) -> None:
        unit = (group, block)

        def before(_: nn.Module, args: Any, keywords: Any) -> Any:
            if self.is_back:
                return None
            count = self._entered[group] = self._entered.get(group, 0) + 1
            self._cut(opens=(group,) if group != self.root and count == 1 else ())
            if block >= 0:
                self.block, self.way = block, PassPart.FORWARD
            inputs = [leaf for leaf in tree_leaves((args, keywords)) if _needs_gradient(leaf)]
            if not inputs:
                return None
            outputs: Any = _Left.apply(lambda: self._leave(unit), *inputs)  # type: ignore[no-untyped-call]
            after = {id(old): new for old, new in zip(inputs, outputs, strict=True)}
            return tree_map_only(torch.Tensor, lambda leaf: after.get(id(leaf), leaf), (args, keywords))

        def behind(_: nn.Module, __: Any, output: Any) -> None:
            if self.is_back:
                return
            count = self._left[group] = self._left.get(group, 0) + 1
            self._cut(closes=(group,) if group != self.root and count == self._members[group] else ())
            if block >= 0:
                self.block, self.way = -1, PassPart.LOSS
            for leaf in tree_leaves(output):
                if _needs_gradient(leaf):
                    leaf.register_hook(lambda gradient: self._enter(unit))

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(behind))

    def turn(self) -> None:
        """The forward pass is over."""
        self._cut(opens=(self.root,))
        self.is_back, self.way, self.block = True, PassPart.LOSS_BACKWARD, -1

    def end(self) -> None:
        """The backward pass is over: groups whose input needs no gradient end here, the root's last."""
        entered = {group for group, _ in self._open_back} | {self.root}
        self._cut(closes=tuple(sorted(entered - self._closed_back)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, unit: tuple[int, int]) -> None:
        if unit in self._open_back:
            return
        group, block = unit
        is_new = group != self.root and all(group != other for other, _ in self._open_back)
        self._open_back.add(unit)
        self._cut(opens=(group,) if is_new else ())
        if block >= 0:
            self.block, self.way = block, PassPart.BACKWARD

    def _leave(self, unit: tuple[int, int]) -> None:
        group, block = unit
        is_over = group != self.root and self._members[group] == 1 and group not in self._closed_back
        self._cut(closes=(group,) if is_over else ())
        if block >= 0:
            self.block = -1

    def _cut(self, closes: tuple[int, ...] = (), opens: tuple[int, ...] = ()) -> None:
        """End a stretch, and begin another."""
        watch = self.watch
        watch.settle()
        start = int(self._start)
        kept = watch.live - start
        released = 0
        if self.is_back:
            self._closed_back |= set(closes)
            released = sum(self._forget_gradients(group) for group in closes)
        self.stretches.append(
            Stretch(
                way=self.way,
                block=self.block,
                opens=self._opens,
                closes=closes,
                rise=watch.peak - start,
                kept=kept,
                released=released,
                flops=watch.flops - self._flops,
            )
        )
        self._opens = opens
        self._begin()

    def _begin(self) -> None:
        self._start = self.watch.peak = self.watch.live
        self._flops = self.watch.flops

    def _forget_gradients(self, group: int) -> int:
        """As they are dealt to their shards; bytes."""
        before = self.watch.live
        for parameter in self._own[group]:
            parameter.grad = None
        return before - self.watch.live


class _Left(torch.autograd.Function):
    """Tells when all gradients of a module's inputs are there."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.tell = tell
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.tell()
        return (None, *gradients)


def _needs_gradient(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _owner(name: str, groups: Mapping[str, int]) -> str:
    """The innermost group that a module is in."""
    while name and name not in groups:
        name = name.rpartition(".")[0]
    return name


def _without_memory(
    model: nn.Module,
    dtype: torch.dtype | None,
    whole: frozenset[nn.Parameter],
    made: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Put fake tensors on the CPU in the place of those on meta, tied ones still tied.

    ``made`` has, by id, what was replaced, and by what; both ways, so that nothing is replaced twice.
    """
    for _, module in walk(model):
        for registry in (parameters_of(module), buffers_of(module)):
            for name, tensor in registry.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = _fake(tensor, None if tensor in whole else dtype)
                    made[id(tensor)] = (tensor, fake)  # kept, so that its id stays its own
                    made[id(fake)] = (fake, fake)
                registry[name] = made[id(tensor)][1]


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    kept = dtype if dtype is not None and is_parameter and tensor.is_floating_point() else tensor.dtype
    empty = torch.empty(tensor.shape, dtype=kept, device="cpu")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
