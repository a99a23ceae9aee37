"""Teaches optimizers of others to step the shards of parameters, where their own code does not, or does it wrongly.

An optimizer is given a class of its own under its class, of the same name: it stays the object that schedules and
checkpoints know, with the parameters that it has.

- bitsandbytes' take no DTensors. They treat each element, or each block of a run of memory, for itself: a step is
  theirs, on each rank's own part. A rank without elements of a parameter has nothing to do for it.
- torchao's step shards, but each rank decides for itself whether it keeps blocks or numbers, and what is compiled
  for a DTensor takes shards of several sizes for shards of one. Here steps are of local tensors, too, and all ranks
  keep numbers of a parameter of which one shard cannot be cut into whole blocks, or is small.
- torch's Adafactor fails on shards: its norms over rows and columns are of parts. Here they are added up, three
  times in a step for all parameters together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.models.optimizers.block_codec import counts_of_shards
from shardwise.models.optimizers.blockwise import OfBitsandbytes32, OfTorchao, blockwise, numbers_of
from shardwise.models.optimizers.factors import factor_like
from shardwise.models.torch_words import splitting_dim
from shardwise.models.view import local_tensor


def step_shards(optimizer: Optimizer) -> Optimizer:
    """Have an optimizer step shards; the same object. One that needs nothing for it is left as it is.

    To be called before the first step. Collective: no, but steps of Adafactor are then, over the parameters' mesh.
    """
    kind = type(optimizer)
    if hasattr(kind, "taught"):
        return optimizer
    in_blocks = blockwise(optimizer)
    if isinstance(in_blocks, OfBitsandbytes32):
        _teach(optimizer, _BitsandbytesSteps)
    elif isinstance(in_blocks, OfTorchao):
        _teach(optimizer, _TorchaoSteps)
    elif kind is getattr(torch.optim, "Adafactor", None):
        _teach(optimizer, _AdafactorSteps)
    return optimizer


def _teach(optimizer: Any, steps: type) -> None:
    kind = type(optimizer)
    own = type(kind.__name__, (steps, kind), {"__module__": kind.__module__, "taught": kind})
    own.__qualname__ = kind.__qualname__
    optimizer.__class__ = own


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch wraps a class's ``step`` once, to call hooks: those of ours are called already."""
    inner: Any = step
    return inner.__wrapped__ if getattr(step, "hooked", False) else inner  # type: ignore[no-any-return]


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return hooked  # type: ignore[no-any-return]


class _TaughtSteps:
    """What is put before an optimizer's class: a step as torch has it, but for what follows the closure."""

    param_groups: list[dict[str, Any]]
    state: Any
    taught: Any

    @_hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_shards()
        return loss

    def _step_shards(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} steps no shards")

    def _step_as_taught(self) -> None:
        """What the class itself makes of the parameters that are in the groups now."""
        _without_hooks(self.taught.step)(self)


class _LocalSteps(_TaughtSteps):
    """Steps on local tensors, which stand in for the parameters meanwhile."""

    def _step_shards(self) -> None:
        with _local_parameters(self):
            self._step_as_taught()


@contextmanager
def _in_groups(optimizer: Any, instead: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Have other parameters in the groups meanwhile."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = instead(parameters)
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


@contextmanager
def _local_parameters(optimizer: Any) -> Iterator[None]:
    """In place of parameters that are sharded, this rank's parts; their state goes along."""
    pairs: list[tuple[Any, nn.Parameter]] = []
    with _in_groups(optimizer, lambda parameters: [_stand_in(each, pairs) for each in parameters]):
        try:
            for parameter, local in pairs:
                if parameter in optimizer.state:
                    optimizer.state[local] = optimizer.state.pop(parameter)
            yield
        finally:
            for parameter, local in pairs:
                if local in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(local)


def _stand_in(parameter: nn.Parameter, pairs: list[tuple[Any, nn.Parameter]]) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    local: Any = nn.Parameter(local_tensor(parameter), requires_grad=parameter.requires_grad)
    gradient = parameter.grad
    local.grad = None if gradient is None else local_tensor(gradient)
    local.counts_of_shards = counts_of_shards(parameter)
    pairs.append((parameter, local))
    return local  # type: ignore[no-any-return]


# bitsandbytes


class _BitsandbytesSteps(_LocalSteps):
    """Its state of a sharded parameter is of local tensors at all times."""

    def get_config(self, group_index: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
        """Whether 8 bits are kept is decided by the largest shard of all ranks."""
        config: dict[str, Any] = self.taught.get_config(self, group_index, index, group)
        counts = getattr(self.param_groups[group_index]["params"][index], "counts_of_shards", None)
        if counts is not None:
            config["min_8bit_size"] = 0 if max(counts) >= config["min_8bit_size"] else math.inf
        return config

    def update_step(self, group: dict[str, Any], parameter: Any, group_index: int, index: int) -> None:
        if not parameter.numel():
            self.state[parameter]["step"] += 1
            return
        own = parameter.data
        self.taught.update_step(self, group, parameter, group_index, index)
        if parameter.data_ptr() != own.data_ptr():  # of strided memory it makes a copy, and steps that
            own.copy_(parameter.data)


# torchao


class _TorchaoSteps(_LocalSteps):
    """All ranks decide alike. Between steps, state is of DTensors, as torchao has it."""

    def _step_shards(self) -> None:
        sharded = [each for group in self.param_groups for each in group["params"] if isinstance(each, DTensor)]
        whole = {each: self.state[each] for each in sharded if each in self.state}
        for parameter, entries in whole.items():
            self.state[parameter] = {
                name: local_tensor(value) if isinstance(value, DTensor) else value
                for name, value in entries.items()
            }
        try:
            super()._step_shards()
        finally:
            for parameter in sharded:
                if parameter in self.state:
                    self.state[parameter] = _with_shards(parameter, self.state[parameter], whole.get(parameter, {}))

    def _new_buffer(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:  # noqa: FBT001 - torchao's own
        counts = getattr(parameter, "counts_of_shards", None)
        if counts is not None and not OfTorchao(self).keeps_blocks(counts):
            return torch.zeros_like(parameter)
        made: torch.Tensor = self.taught._new_buffer(self, parameter, signed)
        return made


def _with_shards(parameter: DTensor, entries: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """State as DTensors: those there were, whose memory has been stepped, and new ones."""
    shape = local_tensor(parameter).shape
    found = dict(entries)
    for name, value in entries.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == shape:
            found[name] = before[name] if name in before else numbers_of(parameter, value)
    return found


# Adafactor


class _AdafactorSteps(_TaughtSteps):
    """Sharded parameters step here, others in torch's own code."""

    def _step_shards(self) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                sharded = [each for each in group["params"] if isinstance(each, DTensor) and each.grad is not None]
                _step_sharded(self.state, group, sharded)
        with _in_groups(self, lambda parameters: [each for each in parameters if not isinstance(each, DTensor)]):
            self._step_as_taught()


@dataclass(slots=True)
class _Factored:
    """One parameter in a step: its shard, and what is summed of it over the shards of others."""

    parameter: DTensor
    own: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any]
    least: float
    """Smaller numbers are not divided by."""
    share: float
    """Of this step in what is kept."""
    rate: float = 0.0
    row_sum: Callable[[], torch.Tensor] | None = None

    @property
    def is_matrix(self) -> bool:
        return self.gradient.ndim > 1

    @property
    def all_dims(self) -> range:
        return range(self.gradient.ndim)

    def local(self, entry: str) -> torch.Tensor:
        return local_tensor(self.state[entry])

    def update(self) -> torch.Tensor:
        """What would be taken off, but for its length."""
        if self.row_sum is not None:
            rows = self.local("row_var")
            mean = (self.row_sum() / self.parameter.shape[-2]).to(rows.dtype)
            estimate = (rows @ self.local("col_var")).div_(mean.clamp_(min=self.least))
        else:
            estimate = self.local("variance").clone()
        return estimate.clamp_(min=self.least * self.least).rsqrt_().mul_(self.gradient)


class _Sums:
    """Numbers that are added up over the ranks that have other parts of the same, all at once for each mesh."""

    def __init__(self) -> None:
        self._parts: dict[tuple[DeviceMesh, tuple[int, ...]], list[torch.Tensor]] = {}
        self._totals: dict[tuple[DeviceMesh, tuple[int, ...]], list[torch.Tensor]] = {}

    def add(self, parameter: DTensor, part: torch.Tensor, dims: Collection[int]) -> Callable[[], torch.Tensor]:
        """A part, to be added up over the axes that split these dimensions; what gives the total afterwards."""
        axes = tuple(
            axis for axis, placement in enumerate(parameter.placements) if splitting_dim(placement) in dims
        )
        key = (parameter.device_mesh, axes)
        parts = self._parts.setdefault(key, [])
        parts.append(part.float())
        index = len(parts) - 1
        return lambda: self._totals[key][index]

    def reduce(self) -> None:
        """Collective: yes, over each mesh."""
        for (mesh, axes), parts in self._parts.items():
            flat = torch.cat([part.flatten() for part in parts]).to(mesh.device_type)
            for axis in axes:
                dist.all_reduce(flat, group=mesh.get_group(axis))
            pieces = flat.to(parts[0].device).split([part.numel() for part in parts])
            self._totals[mesh, axes] = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _step_sharded(state: Any, group: dict[str, Any], parameters: Sequence[DTensor]) -> None:
    """The arithmetic of :class:`torch.optim.Adafactor`, summed over all shards. Collective: over their meshes."""
    rate = float(group["lr"])
    items = [_begun(state[each], each, group) for each in parameters]
    sums, rows, lengths = _Sums(), _Sums(), _Sums()
    norms = [sums.add(item.parameter, item.own.square().sum(), item.all_dims) for item in items]
    squares = [
        [
            sums.add(item.parameter, item.gradient.square().sum(dim, keepdim=True), (item.gradient.ndim + dim,))
            for dim in ((-1, -2) if item.is_matrix else ())
        ]
        for item in items
    ]
    sums.reduce()
    for item, norm, totals in zip(items, norms, squares, strict=True):
        length = math.sqrt(norm().item() / item.parameter.numel())
        item.rate = max(group["eps"][1], length) * min(rate, 1 / math.sqrt(item.state["step"].item()))
        if group["weight_decay"]:
            item.own.mul_(1 - rate * group["weight_decay"])
        for entry, dim, total in zip(("row_var", "col_var"), (-1, -2), totals, strict=False):
            kept = item.local(entry)
            kept.lerp_((total() / item.parameter.shape[dim]).to(kept.dtype), item.share)
        if not item.is_matrix:
            item.local("variance").lerp_(item.gradient.square(), item.share)
    for item in items:
        if item.is_matrix:
            part = item.local("row_var").sum(-2, keepdim=True)
            item.row_sum = rows.add(item.parameter, part, (item.gradient.ndim - 2,))
    rows.reduce()
    norms = [lengths.add(item.parameter, item.update().square().sum(), item.all_dims) for item in items]
    lengths.reduce()
    for item, norm in zip(items, norms, strict=True):
        length = math.sqrt(norm().item() / item.parameter.numel()) / group["d"]
        item.own.add_(item.update(), alpha=-item.rate / max(1.0, length))


def _begun(state: dict[str, Any], parameter: DTensor, group: dict[str, Any]) -> _Factored:
    gradient = local_tensor(parameter.grad)  # type: ignore[arg-type]
    if group["maximize"]:
        gradient = -gradient
    if not state:
        state["step"] = torch.tensor(0.0)
        if gradient.ndim > 1:
            state["row_var"] = factor_like(parameter, "row_var", (), gradient.dtype)
            state["col_var"] = factor_like(parameter, "col_var", (), gradient.dtype)
        else:
            state["variance"] = torch.zeros_like(parameter, dtype=gradient.dtype)
    state["step"] += 1
    least = group["eps"][0]
    if least is None:
        least = torch.finfo(parameter.dtype).eps
    own = local_tensor(parameter)
    return _Factored(parameter, own, gradient, state, least, state["step"].item() ** group["beta2_decay"])
