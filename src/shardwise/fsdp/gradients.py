"""Gradients of a sharded model: clipping, averaging of unsharded parameters, and the state of FSDP2's passes.

Unexported names of FSDP2's groups are used here, all others of torch in ``torch_private``.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.core.errors import ConfigError, private, require_private
from shardwise.core.formatting import canonical_name
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import abbreviate, local_tensor
from shardwise.fsdp.torch_private import iter_fsdp_param_groups


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Clip gradients to a global 2-norm of at most ``max_norm``. Return the norm before.

    Parameters may be unsharded, sharded, or on several meshes. The norm is equal on all ranks. Gradients whose norm
    is not finite are not changed.

    Collective: yes, over all ranks, once.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    gradients = [(parameter, _local_gradient(parameter)) for parameter in parameters if parameter.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=gradients[0][1].device if gradients else None)
    for parameter, gradient in gradients:
        # Every rank adds its part of the square. What several ranks hold is divided by their number, so that the
        # sum over all ranks counts each element once, on whatever meshes parameters are. For example on a mesh
        # (replicate=2, shard=3) each of the 6 ranks divides by 2, and by 6 for what is whole on every rank.
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        total += (norm.double().square() / _copies(parameter, ranks)).to(total.device)
    if ranks > 1:
        total = total.to(torch_private.object_device(None))
        dist.all_reduce(total)
    norm = math.sqrt(total.item())
    if math.isfinite(norm) and norm + _TINY > max_norm:
        private("torch:_foreach_mul_")([gradient for _, gradient in gradients], max_norm / (norm + _TINY))
    return norm


_TINY = 1e-6
"""Added to the norm in the divisor, as in ``clip_grad_norm_``."""


def _copies(parameter: nn.Parameter, ranks: int) -> float:
    """Return the number of ranks that hold each element of a parameter."""
    if not isinstance(parameter, DTensor):
        return ranks
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return ranks / math.prod(size for size, place in sizes if torch_private.splitting_dim(place) is not None)


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's gradient, placed like its parameter.

    Under tensor parallelism it may be partial, and that of an embedding that is split by rows is whole.
    """
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        if gradient.placements != parameter.placements:
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return local_tensor(gradient)


def average_replicated_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average gradients of unsharded parameters of a sharded model over all ranks.

    The hooks belong to the parameter objects. Those of parameters on meta go over to the ones that a load puts in
    their place. Repeated calls have no effect. Every backward pass then ends with a collective, unless FSDP2 does
    not synchronize gradients (``set_requires_gradient_sync(False)``). Gradients accumulate on each rank until it
    does.
    """
    hooks = [hook for parameter in model.parameters() if (hook := _find_hook(parameter)) is not None]
    # One for the model: ranks begin its collectives in one order, whichever parameters a pass reaches first.
    average = next((hook for hook in hooks if hook.model is model), None) or Averaging(mesh, model)
    group_of: dict[nn.Parameter, Any] = {}  # that of the innermost module, as it comes last
    for group in iter_fsdp_param_groups(model):
        for module in group.modules:
            group_of.update(dict.fromkeys(module.parameters(), group))
    for parameter in model.parameters():
        is_alone = parameter.requires_grad and parameter.numel() and not isinstance(parameter, DTensor)
        if is_alone and not is_averaged(parameter):
            if parameter in group_of:
                parameter.register_hook(partial(scale_by_divisor, group_of[parameter]))
            parameter.register_post_accumulate_grad_hook(average)


def scale_by_divisor(group: Any, gradient: torch.Tensor) -> torch.Tensor | None:
    """Scale the gradient of a pass so that the mean is FSDP2's sum by a group's ``set_gradient_divide_factor``."""
    if group.gradient_divide_factor is None:
        return None
    scaling: float = group.mesh_info.mesh.size() / group.gradient_divide_factor
    return gradient * scaling


class Averaging:
    """A hook that averages gradients over all ranks of a mesh, in buckets at the end of a backward pass.

    Accumulated gradients of earlier passes are equal on all ranks, so averaging the sum does not change them.
    Every rank must reach one of the parameters in a pass, but not the same ones as others: with experts as single
    modules, tokens decide. Memory: the gradients once more.
    """

    def __init__(self, mesh: DeviceMesh, model: nn.Module) -> None:
        self.mesh = mesh
        self.model = model
        self._group = next(iter_fsdp_param_groups(model), None)
        if self._group is not None:
            require_private(
                "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
                "all_reduce_grads gradient_divide_factor mesh_info modules reduce_grads",
                self._group,
            )
        self._passes: set[int] = set()
        """Backward passes that have reached a parameter. Nested ones (reentrant checkpointing) are passes, too."""

    def is_synchronizing(self) -> bool:
        """Return whether FSDP2 reduces gradients over all ranks in the current backward pass."""
        return self._group is None or bool(self._group.reduce_grads and self._group.all_reduce_grads)

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None or not self.is_synchronizing():
            return
        number = torch_private.backward_pass_id()
        if number not in self._passes:
            self._passes.add(number)
            torch_private.after_backward(partial(self._average, number))

    @torch.no_grad()
    def _average(self, number: int) -> None:
        self._passes.remove(number)
        # All of the model's, in its order, and zeros where this rank has no gradient: buckets have no names.
        buckets: dict[object, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            if parameter.requires_grad and _find_hook(parameter) is self:
                buckets.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in buckets.values():
            # First, which of them have a gradient: 1 or 0 for each. The mean tells which have one on any rank.
            flags = [parameter.grad is not None for parameter in parameters]
            flags_on_host = torch.tensor(flags, dtype=parameters[0].dtype, device="cpu")
            parts = [torch_private.to_device(flags_on_host, parameters[0].device)]
            for parameter in parameters:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parts.append(gradient.flatten())
            bucket = torch.cat(parts)
            for group in self.mesh.get_all_groups():  # the sum over each axis in turn is that over the mesh
                dist.all_reduce(bucket, group=group)
            counts, *means = bucket.div_(self.mesh.size()).split([part.numel() for part in parts])
            pairs = list(zip(parameters, means, strict=True))
            present = [(each.grad, mean.view_as(each)) for each, mean in pairs if each.grad is not None]
            torch_private.copy_all([gradient for gradient, _ in present], [mean for _, mean in present])
            if len(present) == len(parameters):
                continue
            # Only a rank that lacks one waits for the device here. One that no rank has stays None, so that
            # optimizers skip it.
            for (parameter, mean), count in zip(pairs, counts.tolist(), strict=True):
                if parameter.grad is None and count:
                    parameter.grad = mean.view_as(parameter).clone()


def _find_hook(parameter: nn.Parameter) -> Averaging | None:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return next((hook for hook in hooks.values() if isinstance(hook, Averaging)), None)


def is_averaged(parameter: nn.Parameter) -> bool:
    """Return whether :func:`average_replicated_gradients` averages a parameter's gradient."""
    return _find_hook(parameter) is not None


def count_data_parallel_ranks(model: nn.Module) -> int:
    """Return the number of ranks over which FSDP2 averages gradients: less than all under tensor parallelism.

    Of several groups the largest counts. Those of experts (expert parallelism) take rows of other ranks, too.
    """
    name = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.mesh_info"
    return max((private(name, group).mesh.size() for group in iter_fsdp_param_groups(model)), default=1)


def require_synchronized(model: nn.Module, ranks: int) -> None:
    """Reject a model whose gradients are not reduced over all ranks that get rows of their own.

    Trained parameters must be sharded by FSDP2 over all ranks, averaged by :func:`average_replicated_gradients`, or
    in torch's DistributedDataParallel. Ranks of a tensor parallel group need the same rows, for frozen ones, too.
    Collective: no. The result is the same on every rank if the models are.

    Args:
        model: sharded or in DistributedDataParallel.
        ranks: number of ranks that get rows of their own.

    Raises:
        ConfigError: the message has the parameters.
    """
    if ranks == 1:
        return
    # DistributedDataParallel averages the gradients of its parameters itself.
    in_ddp: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            in_ddp.update(module.parameters())
    data_parallel = count_data_parallel_ranks(model)
    alone: list[str] = []
    on_fewer: list[str] = []
    for name, parameter in model.named_parameters():
        if not parameter.numel() or parameter in in_ddp:
            continue
        if isinstance(parameter, DTensor):
            size = parameter.device_mesh.size()  # more than FSDP2's under tensor parallelism
            if data_parallel < min(size, ranks) or (parameter.requires_grad and size < ranks):
                on_fewer.append(canonical_name(name))
        elif parameter.requires_grad and not is_averaged(parameter):
            alone.append(canonical_name(name))
    if alone:
        raise ConfigError(
            f"{abbreviate(alone)}: trained, but neither sharded nor averaged over the {ranks} ranks, so each rank "
            "would train its own. Add them before the model is sharded, call shardwise.fsdp.gradients."
            "average_replicated_gradients(model, mesh) after adding them, or freeze them"
        )
    if on_fewer:
        raise ConfigError(
            f"{abbreviate(on_fewer)}: FSDP2 averages over fewer than the {ranks} ranks that get rows of their own. "
            "Shard the model on a mesh of all ranks, with an axis for replicas. Ranks of a tensor parallel group "
            "need the same rows: write the loop yourself, or with accelerate's ParallelismConfig(tp_size=...)"
        )


def reset_fsdp_state(root: Any) -> None:
    """Reset FSDP2's state after an aborted pass: gathered parameters, and pending waits. Collective: no.

    ``FSDPModule.reset_iter_state`` does it from torch 2.13 on.

    Args:
        root: the outermost ``FSDPModule``.
    """
    state = root._get_fsdp_state()
    if state._is_root is None:  # no pass has begun
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    # First what all groups share, then each group, then the root.
    shared, idle = state._comm_ctx, type(state._training_state).IDLE
    # The buffer of the last all-gather must be kept until it is copied out, which is before this event.
    if shared.all_gather_state is not None:
        state._device_handle.current_stream().wait_event(shared.all_gather_state.event)
        shared.all_gather_state = None
    shared.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = idle
    for group in iter_fsdp_param_groups(root):
        group.finalize_backward()
        group._partial_reduce_output = None
        group._training_state = idle  # otherwise reshard() keeps parameters for the backward pass
        group.reshard()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
