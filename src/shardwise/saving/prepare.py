"""Plans a save on one rank, before anything is written."""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.layout import ModelLayout, TensorKind, locate_box
from shardwise.core.tensors import Box, DType, Strided, numel
from shardwise.files.storage import WritePolicy
from shardwise.fsdp.named_tensors import TensorRef, build_layout, collect_tensors
from shardwise.fsdp.torch_private import from_torch, saved_dtype
from shardwise.models.four_bit import files as four_bit_files
from shardwise.models.revert import Output, names_in_file, revert
from shardwise.models.selection import AdapterOnly, has_adapters
from shardwise.ranks.world import World
from shardwise.saving.plan import ADAPTER, MODEL, SavedTraining, SavePlan, TensorToSave, arrange_writes, plan_save
from shardwise.state.model_states import broadcast_names_outside
from shardwise.state.state_values import StateOptions
from shardwise.transfer.file_requests import FileRequest, Staging, plan_staging
from shardwise.transfer.memory import gc_disabled
from shardwise.transfer.replicas import Shares

WrittenNames: TypeAlias = Literal["hub", "internal"]
"""Names of saved tensors: those of the model's checkpoints on the hub (and their shapes), or the modules' own."""


@dataclass(frozen=True, slots=True)
class SaveOptions(StateOptions):
    """Settings of a save. None of them changes the saved values.

    Attributes:
        budget_bytes: host memory that one rank may use for staging (casts, copies from an accelerator).
        progress: show a bar on the first rank (if there is a terminal, and transformers' bars are not off).
        process_group: the ranks that hold the model. None is the default group, or this process alone.
        timeouts: how long ranks wait for each other. None for the timeout of the process group, if it was given
            one.
    """

    budget_bytes: int = 256 << 20
    progress: bool = True


MAX_SHARD_SIZE = "50GB"
"""As in ``save_pretrained`` of transformers 5."""


@dataclass(frozen=True, slots=True)
class AdapterTrainingState:
    """Training state of an adapter: tensors as parameters of a module, by name, and the rest as JSON."""

    module: nn.Module
    text: str


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Tensors to save and their names. ``training`` is saved with an adapter."""

    model: nn.Module
    directory: str | os.PathLike[str]
    names: WrittenNames | AdapterOnly = "hub"
    dtype: torch.dtype | None = None
    max_shard_bytes: int = sys.maxsize
    tokenizer: Any = None
    training: AdapterTrainingState | None = None

    @property
    def stem(self) -> str:
        """Prefix of the names of weight files."""
        return ADAPTER if isinstance(self.names, AdapterOnly) else MODEL


@dataclass(frozen=True)
class PreparedSave:
    """All that is decided before anything is written.

    Attributes:
        tensors: this rank's tensors. The requests refer to them by index.
        shares: the boxes of each tensor that each rank writes.
        outputs: the tensors of the files, by key, with their expressions over the model's tensors.
        parameters: number of saved parameters.
        requests: the writes of this rank.
        cast: dtypes before and after the cast, by key.
        digest: of everything that must be equal on all ranks.
    """

    request: SaveRequest
    tensors: Sequence[TensorRef]
    shares: Shares
    layout: ModelLayout
    outputs: Mapping[str, Output]
    parameters: int
    plan: SavePlan
    requests: Sequence[FileRequest]
    staging: Staging
    cast: Mapping[str, tuple[str, str]]
    digest: str


def collect_selected(
    world: World, model: nn.Module, names: WrittenNames | AdapterOnly, dtype: torch.dtype | None
) -> tuple[list[TensorRef], Mapping[str, str]]:
    """Return a model's tensors in files, and for an adapter a map of names in its file to names in the model.

    Collective: yes. Raises as :func:`collect_for_files` and :func:`broadcast_names_outside`.
    """
    if not isinstance(names, AdapterOnly):
        with world.collective("collect the state"):
            return collect_for_files(model, names, dtype), {}
    with world.collective("collect the state"):
        tensors = collect_tensors(model)
    # PEFT decides on the first rank which tensors belong to an adapter. All ranks follow it.
    fqns = broadcast_names_outside(world, model, tensors, names)
    adapter = set(fqns.values())
    return [item for item in tensors if adapter.intersection(item.names)], fqns


def collect_for_files(model: nn.Module, names: WrittenNames, dtype: torch.dtype | None) -> list[TensorRef]:
    """Return a model's tensors as files have them under these names.

    Raises:
        ConfigError: weights are those of bitsandbytes' own layers, experts in four bits have no form in files, or a
            cast to ``dtype`` would change the scales of 4-bit weights.
    """
    if dtype is not None and four_bit_files.has_four_bits(model):
        raise ConfigError(f"dtype={dtype}: 4-bit weights and their scales are saved unchanged. Leave dtype out")
    tensors = collect_tensors(model)
    four_bit_files.require_scales(tensors)
    if names == "hub":
        return four_bit_files.collect_file_tensors(tensors)
    return four_bit_files.rename_mxfp4_codes(tensors)


@gc_disabled()
def prepare(
    request: SaveRequest,
    save_id: str,
    tensors: Sequence[TensorRef],
    fqns: Mapping[str, str],
    shares: Shares,
    rank: int,
    policy: WritePolicy,
    budget_bytes: int,
) -> PreparedSave:
    """Plan the save on this rank alone.

    ``fqns`` are the names of an adapter's tensors in the model, by name in its file. ``shares`` are the boxes that
    each rank writes.
    """
    # The tensors of the files, in the order of the save, as expressions over those of the model.
    remedy = "Call save_adapter, merge the adapter first (merge_and_unload, shardwise merge-adapter)"
    require_hub_names(request.model, request.names, remedy)
    layout = build_layout(tensors)
    outputs = build_outputs(request.model, request.names, tensors, layout, fqns)
    saved = {key: (key, saved_dtype(output.dtype, request.dtype), output.shape) for key, output in outputs.items()}
    # The training state of an adapter has a file of its own, with names and dtypes as they are. It is no part of
    # the number of parameters.
    training: dict[str, Output] = {}
    saved_training = None
    if request.training is not None:
        adapter = set(fqns.values())
        for tensor in layout.tensors:
            if adapter.isdisjoint(tensor.names):
                training[tensor.fqn] = Output.unchanged(tensor.fqn, tensor)
        described = [(key, output.dtype, output.shape) for key, output in training.items()]
        saved_training = SavedTraining(described, request.training.text)
    parameters = 0
    for item in layout.tensors:
        if item.kind is TensorKind.PARAMETER and item.fqn not in training:
            parameters += item.numel
    plan = plan_save(
        list(saved.values()),
        max_shard_bytes=request.max_shard_bytes,
        parameters=parameters,
        save_id=save_id,
        stem=request.stem,
        training=saved_training,
    )
    # This rank's writes. They depend on its boxes, and everything above does not.
    is_on_host = all(item.local.device.type == "cpu" for item in tensors)
    staging = plan_staging(budget_bytes, policy.concurrency, on_device=not is_on_host)
    cast: dict[str, tuple[str, str]] = {}
    for key, output in outputs.items():
        _, dtype, _ = saved[key]
        if output.dtype != dtype:
            cast[key] = (output.dtype.label, dtype.label)
    outputs = {**outputs, **training}
    local_boxes: dict[str, list[tuple[Box, Strided]]] = {}
    for name, boxes in shares.by_name.items():
        boxes_in_memory = layout.by_name[name].boxes
        local_boxes[name] = [(box, locate_box(box, boxes_in_memory)) for box in boxes[rank]]
    requests = arrange_writes(
        [(entry, outputs[key].expression) for key, entry in plan.entries.items()],
        local_boxes,
        {name: number for number, item in enumerate(tensors) for name in item.names},
        {name for item in tensors if _is_staged(item, request.dtype) for name in item.names},
        policy,
        staging.nbytes,
    )
    # What all ranks must have in common. `plan.files` contains the headers.
    digest = hashlib.sha256(repr((list(saved.values()), plan.names, plan.files)).encode()).hexdigest()
    return PreparedSave(
        request, tensors, shares, layout, outputs, parameters, plan, requests, staging, cast, digest
    )


def require_hub_names(model: nn.Module, names: WrittenNames | AdapterOnly, remedy: str) -> None:
    """Raise ConfigError for a model with adapters under the names of the hub. ``remedy`` depends on the call."""
    if names == "hub" and has_adapters(model):
        raise ConfigError(
            f"{type(model).__name__}: has PEFT adapters, and the hub has no names for base and adapter together. "
            f"{remedy}, or pass names='internal'"
        )


def build_outputs(
    model: nn.Module,
    names: WrittenNames | AdapterOnly,
    tensors: Sequence[TensorRef],
    layout: ModelLayout,
    fqns: Mapping[str, str],
) -> Mapping[str, Output]:
    """Return the tensors of files, by key, and their expressions over the model's.

    ``tensors`` and ``fqns`` are those of :func:`collect_selected`, and ``layout`` is that of ``tensors``.
    """
    if isinstance(names, AdapterOnly):
        return {key: Output.unchanged(key, layout.by_name[name]) for key, name in fqns.items()}
    return four_bit_files.reshape_for_files(tensors, revert(model, layout, internal_names=names == "internal"))


def _is_staged(item: TensorRef, dtype: torch.dtype | None) -> bool:
    """Return whether a tensor cannot be written directly from memory."""
    stored = from_torch(item.tensor.dtype, item.fqn) if item.kind.is_saved else None
    return item.local.device.type != "cpu" or (stored is not None and saved_dtype(stored, dtype) != stored)


def find_main_dtype(tensors: Iterable[TensorToSave]) -> DType | None:
    """Return the dtype of most floating-point numbers of 16 bits and more."""
    numels: Counter[DType] = Counter()
    for _, dtype, shape in tensors:
        if dtype.kind == "float" and dtype.bits >= 16:
            numels[dtype] += numel(shape)
    return numels.most_common(1)[0][0] if numels else None


def find_tied_names(prepared: PreparedSave) -> dict[str, str]:
    """Return the names that are not saved, each with the name under which its tensor is saved."""
    tied: dict[str, str] = {}
    if isinstance(prepared.request.names, AdapterOnly):
        return tied
    for tensor in prepared.layout.saved():
        saved_names = names_in_file(prepared.request.model, tensor)
        if saved_names:
            tied |= {name: saved_names[0] for name in tensor.names if name not in saved_names}
    return tied


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that floating-point tensors are cast to, which may be given by name. None for no cast."""
    if dtype is None:
        return None
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point or resolved.itemsize < 2:
        raise ConfigError(f"dtype={dtype!r} is not a floating dtype of 16 bits or more. Pass torch.bfloat16, say")
    return resolved
