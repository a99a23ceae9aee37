"""Loads models and optimizers that accelerate saved under FSDP, in any of its forms."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.consents import Consent, Ignore, OnMissing
from shardwise.core.formatting import canonical_name
from shardwise.core.reports import StateReport
from shardwise.files import accelerate_saves
from shardwise.files.join_entries import METADATA
from shardwise.files.local_reader import LocalReader
from shardwise.files.stored_tensors import stored_tensors
from shardwise.fsdp.named_tensors import collect_tensors, unwrap
from shardwise.fsdp.optimizer_states_by_name import ParsedState, names_by_index, read
from shardwise.fsdp.rebind import label
from shardwise.integrations.accelerate_writing import agree_on_call, untrained_names
from shardwise.models.selection import AdapterOnly, Selection, has_adapters
from shardwise.ranks.call_arguments import get_world
from shardwise.ranks.world import Clock, World
from shardwise.saving.rename_journal import journal_folder, link_as_renamed, read_journals
from shardwise.saving.saved_trees import read_distributed_tree, read_file_tree
from shardwise.saving.torch_saves import read_rank_file
from shardwise.state import state_values
from shardwise.state.model_states import open_stored_values, set_model_values, swap_stored_experts
from shardwise.state.optimizer_fit import OptimizerTargets
from shardwise.state.optimizer_states import collect_optimizer_targets, set_optimizer_values
from shardwise.transfer.distributed_chunks import StatePath
from shardwise.transfer.matching import OnFault

_MOST_DIGITS = 10
"""Of the number of a parameter; what is longer is a name."""


@dataclass(frozen=True, slots=True)
class FilesSource:
    """Location of a model or an optimizer, its number there, and its allowed mismatches."""

    path: Path
    number: int
    consent: Consent
    options: state_values.StateOptions


@torch.no_grad()
def load_accelerate_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    number: int = 0,
    only: Selection = None,
    on_missing: OnFault = "error",
    on_unexpected: OnFault = "error",
    on_mismatched: OnFault = "error",
    options: state_values.StateOptions = state_values.StateOptions(),  # noqa: B008
) -> StateReport:
    """Give a model the values that accelerate saved under FSDP, of version 1 or 2, in any of its forms.

    Every rank reads its own bytes, on any number of ranks. Only per-rank files need as many ranks as wrote them.
    Values are cast as ``set_model_state_dict`` does. No code in a file is run.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``.

    Args:
        model: any module, sharded or not. Tensors on meta get memory.
        path: the folder that holds models and optimizers, or the model's own file or folder in it.
        number: of the model among those in the folder.
        only: ``AdapterOnly()`` for an adapter of PEFT's, by PEFT's names or the model's.
        on_missing: ``Ignore(only=...)`` for tensors that may keep their values.
        on_unexpected: ``Ignore(only=...)`` for names that the model does not have.
        on_mismatched: ``Ignore(only=...)`` for tensors that may keep their values where the shape differs.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: an argument is not supported, or the model is stored in several forms.
        KeyMismatchError: missing, unexpected or mismatched tensors, all at once.
        RankMismatchError: ranks have different models, or files of ranks that do not fit together.
        FormatError: the files are not accelerate's, are incomplete, contain objects other than data, or are in an
            unsupported form (LOCAL_STATE_DICT of FSDP1).
        ShardingError: files of ranks are of another number of ranks.
        StorageError: bytes could not be read.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    model = unwrap(model)
    clock = Clock()
    consents = {"on_missing": on_missing, "on_unexpected": on_unexpected, "on_mismatched": on_mismatched}
    consent = Consent(on_missing, on_mismatched, on_unexpected)
    source = FilesSource(Path(os.path.expanduser(path)), number, consent, options)
    with get_world(options, "load_accelerate_model") as world, torch.device("cpu"):
        with clock.phase("agree"):
            arguments = {"only": only, **consents}
            agree_on_call(world, load_accelerate_model, source.path, number, arguments, options)
        return read_model(world, model, source, only, clock)


@torch.no_grad()
def load_accelerate_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    number: int = 0,
    on_missing: OnFault = "error",
    on_unexpected: OnFault = "error",
    on_mismatched: OnFault = "error",
    options: state_values.StateOptions = state_values.StateOptions(),  # noqa: B008
) -> StateReport:
    """Set an optimizer's state from accelerate's files in any form, or from a file of ``optimizer.state_dict()``.

    As :func:`~shardwise.state.optimizer_states.set_optimizer_state_dict`, with the reading of
    :func:`load_accelerate_model`, whose errors it has, too.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: needs no state, and takes no step.
        path: the folder that holds models and optimizers, or the optimizer's own file or folder in it.
        number: of the optimizer among those in the folder.
        on_missing: as of :func:`~shardwise.state.optimizer_states.set_optimizer_state_dict`.
        on_unexpected: likewise.
        on_mismatched: likewise.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: the state has indices instead of names, and no names for them (``param_names``).
    """
    model = unwrap(model)
    clock = Clock()
    consents = {"on_missing": on_missing, "on_unexpected": on_unexpected, "on_mismatched": on_mismatched}
    consent = Consent(on_missing, on_mismatched, on_unexpected)
    source = FilesSource(Path(os.path.expanduser(path)), number, consent, options)
    with get_world(options, "load_accelerate_optimizer") as world, torch.device("cpu"):
        with clock.phase("agree"):
            agree_on_call(world, load_accelerate_optimizer, source.path, number, consents, options)
        with ExitStack() as stack:
            with clock.phase("agree"):
                save = _find_save(world, source, accelerate_saves.OPTIMIZER, stack)
                targets = collect_optimizer_targets(world, model, optimizer)
                parsed, values = _read_optimizer_state(world, save, targets, options, stack)
            return set_optimizer_values(
                world, targets, parsed, values, consent=source.consent, options=options, clock=clock
            )


def read_model(world: World, model: nn.Module, source: FilesSource, only: Selection, clock: Clock) -> StateReport:
    """Find a model's files and give a model their values. Collective: yes.

    Memory, errors: as of :func:`load_accelerate_model`.
    """
    consent = source.consent
    with ExitStack() as stack:
        with clock.phase("agree"):
            values = _read_model_values(world, source, stack)
            if has_adapters(model):
                folder = source.path if source.path.is_dir() else source.path.parent
                chosen = only.adapter if isinstance(only, AdapterOnly) else None
                values = swap_stored_experts(world, model, values, chosen, str(folder))
            if isinstance(only, AdapterOnly):
                # What PEFT saves of the base (embeddings), accelerate leaves out of one file, in which it has
                # what torch does not know as frozen: buffers, and the second names of tied parameters.
                with world.collective("find untrained tensors"):
                    untrained = untrained_names(collect_tensors(model), only.adapter)
                missing, unexpected = _also(consent.missing, untrained), _also(consent.unexpected, untrained)
                consent = replace(consent, missing=missing, unexpected=unexpected)
        options = source.options
        return set_model_values(world, model, values, only=only, consent=consent, options=options, clock=clock)


def _also(consent: OnMissing | OnFault, names: Sequence[str]) -> Ignore:
    return Ignore((*(consent.only if isinstance(consent, Ignore) else ()), *names))


def _read_model_values(world: World, source: FilesSource, stack: ExitStack) -> state_values.Values:
    """Return the values of a model saved by accelerate, in any of its layouts. Collective: yes."""
    save = _find_save(world, source, accelerate_saves.MODEL, stack)
    match save:
        case accelerate_saves.FilePerRank(folder, files):
            state = read_rank_file(world, Path(folder), files)
            with world.collective("map the names"):
                tensors = state_values.by_canonical_names(state, f"the state in {folder}")
            return state_values.ProvidedValues(tensors)
        case accelerate_saves.WholeFile(folder, file):
            return open_stored_values(world, folder, file, source.options, stack)
        case accelerate_saves.Distributed(folder):
            return open_stored_values(world, folder, METADATA, source.options, stack)
        case _:
            assert_never(save)


def _read_optimizer_state(
    world: World,
    save: accelerate_saves.AccelerateSave,
    targets: OptimizerTargets,
    options: state_values.StateOptions,
    stack: ExitStack,
) -> tuple[ParsedState, state_values.Values]:
    """Return this rank's part of the stored state, and the values of its tensors. Collective: yes."""
    if isinstance(save, accelerate_saves.FilePerRank):
        state = read_rank_file(world, Path(save.folder), save.files)
        with world.collective("parse the state"):
            parsed, _ = _parse(state, targets)
        return parsed, state_values.ProvidedValues(parsed.tensors)
    with world.collective("open the folder"):
        reader = stack.enter_context(LocalReader(save.folder))
    with world.broadcast("read the values") as exchange:
        if world.rank == 0:
            if isinstance(save, accelerate_saves.WholeFile):
                tree = read_file_tree(reader, save.file)
            else:
                tree = read_distributed_tree(reader, options.budget_bytes)
            tree = tree.inside("optimizer")
            exchange.local = (tree, *_parse(tree.tree, targets))
    tree, parsed, paths = exchange.result
    expressions = stored_tensors(tree.index)
    by_label = {name: expressions[tree.keys[paths[name]]] for name in parsed.tensors}
    values = state_values.StoredValues(reader, tree.index, by_label, options.budget_bytes)
    # Every rank has the whole state. It counts once, as that of the first rank.
    if world.rank > 0:
        parsed = ParsedState()
    return parsed, values


def _find_save(
    world: World, source: FilesSource, kind: accelerate_saves.SavedKind, stack: ExitStack
) -> accelerate_saves.AccelerateSave:
    """Find a save. If its renames are not finished, it is read through links until ``stack`` is closed.

    Collective: yes.
    """
    path, number = source.path, source.number
    folder = journal_folder(path)
    with world.broadcast("look for a rename in progress") as exchange:
        if world.rank == 0:
            exchange.local = read_journals(folder)
    if exchange.result:
        # Each rank makes links in a temporary folder of its own, so each finds the save under another path.
        with world.collective("find saved files"):
            path = stack.enter_context(link_as_renamed(folder)) / path.relative_to(folder)
            return accelerate_saves.find_saved(path, kind, number)
    with world.broadcast("find saved files") as exchange:
        if world.rank == 0:
            exchange.local = accelerate_saves.find_saved(path, kind, number)
    save: accelerate_saves.AccelerateSave = exchange.result
    return save


def _parse(state: Any, targets: OptimizerTargets) -> tuple[ParsedState, dict[str, StatePath]]:
    """Parse a state. Return also the path of each of its values in the stored tree, by label.

    Parameters have indices, with their names in ``param_names`` of the groups, or names. A folder of DCP has the
    indices as text.

    Raises:
        ConfigError, KeyMismatchError: it has another layout, or unknown parameters.
    """
    if not isinstance(state, Mapping) or "param_groups" not in state:
        return read(state, targets.first_names, targets.shapes), {}
    # {"state": {0: {"step": ...}}, "param_groups": [{"params": [0], "param_names": ["lm_head.weight"]}]} becomes
    # {"state": {"lm_head.weight": {"step": ...}}, ...}, and the label of the step leads to ("state", 0, "step").
    state = {"state": {}, **state}  # a folder of DCP does not keep an empty dict
    named = names_by_index(state)
    groups: list[dict[str, Any]] = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [named.get(name, name) for name in group["params"]]})
    values: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    for key, entries in state["state"].items():
        index = key
        if isinstance(key, str) and key.isdecimal() and len(key) < _MOST_DIGITS:
            index = int(key)
        name = str(named.get(index, key))
        values[name] = entries
        fqn = targets.first_names.get(canonical_name(name), canonical_name(name))
        paths |= {label(fqn, str(entry)): ("state", key, entry) for entry in entries}
    return read({"state": values, "param_groups": groups}, targets.first_names, targets.shapes), paths
