"""Wrapping of a model into FSDP2 groups, and activation checkpointing and compilation of its blocks."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.formatting import canonical_name, comparable_text, first_line
from shardwise.core.layout import TensorKind
from shardwise.fsdp.named_tensors import TensorRef, abbreviate, axis_names
from shardwise.fsdp.policies import (
    Classes,
    Grouping,
    Matching,
    MinSize,
    WrapPolicy,
    find_repeated_blocks,
    group_parameters,
    select_unplanned,
    shard_dim,
)
from shardwise.fsdp.torch_private import accelerator, accelerator_module, has_collectives, select_accelerator

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding of a model: mesh, groups, FSDP2's policies, and how its blocks are prepared before.

    Attributes:
        mesh: one-dimensional (shard) or two-dimensional (replicate, shard). None for all ranks of the call's
            process group. Without a process group the model is not sharded.
        wrap: a policy, a class of modules or several, a policy of FSDP1 (or a partial of one), or a function of a
            module. See :func:`~shardwise.fsdp.wrap.as_policy`.
        mp_policy: FSDP2's mixed precision. Without a process group it has no effect.
        offload_policy: FSDP2's offload.
        reshard_after_forward: FSDP2's option for the blocks. The root group stays gathered until the backward pass.
            Without one (an evaluation) it stays so, and ``model.parameters()`` are then not the shards: call
            ``model.reshard()`` before an optimizer is made.
        activation_checkpointing: of the repeated blocks. It depends neither on the groups nor on a mesh.
        compile: True, or keyword arguments of ``torch.compile``, to compile each repeated block in place.
        replicas: without a mesh, the number of replicas of the sharded model (HSDP). All ranks form the mesh.
    """

    mesh: DeviceMesh | None = None
    wrap: WrapPolicy = "auto"
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: bool | int = True
    activation_checkpointing: ActivationCheckpointing = False
    compile: bool | Mapping[str, Any] = False
    replicas: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "wrap", as_policy(self.wrap))
        count: object = self.replicas
        if not isinstance(count, int) or count < 1 or (self.mesh is not None and count > 1):
            raise ConfigError(
                f"replicas={count!r}: must be 1 or more, and 1 with a mesh, whose axes tell it. Leave it out"
            )
        if not isinstance(self.compile, bool | Mapping):
            raise ConfigError(
                f"compile={self.compile!r} is not known. Pass True, False, or arguments of torch.compile, as in "
                'compile={"backend": "inductor"}'
            )
        every: object = self.activation_checkpointing
        if not isinstance(every, int) or every < 0:
            raise ConfigError(
                f"activation_checkpointing={every!r} is not known. Pass True, False, or n for every n-th block"
            )

    @classmethod
    def from_accelerate(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Sharding:
        """Read a sharding from a config of accelerate or the Trainer. Warns of ignored keys.

        Args:
            source: the YAML file of ``accelerate config`` or its values, the Trainer's with ``fsdp`` and
                ``fsdp_config``, or an ``fsdp_config`` alone. Keys with or without the prefix ``fsdp_``.

        Raises:
            ConfigError: it cannot be read, or keys are unknown, contradictory, or not supported. The message names
                every such key.
        """
        from shardwise.fsdp.accelerate_config import read_accelerate_config

        fields, replicas, notes = read_accelerate_config(source)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return cls(replicas=replicas, **fields)


def comparable_settings(sharding: Sharding) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, as text by name."""
    mesh = None if sharding.mesh is None else sharding.mesh.mesh.tolist()
    names = [item.name for item in fields(sharding) if item.name != "mesh"]
    return {"mesh": repr(mesh), **{name: comparable_text(getattr(sharding, name)) for name in names}}


def require_replicas(replicas: int, ranks: int) -> None:
    """Check that so many ranks can be divided into replicas of a sharded model.

    Raises:
        ConfigError: they cannot.
    """
    if replicas > 1 and (ranks % replicas or ranks == replicas):
        raise ConfigError(
            f"{replicas} replicas: {ranks} ranks cannot be divided into that many groups of two or more. Use "
            f"{2 * replicas} ranks or a larger multiple of {replicas}, or 1 replica (dp_replicate_size: 1)"
        )


def default_mesh(group: dist.ProcessGroup | None = None, replicas: int = 1) -> DeviceMesh | None:
    """Return a mesh of all ranks of a process group, by default the default group, or None without one.

    It has one dimension, or two if there are ``replicas`` of the sharded model (HSDP), which need a process group.

    Collective: yes, over the default group.

    Raises:
        ConfigError: the ranks cannot be divided into replicas, or are only some of those of the default group.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    require_replicas(replicas, ranks)
    if not dist.is_initialized():
        return None
    kind = _device_type(group)
    _select_launched_device(kind)
    if replicas > 1:
        # It creates process groups, for which all ranks of the default group meet.
        if ranks < dist.get_world_size():
            raise ConfigError(f"{replicas} replicas: process_group has {ranks} ranks, not all. Pass a mesh of them")
        return init_device_mesh(kind, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    if group is not None:
        return DeviceMesh.from_group(group, kind, mesh_dim_names=("fsdp",))
    return init_device_mesh(kind, (ranks,), mesh_dim_names=("fsdp",))


def _select_launched_device(kind: str) -> None:
    """Select the device of a launcher's rank, unless this process has selected or used one.

    torch does so in ``init_device_mesh`` alone, not for a rank that is shown one device, and not once CUDA is
    initialized. A question does that (bitsandbytes asks for capabilities when it is imported), and leaves all
    ranks of a machine at device 0.
    """
    environment = os.environ  # noqa: TID251 - as torch does
    rank = environment.get("LOCAL_RANK")
    if rank is None or kind == "cpu":
        return
    module = accelerator_module(torch.device(kind))
    is_other = module.is_initialized() and module.current_device() == 0 < int(rank) < module.device_count()
    if not module.is_initialized() or (is_other and module.memory_reserved(0) == 0):
        select_accelerator(environment, int(rank), 1)


def _device_type(group: dist.ProcessGroup | None) -> str:
    """Return the device type of a mesh of these ranks."""
    device = accelerator()
    return device.type if device is not None and has_collectives(device, group) else "cpu"


def with_mesh(sharding: Sharding, group: dist.ProcessGroup | None) -> Sharding:
    """Return the sharding with a mesh of the process group (None: the default one), if there is one.

    Collective: yes, over the default group, if no mesh is passed. Ranks have compared the shardings before.

    Raises:
        ConfigError: there cannot be so many replicas.
    """
    mesh = sharding.mesh
    if mesh is None:
        mesh = default_mesh(group, sharding.replicas)
    else:
        _select_launched_device(mesh.device_type)
    return replace(sharding, mesh=mesh, replicas=1)


def require_same_ranks(sharding: object, group: dist.ProcessGroup | None) -> None:
    """Check that the mesh, if one is passed, has the ranks of the process group (None: the default one).

    Collective: no. Called before ranks meet, because those that the mesh lacks may never come.

    Raises:
        ShardingError: it has others.
    """
    mesh = getattr(sharding, "mesh", None)
    ranks = sorted(dist.get_process_group_ranks(group)) if dist.is_initialized() else [0]
    if isinstance(mesh, DeviceMesh) and sorted(mesh.mesh.flatten().tolist()) != ranks:
        raise ShardingError(
            f"the mesh has the ranks {mesh.mesh.flatten().tolist()}, but the process group of the call has "
            f"{ranks}. Pass a process_group with the mesh's ranks in the options"
        )


def wrap(
    model: nn.Module, sharding: Sharding, kept_whole: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Apply ``fully_shard`` to the blocks and then to the root. Return the blocks' names, nested ones first.

    FSDP2 cannot shard parameters without dimensions or elements, and needs one dtype per group. Such parameters,
    those of another dtype that cannot be a group of their own, and those in ``kept_whole`` (with the reason) stay
    unsharded. See :func:`~shardwise.fsdp.gradients.average_replicated_gradients`.

    Collective: yes (creates process groups the first time a mesh is used).

    Raises:
        ShardingError: the policy matches nothing, or ``fully_shard`` would reject the mesh or a parameter.
        ConfigError: this torch cannot shard packed weights.
    """
    mesh = sharding.mesh
    if mesh is None:
        raise ShardingError("there is no mesh to shard the model on. Pass one, or initialize torch.distributed")
    grouping = group_parameters(model, sharding.wrap, kept_whole)
    # All checks come before the first fully_shard: a model that is rejected later would be sharded in part.
    require_shardable(model, grouping, sharding)
    require_contiguous(model, grouping)
    shard_size = mesh.size(mesh.ndim - 1)
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": _without_pinning_on_cpu(sharding.offload_policy),
        "shard_placement_fn": lambda parameter: Shard(
            shard_dim(parameter.shape, shard_size, is_packed=not parameter.is_floating_point())
        ),
        "ignored_params": set(grouping.whole),
    }
    # From the inside out: fully_shard takes the parameters of its modules that no earlier call has taken.
    modules = dict(model.named_modules())
    unplanned = set(select_unplanned(model, sharding.wrap))
    for group in grouping.blocks:
        members = [modules[name] for name in group.modules]
        # The blocks of a vision tower take float32 angles of rotary embeddings, which FSDP2 would round.
        casts_inputs = sharding.mp_policy.cast_forward_inputs and unplanned.isdisjoint(group.modules)
        fully_shard(
            members if len(members) > 1 else members[0],
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=replace(sharding.mp_policy, cast_forward_inputs=casts_inputs),
            **options,
        )
    # Without reshard_after_forward: FSDP2 keeps the root gathered, as its backward pass comes first.
    fully_shard(model, mp_policy=sharding.mp_policy, **options)
    if hasattr(model, "generate"):  # it calls encoders without the model's forward
        register_fsdp_forward_method(model, "generate")
    mark_sharded(model, mesh)
    return tuple(canonical_name(name) for group in grouping.blocks for name in group.modules)


def warn_of_unused_dtypes(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Warn if a model that stays unsharded does not compute in the dtypes of this policy."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    policy_dtypes = {policy.param_dtype, policy.output_dtype} - {None}
    if policy_dtypes and len(policy_dtypes | dtypes) > 1:
        _log.warning(
            "mp_policy has no effect without a process group: the model computes in the dtypes of its parameters "
            "(%s), or in those of torch.autocast. Use the latter, or call torch.distributed.init_process_group() "
            "before, also on one rank",
            ", ".join(sorted(map(str, dtypes))),
        )


def _save_gathered(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,  # noqa: FBT001, FBT002 - as transformers has it
    state_dict: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run ``save_pretrained`` of a sharded model, which without a state dict would delete files before it fails."""
    if state_dict is None:
        raise ConfigError(
            "save_pretrained: the model is sharded. Call shardwise.save(model, folder) on all ranks, or pass a "
            "gathered state_dict"
        )
    type(model).save_pretrained(model, save_directory, is_main_process, state_dict, **options)


def _save_gathered_adapter(model: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
    """Run ``save_pretrained`` of a PEFT model, which on the first rank alone would fail on an adapter's shards."""
    adapters = set(model.peft_config)
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if options.get("state_dict") is None and any(adapters.intersection(name.split(".")) for name in sharded):
        raise ConfigError(
            "save_pretrained: the adapter is sharded. Call shardwise.save_adapter(model, folder) on all ranks, or "
            "pass a gathered state_dict"
        )
    type(model).save_pretrained(model, save_directory, *args, **options)


def _resize_token_embeddings(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,  # noqa: FBT001, FBT002 - as transformers has it
) -> nn.Module:
    """Run ``resize_token_embeddings`` of a sharded model if it changes nothing."""
    rows = model.get_input_embeddings().weight.shape[0]
    num_tokens = rows if new_num_tokens is None else new_num_tokens
    multiple = pad_to_multiple_of or 1
    if -(-num_tokens // multiple) * multiple != rows:
        raise ConfigError(
            "resize_token_embeddings: the model is sharded. Pass resize_vocab= to shardwise.from_pretrained, or "
            "resize the model before shardwise.shard"
        )
    embeddings: nn.Module = type(model).resize_token_embeddings(
        model, new_num_tokens, pad_to_multiple_of, mean_resizing
    )
    return embeddings


def _has_unfinished_sequences(
    model: Any,
    mesh: DeviceMesh,
    this_peer_finished: bool,  # noqa: FBT001 - as transformers has it
    synced_gpus: bool,  # noqa: FBT001
    device: torch.device,
) -> bool:
    """Return whether a rank of the mesh has unfinished sequences. transformers asks all ranks."""
    if synced_gpus:
        unfinished = torch.tensor(0 if this_peer_finished else 1, device=device)
        for group in mesh.get_all_groups():  # the sum over each axis in turn is that over the mesh
            dist.all_reduce(unfinished, group=group)
        this_peer_finished = not unfinished.item()
    result: bool = type(model)._has_unfinished_sequences(model, this_peer_finished, False, device)
    return result


def mark_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    """Mark the model, and the one in PEFT's, as sharded.

    Generation synchronizes ranks (``is_fsdp_managed_module``), saving and resizing are refused.
    """
    inner: Any = model
    if hasattr(model, "get_base_model"):
        vars(model)["save_pretrained"] = functools.partial(_save_gathered_adapter, model)
        inner = inner.get_base_model()
    inner._is_fsdp_managed_module = True
    if isinstance(inner, PreTrainedModel):
        vars(inner)["save_pretrained"] = functools.partial(_save_gathered, inner)
        vars(inner)["resize_token_embeddings"] = functools.partial(_resize_token_embeddings, inner)
        if dist.is_initialized() and mesh.size() < dist.get_world_size():
            unfinished = functools.partial(_has_unfinished_sequences, inner, mesh)
            vars(inner)["_has_unfinished_sequences"] = unfinished


def prepare_blocks(model: nn.Module, sharding: Sharding) -> None:
    """Recompute and compile a model's blocks where the sharding requests it. See :func:`blocks_to_prepare`."""
    # False is 0, True 1 (every block), and n every n-th block from the first.
    every = int(sharding.activation_checkpointing)
    compile_options = sharding.compile if isinstance(sharding.compile, Mapping) else {}
    for index, name in enumerate(blocks_to_prepare(model, sharding)):
        block = model.get_submodule(name)
        if every and index % every == 0:
            block.forward = Recomputed(block, block.forward, canonical_name(name))
        # After the recomputation, which is compiled with the block, and before fully_shard, whose hooks are not. In
        # place, so that names of parameters do not change. The first call compiles.
        if sharding.compile is not False:
            block.compile(**compile_options)


def blocks_to_prepare(model: nn.Module, sharding: Sharding) -> list[str]:
    """Return the names of the blocks that will be recomputed, all or every n-th, or compiled, without any change.

    Raises:
        ConfigError: the model recomputes activations by itself, its blocks have been prepared already, or
            ``torch.compile`` does not have the arguments.
        ShardingError: the model has no recognizable blocks.
    """
    if isinstance(sharding.compile, Mapping):
        try:
            torch.compile(lambda: None, **sharding.compile)  # looks the backend up, and compiles nothing
        except Exception as error:  # torch raises errors of many kinds for a backend, a mode or an option
            raise ConfigError(
                f"compile={dict(sharding.compile)!r}: torch.compile does not accept it ({first_line(error)}). Pass "
                "arguments of torch.compile"
            ) from error
    if not sharding.activation_checkpointing and sharding.compile is False:
        return []
    # Compiling needs no more than the blocks. Recomputation must not be on twice.
    names = find_repeated_blocks(model)
    if not sharding.activation_checkpointing:
        return names
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            raise ConfigError(_double_checkpointing_message(canonical_name(name) or type(model).__name__))
    for name in names:
        if is_recomputed(model.get_submodule(name)):
            raise ConfigError(f"{canonical_name(name)} is recomputed already. Prepare a model's blocks once")
    return names


def is_recomputed(block: nn.Module) -> bool:
    """Return whether :func:`prepare_blocks` has had a block recomputed."""
    return isinstance(vars(block).get("forward"), Recomputed)


def describe_mesh(mesh: DeviceMesh) -> str:
    """Return names and sizes of the axes, as in ``replicate=2, shard=4``."""
    return ", ".join(f"{name}={size}" for name, size in zip(axis_names(mesh), mesh.shape, strict=True))


_NOT_DATA_PARALLEL = frozenset({"tp", "ep", "pp", "cp", "sp"})
"""Names in accelerate and transformers of mesh axes whose ranks work on the same rows of a batch."""


def require_shardable(model: nn.Module, grouping: Grouping, sharding: Sharding) -> None:
    """Reject what ``fully_shard`` would fail on after it has wrapped some blocks. Nothing without a mesh.

    Raises:
        ShardingError: the mesh has axes that ``fully_shard`` does not take, or ``reshard_after_forward`` does not
            divide it.
        ConfigError: this torch cannot shard packed weights.
    """
    mesh = sharding.mesh
    if mesh is None:
        return
    if mesh.ndim > 2 or _NOT_DATA_PARALLEL.intersection(mesh.mesh_dim_names or ()):
        raise ShardingError(
            f"{type(model).__name__} cannot be sharded on the mesh {describe_mesh(mesh)}: fully_shard takes one "
            "axis (shard) or two (replicate, shard). For tensor and expert parallelism, shard on their axes "
            "yourself, then fully_shard on the others, and call shardwise.load. For context parallelism, pass a "
            "mesh whose axes dp_shard and cp are flattened into one"
        )
    _require_shardable_dtypes(model, grouping)
    require_divisor(sharding.reshard_after_forward, mesh.size(mesh.ndim - 1))


def require_contiguous(model: nn.Module, grouping: Grouping) -> None:
    """Raise ShardingError for a parameter in a group that is not contiguous."""
    for name, parameter in model.named_parameters():
        if parameter not in grouping.whole and not parameter.is_contiguous():
            raise ShardingError(
                f"{canonical_name(name)}: has shape {tuple(parameter.shape)} and strides {parameter.stride()}, and "
                "fully_shard takes contiguous parameters only. Make it contiguous in the model's class"
            )


def _require_shardable_dtypes(model: nn.Module, grouping: Grouping) -> None:
    """Reject packed weights where FSDP2 makes every shard one that takes gradients: in torch before 2.13."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return
    for name, parameter in model.named_parameters():
        if parameter not in grouping.whole and not (parameter.is_floating_point() or parameter.is_complex()):
            raise ConfigError(
                f"torch {torch.__version__}: FSDP2 shards floating-point parameters only, and "
                f"{canonical_name(name)} is {parameter.dtype}. Packed weights on several ranks need torch 2.13 "
                "or newer. Run pip install -U torch"
            )


def require_divisor(reshard_after_forward: bool | int, shard_size: int) -> None:  # noqa: FBT001 - FSDP2's own
    """Raise ShardingError if ``reshard_after_forward`` is a number of ranks that does not divide the mesh."""
    fitting = [size for size in range(2, shard_size + 1) if shard_size % size == 0]
    if not isinstance(reshard_after_forward, bool) and reshard_after_forward not in fitting:
        raise ShardingError(
            f"reshard_after_forward={reshard_after_forward}: is not a number of ranks that divides the "
            f"{shard_size} of the mesh. Pass one of {fitting}, True or False"
        )


def _without_pinning_on_cpu(policy: OffloadPolicy) -> OffloadPolicy:
    """Disable pinned memory if there is no accelerator, because pinning would fail."""
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        return CPUOffloadPolicy(pin_memory=False)
    return policy


ActivationCheckpointing: TypeAlias = bool | int
"""Whether activations of blocks are recomputed in the backward pass. ``n`` recomputes those of every n-th block.

Gradients are bitwise equal, also with dropout: the recomputation restores the random state.
"""


class Recomputed:
    """A forward function of a block that keeps only its inputs for the backward pass."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], name: str) -> None:
        self.block = block
        self.forward = forward
        self.name = name
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **keywords)
        if self.block.training and getattr(self.block, "gradient_checkpointing", False):
            raise ConfigError(_double_checkpointing_message(self.name))
        args = tuple(self._without_cache(value) for value in args)
        keywords = {key: self._without_cache(value) for key, value in keywords.items()}
        if "use_cache" in keywords:
            keywords["use_cache"] = False
        # Passed by position: checkpoint() saves the random state only of devices that positional arguments are on.
        return checkpoint(self._run, keywords, *args, use_reentrant=False, preserve_rng_state=True)

    def _run(self, keywords: dict[str, Any], *args: Any) -> Any:
        return self.forward(*args, **keywords)

    def _without_cache(self, value: Any) -> Any:
        """Replace a cache by None, because the recomputation would add keys and values to it again.

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


def _double_checkpointing_message(name: str) -> str:
    return (
        f"{name} recomputes activations by itself (its gradient_checkpointing is on), and "
        "activation_checkpointing=True would do it again. Turn the model's own off, or pass False"
    )


_FSDP1_OPTIONS = {
    transformer_auto_wrap_policy: "transformer_layer_cls",
    size_based_auto_wrap_policy: "min_num_params",
}


def as_policy(policy: Any) -> Any:
    """Convert classes, functions, and policies of FSDP1 or partials of them, to a :data:`WrapPolicy`.

    Classes, and ``transformer_auto_wrap_policy`` with its classes, become ``Classes``. The latter without classes
    becomes ``"no_split_modules"``, ``size_based_auto_wrap_policy`` becomes ``MinSize``, and other functions become
    ``Matching``. Other values are returned unchanged.

    Raises:
        ConfigError: a partial has unknown arguments.
    """
    # FSDP1 takes functions, and has their arguments bound by functools.partial.
    function, keywords = policy, {}
    if isinstance(policy, functools.partial):
        if policy.args:
            raise ConfigError(
                f"wrap is a functools.partial with {len(policy.args)} positional arguments. Name them"
            )
        function, keywords = policy.func, dict(policy.keywords)
    option = _FSDP1_OPTIONS.get(function) if callable(function) else None
    if option is None:
        return _as_classes(policy)
    value = keywords.pop(option, None)
    if unknown := {name: value for name, value in keywords.items() if value is not None}:
        raise ConfigError(f"wrap: {function.__name__} has {unknown}, which is not known. Name the classes to wrap")
    if function is size_based_auto_wrap_policy:
        return MinSize(int(value or inspect.signature(function).parameters[option].default))
    classes = "no_split_modules" if value is None and function is policy else _as_classes(value)
    if not isinstance(classes, str | Classes):
        raise ConfigError(f"transformer_layer_cls={value!r} must be a set of classes, as in {{LlamaDecoderLayer}}")
    return classes


def _as_classes(policy: Any) -> Any:
    """Convert classes of modules, sorted by name, or a function. Other values are returned unchanged."""
    kinds = policy if isinstance(policy, (set, frozenset, list, tuple)) else (policy,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        return Classes(tuple(sorted(kind.__name__ for kind in kinds)))
    return Matching(policy) if callable(policy) and not isinstance(policy, type) else policy


def require_movable(tensors: Sequence[TensorRef]) -> None:
    """Reject parameters that sharding would change.

    Raises:
        ShardingError: parameters are of a tensor subclass, have gradients, or overlap in memory without being one
            parameter. The message names them.
    """
    parameters = [item for item in tensors if item.kind is TensorKind.PARAMETER]
    faults: list[str] = []
    for item in parameters:
        kind = type(item.tensor)
        if kind is not nn.Parameter:
            faults.append(f"{item.fqn} is a {kind.__name__}: shard the model before it is quantized or wrapped")
    with_gradient = [item.fqn for item in parameters if item.tensor.grad is not None]
    if with_gradient:
        faults.append(f"{abbreviate(with_gradient)}: a gradient would be lost. Take the step, or call zero_grad()")
    # Two parameters of the same elements are a tie only to the user. Sharded, each would get values of its own.
    for other, fqn in _find_overlaps(parameters):
        faults.append(
            f"{fqn} and {other} are two parameters that share memory, and would each become its own. "
            "Make them one parameter, by assigning it to both modules"
        )
    if faults:
        raise ShardingError("the model cannot be sharded as it is:\n  " + "\n  ".join(faults[:20]))


@dataclass(frozen=True, slots=True)
class _Span:
    """The addresses of a parameter, of which its elements take ``nbytes``."""

    device: str
    start: int
    stop: int
    nbytes: int
    fqn: str


def _find_overlaps(parameters: Sequence[TensorRef]) -> list[tuple[str, str]]:
    """Return names of pairs of parameters with common elements. Disjoint views of one storage have none."""
    spans: list[_Span] = []
    for item in parameters:
        tensor = item.tensor
        if type(tensor) is nn.Parameter and not tensor.is_meta and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start, length = tensor.data_ptr(), (last + 1) * tensor.itemsize
            nbytes = min(tensor.nbytes, length)  # elements of an expanded tensor share memory
            spans.append(_Span(str(tensor.device), start, start + length, nbytes, item.fqn))
    spans.sort(key=attrgetter("device", "start"))
    pairs: list[tuple[str, str]] = []
    for one, other in pairwise(spans):
        # Columns of one matrix lie between each other. Where there is room for both, they are taken as disjoint.
        has_room = max(one.stop, other.stop) - one.start >= one.nbytes + other.nbytes
        if one.device == other.device and other.start < one.stop and not has_room:
            pairs.append((one.fqn, other.fqn))
    return pairs


TrainedDtype: TypeAlias = torch.dtype | Literal["unchanged"]
"""Dtype of trained parameters, if it is wider than their own. ``"unchanged"`` keeps all dtypes."""


def require_trainable_dtype(dtype: object) -> None:
    """Reject a dtype in which parameters cannot be trained.

    Raises:
        ConfigError: it is not a floating dtype of at least 16 bits.
    """
    if dtype != "unchanged" and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
    ):
        raise ConfigError(
            f"trained_dtype={dtype!r}: is not a floating dtype of 16 bits or more. Pass torch.float32 or "
            "'unchanged'"
        )


def get_trained_dtype(trained_dtype: TrainedDtype, dtype: torch.dtype, requires_grad: bool) -> torch.dtype:  # noqa: FBT001
    """Return ``trained_dtype`` if it is wider than the dtype and the parameter is trained, otherwise the dtype.

    8-bit floats and integers keep their dtype.
    """
    if isinstance(trained_dtype, str) or not requires_grad or not dtype.is_floating_point or dtype.itemsize < 2:
        return dtype
    return trained_dtype if torch.promote_types(dtype, trained_dtype) == trained_dtype else dtype
