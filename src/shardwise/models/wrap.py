"""Wrapping of a model in FSDP2 groups, and its checks."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from shardwise.errors import ConfigError, ShardingError
from shardwise.layout import TensorKind
from shardwise.models import pretrained
from shardwise.models.policies import (
    Classes,
    Grouping,
    Matching,
    MinSize,
    WrapPolicy,
    group_parameters,
    repeated_blocks,
    shard_dim,
)
from shardwise.models.torch_api import accelerator, has_collectives
from shardwise.models.view import TensorRef, abbreviate, canonical


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding of a model: mesh, groups, FSDP2's policies, and how blocks are run.

    ``mesh`` is one-dimensional (shard) or two-dimensional (replicate, shard). None means all ranks of the default
    process group, or no sharding without one. ``reshard_after_forward`` is for the blocks. The root group stays
    gathered until the backward pass, as in FSDP2. ``activation_checkpointing`` is for the blocks as
    :func:`~shardwise.models.policies.repeated_blocks` finds them, whatever the groups are, and without a mesh too.

    ``wrap`` may also be a class of modules or several, a policy of torch's for FSDP1 (or a partial of one), or a
    function of a module: see :func:`~shardwise.models.wrap.as_policy`.
    """

    mesh: DeviceMesh | None = None
    wrap: WrapPolicy = "auto"
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: bool | int = True
    activation_checkpointing: ActivationCheckpointing = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "wrap", as_policy(self.wrap))
        every: object = self.activation_checkpointing
        if not isinstance(every, int) or every < 0:
            raise ConfigError(
                f"activation_checkpointing={every!r} is not known. Pass True, False, or n for every n-th block."
            )

    @classmethod
    def from_accelerate(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Sharding:
        """Read a sharding from a config of accelerate or the Trainer. Ignored keys are one warning.

        Collective: yes, over the default process group, if it has replicas.

        Args:
            source: the YAML file of ``accelerate config`` or its values, the Trainer's with ``fsdp`` and
                ``fsdp_config``, or an ``fsdp_config`` alone. Keys with or without the prefix ``fsdp_``.

        Raises:
            ConfigError: it cannot be read, or keys are unknown, contradictory, or not supported. The message has
                every such key.
        """
        from shardwise.models.accelerate_config import read_accelerate_config

        fields, replicas, notes = read_accelerate_config(source)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return cls(mesh=replicated_mesh(replicas), **fields)


def comparable_settings(sharding: Sharding) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, by name."""
    mesh = None if sharding.mesh is None else sharding.mesh.mesh.tolist()
    policies = {item.name: _told(getattr(sharding, item.name)) for item in fields(sharding) if item.name != "mesh"}
    return {"mesh": repr(mesh), **policies}


def _told(value: object) -> str:
    """Return ``repr``, or the name of a function, because addresses differ between ranks."""
    if isinstance(value, type) or not (is_dataclass(value) or callable(value)):
        return repr(value)
    if is_dataclass(value):
        parts = ", ".join(f"{item.name}={_told(getattr(value, item.name))}" for item in fields(value))
        return f"{type(value).__name__}({parts})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def default_mesh(group: dist.ProcessGroup | None = None) -> DeviceMesh | None:
    """Return a one-dimensional mesh of all ranks of a process group (None.

    The default one), or None without a process group.

    Collective: yes, over the default group.
    """
    if not dist.is_initialized():
        return None
    found = accelerator()
    kind = found.type if found is not None and has_collectives(found, group) else "cpu"
    if group is not None:
        return DeviceMesh.from_group(group, kind, mesh_dim_names=("fsdp",))
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def replicated_mesh(replicas: int) -> DeviceMesh | None:
    """Return a mesh with this number of replicas of the sharded model (HSDP), or None for one.

    Collective: yes, over the default group.

    Raises:
        ConfigError: the ranks cannot be dealt so.
    """
    if replicas == 1:
        return None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if replicas < 1 or ranks % replicas or ranks == replicas:
        raise ConfigError(
            f"{replicas} replicas: {ranks} ranks cannot be divided into that many groups of two or more. "
            "Call torch.distributed.init_process_group first, on a multiple of them"
        )
    found = accelerator()
    kind = found.type if found is not None and has_collectives(found, None) else "cpu"
    return init_device_mesh(kind, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The global ranks of a process group (None: the default one), sorted."""
    return sorted(dist.get_process_group_ranks(group)) if dist.is_initialized() else [0]


def with_mesh(sharding: Sharding, group: dist.ProcessGroup | None) -> Sharding:
    """With a mesh, if there is to be one, that has the ranks of the process group (None: the default one).

    Collective: yes, over the default group, if no mesh is passed.

    Raises:
        ShardingError: when the given mesh has other ranks.
    """
    mesh = sharding.mesh if sharding.mesh is not None else default_mesh(group)
    if mesh is not None and sorted(mesh.mesh.flatten().tolist()) != ranks_of(group):
        raise ShardingError(
            f"the mesh has the ranks {mesh.mesh.flatten().tolist()}, and the process group that acts together has "
            f"{ranks_of(group)}. Pass process_group=... in the options, with the mesh's ranks"
        )
    return replace(sharding, mesh=mesh)


def wrap(
    model: nn.Module, sharding: Sharding, kept_whole: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Apply ``fully_shard`` to the blocks and then to the root. Returns the blocks' names, nested ones first.

    FSDP2 cannot shard parameters without dimensions or without elements, and wants one dtype per group. Such
    parameters, those of another dtype that no group of their own can hold, and those in ``kept_whole`` (with the
    reason) stay unsharded on every rank. See :func:`~shardwise.models.gradients.average_replicated_gradients`.

    Collective: yes (creates process groups the first time a mesh is used).

    Raises:
        ShardingError: when the policy matches nothing, or ``fully_shard`` would refuse the mesh or a parameter.
    """
    mesh = sharding.mesh
    if mesh is None:
        raise ShardingError("there is no mesh to shard the model on. Pass one, or initialize torch.distributed")
    grouping = group_parameters(model, sharding.wrap, kept_whole)
    _require_shardable(model, grouping, mesh)
    shard_size = mesh.size(mesh.ndim - 1)
    _require_divisor(sharding.reshard_after_forward, shard_size)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": sharding.mp_policy,
        "offload_policy": _pinning_where_it_can(sharding.offload_policy),
        "shard_placement_fn": lambda parameter: Shard(shard_dim(parameter.shape, shard_size)),
        "ignored_params": set(grouping.whole),
    }
    modules = dict(model.named_modules())
    for group in grouping.blocks:
        members = [modules[name] for name in group.modules]
        fully_shard(
            members if len(members) > 1 else members[0],
            reshard_after_forward=sharding.reshard_after_forward,
            **options,
        )
    fully_shard(model, **options)
    pretrained.mark_sharded(model)
    return tuple(canonical(name) for group in grouping.blocks for name in group.modules)


def prepare_blocks(model: nn.Module, sharding: Sharding) -> None:
    """Recompute a model's blocks if the sharding requests it, before, after or without :func:`wrap`.

    Raises:
        ConfigError, ShardingError: as of :func:`blocks_to_prepare`.
    """
    for index, name in enumerate(blocks_to_prepare(model, sharding)):
        if index % int(sharding.activation_checkpointing) == 0:
            block = model.get_submodule(name)
            block.forward = Recomputed(block, block.forward, canonical(name))


def blocks_to_prepare(model: nn.Module, sharding: Sharding) -> list[str]:
    """Return the names of a model's blocks if they are to be recomputed. Changes nothing.

    Raises:
        ConfigError: the model recomputes activations by itself, or its blocks have been prepared already.
        ShardingError: the model has no recognizable blocks.
    """
    if not sharding.activation_checkpointing:
        return []
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            raise ConfigError(_twice(canonical(name) or type(model).__name__))
    names = repeated_blocks(model)
    for name in names:
        if isinstance(vars(model.get_submodule(name)).get("forward"), Recomputed):
            raise ConfigError(f"{canonical(name)} is recomputed already. Prepare a model's blocks once")
    return names


def describe_mesh(mesh: DeviceMesh) -> str:
    """Return axes and sizes, as in ``replicate=2, shard=4``."""
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


_NOT_DATA_PARALLEL = frozenset({"tp", "ep", "pp", "cp", "sp"})
"""Axes whose ranks do not each have rows of their own, as accelerate and transformers name them."""


def _require_shardable(model: nn.Module, grouping: Grouping, mesh: DeviceMesh) -> None:
    """Reject by name the parameters that ``fully_shard`` would fail on halfway."""
    axes = describe_mesh(mesh)
    if mesh.ndim > 2 or _NOT_DATA_PARALLEL.intersection(mesh.mesh_dim_names or ()):
        raise ShardingError(
            f"{type(model).__name__} cannot be sharded on the mesh {axes}: fully_shard takes one axis (shard) or "
            "two (replicate, shard). For tensor and expert parallelism, shard on their axes yourself, then "
            "fully_shard on the others, and call shardwise.load. For context parallelism, pass a mesh whose axes "
            "dp_shard and cp are flattened into one."
        )
    for name, parameter in model.named_parameters():
        if parameter not in grouping.whole and not parameter.is_contiguous():
            raise ShardingError(
                f"{canonical(name)} has shape {tuple(parameter.shape)} and strides {parameter.stride()}, and "
                f"cannot be sharded on the mesh {axes}: fully_shard takes contiguous parameters only. Have the "
                "model's class make it contiguous"
            )


def _require_divisor(reshard_after_forward: bool | int, shard_size: int) -> None:  # noqa: FBT001 - FSDP2's own
    fitting = [size for size in range(2, shard_size + 1) if shard_size % size == 0]
    if not isinstance(reshard_after_forward, bool) and reshard_after_forward not in fitting:
        raise ShardingError(
            f"reshard_after_forward={reshard_after_forward}: a number is that of ranks to which a block is dealt "
            f"after its forward pass, and divides the {shard_size} that it is sharded over: one of {fitting}, or "
            "True or False"
        )


def _pinning_where_it_can(policy: OffloadPolicy) -> OffloadPolicy:
    """Without an accelerator there is no memory to pin, and no use for it."""
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        return CPUOffloadPolicy(pin_memory=False)
    return policy


ActivationCheckpointing: TypeAlias = bool | int
"""Whether activations of blocks are recomputed in the backward pass; ``n`` recomputes those of every n-th block.

Gradients are the same to the bit, dropout included: the random state of the first pass is restored for the second.
"""


class Recomputed:
    """The forward pass of a block, of which only the input is kept for the backward pass."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], name: str) -> None:
        self.block = block
        self.forward = forward
        self.name = name
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **keywords)
        if self.block.training and getattr(self.block, "gradient_checkpointing", False):
            raise ConfigError(_twice(self.name))
        args = tuple(self._without_cache(value) for value in args)
        keywords = {key: self._without_cache(value) for key, value in keywords.items()}
        if "use_cache" in keywords:
            keywords["use_cache"] = False
        # Keywords go as an argument: torch looks in arguments alone for devices whose random state is to be kept.
        return checkpoint(self._run, keywords, *args, use_reentrant=False, preserve_rng_state=True)

    def _run(self, keywords: dict[str, Any], *args: Any) -> Any:
        return self.forward(*args, **keywords)

    def _without_cache(self, value: Any) -> Any:
        """None for a cache: the second pass would write its keys and values to it once more.

        transformers creates an empty one for each forward pass unless ``use_cache=False``.
        """
        if not isinstance(value, Cache):
            return value
        if value.get_seq_length():
            raise ConfigError(
                f"{self.name}: a cache that holds {value.get_seq_length()} tokens cannot be used where activations "
                "are recomputed. Load the model with activation_checkpointing=False, or run it under no_grad"
            )
        return None


def _twice(name: str) -> str:
    return (
        f"{name} recomputes activations by itself (its gradient_checkpointing is on), and would once more by "
        "activation_checkpointing=True. Take one: turn the model's own off, or pass False"
    )


def as_policy(given: Any) -> Any:
    """Convert classes, functions and policies of torch's FSDP1, or partials of them, into a policy of ours.

    A class, or several: the modules of these. ``transformer_auto_wrap_policy`` with its classes likewise, without:
    those that the model declares. ``size_based_auto_wrap_policy``: by size. Other values are returned as they are.

    Raises:
        ConfigError: a partial of torch's that cannot be honored.
    """
    function, keywords = given, {}
    if isinstance(given, functools.partial):
        if given.args:
            raise ConfigError(f"wrap is a functools.partial with {len(given.args)} positional arguments. Name them")
        function, keywords = given.func, dict(given.keywords)
    options: tuple[tuple[Any, str], ...] = (
        (transformer_auto_wrap_policy, "transformer_layer_cls"),
        (size_based_auto_wrap_policy, "min_num_params"),
    )
    option = next((option for known, option in options if function is known), None)
    if option is None:
        return _as_classes(given)
    value = keywords.pop(option, None)
    if left := {name: value for name, value in keywords.items() if value is not None}:
        raise ConfigError(f"wrap: {function.__name__} has {left}, which is not known. Name the classes to wrap")
    if function is size_based_auto_wrap_policy:
        return MinSize(int(value or inspect.signature(function).parameters[option].default))
    found = "no_split_modules" if value is None and function is given else _as_classes(value)
    if not isinstance(found, str | Classes):
        raise ConfigError(f"transformer_layer_cls={value!r} must be a set of classes, as in {{LlamaDecoderLayer}}")
    return found


def _as_classes(given: Any) -> Any:
    """Convert classes of modules, in a fixed order, or a function. Other values are returned unchanged."""
    kinds = given if isinstance(given, (set, frozenset, list, tuple)) else (given,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        return Classes(tuple(sorted(kind.__name__ for kind in kinds)))
    return Matching(given) if callable(given) and not isinstance(given, type) else given


def reject_unmovable(held: Sequence[TensorRef]) -> None:
    """Raise for parameters whose values cannot be handed over as they are.

    Raises:
        ShardingError: parameters are of a subclass with values outside of the tensor, have gradients, which would
            be lost, or share memory without being one parameter, which would end. The message names them.
    """
    parameters = [item for item in held if item.kind is TensorKind.PARAMETER]
    faults = [
        f"{item.fqn} is a {type(item.tensor).__name__}: shard the model before it is quantized or wrapped"
        for item in parameters
        if type(item.tensor) is not nn.Parameter
    ]
    with_gradient = [item.fqn for item in parameters if item.tensor.grad is not None]
    if with_gradient:
        faults.append(f"{abbreviate(with_gradient)}: a gradient would be lost. Take the step, or call zero_grad()")
    at: dict[object, str] = {}
    for item in parameters:
        if type(item.tensor) is nn.Parameter and not item.tensor.is_meta and item.tensor.numel():
            other = at.setdefault(_memory(item.tensor), item.fqn)
            if other != item.fqn:
                faults.append(
                    f"{item.fqn} and {other} are two parameters that share memory, and would each become its own. "
                    "Make them one parameter, by assigning it to both modules"
                )
    if faults:
        raise ShardingError("the model cannot be sharded as it is:\n  " + "\n  ".join(faults[:20]))


def _memory(tensor: torch.Tensor) -> object:
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )


TrainedDtype: TypeAlias = torch.dtype | Literal["unchanged"]
"""dtype of trained parameters, if it is wider than their own; ``"unchanged"`` leaves every parameter its dtype."""


def require_trainable_dtype(dtype: object) -> None:
    """Refuse a dtype that nothing can be trained in.

    Raises:
        ConfigError: it is no floating dtype of 16 bits or more.
    """
    if dtype != "unchanged" and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
    ):
        raise ConfigError(
            f"trained dtype: {dtype!r} is not a floating dtype of 16 bits or more. Pass torch.float32, or "
            "'unchanged'."
        )


def trained_dtype_of(wanted: TrainedDtype, dtype: torch.dtype, requires_grad: bool) -> torch.dtype:  # noqa: FBT001
    """Return the dtype a parameter is kept in: ``wanted`` if it is trained and ``wanted`` is wider, else its own.

    8-bit floats and integers keep their dtype.
    """
    if isinstance(wanted, str) or not requires_grad or not dtype.is_floating_point or dtype.itemsize < 2:
        return dtype
    return wanted if torch.promote_types(dtype, wanted) == wanted else dtype
