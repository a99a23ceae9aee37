"""Optimizers of a model whose parameters are replaced: their state by name, and rebinding to new parameters.

Parameters are matched by identity. (On meta, all ``data_ptr()`` are 0.)
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.core.errors import ConfigError, KeyMismatchError, ShardingError
from shardwise.fsdp.named_tensors import TensorRef, local_tensor
from shardwise.fsdp.torch_private import splitting_dim, to_device

_log = logging.getLogger(__name__)

Scalar: TypeAlias = torch.Tensor | int | float | bool | str | None
"""State other than tensors of the parameter's shape, such as counts of steps."""


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of an optimizer's state. ``optimizer`` is its index in the sequence of optimizers."""

    optimizer: int
    parameter: str
    entry: str

    @property
    def label(self) -> str:
        """Text that is unique as long as a parameter is in one optimizer only."""
        return label(self.parameter, self.entry)

    def __str__(self) -> str:
        return f"{self.label} of optimizer {self.optimizer}"


def label(parameter: str, entry: str) -> str:
    """Return the label of an optimizer state entry."""
    return f"{parameter}: {entry}"


@dataclass(slots=True)
class Bound:
    """An optimizer and its state, by parameter names.

    Attributes:
        groups: FQNs, by parameter group.
        tensors: state of the parameter's shape, and DTensors of any shape.
        rank_local: 8-bit, 4-bit or factored state, which belongs to this rank.
        scalars: the rest of the state.
        unused: parameters whose state is an empty dict.
    """

    optimizer: Optimizer
    index: int
    groups: list[list[str]]
    tensors: dict[Key, torch.Tensor]
    scalars: dict[Key, Scalar]
    unused: list[str]
    rank_local: dict[Key, torch.Tensor] = field(default_factory=dict)

    def description(self) -> list[str]:
        """Return the class, and parameters and settings of each group. They must be equal on every rank."""
        lines = [type(self.optimizer).__name__]
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            settings = {key: _comparable(value) for key, value in sorted(group.items()) if key != "params"}
            lines += [f"{settings}", *names]
        return lines

    def unbind(self) -> None:
        """Release the parameters and the state, so that their memory can be freed."""
        for group in self.optimizer.param_groups:
            group["params"] = []
        self.optimizer.state.clear()
        self.tensors = {}
        self.rank_local = {}

    @torch.inference_mode(mode=False)  # as of state_like
    def rebind(
        self,
        parameters: Mapping[str, nn.Parameter],
        tensors: Mapping[Key, torch.Tensor],
        scalars: Mapping[Key, Scalar],
    ) -> None:
        """Set new parameters by name, and their state. Groups keep their settings and their order."""
        on_device: set[str] = set()  # parameters whose count of steps is read by kernels
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            group["params"] = [parameters[name] for name in names]
            if group.get("capturable") or group.get("fused"):
                on_device.update(names)
        for name in self.unused:
            self.optimizer.state[parameters[name]] = {}
        for key, value in [*tensors.items(), *scalars.items()]:
            if key.optimizer == self.index:
                parameter = parameters[key.parameter]
                state = self.optimizer.state.setdefault(parameter, {})
                if isinstance(value, torch.Tensor) and key in scalars:
                    value = _to_device(value, key, parameter, is_read_by_kernels=key.parameter in on_device)
                state[key.entry] = value

    def count(self) -> tuple[int, int]:
        """Return the number of parameters and of state entries."""
        return sum(map(len, self.groups)), sum(map(len, self.optimizer.state.values()))


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of accelerate's wrappers."""
    while type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    return optimizer


@torch.inference_mode(mode=False)  # an optimizer could not step with a tensor of the caller's inference mode
def state_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate state of a parameter's shape and sharding."""
    return torch.empty_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)


def bind_optimizers(
    optimizers: Sequence[Optimizer],
    tensors: Sequence[TensorRef],
    remedy: str = "Create the optimizer after sharding, or before its first step",
    *,
    by_rank: bool = False,
) -> list[Bound]:
    """Return the bound optimizers of a model.

    Args:
        optimizers: of the model. Those inside of accelerate's wrappers are bound.
        tensors: those of the model.
        remedy: advice for state that cannot be sharded like its parameter.
        by_rank: whether rank-local state is accepted, as that of this rank.

    Raises:
        ConfigError: it is not an optimizer.
        ShardingError: parameters are not the model's or are in two groups, an optimizer does not step shards, or
            state cannot be sharded. The message has all of them.
    """
    unchecked: object = optimizers
    if not isinstance(unchecked, Sequence) or not all(isinstance(item, Optimizer) for item in optimizers):
        raise ConfigError("optimizers: is not a sequence of torch optimizers. Pass optimizers=(optimizer,)")
    optimizers = list(map(plain_optimizer, optimizers))
    binder = _Binder({item.tensor: item.fqn for item in tensors if isinstance(item.tensor, nn.Parameter)}, by_rank)
    bounds = [binder.bind(optimizer, index) for index, optimizer in enumerate(optimizers)]
    faults = [*binder.faults, *(f"{sentence}. {remedy}" for sentence in binder.unshardable)]
    if faults:
        raise ShardingError("the optimizers cannot be bound to the model:\n  " + "\n  ".join(faults[:20]))
    return bounds


@dataclass(slots=True)
class _Binder:
    """Binds optimizers one after the other. ``unshardable`` has a sentence for each such entry of state."""

    names: Mapping[nn.Parameter, str]
    by_rank: bool
    groups: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unshardable: list[str] = field(default_factory=list)

    def bind(self, optimizer: Optimizer, index: int) -> Bound:
        bound = Bound(optimizer, index, [], {}, {}, [])
        why = sharding_obstacle(type(optimizer))
        if why and any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
            self.faults.append(why)
        for number, group in enumerate(optimizer.param_groups):
            place = f"group {number} of optimizer {index} ({type(optimizer).__name__})"
            bound.groups.append(self._members(group, place))
        # Only reading the state of a parameter makes an empty one, because torch has it in a defaultdict.
        for parameter, state in optimizer.state.items():
            name = self.names.get(parameter) if isinstance(parameter, nn.Parameter) else None
            if name is not None and not state:
                bound.unused.append(name)
            elif name is not None:
                for entry, value in state.items():
                    self._add(bound, Key(index, name, str(entry)), value, parameter)
            elif state:
                self.faults.append(f"optimizer {index} has state of parameters outside the model: {sorted(state)}")
        return bound

    def _members(self, group: Mapping[str, Any], place: str) -> list[str]:
        members: list[str] = []
        for position, parameter in enumerate(group["params"]):
            name = self.names.get(parameter)
            if name is None:
                called = group["param_names"][position] if "param_names" in group else f"number {position}"
                self.faults.append(
                    f"parameter {called}, {tuple(parameter.shape)}, in {place} is not the model's. Create the "
                    "optimizer from model.parameters(), and do not replace these afterwards. If a forward pass "
                    "without a backward pass came first, call model.reshard() before that"
                )
            elif name in self.groups:
                self.faults.append(f"{name} is in {place} and in {self.groups[name]}. Leave it in one of them")
            else:
                self.groups[name] = place
                members.append(name)
        return members

    def _add(self, bound: Bound, key: Key, value: Any, parameter: torch.Tensor) -> None:
        # Rank-local state first: it may happen to have the shape of the parameter. Then what is sharded like the
        # parameter, and what is one number, the same on all ranks.
        if isinstance(value, torch.Tensor) and value.ndim and has_rank_local_state(bound.optimizer):
            if self.by_rank:
                bound.rank_local[key] = value
            else:
                self.unshardable.append(f"{key} is rank-local (8-bit, 4-bit or factored)")
        elif isinstance(value, DTensor) or (
            isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim
        ):
            bound.tensors[key] = value
        elif value is None or isinstance(value, (int, float, str)):
            bound.scalars[key] = value
        elif not isinstance(value, torch.Tensor):
            self.unshardable.append(f"{key} is a {type(value).__name__}, and its sharding is unknown")
        elif value.numel() == 1:
            bound.scalars[key] = value
        else:
            shapes = f"{key} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
            self.unshardable.append(f"{shapes}: it cannot be sharded like the parameter")


def _to_device(value: torch.Tensor, key: Key, parameter: torch.Tensor, *, is_read_by_kernels: bool) -> torch.Tensor:
    """Move a single number as torch does: steps to the host unless a kernel reads them, others to the parameter."""
    if value.is_meta:  # of an optimizer that was made on meta: a restore replaces it
        return value
    if key.entry == "step":
        return to_device(value, parameter.device) if is_read_by_kernels else value
    if parameter.ndim == 0 and value.is_floating_point():
        return to_device(value.to(parameter.dtype), parameter.device)
    return value


def _comparable(value: Any) -> Any:
    """Return a setting as a value that can be compared between processes, of other objects the class."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if not value.is_meta else "meta"
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return value if value is None or isinstance(value, (int, float, str)) else type(value).__name__


def _library(kind: type[Optimizer]) -> str:
    """Return the library of a class with rank-local state, or of such a base class. "" for others."""
    for each in kind.__mro__:
        library = each.__module__.partition(".")[0]
        if library in ("bitsandbytes", "torchao") or (
            library in ("torch", "transformers") and each.__name__ == "Adafactor"
        ):
            return library
    return ""


def has_rank_local_state(optimizer: Optimizer) -> bool:
    """Return whether state of an optimizer belongs to a rank, instead of to elements of the parameter."""
    return bool(_library(type(optimizer)))


def sharding_obstacle(kind: type[Optimizer]) -> str | None:
    """Return the reason why a class cannot step sharded parameters, or None."""
    library = _library(kind)
    if library in ("", "torchao"):
        return None
    whose = library + ("'" if library.endswith("s") else "'s")
    return f"{whose} {kind.__name__}: steps whole tensors, not shards. Use torchao's AdamW8bit"


def require_steps_shards(optimizers: Iterable[Optimizer]) -> None:
    """Raise :class:`ShardingError` for optimizers that cannot step sharded parameters."""
    for optimizer in optimizers:
        if why := sharding_obstacle(type(optimizer)):
            raise ShardingError(why)


def require_sharded_parameters(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Check the optimizer of these parameters. Warn about those whose state torchao does not quantize.

    Collective: no. The result is the same on every rank.

    Raises:
        ShardingError: it does not step shards, or is torchao's and shards have several sizes.
    """
    sharded = {name: each for name, each in parameters.items() if isinstance(each, DTensor) and each.requires_grad}
    if sharded:
        require_steps_shards([optimizer])
    if _library(type(optimizer)) != "torchao":
        return
    block: int = vars(optimizer)["block_size"]
    whose = f"torchao's {type(optimizer).__name__}"
    # torchao decides by the number of elements of a shard whether its state is in 8 or 4 bits.
    unquantized = []
    for name, each in sharded.items():
        splits: list[tuple[int, int]] = []  # (size of the dim, number of shards)
        for size, place in zip(each.device_mesh.shape, each.placements, strict=True):
            dim = splitting_dim(place)
            if dim is not None:
                splits.append((each.shape[dim], int(size)))
        # The elements of a shard, if all are of one size: (4096, 512) on 8 ranks has 262144.
        numel = each.numel() // math.prod(count for _, count in splits)
        # Smaller shards are not quantized, and may be of several sizes.
        if numel >= _LEAST and any(length % count for length, count in splits):
            raise ShardingError(
                f"{whose}: {name}, of shape {tuple(each.shape)}, is cut into shards of several sizes, and a "
                "compiled step takes those of one size. Train on a number of ranks that divides it, or use AdamW"
            )
        if numel < _LEAST or numel % block:
            unquantized.append(name)
    if unquantized:
        _log.warning(
            "%s: keeps 32 bits of %d of %d parameters, such as %s, whose shards have fewer than %d elements or no "
            "multiple of %d",
            *(whose, len(unquantized), len(sharded), unquantized[0], _LEAST, block),
        )


_LEAST = 4096
"""Elements of the smallest shard that torchao quantizes."""


def inner_tensors(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors of this rank's part of a state tensor, by name."""
    local: Any = local_tensor(value)
    if not hasattr(local, "__tensor_flatten__"):
        return {"": local}
    names, _ = local.__tensor_flatten__()
    return {name: getattr(local, name) for name in names}


def describe_sharding(parameters: Iterable[torch.Tensor]) -> list[str]:
    """Describe how parameters are sharded, equally on all ranks."""
    return [
        f"{each.device_mesh.mesh.tolist()} {each.placements}" if isinstance(each, DTensor) else "whole"
        for each in parameters
    ]


def rebuild_state_tensor(
    optimizer: Any, parameter: torch.Tensor, entry: str, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Build a state tensor from its inner tensors, as the optimizer would allocate it.

    Raises:
        KeyMismatchError: the optimizer has other blocks.
    """
    plain = values.get("")
    # torchao decides by the parameter's size whether its state is quantized, and in which blocks.
    if _library(type(optimizer)) == "torchao":
        state: torch.Tensor = optimizer._new_buffer(parameter.detach(), entry == "exp_avg")
    elif plain is None:
        raise KeyMismatchError(
            f"{entry} was saved in another form than {type(optimizer).__name__} has. {_CREATE_ALIKE}"
        )
    elif getattr(optimizer, "is_paged", False) and plain.shape == parameter.shape:
        state = optimizer.get_state_buffer(parameter, dtype=plain.dtype)
    else:
        state = torch.empty_like(plain, device=parameter.device)
    for name, inner in inner_tensors(state).items():
        stored = values.get(name)
        # "qmap" is torchao's codebook. With another one the same codes are other values.
        is_alike = stored is not None and (stored.shape, stored.dtype) == (inner.shape, inner.dtype)
        if stored is None or not is_alike or (name == "qmap" and not torch.equal(stored, inner.cpu())):
            raise KeyMismatchError(
                f"{entry} was saved in other blocks than {type(optimizer).__name__} keeps. {_CREATE_ALIKE}"
            )
        inner.copy_(stored)
    return state


_CREATE_ALIKE = "Create the optimizer as it was created when it was saved, or start with a new one"
