"""Saves and reads adapters of a bank as PEFT's files, with their training state.

[Note: Lent tensors] Saves and reads work on models, not on buffers. So the adapter's outline, a PEFT model on meta,
borrows real tensors: the adapter's matrices, and the base's parameters (shards). Nothing is copied, and the outline
is discarded afterwards. A PEFT file with adapters on embeddings also has the embeddings. They are read into scratch
tensors, so the base is never written. The training state is lent in the same way to a module that has nothing else
(see [Note: Named by the adapter] in ``files/peft_adapter.py``).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.bank import training_facts
from shardwise.bank import training_state as states
from shardwise.bank.adapter import AdapterStart, BankAdapter
from shardwise.core.consents import Consent, allows
from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.layout import TensorKind
from shardwise.files.checkpoint_index import without_wrappers
from shardwise.files.local_reader import LocalReader
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.peft_adapter import TRAINING_KEY, find_adapter_weights, find_training_file
from shardwise.files.safetensors_files import read_header
from shardwise.files.stored_tensors import stored_tensors
from shardwise.fsdp.named_tensors import collect_tensors, local_tensor
from shardwise.fsdp.torch_private import original_class
from shardwise.models.build import build_on_meta
from shardwise.models.lora import peft_private
from shardwise.models.lora.adapted_layers import AdapterOutline, name_in_base, outline_adapter
from shardwise.models.lora.former_adapters import rename_adapter
from shardwise.models.lora.inject import StoredAdapter
from shardwise.models.lora.peft_private import read_lora_config
from shardwise.models.selection import AdapterOnly, names_outside
from shardwise.ranks.world import Clock, World
from shardwise.saving.prepare import AdapterTrainingState
from shardwise.saving.verify import require_as_saved
from shardwise.state.model_states import (
    open_stored_values,
    set_model_values,
    swap_stored_experts,
)
from shardwise.state.state_values import StateOptions, Values, by_canonical_names
from shardwise.transfer.matching import OnFault

if TYPE_CHECKING:
    from peft import LoraConfig


def outline_lora(model: PreTrainedModel, config: LoraConfig, *, is_new: bool) -> AdapterOutline:
    """Return the outline of the adapter that PEFT would add to a model, from a model of its class on meta."""
    return outline_adapter(_build(model), config, is_new=is_new)


def _build(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same class on meta."""
    kind: Any = original_class(model)
    return build_on_meta(kind, copy.deepcopy(model.config), torch.float32, None)


def read_adapter_headers(model: PreTrainedModel, folder: str | os.PathLike[str]) -> StoredAdapter:
    """Return the config and the headers of an adapter in a folder, with the names of a model's modules.

    Raises:
        FormatError: the folder has no adapter.
        ConfigError: the adapter is not a LoRA, or its config is not supported.
        KeyMismatchError: matrices of single experts cannot be fused.
    """
    root = Path(os.path.expanduser(folder))
    file, config = find_adapter_weights(root), read_lora_config(root)
    peft_private.require_supported(config, str(root))
    config.inference_mode = False
    # The matrices are read. Whether the base was changed has been checked above.
    config.init_lora_weights = True
    with LocalReader(root) as reader:
        index, _ = without_wrappers(open_checkpoint(reader, weights_name=file))
    tensors = by_canonical_names(stored_tensors(index), str(root), FormatError)
    return rename_adapter(_build(model), StoredAdapter(str(root), config, tensors))


def lend_tensors(model: PreTrainedModel, adapter: BankAdapter) -> nn.Module:
    """Return a PEFT model of the base and this adapter. See [Note: Lent tensors]."""
    outline = outline_lora(model, adapter.config, is_new=False)
    matrices = {matrix.fqn: adapter.matrices[matrix.key] for matrix in outline.matrices()}
    base = {name: item.tensor for item in collect_tensors(model) for name in item.names}
    for item in {id(item): item for item in outline.tensors.values()}.values():  # a tied tensor has several names
        # Buffers stay on meta.
        if item.fqn in matrices:
            item.install(nn.Parameter(matrices[item.fqn], requires_grad=False))
        elif item.kind is TensorKind.PARAMETER:
            item.install(base[name_in_base(item.fqn)])
    return outline.model


def remove_embeddings(model: PreTrainedModel, adapter: BankAdapter, state: object) -> object:
    """Return matrices by PEFT's names without the base's embeddings, which PEFT saves with adapters on them."""
    if not isinstance(state, Mapping) or not all(isinstance(values, torch.Tensor) for values in state.values()):
        return state
    # The common case, which needs no outline: there is nothing but matrices.
    if state.keys() <= adapter.shapes.keys():
        return state
    peft_model = lend_tensors(model, adapter)
    base_keys = names_outside(peft_model, collect_tensors(peft_model), AdapterOnly()).keys() - adapter.shapes.keys()
    return {key: values for key, values in state.items() if key not in base_keys}


def collect_training_state(
    adapter: BankAdapter, base: Mapping[str, str], dtype: torch.dtype | None
) -> AdapterTrainingState:
    """Return the training state to save with matrices that are cast to ``dtype``.

    Collective: yes if the adapter has an open window, whose gradients are then added up.

    Raises:
        ConfigError: the optimizer or the schedule has a value that is not plain data.
    """
    tensors = states.collect_training_tensors(adapter)
    if dtype not in (None, adapter.flat.dtype):
        tensors[states.MATRICES] = adapter.flat.detach()
    text = training_facts.facts_to_text(training_facts.get_facts(adapter, base), repr(adapter.name))
    return AdapterTrainingState(_as_module(tensors), text)


def _as_module(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module whose parameters have these names, with or without "optimizer." in front."""
    root = nn.Module()
    root.optimizer = nn.Module()
    for name, values in tensors.items():
        # "optimizer.exp_avg" is the parameter exp_avg of the submodule optimizer. "gradient" is one of the root.
        path, _, last = name.rpartition(".")
        root.get_submodule(path).register_parameter(last, nn.Parameter(values, requires_grad=False))
    return root


def find_training(folder: Path, *, training_state: bool) -> states.StoredTraining | AdapterStart:
    """Verify a folder against the record of its save, and read the training state. All files are read once.

    Returns:
        The training state, or the reason why the adapter's training starts anew.

    Raises:
        FormatError: a file is damaged or invalid, or the training file that the adapter names is missing or has no
            checksums.
        StorageError: the folder cannot be read.
    """
    weights = find_adapter_weights(folder)
    with LocalReader(folder) as reader:
        file = find_training_file(reader, weights) if training_state else None
        # Before the state is parsed. Without one, the matrices' file is verified alone.
        require_as_saved(reader, weights, file)
        if not training_state:
            return AdapterStart(reason="the matrices alone were asked for")
        if file is None:
            return AdapterStart(reason=f"{weights} in {folder} names no state of its training")
        header = read_header(reader, file)
    text = header.metadata.get(TRAINING_KEY)
    if text is None:
        raise FormatError(f"{folder / file}: its header has no {TRAINING_KEY}. The file is corrupt. Save it again")
    tensors = {entry.key: (entry.shape, entry.dtype) for entry in header.entries}
    facts = training_facts.parse_facts(text, f"{folder / file}: {TRAINING_KEY}")
    return states.StoredTraining(str(folder / file), facts, tensors)


def read_adapter(
    world: World,
    model: PreTrainedModel,
    adapter: BankAdapter,
    stored_adapter: StoredAdapter,
    training: states.StoredTraining | AdapterStart,
    targets: Mapping[str, torch.Tensor],
    on_other_base: OnFault,
) -> None:
    """Read an adapter's matrices and the tensors of its training from a folder. Collective: yes.

    Raises:
        ConfigError: the adapter was saved with other embeddings than those of the base.
        KeyMismatchError: the stored tensors do not match the config.
        FormatError, StorageError, RankMismatchError, RankLostError: as for a load.
    """
    folder = Path(stored_adapter.directory)
    with world.collective("create scratch tensors"):
        peft_model, scratch = _lend_with_scratch(model, adapter)
        weights = find_adapter_weights(folder)
    # Into the adapter's own matrices, and into the scratch tensors.
    _read(world, peft_model, folder, weights, stored_adapter)
    # Each rank compares its shards.
    if not allows(on_other_base, "values"):
        with world.collective("compare values"):
            _require_same_values(folder, scratch)
    if isinstance(training, states.StoredTraining):
        with world.collective("name the tensors"):
            module = _as_module(targets)
        _read(world, module, folder, Path(training.what).name, None)


def _read(world: World, module: nn.Module, folder: Path, file: str, stored_adapter: StoredAdapter | None) -> None:
    """Read all tensors of a file, which may be an adapter's, into a module. Collective: yes."""
    options = StateOptions()
    # On the CPU whatever the caller's default device is, as in set_model_state_dict.
    with torch.device("cpu"), torch.no_grad(), ExitStack() as stack:
        stored = open_stored_values(world, str(folder), file, options, stack)
        values: Values = stored
        if stored_adapter is not None:
            renamed = replace(stored, expressions=stored_adapter.tensors)
            # In the layout of the PEFT that is installed, and under the names of the base's modules.
            values = swap_stored_experts(world, module, renamed, AdapterOnly().adapter, str(folder))
        only = None if stored_adapter is None else AdapterOnly()
        set_model_values(world, module, values, only=only, consent=Consent(), options=options, clock=Clock())


def _lend_with_scratch(
    model: PreTrainedModel, adapter: BankAdapter
) -> tuple[nn.Module, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return a PEFT model of the adapter with scratch memory for the base's tensors that its file has.

    Returns:
        The model, and by name the base's own tensors with their scratch memory, of the same shapes and dtypes.
    """
    scratch: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    peft_model = lend_tensors(model, adapter)
    tensors = collect_tensors(peft_model)
    by_name = {name: item for item in tensors for name in item.names}
    for key, fqn in names_outside(peft_model, tensors, AdapterOnly()).items():
        item = by_name[fqn]
        if key not in adapter.shapes and item.fqn not in scratch:  # a tied tensor has two keys
            scratch[item.fqn] = item.tensor, torch.empty_like(item.tensor)
            item.install(nn.Parameter(scratch[item.fqn][1], requires_grad=False))
    return peft_model, scratch


def _require_same_values(folder: Path, scratch: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for name, (of_base, stored) in scratch.items():
        if not torch.equal(local_tensor(of_base), local_tensor(stored)):
            raise ConfigError(
                f"{folder}: the adapter was trained with another {name_in_base(name)}, which it stores. Merge it, "
                "or pass on_other_base=Ignore() to use that of this base"
            )
