"""torch's unexported names, accelerators and dtypes.

Unexported names of FSDP2's passes are in ``gradients``.
Checked with torch 2.11, 2.13 and 2.15. Each name is looked up when it is used, so a missing one is an error of the
calls that need it, and of ``tests/canary``, which asserts what each name means.

Accelerators are those of CUDA and ROCm, Intel (xpu) and Huawei (npu), through ``torch.get_device_module``. Others,
such as mps, are rejected. Without a supported accelerator, tensors stay on the CPU.
"""

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwise.core.errors import ShardingError, lacks, private, require_private
from shardwise.core.tensors import DType

KINDS = ("cuda", "xpu", "npu")


def accelerator() -> torch.device | None:
    """Return the device type of the available accelerator, or None if there is none of a supported type."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device if device is not None and device.type in KINDS else None


def accelerator_module(device: torch.device) -> Any:
    """Return torch's module for a type of accelerator.

    Raises:
        ShardingError: the type is not supported.
    """
    if device.type not in KINDS:
        raise ShardingError(
            f"device {device}: tensors are loaded on the CPU, or on accelerators of these types: "
            f"{', '.join(KINDS)}. Load on the CPU and move the model afterwards"
        )
    return torch.get_device_module(device.type)


def both_backends(kind: torch.device) -> str:
    """Return the backend string of a process group for tensors on the host and on an accelerator."""
    return f"cpu:gloo,{kind.type}:{dist.get_default_backend_for_device(kind)}"


def has_collectives(kind: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a process group (None: the default one) has a backend for an accelerator."""
    return dist.get_default_backend_for_device(kind) in str(dist.get_backend_config(group))


_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)
"""Variables in which a scheduler names the devices of a process."""


def select_accelerator(environment: Mapping[str, str], local_rank: int, local_size: int) -> str:
    """Select the accelerator of a rank. Return the backends of its process group, as in "cpu:gloo,cuda:nccl".

    The device is that of the local rank, or device 0 if the environment makes one device visible
    (``srun --gpus-per-task=1``).

    Raises:
        ShardingError: there are accelerators, but not one for each rank of this machine.
    """
    kind = accelerator()
    if kind is None:
        return "gloo"
    # A launcher that gives no size of the machine still gives the local rank, which needs a device of that number.
    count, size = torch.accelerator.device_count(), max(local_rank + 1, local_size)
    shows_own = count == 1 and any("," not in environment.get(name, ",") for name in _VISIBLE)
    if size > count and not shows_own:
        raise ShardingError(
            f"{size} ranks on a machine: each needs a device, and this process sees {count}. Start at most "
            f"{count}, or hide the devices to compute on the CPU ({_VISIBLE[0]}=)"
        )
    accelerator_module(kind).set_device(0 if shows_own else local_rank)
    return both_backends(kind)


def free_memory(device: torch.device) -> int:
    """Return the bytes of an accelerator that can be allocated: free, or cached by torch."""
    module = accelerator_module(device)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + int(cached)


def release_pinned_memory() -> None:
    """Give pinned memory of CUDA that is not in use, which torch keeps for later tensors, back to the system.

    torch 2.11 has no call for it.
    """
    kind = accelerator()
    if kind is not None and kind.type == "cuda" and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()


def synchronize_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Synchronize the streams of this thread, so that other threads can read these tensors."""
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            accelerator_module(device).current_stream(device).synchronize()


_TO_TORCH: dict[DType, torch.dtype] = {
    DType.BOOL: torch.bool,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.U16: torch.uint16,
    DType.I16: torch.int16,
    DType.U32: torch.uint32,
    DType.I32: torch.int32,
    DType.U64: torch.uint64,
    DType.I64: torch.int64,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E4M3FNUZ: torch.float8_e4m3fnuz,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E5M2FNUZ: torch.float8_e5m2fnuz,
    DType.F8_E8M0: torch.float8_e8m0fnu,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
    DType.C64: torch.complex64,
}
_FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in _TO_TORCH.items()}


def to_torch(dtype: DType) -> torch.dtype:
    """Return the torch dtype of a stored dtype of whole bytes. Raises :class:`KeyError` for smaller ones."""
    return _TO_TORCH[dtype]


def from_torch_or_other(dtype: torch.dtype) -> DType:
    """Return the dtype of a tensor that is not saved, ``OTHER`` if safetensors has none for it."""
    return _FROM_TORCH.get(dtype, DType.OTHER)


def from_torch(dtype: torch.dtype, fqn: str) -> DType:
    """Return the safetensors dtype of a model's tensor.

    Raises:
        ShardingError: safetensors has no such dtype.
    """
    if dtype not in _FROM_TORCH:
        raise ShardingError(f"{fqn} is {dtype}, which safetensors cannot hold")
    return _FROM_TORCH[dtype]


def saved_dtype(dtype: DType, target: torch.dtype | None) -> DType:
    """Return the dtype that a tensor is saved in: ``target`` for floats of at least 16 bits, otherwise its own."""
    is_cast = dtype.kind == "float" and dtype.bits >= 16
    return from_torch(target, "dtype") if is_cast and target is not None else dtype


def get_parameters(module: nn.Module) -> dict[str, Any]:
    """Return a module's registry of parameters. Insertions bypass ``nn.Module``'s checks."""
    try:  # called too often for ``private``
        return module._parameters
    except AttributeError as error:
        raise lacks("torch.nn:Module._parameters") from error


def get_buffers(module: nn.Module) -> dict[str, Any]:
    """Return a module's registry of buffers."""
    try:
        return module._buffers
    except AttributeError as error:
        raise lacks("torch.nn:Module._buffers") from error


def sets_grad_dtype(parameter: nn.Parameter) -> bool:
    """Return whether ``grad_dtype`` of a parameter was set. Before torch 2.15 its own dtype counts as unset."""
    return bool(getattr(parameter, "_has_grad_dtype_override", parameter.grad_dtype != parameter.dtype))


def copy_attributes(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Copy the Python attributes and the ``grad_dtype`` of another parameter."""
    vars(parameter).update(vars(other))
    if sets_grad_dtype(other):
        parameter.grad_dtype = other.grad_dtype


def share_hooks(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Give a parameter the hooks of another one. Their handles remove them from both."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(other, name, None)) is not None:
            setattr(parameter, name, hooks)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``copy_`` all tensors by one call. Copies from accelerators may be in progress when this returns."""
    if targets:
        private("torch:_foreach_copy_")(targets, sources, non_blocking=True)


def backward_pass_id() -> int:
    """Return the unique number of the current backward pass."""
    return int(private("torch._C:_current_graph_task_id")())


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the current backward pass, on the thread and stream it began on."""
    private("torch.autograd:Variable._execution_engine").queue_callback(callback)


def add_all(targets: list[torch.Tensor], stacked: torch.Tensor) -> None:
    """Add a stack (tensors, ...), cast to their dtype, to tensors, by few kernels."""
    private("torch:_foreach_add_")(targets, list(stacked.to(targets[0].dtype)))


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. Values of the host go there through pinned memory, so that it does not wait."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def get_temporary_names(module: nn.Module) -> set[str]:
    """Return the names of a module's buffers that were registered with ``persistent=False``."""
    return set(private("torch.nn:Module._non_persistent_buffers_set", module))


def normalizes_over_rows(module: nn.Module) -> bool:
    """Return whether this is a batch normalization."""
    return isinstance(module, private("torch.nn.modules.batchnorm:_BatchNorm"))


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` has been called."""
    return private("torch.nn:Module._compiled_call_impl", module) is not None


def tree_leaves(tree: Any) -> Any:
    """Return the leaves of nested containers, in order."""
    return private("torch.utils._pytree:tree_leaves")(tree)


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested containers with the leaves of a class replaced by the results of a function."""
    return private("torch.utils._pytree:tree_map_only")(kind, function, tree)


def dispatch_mode_class() -> Any:
    """Return the class of modes that see every operation."""
    return private("torch.utils._python_dispatch:TorchDispatchMode")


def fake_mode() -> Any:
    """Return a mode in which new tensors take no memory."""
    return private("torch._subclasses.fake_tensor:FakeTensorMode")()


def save_without_data(make: Callable[[], object], file: Path) -> None:
    """Call ``torch.save`` on the result of ``make``, with space for its tensors, which are not allocated."""
    with fake_mode():
        hollow = make()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(hollow, file)


def make_storage_info(file: str, start: int, nbytes: int) -> object:
    """Return the location of a chunk as an entry of a distributed checkpoint's metadata."""
    location: object = private("torch.distributed.checkpoint.filesystem:_StorageInfo")(file, start, nbytes)
    return location


def get_version(tensor: torch.Tensor) -> int:
    """Return the version of a tensor, which grows with every in-place operation."""
    try:
        return tensor._version
    except AttributeError as error:
        raise lacks("torch:Tensor._version") from error


def make_without_memory(kind: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return an instance of a tensor subclass that has a shape and a dtype, but no memory."""
    make = private("torch:Tensor._make_wrapper_subclass")
    return make(kind, tuple(shape), dtype=dtype, device=torch.device("cpu"))


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that is equal for all Python objects of one storage while it is alive."""
    return int(private("torch:UntypedStorage._cdata", storage))


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before ``fully_shard``: the one after ``FSDPModule``."""
    kinds = type(module).__mro__
    return kinds[kinds.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else type(module)


def is_under_replicate(module: nn.Module) -> bool:
    """Return whether one of torch's two ``replicate()`` has been applied to a module."""
    names = {"torch.distributed._composable.replicate", "torch.distributed._composable.replicate_with_fsdp"}
    return any(kind.__module__ in names for kind in type(module).__mro__)


@contextlib.contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Restore the original classes of sharded modules within the block.

    transformers looks up conversions and initializers by a class's name and module, and ``fully_shard`` creates
    classes of other names in torch's module.
    """
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    for module, _ in sharded:
        module.__class__ = original_class(module)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind


def default_store() -> Any:
    """Return the store of the default process group's rendezvous."""
    return private("torch.distributed.distributed_c10d:_get_default_store")()


def get_given_timeout(group: Any) -> float | None:
    """Return the timeout of a process group (None: the default one) in seconds. None if it is torch's default."""
    group = group or dist.group.WORLD
    for device in private("torch.distributed:ProcessGroup._device_types", group):
        backend = private("torch.distributed:ProcessGroup._get_backend", group)(device)
        # Backends of other libraries may have no options.
        options = getattr(backend, "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is None or timeout == dist.default_pg_timeout:
            continue
        if timeout != private("torch.distributed.distributed_c10d:default_pg_nccl_timeout"):
            return float(timeout.total_seconds())
    return None


def set_timeout(seconds: float) -> None:
    """Set the timeout of all process groups of this process."""
    change = private("torch.distributed.distributed_c10d:_set_pg_timeout")
    for group in [*private("torch.distributed.distributed_c10d:_world").pg_map]:
        change(timedelta(seconds=seconds), group)


def object_device(group: Any) -> torch.device:
    """Return the device that object collectives of a process group (None: the default one) use."""
    return torch.device(private("torch.distributed.distributed_c10d:_get_object_coll_device")(group))


def keep_forever(group: Any) -> None:
    """Never destroy a process group (None: the default one) with a pending collective that cannot end.

    Destroying it, also at exit, would wait for it: with gloo, half an hour.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group or dist.group.WORLD))


def fsdp_params(model: nn.Module) -> dict[nn.Parameter, Any]:
    """Return the ``FSDPParam`` of each sharded parameter."""
    by_parameter: dict[nn.Parameter, Any] = {}
    for group in iter_fsdp_param_groups(model):
        for param in group.fsdp_params:
            require_private(
                "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
                "_sharded_param_data fsdp_placement offload_to_cpu padded_sharded_param_size pin_memory "
                "reset_sharded_param sharded_size",
                param,
            )
            by_parameter[param.sharded_param] = param
    return by_parameter


def iter_fsdp_param_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = private("torch.distributed.fsdp:FSDPModule._get_fsdp_state", module)()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:  # torch < 2.13 has one group for a module
                yield state._fsdp_param_group


def reshard_owners(module: nn.Module) -> None:
    """Reshard the FSDP2 groups that a module's own parameters are in, as its ``state_dict()`` does.

    The group may belong to a module further out. ``FSDPModule.reshard`` leaves a root group gathered whose forward
    pass has not ended.
    """
    for hook in private("torch.nn:Module._state_dict_pre_hooks", module).values():
        register = private(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._register_state_dict_hooks"
        )
        if getattr(hook, "__qualname__", "").startswith(f"{register.__qualname__}."):
            hook(module, "", keep_vars=False)


def fsdp_policies(model: nn.Module) -> list[tuple[MixedPrecisionPolicy, OffloadPolicy]]:
    """Return the policies of each FSDP2 group."""
    policies: list[tuple[MixedPrecisionPolicy, OffloadPolicy]] = []
    for group in iter_fsdp_param_groups(model):
        require_private(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
            "mp_policy offload_policy",
            group,
        )
        policies.append((group.mp_policy, group.offload_policy))
    return policies


def gathered_sizes(model: nn.Module) -> list[int]:
    """Return the bytes of the parameters of each FSDP2 group when they are gathered, the root's first."""
    sizes = []
    for group in iter_fsdp_param_groups(model):
        require_private("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", "mp_policy", group)
        size, cast = 0, group.mp_policy.param_dtype
        for param in group.fsdp_params:
            dtype = param.sharded_param.dtype
            size += param.sharded_param.numel() * (cast if cast and dtype.is_floating_point else dtype).itemsize
        sizes.append(size)
    return sizes


def is_offloaded(fsdp_param: Any) -> bool:
    """Return whether the sharded parameter is on the CPU, and the mesh on another device."""
    return bool(fsdp_param.offload_to_cpu)


def padded_numel(fsdp_param: Any) -> int:
    """Return the elements of this rank's memory for a sharded parameter, padded to the size of rank 0's shard."""
    return int(fsdp_param.padded_sharded_param_size.numel())


def padded_size(fsdp_param: Any) -> tuple[int, ...]:
    """Return the size of this rank's shard, padded to that of rank 0."""
    return tuple(fsdp_param.padded_sharded_param_size)


def pins_memory(fsdp_param: Any) -> bool:
    """Return whether the sharded parameter's host memory is to be pinned."""
    return bool(fsdp_param.pin_memory) and torch.accelerator.is_available()


def zero_padding(fsdp_param: Any, padded: torch.Tensor) -> torch.Tensor:
    """Set the padding of new memory to zero, and return the part without padding.

    ``reset_sharded_param`` copies a shard whose memory has no padding.
    """
    if padded.shape == fsdp_param.sharded_size:
        return padded
    # For example 2 rows that are padded to 3: row 2 becomes zero, and rows 0 and 1 are returned.
    dim = fsdp_param.fsdp_placement.dim
    length = fsdp_param.sharded_size[dim] if fsdp_param.sharded_size.numel() else 0
    padded.narrow(dim, length, padded.shape[dim] - length).zero_()
    return padded.narrow(dim, 0, length)


def make_dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor of a new local tensor, like another DTensor, and a parameter if the other is one.

    Without autograd, as FSDP2 creates its own, and without the ``detach`` of ``nn.Parameter``.
    """
    make = private("torch.distributed.fsdp._fully_shard._fsdp_common:_from_local_no_grad")
    result: DTensor = make(local, tensor._spec)
    if isinstance(tensor, nn.Parameter):
        result.requires_grad_(tensor.requires_grad)
        result._is_param = True
    return result


def adopt_sharded(fsdp_param: Any, parameter: nn.Parameter) -> None:
    """Let FSDP2 gather from a materialized sharded parameter, which is already set on its modules."""
    local = parameter._local_tensor  # type: ignore[attr-defined]
    data = torch.empty(0, dtype=local.dtype, device=local.device)
    numel = padded_numel(fsdp_param)
    # FSDP2 gathers from a flat padded tensor. If the local tensor is a view of memory of that size, it becomes this
    # tensor. It must be set before reset_sharded_param, which otherwise allocates one and copies.
    if local.untyped_storage().nbytes() == numel * local.itemsize:
        data.set_(local.untyped_storage(), 0, (numel,), (1,))
        fsdp_param._sharded_param_data = data
    fsdp_param.reset_sharded_param()


Run = tuple[int, int]
"""(start, count) of consecutive indices."""


@lru_cache(maxsize=65536)
def local_runs(size: int, splits: tuple[tuple[Placement, int, int], ...]) -> tuple[Run, ...]:
    """Return the runs of indices of one dimension that a rank holds.

    ``splits`` are (placement, size of the mesh axis, coordinate on it) for each axis that splits the dimension, in
    the order of the mesh.
    """
    if not splits:
        return ((0, size),) if size else ()
    if len(splits) == 1 and not _is_strided(splits[0][0]):  # however many indices there are
        start, count = _chunk(size, *splits[0][1:])
        return ((start, count),) if count else ()
    # Strided, or several axes split this dim, each what the axis before has left. Indices are split as torch splits
    # elements.
    indices = torch.arange(size, device="cpu")
    for placement, chunks, coordinate in splits:
        indices = _split(indices, placement, chunks, coordinate)
    return _runs(indices)


def _is_strided(placement: Placement) -> bool:
    """Return whether ranks hold several runs of a dimension, as after tensor parallelism on the same one."""
    if isinstance(placement, (Shard, Replicate, Partial)):
        return False
    return isinstance(placement, private("torch.distributed.tensor.placement_types:_StridedShard"))


def _chunk(size: int, chunks: int, coordinate: int) -> Run:
    """Return the run of a plain shard, as by ``torch.chunk``: of 10 in 4 the runs have 3, 3, 3 and 1."""
    length = -(-size // chunks)
    start = min(coordinate * length, size)
    return start, min(length, size - start)


def _split(indices: torch.Tensor, placement: Any, chunks: int, coordinate: int) -> torch.Tensor:
    if not _is_strided(placement):
        return indices.narrow(0, *_chunk(len(indices), chunks, coordinate))
    # The same placement of a flat tensor, whatever dimension it splits.
    along = type(placement)(0, split_factor=placement.split_factor)
    split = private("torch.distributed.tensor.placement_types:_StridedShard._split_tensor", along)
    piece: torch.Tensor = split(indices, chunks, with_padding=False, contiguous=True)[0][coordinate]
    return piece


def _runs(indices: torch.Tensor) -> tuple[Run, ...]:
    if indices.numel() == 0:
        return ()
    # For example indices 0 1 4 5: one break, after the second; edges 0, 2, 4; runs (0, 2) and (4, 2).
    breaks = torch.nonzero(indices.diff() != 1).flatten().add_(1).tolist()
    edges = [0, *breaks, indices.numel()]
    # A single run needs one index only, however many there are.
    starts = indices.tolist() if breaks else [int(indices[0])]
    return tuple((starts[first if breaks else 0], stop - first) for first, stop in itertools.pairwise(edges))


def splitting_dim(placement: Any) -> int | None:
    """Return the dimension that a placement splits, or None if it replicates."""
    return int(placement.dim) if isinstance(placement, Shard) or _is_strided(placement) else None
