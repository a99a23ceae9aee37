"""Forecasts the memory of a load and of a training run from configs and headers, and records the memory in use."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, Unpack

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers.training_args import OptimizerNames

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.estimate_report import Estimate, GroupEstimate, TrainingEstimate
from shardwise.core.layout import Activations, MeshShape, ModelLayout, TensorKind, WorldLayout
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import CheckpointIndex, wrapper_notes
from shardwise.files.urls import is_url
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.fsdp.policies import WrapPolicy, find_repeated_blocks
from shardwise.fsdp.torch_private import from_torch
from shardwise.fsdp.wrap import Sharding, prepare_blocks, require_divisor, require_replicas
from shardwise.loading import estimate_arithmetic, meta_model
from shardwise.loading.estimate_arithmetic import BankSizes, Head, Step
from shardwise.loading.estimate_layout import predict_layout
from shardwise.loading.from_pretrained import OpenModel, open_model
from shardwise.loading.memory_estimate import MemoryPlacement, largest_computation
from shardwise.loading.plan import LoadPlan, plan_load
from shardwise.loading.prepare import LoadOptions, describe_plan, find_origin, get_rules, plan_initial_values
from shardwise.models.initialize import Initializers
from shardwise.models.lora.inject import Tuned
from shardwise.ranks.world import World
from shardwise.transfer.memory import gc_disabled

_OPTIM = "adamw_torch_fused"
_FLASH = "FlashAttention is planned as the model's default, which does not keep scores if that is sdpa"
_STORED_TWICE = "stored twice, taken to be equal; a load compares them, and keeps both if they differ"


class PlanOptions(meta_model.FilledOptions, total=False):
    """Keyword arguments of :func:`plan`, in addition to :class:`FilledOptions`. Each is optional.

    ``sharding`` has no mesh, as there are no ranks. Arguments of the second group describe a training run with
    ``tuning``. They are named as in ``TrainingArguments`` and TRL.

    Attributes:
        mesh: axes of the mesh and their sizes, as in ``{"replicate": 2, "shard": 4}``. Default: those of
            ``sharding.replicas``, or one axis of all ranks.
        device: "cpu", or the kind of accelerator that the shards will go to (default "cuda").
        budget_bytes: as ``budget_bytes`` of :class:`~shardwise.loading.prepare.LoadOptions`.

        optim: name of the optimizer (default "adamw_torch_fused").
        per_device_train_batch_size, max_length: rows of a forward pass and tokens of a row. If both are given,
            activations are included.
        gradient_accumulation_steps: micro-batches of a step.
        gradient_checkpointing: whether all blocks are recomputed (``sharding.activation_checkpointing``
            for every n-th).
        mixed_precision: autocast of the Trainer, "no" (default), "bf16" or "fp16".
        memory_bytes: memory of each rank, for which ``training.largest_batch`` is computed.
        bank: adapters of an ``AdapterBank``, of which ``tuning`` is the largest. A pass has the rows above.
    """

    mesh: Mapping[str, int]
    device: str
    budget_bytes: int

    optim: str
    per_device_train_batch_size: int
    max_length: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    mixed_precision: Literal["no", "bf16", "fp16"]
    memory_bytes: int
    bank: BankSizes


def plan(name_or_path: str | os.PathLike[str], *, ranks: int, **options: Unpack[PlanOptions]) -> Estimate:
    """Estimate memory and reads of ``from_pretrained``, and of a training run with ``tuning``, on each rank.

    The checkpoint is a directory, a hub id in the cache, or a URL. Only its config and the headers of its files are
    read, and nothing is downloaded. Neither ranks nor a process group nor the accelerator are needed. Tied tensors
    that are stored twice are taken to be equal.

    Keyword arguments: see :class:`PlanOptions`.

    Collective: no.
    Memory: the names and places of the checkpoint's tensors.

    Raises:
        ConfigError: the config, the mesh or an argument cannot be used, or the model cannot run without data.
        ShardingError: the wrap policy matches nothing, the model has a parameter that ``fully_shard`` rejects, or
            ``reshard_after_forward`` does not divide the mesh.
        KeyMismatchError: checkpoint and model do not cover each other, as for a load.
        FormatError, StorageError: the checkpoint's files contradict their format, or cannot be read.
    """
    options = meta_model.check_keywords("plan", options, PlanOptions)
    if (optim := options.get("optim", _OPTIM)) not in {name.value for name in OptimizerNames}:
        raise ConfigError(f"optim: {optim} is none of TrainingArguments. Pass adamw_torch, sgd, ...")
    for name in ("per_device_train_batch_size", "max_length", "gradient_accumulation_steps"):
        count: object = options.get(name, 1)
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name}={count!r}: is not a number above 0. Pass 1 or more")
    options = {**options, "device": _device_type(options.get("device", "cuda"))}
    notes = _leave_out_flash_attention(options)
    mesh = build_mesh(ranks, options)
    # A plan downloads nothing, so a model that is not in the cache is an error.
    cached: Any = options
    if not is_url(name_or_path):
        cached = {**options, "hub": replace(options["hub"], local_files_only=True)}
    with ExitStack() as stack:
        world = World(0, 1)
        opened = open_model(world, name_or_path, cached, stack)
        stack.enter_context(torch.device("cpu"))
        with world.collective("estimate the memory"):
            estimated = estimate(opened, mesh, options)
    return replace(estimated, notes=(*estimated.notes, *notes))


def _leave_out_flash_attention(options: PlanOptions) -> list[str]:
    """Remove FlashAttention from the options, as it needs a GPU, and return a note if it was there."""
    attention = options.get("attn_implementation") or {}
    parts = attention if isinstance(attention, dict) else {"": attention}  # by part of a model that has several
    others = {part: name for part, name in parts.items() if "flash" not in name}
    if len(others) == len(parts):
        return []
    del options["attn_implementation"]
    if others:
        options["attn_implementation"] = others
    return [f"attn_implementation: {_FLASH}"]


def _device_type(device: str) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r}: is no device of torch. Use cpu, cuda, ...") from error


@gc_disabled()
def estimate(opened: OpenModel, mesh: MeshShape, options: PlanOptions) -> Estimate:
    """Forecast a load, and a training run, of a checkpoint whose headers have been read."""
    index = opened.source.index
    # The model, as a load would build it: ties, four bits and adapters are settled on meta.
    built = meta_model.build_meta_model(
        opened.directory, opened.config, opened.index, options, options.get("resize_vocab")
    )
    # A load reads both values and compares them. Here no values are read.
    stored_twice = built.ties_stored_twice()
    built.equal_ties = frozenset(name for name, _ in stored_twice)
    sharding = options.get("sharding", Sharding())
    # The layout on all ranks and the plan of the load, from which all sizes follow.
    param_dtype, reduce_dtype = sharding.mp_policy.param_dtype, sharding.mp_policy.reduce_dtype
    tuned = meta_model.prepare_for_training(built, set(), options, adapters=opened.adapters, casts_to=param_dtype)
    budget_bytes = options.get("budget_bytes", LoadOptions().budget_bytes)
    world, plan = _plan(tuned, index, mesh, sharding.wrap, budget_bytes, options)
    placement = MemoryPlacement.from_plan(
        plan,
        opened.source.reader.policy,
        device=options.get("device", "cuda"),
        budget_bytes=budget_bytes,
        offloads_shards=isinstance(sharding.offload_policy, CPUOffloadPolicy),
    )
    if placement.offloads_shards and not placement.has_mesh(mesh.ranks) and "tuning" in options:
        raise ConfigError(
            "offload_policy: one rank on the CPU is not sharded, so nothing is offloaded. Use two ranks"
        )
    # Sizes of groups, of ranks during the load, and of a training step if one is described.
    groups = estimate_arithmetic.estimate_groups(world, _dtype(param_dtype), _dtype(reduce_dtype))
    ranks = estimate_arithmetic.estimate_ranks(plan, world, placement)
    trained = [tensor for tensor in world.rank0.tensors if estimate_arithmetic.is_trained(tensor)]
    training = None
    if "tuning" in options:
        training = _training(tuned, world, groups, placement, options)
    notes = [*wrapper_notes(built.bindings.wrapped), *tuned.notes]
    notes += [f"{name} = {other}: {_STORED_TWICE}" for name, other in stored_twice]
    if "tuning" in options and not estimate_arithmetic.has_known_states(options.get("optim", _OPTIM)):
        notes.append(f"{options.get('optim')}: its states are not known, and counted as those of AdamW")
    if (needed := largest_computation(plan)) > budget_bytes:
        notes.append(f"a conversion needs budget_bytes={needed:,}; a load with {budget_bytes:,} refuses it")
    return Estimate(
        checkpoint=index.root,
        model_class=type(built.model).__name__,
        dtype=str(opened.config.dtype).removeprefix("torch."),
        parameters=sum(tensor.numel for tensor in world.rank0.tensors if tensor.kind is TensorKind.PARAMETER),
        checkpoint_bytes=index.nbytes,
        checkpoint_tensors=len(index.tensors()),
        bytes_per_dtype=_bytes_per_dtype(world.rank0),
        whole=world.whole,
        **describe_plan(plan),
        device=placement.device,
        mesh=dict(zip(mesh.names, mesh.sizes, strict=True)),
        groups=groups,
        ranks=ranks,
        notes=tuple(notes),
        trained=tuple(tensor.fqn for tensor in trained),
        trainable_parameters=sum(tensor.numel for tensor in trained),
        training=training,
    )


def _dtype(policy_dtype: torch.dtype | None) -> DType | None:
    return None if policy_dtype is None else from_torch(policy_dtype, "mp_policy")


def build_mesh(ranks: int, options: PlanOptions) -> MeshShape:
    """Return the requested mesh.

    Raises:
        ConfigError: ranks and mesh contradict each other.
        ShardingError: ``reshard_after_forward`` does not divide the mesh.
    """
    count: object = ranks
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"ranks={ranks!r}: is not a number of ranks. Use 1 or more")
    sharding, axes = options.get("sharding", Sharding()), options.get("mesh")
    if sharding.mesh is not None:
        raise ConfigError(
            'sharding: has a mesh of real ranks. Give its axes as mesh={"replicate": 2, "shard": 4} instead'
        )
    require_replicas(sharding.replicas, ranks)
    if sharding.replicas > 1:
        replicated = {"replicate": sharding.replicas, "shard": ranks // sharding.replicas}
        if axes not in (None, replicated):
            raise ConfigError(f"mesh={axes}: contradicts replicas={sharding.replicas} of sharding. Leave one out")
        axes = replicated
    mesh = MeshShape.flat(ranks) if axes is None else MeshShape.from_axes(ranks, axes)
    if ranks > 1:
        require_divisor(sharding.reshard_after_forward, mesh.shard_size)
    return mesh


# Training


def _training(
    tuned: Tuned,
    world: WorldLayout,
    groups: Sequence[GroupEstimate],
    placement: MemoryPlacement,
    options: PlanOptions,
) -> TrainingEstimate:
    """Forecast a training step: with activations if the batch is given, with the largest batch if the memory is."""
    sharding = options.get("sharding", Sharding())
    # Without rows and tokens, only parameters, gradients and optimizer states are counted.
    rows, tokens = options.get("per_device_train_batch_size", 0), options.get("max_length", 0)
    bank = options.get("bank")  # whose gradients exist at any time, as with accumulation
    accumulates = options.get("gradient_accumulation_steps", 1) > 1 or bank is not None
    step = Step(options.get("optim", _OPTIM), accumulates=accumulates, bank=bank)
    memory_bytes = options.get("memory_bytes") if rows and tokens else None
    if rows and tokens:
        recomputed = True if options.get("gradient_checkpointing") else sharding.activation_checkpointing
        prepare_blocks(tuned.base, replace(sharding, activation_checkpointing=recomputed, compile=False))
        param_dtype = sharding.mp_policy.param_dtype if placement.has_mesh(world.mesh.ranks) else None
        head = _head(tuned.base, param_dtype, options)
        # Activations grow linearly with the rows: two traces determine them for every batch.
        sizes = [rows] if memory_bytes is None else [rows, 2 * rows]
        traced = [_trace(tuned, world, (size, tokens), param_dtype, options) for size in sizes]
        step = replace(step, batch_size=rows, max_length=tokens, head=head, activations=traced[0], twice=traced[-1])
    return estimate_arithmetic.estimate_training(
        world,
        groups,
        step,
        placement,
        param_dtype=sharding.mp_policy.param_dtype is not None,
        reshard_after_forward=sharding.reshard_after_forward,
        memory_bytes=memory_bytes,
    )


def _autocast(options: PlanOptions) -> torch.dtype | None:
    dtypes = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes[options.get("mixed_precision", "no")]


def _head(base: Any, param_dtype: torch.dtype | None, options: PlanOptions) -> Head | None:
    module = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if module is None:
        return None
    vocab_size, hidden = module.weight.shape[-2:]
    # The dtype in which FSDP2 gathers the weight. Autocast may compute in another one, and then copies the
    # weight.
    gathered = param_dtype or module.weight.dtype
    computed = _autocast(options) or gathered
    return Head(
        vocab_size,
        hidden,
        computed.itemsize,
        is_cast=computed != gathered,
        on_cpu=options.get("device", "cuda") == "cpu",
        trained=module.weight.requires_grad,
    )


def _trace(
    tuned: Tuned, world: WorldLayout, size: tuple[int, int], param_dtype: torch.dtype | None, options: PlanOptions
) -> Activations:
    from shardwise.models.activations import trace_activations  # needs a private name of torch to be imported

    try:
        blocks = find_repeated_blocks(tuned.base)
    except ShardingError:  # a model without repeated blocks is traced as a whole
        blocks = []
    # Blocks are gathered one at a time. What is in the root group, or in none, exists for the whole pass.
    in_root = {*world.groups[-1].parameters, *world.whole}
    try:
        return trace_activations(
            tuned.model,
            tuned.base,
            blocks,
            size,
            param_dtype=param_dtype,
            autocast=_autocast(options),
            in_root=in_root,
        )
    except Exception as error:  # the model's own code may raise any
        first = str(error).strip().partition("\n")[0].removesuffix(".")
        raise ConfigError(
            f"{type(tuned.base).__name__}: cannot run without data, {type(error).__name__}: {first}. Leave out "
            "per_device_train_batch_size and max_length to plan without activations"
        ) from error


# The plan of a load


def _plan(
    tuned: Tuned,
    index: CheckpointIndex,
    mesh: MeshShape,
    wrap_policy: WrapPolicy,
    budget_bytes: int,
    options: PlanOptions,
) -> tuple[WorldLayout, LoadPlan]:
    """Return the layout of all ranks, and the plan of a load.

    Raises:
        KeyMismatchError: as a load before it reads.
    """
    model, additions = tuned.model, tuned.additions
    initializers = Initializers(model, collect_tensors(model), additions)
    buffers = initializers.buffers(options.get("buffers", {}), seed=0)
    origins = partial(find_origin, initializers, buffers)
    world = predict_layout(model, tuned.base, wrap_policy, mesh, origins, tuned.kept_whole)
    rules = get_rules(tuned.base)
    consent = meta_model.get_consent(options)
    plan = plan_load(index, world.rank0, tuned.bindings, rules, consent, additions.base_names)
    # Only for its errors: a load would raise them, too.
    plan_initial_values(initializers, plan, LoadOptions(budget_bytes=budget_bytes))
    return world, plan


def _bytes_per_dtype(layout: ModelLayout) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in layout.saved():
        sizes[tensor.dtype.label] = sizes.get(tensor.dtype.label, 0) + tensor.numel * tensor.dtype.bits // 8
    return dict(sorted(sizes.items(), key=itemgetter(1), reverse=True))
