"""``for_trainer``: attributes that the Hugging Face Trainer and TRL's trainers expect of a sharded model.

[Note: References] DPO, GRPO and other trainers add a second adapter "ref" to a PEFT model and copy the first one's
values into it, parameter by parameter: ``model.get_parameter(name).data.copy_(value)``. An adapter that changes
nothing yet needs no copy: the reference is the model without it, which is what TRL uses if there is no "ref". So
``add_adapter`` does not add it, and ``get_parameter`` returns a proxy that takes no value.

Of an adapter that has been trained before there is a copy. Modules that PEFT adds to a sharded model are unsharded
on every rank, in no FSDP2 group. Matrices are small and never trained. Copies of whole modules
(``modules_to_save``) begin with the shards of the original, so they get memory for the whole tensor. If the first
adapter is sharded, its values are DTensors, and copying one into a plain tensor is an error. So for these names
``get_parameter`` returns a proxy that gathers the value first. TRL reads all of them in the same order on all
ranks, so gathering is safe.

[Note: Patches] The Trainer neither moves nor wraps a model that transformers itself has sharded while loading, and
defers its gradient reduction between micro-batches by FSDP2's own switch. It recognizes such a model by a mark. A
model that shardwise has sharded has the same properties, so it gets the same mark, and attributes on the instance
that override methods of its class: ``save_pretrained``, which would gather, and for an adapter ``add_adapter`` and
``get_parameter``, by which TRL makes the frozen copy that it compares with ([Note: References]). Unsharded
parameters whose gradients are averaged already get the mark that keeps the Trainer from averaging them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.fsdp.gradients import average_replicated_gradients, is_averaged, require_synchronized
from shardwise.fsdp.named_tensors import abbreviate, reshard, unwrap
from shardwise.integrations import trainer_compat as compat
from shardwise.integrations.context_parallel import require_sdpa
from shardwise.models.lora import peft_private
from shardwise.models.selection import has_adapters
from shardwise.ranks.world import World
from shardwise.saving.save import save, save_adapter


class _GatheringProxy:
    """Proxy of an unsharded parameter that takes the values of a sharded one. Of None it takes no value."""

    def __init__(self, parameter: nn.Parameter | None) -> None:
        self._parameter = parameter
        self.data = self

    @torch.no_grad()
    def copy_(self, values: torch.Tensor) -> None:
        """Collective: yes, over the mesh of ``values``."""
        if self._parameter is None:
            return
        whole = values.full_tensor() if isinstance(values, DTensor) else values
        self._parameter.copy_(whole)


ModelT = TypeVar("ModelT", bound=nn.Module)

_CAST_ADAPTERS = "is_loaded_in_4bit"
"""TRL's trainers cast trained adapters on such a base, which replaces the parameters that FSDP2 manages."""


def for_trainer(model: ModelT) -> ModelT:
    """Mark a sharded model so that the Hugging Face ``Trainer`` and TRL's trainers use it as it is.

    Returns the same model, marked for good. See docs/trainer.md. For resumable checkpoints use
    :class:`~shardwise.integrations.trainer.ShardwiseTrainer` as well.

    From then on ``model.save_pretrained(folder)`` is a collective of all ranks, and writes as ``shardwise.save``
    does or, for a PEFT model, ``shardwise.save_adapter``.

    Collective: yes, over the default process group, whose ranks are those of the model's mesh.

    Args:
        model: a transformers model, or PEFT's around one, sharded by ``from_pretrained``, ``shard`` or
            ``fully_shard``. In one process without a process group, any model.

    Raises:
        ConfigError: the model is not of transformers or PEFT, is the result of ``torch.compile``, is not sharded,
            or has parameters that each rank would train for itself.
        ShardingError: the model has tensors on meta.

    Every error is the same on every rank.
    """
    with World.current(call="for_trainer") as world:
        with world.collective("check that marks fit"):
            inner = _require_fit(model, world)
        # Hooks first: they average the gradients that FSDP2 does not reduce, and the check finds those without.
        mesh = next((item.device_mesh for item in inner.parameters() if isinstance(item, DTensor)), None)
        if mesh is not None:
            average_replicated_gradients(model, mesh)
        with world.collective("check gradient synchronization"):
            require_synchronized(model, world.size)
    if mesh is not None:  # otherwise the Trainer moves the model to its device
        compat.add_marks(inner, mesh.size(0) if mesh.ndim == 2 else 1)  # (replicas, shards) of HSDP
    # After average_replicated_gradients, which decides which gradients are averaged.
    for parameter in model.parameters():
        if is_averaged(parameter):
            setattr(parameter, compat.HOOKED, True)
    attributes = vars(model)  # of the instance, over the methods of its class; a module would register them
    attributes["save_pretrained"] = _SavePretrained(model)
    if inner is not model:
        if getattr(model, _CAST_ADAPTERS, False):
            attributes[_CAST_ADAPTERS] = False
        # Not nested functions, of which a copy of the model would have the original's.
        attributes["add_adapter"] = partial(_add_adapter, model)
        attributes["get_parameter"] = partial(_get_parameter, model)
    return model


def is_for_trainer(model: object) -> bool:
    """Return whether a model has the marks of :func:`for_trainer`."""
    return isinstance(model, nn.Module) and isinstance(vars(model).get("save_pretrained"), _SavePretrained)


class _SavePretrained:
    """``save_pretrained`` of a marked model. Collective: yes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,  # noqa: ARG002, FBT001, FBT002 - as transformers has it
        state_dict: dict[str, Any] | None = None,
        max_shard_size: int | str = "50GB",
        safe_serialization: bool = True,  # noqa: FBT001, FBT002
        **others: Any,
    ) -> None:
        unsupported = {"state_dict": state_dict is not None, "safe_serialization": not safe_serialization, **others}
        if names := [name for name, value in unsupported.items() if value]:
            raise ConfigError(
                f"save_pretrained({', '.join(names)}) after for_trainer: every rank writes its own bytes as "
                "safetensors, without options. Call shardwise.save(...)"
            )
        if not has_adapters(self.model):
            save(self.model, save_directory, max_shard_size=max_shard_size)
            return
        # Every adapter but TRL's reference, in PEFT's layout: others than "default" in folders of their names.
        adapters: Any = self.model.peft_config
        for name in adapters:
            if name != compat.REFERENCE:
                place = save_directory if name == "default" else os.path.join(save_directory, name)
                save_adapter(self.model, place, adapter=name)


def _add_adapter(model: Any, adapter_name: str, peft_config: Any, **options: Any) -> None:
    """Run ``add_adapter`` of a model with an adapter, for TRL's reference. Collective: yes, for the reference."""
    if adapter_name == compat.REFERENCE:
        with World.current(call="add_adapter") as world:
            # Each rank sees its own shards. All must decide the same, because copying the values is collective.
            changes = peft_private.find_changes(model, model.active_adapter)
            if not world.all_reduce_object(changes, _is_any_change):
                return
    type(model).add_adapter(model, adapter_name, peft_config, **options)
    if adapter_name == compat.REFERENCE:
        # PEFT copies modules_to_save with this rank's shards, and TRL then sets the copies to whole values.
        for _, copy in peft_private.copies(model, adapter_name):
            _allocate_whole(copy)


def _is_any_change(ranks: Sequence[Sequence[Sequence[bool]]]) -> bool:
    """Return whether an adapter changes the model, from ``peft_private.find_changes`` of all ranks."""
    # ranks[r][layer][factor]: whether rank r's shard of a factor of the layer's product is not zero. A layer
    # changes the model if each of its factors (lora_A and lora_B) is not zero on some rank. With one layer and two
    # ranks, [[[True, False]], [[False, True]]] is a change, and [[[True, False]], [[True, False]]] is none.
    layers = zip(*ranks, strict=True)
    return any(all(any(factor) for factor in zip(*by_rank, strict=True)) for by_rank in layers)


def _allocate_whole(module: nn.Module) -> None:
    """Replace the sharded parameters of a module by unsharded ones, whose values are not set."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                whole = parameter.to_local().new_empty(parameter.shape)
                setattr(part, name, nn.Parameter(whole, requires_grad=False))


def _get_parameter(model: Any, target: str) -> Any:
    """Run ``get_parameter`` of a model with an adapter."""
    is_reference = f".{compat.REFERENCE}." in target
    if is_reference and compat.REFERENCE not in model.peft_config:
        return _GatheringProxy(None)
    parameter = type(model).get_parameter(model, target)
    # A sharded parameter takes sharded values itself.
    if is_reference and not isinstance(parameter, DTensor):
        return _GatheringProxy(parameter)
    return parameter


def _get_pretrained(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers inside of PEFT's."""
    inner: Any = model
    while has_adapters(inner) and not isinstance(inner, PreTrainedModel):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(
            f"for_trainer({type(model).__name__}): is not a model of transformers, nor a PEFT model around one, "
            "and the Trainer recognizes sharded models by transformers' attributes. Pass such a model"
        )
    return inner


def _require_sharded(call: str, model: PreTrainedModel, world: World) -> None:
    is_split = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if world.size > 1 and not is_split and not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            f"{call}({type(model).__name__}): is not sharded, and {world.size} ranks train it together. Load it "
            "with shardwise.from_pretrained(...) after torch.distributed.init_process_group(), or call "
            "shardwise.shard(model) before"
        )


def _require_fit(model: nn.Module, world: World) -> PreTrainedModel:
    """Return the model of transformers in this one.

    Raises:
        ConfigError, ShardingError: the Trainer cannot train it.
    """
    compat.require_names()
    if unwrap(model) is not model:
        raise ConfigError(
            f"for_trainer: the model is inside of {type(model).__name__}. Pass the model itself, and in place of "
            "torch.compile call compile() on each of its blocks"
        )
    inner = _get_pretrained(model)
    reshard(model)  # before its parameters are read and marked
    on_meta = [name for name, item in [*model.named_parameters(), *model.named_buffers()] if item.is_meta]
    if on_meta:
        raise ShardingError(
            f"{abbreviate(on_meta)}: on meta, so the Trainer's optimizer would hold tensors without memory. Load "
            "the model first (from_pretrained, or shardwise.load), then call for_trainer"
        )
    _require_sharded("for_trainer", inner, world)
    # Replicas of a sharded model (HSDP) are an axis of one mesh.
    meshes = {tuple(item.device_mesh.shape) for item in inner.parameters() if isinstance(item, DTensor)}
    if len(meshes) > 1:
        raise ConfigError(
            f"for_trainer({type(inner).__name__}): its parameters are on several meshes ({sorted(meshes)}), and "
            "the Trainer gives every rank rows of its own. Shard it on one mesh of all ranks, with an axis for "
            "replicas"
        )
    # The mark of transformers is also that of an earlier call of for_trainer, which may be repeated.
    if compat.is_open(inner) and not is_for_trainer(model):
        raise ConfigError(
            f"for_trainer({type(inner).__name__}): transformers has sharded it (from_pretrained with a "
            "distributed_config), so the Trainer takes it as it is. For resumable checkpoints load it with "
            "shardwise.from_pretrained(...)"
        )
    return inner


# Arguments of ShardwiseTrainer


def require_trainable(kind: type, kwargs: Mapping[str, Any], world: World) -> None:
    """Check the arguments of a Trainer before anything is created.

    Raises:
        ConfigError: an argument is not supported.
    """
    compat.require_names()
    model, args = kwargs.get("model"), kwargs.get("args")
    if kwargs.get("model_init") is not None or not isinstance(model, nn.Module):
        shown = repr(model) if isinstance(model, str) else type(model).__name__
        raise ConfigError(
            f"{kind.__name__}(model={shown}): ShardwiseTrainer trains a loaded model. Call "
            "shardwise.from_pretrained(...), and pass model=for_trainer(model)"
        )
    if not is_for_trainer(model):
        raise ConfigError(f"{kind.__name__}(model={type(model).__name__}): pass model=for_trainer(model)")
    # Once more: TrainingArguments make the process group if there was none for for_trainer.
    _require_sharded(kind.__name__, _get_pretrained(model), world)
    for option in ("fsdp", "deepspeed"):
        if getattr(args, option, None):
            raise double_sharding_error(option)
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            f"{kind.__name__}: enable_jit_checkpoint saves on the rank that gets a signal alone. Leave it out"
        )
    if (devices := getattr(args, "n_gpu", 1)) > 1:
        raise ConfigError(
            f"{kind.__name__}: this process has {devices} devices and no ranks, so the Trainer would train on "
            "replicas of the model. Start it by torchrun, or show it one device (CUDA_VISIBLE_DEVICES=0)"
        )
    accelerator_config = getattr(args, "accelerator_config", None)
    if world.size > 1 and accelerator_config is not None and not accelerator_config.even_batches:
        raise ConfigError(
            f"{kind.__name__}: accelerator_config has even_batches=False, so that a rank with fewer batches would "
            "leave an evaluation while the others wait for it to gather the model. Leave it out"
        )
    if world.size > 1 and accelerator_config is not None and accelerator_config.split_batches:
        raise ConfigError(
            f"{kind.__name__}: accelerator_config has split_batches=True, so that per_device_train_batch_size "
            "would be the rows of all ranks, and a position in the data could not be restored. Leave it out, and "
            f"divide per_device_train_batch_size by {world.size}"
        )
    parallelism = getattr(args, "parallelism_config", None)
    if parallelism is not None:
        require_rows_or_sequences(parallelism)
        if parallelism.total_size not in (1, world.size):
            raise ConfigError(
                f"parallelism_config is for {parallelism.total_size} ranks, and there are {world.size}. Pass "
                "dp_replicate_size, dp_shard_size and cp_size whose product is the number of ranks"
            )
    if parallelism is not None and parallelism.cp_size > 1:
        _require_splittable(kind, model, args, kwargs)
    if kwargs.get("peft_config") is not None:
        raise ConfigError(
            f"{kind.__name__}(peft_config=...): an adapter that is added after sharding would not be sharded, and "
            "could differ between ranks. Load the model with from_pretrained(tuning=Lora(config)) instead"
        )
    # What follows is about the trainers of TRL.
    if not compat.is_trl_trainer(kind):
        return
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if world.size > 1 and isinstance(head, FSDPModule):
        raise ConfigError(
            f"{kind.__name__}: TRL reads the weight of the model's head without calling it, and the head is an "
            "FSDP2 group of its own, so that its gradient would not be averaged over ranks. Shard with a wrap "
            "policy that leaves the head in the root group (the default, 'auto', does)"
        )
    _require_reference(kind, model, args, kwargs)


def require_trackers_that_save_nothing(callbacks: Iterable[object]) -> None:
    """Check that no experiment tracker saves the model at the end, which it would do on the first rank alone.

    Raises:
        ConfigError: one does.
    """
    for callback in callbacks:
        kinds = [kind.__name__ for kind in type(callback).__mro__]
        logs_model = getattr(callback, "_log_model", None)
        is_wandb = "WandbCallback" in kinds and getattr(logs_model, "is_enabled", False)
        if is_wandb or ("DVCLiveCallback" in kinds and logs_model is True):
            name = "WANDB_LOG_MODEL" if is_wandb else "HF_DVCLIVE_LOG_MODEL"
            raise ConfigError(
                f"{name}: the tracker would save the model on the first rank alone. Unset it, and upload the "
                "output folder after the training"
            )


def _require_reference(kind: type, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    reference = kwargs.get("ref_model")
    if getattr(args, "precompute_ref_log_probs", False):
        raise ConfigError(
            f"{kind.__name__}(precompute_ref_log_probs=True): TRL would hash the model's weights, which are "
            "sharded. Leave it out"
        )
    for name, other in (("ref_model", "reference"), ("teacher_model", "teacher")):
        if isinstance(kwargs.get(name), nn.Module) and not is_for_trainer(kwargs[name]):
            raise ConfigError(
                f"{kind.__name__}({name}=...): pass {name}=for_trainer({other}), sharded as the model is"
            )
    # In most methods beta weighs a reference model. Where it has another meaning, it asks for none.
    has_beta = bool(getattr(args, "beta", 0)) and not compat.has_no_reference(kind)
    compares = compat.wants_reference(kind) or has_beta
    if reference is None and compares and not has_adapters(model):
        if compat.wants_reference(kind) or compat.loads_reference(kind):
            hint = "Pass ref_model=for_trainer(reference), sharded as the model is"
        else:
            hint = "Pass beta=0.0"
        raise ConfigError(
            f"{kind.__name__}: compares with a reference model, which TRL would load whole on every rank. {hint}, "
            "or train a LoRA, whose reference is the model without it"
        )


def require_rows_or_sequences(config: Any) -> None:
    """Check that ranks of a ``ParallelismConfig`` have rows of their own, or share sequences.

    Raises:
        ConfigError: it has other axes.
    """
    sizes = {name: getattr(config, name) for name in ("tp_size", "sp_size")}
    if others := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
        raise ConfigError(
            f"parallelism_config has {', '.join(others)}, and the Trainer supports a model that is sharded "
            "already with data and context parallelism only. Write the loop with accelerate (docs/meshes.md)"
        )


def _require_splittable(kind: type, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Check that a Trainer can train with sequences that ranks share.

    Raises:
        ConfigError: a loss or a metric would be computed of a part of a sequence.
    """
    require_sdpa(model)
    # Each of these computes from the logits or labels of a sequence, of which a rank has a part. batch_rebalance
    # gives each rank other rows, also those that share sequences.
    unfit = {
        "a trainer of TRL": compat.is_trl_trainer(kind),
        "compute_loss_func": kwargs.get("compute_loss_func") is not None,
        f"label_smoothing_factor={args.label_smoothing_factor}": args.label_smoothing_factor > 0,
        f"eval_strategy={args.eval_strategy.value!r}": args.eval_strategy != "no",
        "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy == "batch_rebalance",
        "a model that is not a causal language model": getattr(_get_pretrained(model), "loss_type", None)
        != "ForCausalLM",
    }
    if named := [name for name, is_unfit in unfit.items() if is_unfit]:
        raise ConfigError(
            f"{kind.__name__}(cp_size={args.parallelism_config.cp_size}) with {named[0]}: it would compute from "
            "this rank's part of each sequence, or from rows of this rank alone. Leave it out, or write the loop "
            "with accelerate (docs/meshes.md)"
        )


def double_sharding_error(what: str) -> ConfigError:
    """Return the error for a setting by which the Trainer would shard the model again."""
    return ConfigError(
        f"{what} would have the Trainer shard a model that is sharded already. Leave it out, and pass "
        "from_pretrained(sharding=Sharding(...))"
    )
