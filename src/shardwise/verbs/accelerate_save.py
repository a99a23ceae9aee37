"""``save_accelerate_model``, ``save_accelerate_optimizer``: written as accelerate writes them under FSDP2."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from shardwise.execution.states.agreed import StateOptions
from shardwise.interchange.accelerate_writing import FilesPlace, save_model, save_optimizer
from shardwise.models.selection import Everything, Selection
from shardwise.planning.loads.load_plan import OnDiffering, TakeFirst
from shardwise.planning.states.forms import DistributedFolder, FileForm
from shardwise.report.save_report import FilesReport


def save_accelerate_model(
    model: nn.Module,
    directory: str | os.PathLike[str],
    form: FileForm = DistributedFolder(),  # noqa: B008 - frozen
    *,
    number: int = 0,
    only: Selection = Everything(),  # noqa: B008
    on_differing_buffers: OnDiffering = TakeFirst(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> FilesReport:
    """Write a model as accelerate does under FSDP2, which ``accelerator.load_state`` reads.

    ``OneFile()`` is ``pytorch_model_fsdp.bin`` (``_1.bin`` for number 1), ``DistributedFolder()``
    ``pytorch_model_fsdp_0/``, ``RankFiles()`` ``pytorch_model_fsdp_0_rank0.bin`` and so on. Names are those of the
    plain model. Of an adapter they are PEFT's; in one file, as accelerate has it, those of the model, and of what
    is trained alone.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``; no rank holds the whole.

    Args:
        model: any module, sharded or not.
        directory: the folder that holds models and optimizers; made where it is not there, seen by every rank.
        form: in which form.
        number: of the model among those in the folder.
        only: ``Everything()``, or ``AdapterOnly()`` for an adapter of PEFT's.
        on_differing_buffers: buffers that have other values on some ranks than on others are the first rank's,
            ``TakeFirst()``, or an error, ``Refuse()``.
        options: budget, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        PlacementError: tensors are on meta, or are placed neither as shards nor as replicas.
        DisagreementError: ranks have different models or arguments, or different values of what several hold.
        StorageError: files could not be written; the older ones are as they were.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    return save_model(model, FilesPlace(Path(directory), number, form), only, on_differing_buffers, options)


def save_accelerate_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str | os.PathLike[str],
    form: FileForm = DistributedFolder(),  # noqa: B008
    *,
    number: int = 0,
    options: StateOptions = StateOptions(),  # noqa: B008
) -> FilesReport:
    """Write an optimizer as accelerate does under FSDP2, by the names of the model's parameters.

    ``OneFile()`` is ``optimizer.bin`` (``optimizer_1.bin``), ``DistributedFolder()`` is ``optimizer_0/``, and
    ``RankFiles()`` are ``optimizer_0_rank0.bin`` and so on. The layout inside is that of
    :func:`~shardwise.verbs.optimizer_state.optimizer_state`.

    Collective, Memory, Raises: as of :func:`save_accelerate_model`; state that nobody knows how to deal is a
    PlacementError.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: with state or without. (accelerate loads only what has all state: after a step.)
        directory: the folder that holds models and optimizers.
        form: in which form.
        number: of the optimizer among those in the folder.
        options: budget, process group, patience.
    """
    return save_optimizer(model, optimizer, FilesPlace(Path(directory), number, form), options)
